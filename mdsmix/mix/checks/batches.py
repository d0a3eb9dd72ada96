"""Checks of weights, epochs, batches, packing, and train against eval: weights must draw the
intended samples, and each sample in one stream; an epoch must fill its batches; and an evaluation
must draw the same samples each time, which are not trained on.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.foundry_yaml.loader_keys import MDSMIX_LOADER, as_whole_number, is_number
from mdsmix.messages import plural
from mdsmix.mix.epoch.apportion import describe_redistribution
from mdsmix.mix.epoch.draws import (
    DEVICE_PER_STREAM,
    METHODS,
    count_loader_delivered,
    count_loader_draws,
    find_tiny_blocks_of,
    get_batching_method,
)
from mdsmix.mix.epoch.figures import StreamInEpoch, compute_share, measure_epoch
from mdsmix.mix.epoch.stream_counts import find_fixed_row_length
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix, list_stream_names
from mdsmix.shards.index import Shard
from mdsmix.table import is_known

CHECKS = CheckList()

MAX_SKEW = 2.0
"If a stream's share of tokens and its share of samples differ by a larger factor, it is noted."
USEFUL_PASSES = 4
"Up to this many passes over the same data train about as well as new data (arXiv 2305.16264)."


@CHECKS.loader("warning", "The stream is in the mix and never used.", "weights-off")
@CHECKS.loader("error", "Streaming silently rounds down: the stream is never used.", "weights-zero")
def weights_without_samples(mix: Mix, loader: Loader) -> Findings:
    """Find streams with samples, if an epoch draws none of them: the stream's weight is 0, or
    Streaming rounds it down to 0 samples.
    """
    # The counts are None if Streaming refuses the weights.
    for stream, drawn in zip(loader.streams, count_loader_draws(loader) or [], strict=False):
        is_off = _is_off(stream)
        is_intended = is_off and mix.shares is not None  # `share: 0` leaves a stream out
        if stream.index.samples and not drawn and not is_intended:
            yield Finding(
                f"the stream {stream.name} has {stream.index.samples} samples, and its weight "
                f"{stream.weight_text} draws none of the samples in an epoch.",
                "raise its weight, or remove the stream.",
                [stream.name],
                "weights-off" if is_off else "weights-zero",
            )


def _is_off(stream: StreamInMix) -> bool:
    """Check whether the stream's weight is 0. A stream without a weight is not off."""
    weights = stream.weight.values()
    return bool(weights) and not any(weights)


@CHECKS.mix("warning", "The mix has other shares than the recipe asks for.")
def shares_limited(mix: Mix) -> Findings:
    """Find shares that need more passes over their streams than max_repeat allows."""
    if mix.shares and mix.shares.limited:
        yield Finding(
            f"{'; '.join(describe_redistribution(mix.shares))}.",
            "OK if intended. Otherwise raise max_repeat, set a smaller budget, or add data.",
            [share.stream for share in mix.shares.limited],
        )


@CHECKS.mix("note", "After about four passes, a sample teaches less each time.")
def weights_repeated(mix: Mix) -> Findings:
    """Find streams that an epoch reads more than four times."""
    for stream in _measure_epoch(mix):
        if stream.drawn > USEFUL_PASSES * stream.samples > 0:
            yield Finding(
                f"an epoch draws {stream.drawn} samples of the stream {stream.stream}, which has "
                f"{stream.samples} samples.",
                "OK if intended. Otherwise lower the stream's weight or epoch_size.",
                [stream.stream],
            )


@CHECKS.mix("note", "Weights count samples, and training counts tokens.")
def weights_tokens(mix: Mix) -> Findings:
    """Find streams whose share of an epoch's tokens is far from their share of its samples."""
    if mix.shares is not None:
        return  # a recipe with shares says itself what they count (`count`)
    epoch = _measure_epoch(mix)
    samples = sum(stream.delivered for stream in epoch)
    tokens = sum(stream.tokens for stream in epoch)
    for stream in epoch:
        of_samples = compute_share(stream.delivered, samples)
        of_tokens = compute_share(stream.tokens, tokens)
        if not of_samples or of_tokens is None:
            continue
        if not 1 / MAX_SKEW <= of_tokens / of_samples <= MAX_SKEW:
            yield Finding(
                f"the stream {stream.stream} is {of_samples:.1%} of an epoch's samples and "
                f"{of_tokens:.1%} of its tokens.",
                "OK if intended. To weight by tokens, use share in a recipe.",
                [stream.stream],
            )


@CHECKS.mix(
    "warning",
    "Without shuffling, streams are read one after another: the model remembers the last one.",
)
def shuffle_off(mix: Mix) -> Findings:
    """Find a mix of several streams that are not shuffled."""
    if len(mix.train.streams) > 1 and mix.train.dataset.get("shuffle") is not True:
        yield Finding(
            f"train_loader reads {len(mix.train.streams)} streams with shuffle: "
            f"{mix.train.dataset.get('shuffle', 'unset')}.",
            "set shuffle: true.",
        )


@CHECKS.loader(
    "warning", "Streaming draws other samples each time, so two evaluations cannot be compared."
)
def evaluation_varies(mix: Mix, loader: Loader) -> Findings:
    """Find an evaluation that draws only some of its samples, and other samples each time."""
    if loader.trains or loader.dataset.get("sampling_method") == "fixed":
        return
    drawn = count_loader_draws(loader) or []
    varied = list[StreamInMix]()
    for stream, count in zip(loader.streams, drawn, strict=False):
        # Whole passes draw every sample equally often.
        is_whole = count % max(1, stream.index.samples) == 0
        if not is_whole:
            varied.append(stream)
    if varied:
        yield Finding(
            "{loader} draws only some of the samples of {streams}, because of epoch_size or a "
            "weight.",
            "remove epoch_size and the weight, or set sampling_method: fixed.",
            list_stream_names(varied),
        )


@CHECKS.loader("note", "The evaluation takes longer, and gives the same loss.")
def evaluation_repeats(mix: Mix, loader: Loader) -> Findings:
    """Find an evaluation that draws each sample of a stream several times."""
    if loader.trains:
        return
    drawn = count_loader_draws(loader) or []
    for stream, count in zip(loader.streams, drawn, strict=False):
        passes, rest = divmod(count, max(1, stream.index.samples))
        if passes > 1 and not rest:
            yield Finding(
                f"{{loader}} draws each sample of {{streams}} {passes:,} times.",
                "remove epoch_size and the weight: those of an evaluation do not change what is "
                "trained.",
                list_stream_names([stream]),
            )


@CHECKS.loader(
    "warning",
    "The evaluation's loss does not show how well the model does on text that it has not seen.",
)
def evaluation_trained(mix: Mix, loader: Loader) -> Findings:
    """Find evaluations on streams that are trained on too, here or as a copy in another folder, and
    evaluations on shards whose bytes a stream that is trained on has too.
    """
    if loader.trains:
        return
    fix = "OK if intended. Otherwise evaluate on samples that are held out (`holdout` in a recipe)."
    trained = [stream for stream in mix.train.streams if not _is_off(stream)]
    names = {_identify(stream) for stream in trained}
    drawn = [stream for stream in loader.streams if not _is_off(stream)]
    trained_too = [stream for stream in drawn if _identify(stream) in names]
    if trained_too:
        yield Finding(
            "{loader} evaluates on {streams}, and the same samples are trained on.",
            fix,
            list_stream_names(trained_too),
        )
    trained_shards = {_identify_shard(shard) for each in trained for shard in each.index.shards}
    for stream in drawn:
        shared = 0
        for shard in stream.index.shards:
            hashes = _identify_shard(shard)
            if hashes and hashes in trained_shards:
                shared += shard.samples
        if shared and stream not in trained_too:
            yield Finding(
                f"{{loader}} evaluates on {{streams}}, and {shared:,} of its "
                f"{plural(stream.index.samples, 'sample')} are trained on.",
                fix,
                [stream.name],
            )


@CHECKS.mix("warning", "An epoch draws these samples from each of the streams.")
def samples_shared(mix: Mix) -> Findings:
    """Find streams that are trained on and have shards of equal bytes, such as two streams of one
    file, or two versions of one stream. Equal records in other shards are not found.
    """
    first_streams = dict[frozenset[tuple[str, str]], str]()  # hashes of a shard -> its stream
    for stream in mix.train.streams:
        if _is_off(stream):
            continue
        shared = Counter[str]()  # an earlier stream -> samples of this stream that it has too
        for shard in stream.index.shards:
            hashes = _identify_shard(shard)
            if hashes and first_streams.setdefault(hashes, stream.name) != stream.name:
                shared[first_streams[hashes]] += shard.samples
        for earlier, samples in shared.items():
            yield Finding(
                f"{samples:,} of {plural(stream.index.samples, 'sample')} of {stream.name} are in "
                f"{earlier} too, in shards of equal bytes.",
                "OK if intended. Otherwise remove one of the streams, or take the files that both "
                "read out of one of them.",
                [earlier, stream.name],
            )


def _identify_shard(shard: Shard) -> frozenset[tuple[str, str]]:
    """Return the hashes of the shard's file, {(xxh128, hex digest)}. Shards with equal hashes have
    the same samples. Empty if the index has no hashes.
    """
    return frozenset(shard.stored.hashes.items())


def _identify(stream: StreamInMix) -> str:
    """Return a name of the stream's samples: the hash of the index, which a copy in another folder
    shares. If the index has no hashes of the shards, as MDSWriter writes it by default, different
    streams may have equal indexes, and the name is the folder's URL.
    """
    files = stream.index.files
    has_hashes = bool(files) and all(file.hashes for file in files)
    return stream.index.hash if has_hashes else stream.folder.url


@CHECKS.mix("error", "The loader gives no batch at all, or LLM-Foundry refuses it.")
def epoch_too_small(mix: Mix) -> Findings:
    """Find an epoch that has no samples, or not enough for one batch while the loader drops
    incomplete batches.
    """
    batch = mix.yaml.batch_size
    epoch = _measure_epoch(mix)
    drawn = sum(stream.drawn for stream in epoch)
    ratio = mix.train.dataset.get("packing_ratio")
    # Only loaders that read turns pack samples.
    packing = 1.0
    if mix.train.reads_turns and is_number(ratio) and ratio:
        packing = float(ratio)
    needed = 0  # samples of one batch
    if batch:
        needed = int(batch * packing)
    # The rule weights-none reports weights that are all 0, and index-empty streams without samples.
    has_weight = not all(_is_off(stream) for stream in mix.train.streams)
    has_samples = any(stream.samples for stream in epoch)
    if has_weight and has_samples and not drawn:
        yield Finding(
            "the weights draw no samples from any stream.",
            "give at least one stream a weight above 0.",
        )
    elif 0 < drawn < needed and mix.train.section.get("drop_last"):
        packed = f" and packing_ratio {ratio}" if packing > 1 else ""
        yield Finding(
            f"an epoch has only {drawn} samples, which fill no batch: global_train_batch_size is "
            f"{batch}{packed} with drop_last: true.",
            "add data, raise the weights (`repeat: 8` in the recipe's `mix`), set "
            "global_train_batch_size to at most the samples, or set drop_last: false.",
        )


@CHECKS.loader(
    "error",
    "LLM-Foundry's finetuning loader refuses fewer samples than canonical nodes "
    "(DatasetTooSmallError), and Streaming's shuffle py1e fails at the first batch (ValueError) if "
    "an epoch draws fewer.",
)
def canonical_nodes(mix: Mix, loader: Loader) -> Findings:
    """Find a loader with more canonical nodes (num_canonical_nodes) than samples: some loaders and
    shuffles fail on it. Canonical nodes are the sections into which Streaming divides an epoch,
    whatever the real number of nodes is.
    """
    nodes = as_whole_number(loader.dataset.get("num_canonical_nodes"))
    # The samples of a stream that mdsmix cannot open are unknown.
    if not nodes or loader.unopened:
        return
    algorithm = loader.dataset.get("shuffle_algo", "py1e")
    is_py1e = loader.dataset.get("shuffle") is True and algorithm == "py1e"
    stored = sum(stream.index.samples for stream in loader.streams)
    drawn = count_loader_draws(loader) if is_py1e else None
    if loader.name == "finetuning" and stored < nodes:
        least, samples = stored, plural(stored, "sample")
    elif drawn and sum(drawn) < nodes:
        least, samples = sum(drawn), f"{plural(sum(drawn), 'sample')} an epoch"
    else:
        return
    yield Finding(
        f"{{loader}} has {samples} and num_canonical_nodes: {nodes}.",
        f"set num_canonical_nodes to at most {least}.",
    )


@CHECKS.mix(
    "note",
    "A run that is resumed within an epoch on other devices loses samples and repeats others, and "
    "LLM-Foundry's loaders do not notice.",
)
def resume_devices(mix: Mix) -> Findings:
    """Report a batching method with which a run can be resumed only on as many devices as before.
    On other devices the run would repeat some samples and lose others.
    """
    # The loader of mdsmix needs no note, since it refuses to resume on other devices.
    if get_batching_method(mix.train) in METHODS and not mix.train.is_mdsmix:
        yield Finding(
            f"train_loader sets batching_method: {get_batching_method(mix.train)}, so a checkpoint "
            "can be resumed exactly only on the same number of nodes and devices, with the same "
            "batch for each device.",
            "resume on as many nodes and devices as before, or use batching_method: random. The "
            f"loader with name: {MDSMIX_LOADER} refuses to resume on other devices.",
        )


@CHECKS.mix(
    "warning",
    "Samples that do not fit into a row wait for a later batch. Samples that still wait when the "
    "epoch ends are never trained.",
)
def packing_high(mix: Mix) -> Findings:
    """Find a packing_ratio above the number of samples that fit into a row on average.

    Two upper bounds of this number are computed, and the smaller bound is used. The first follows
    from the mean length of samples. The second follows from the samples longer than half a row: no
    two of them fit into one row. Above the bound some samples are certainly not trained. Their
    number is an estimate, since those that wait may be longer than the mean.
    """
    loader = mix.train
    epoch = _measure_epoch(mix)
    ratio: Any = loader.dataset.get("packing_ratio")
    limit = loader.max_seq_len
    samples = float(sum(stream.delivered for stream in epoch))
    tokens = sum(stream.tokens for stream in epoch)
    if not (loader.reads_turns and is_number(ratio) and limit and samples and is_known(tokens)):
        return
    streams = {stream.name: stream for stream in loader.streams}
    long_samples = 0.0
    for figures in epoch:
        share = _share_above(streams[figures.stream], limit / 2)
        long_samples += share * float(figures.delivered)
    by_mean_length = limit * samples / max(1.0, float(tokens))
    by_long_samples = samples / max(1.0, long_samples)
    max_ratio = min(by_mean_length, by_long_samples)
    usable_ratio = max(1.0, max_ratio)  # a ratio below 1 is not possible
    if ratio > usable_ratio:
        untrained = int(samples * (1 - usable_ratio / ratio))
        rounded_down = max(1.0, math.floor(10 * max_ratio) / 10)
        yield Finding(
            f"packing_ratio of train_loader is {ratio:g}, and a row of {plural(limit, 'token')} "
            f"has room for at most {max_ratio:.2f} samples on average: about {untrained:,} of "
            f"{samples:,.0f} samples of an epoch are not trained.",
            f"set packing_ratio to at most {rounded_down:g}, or to auto.",
        )


def _share_above(stream: StreamInMix, length: float) -> float:
    """Return the share of a stream's samples, 0 to 1, that are certainly longer than `length`
    tokens. It is 0 if no lengths are known.
    """
    fixed = find_fixed_row_length(stream)
    if fixed is not None:
        return float(fixed > length)
    manifest = stream.trusted_manifest
    samples = stream.index.samples
    if not manifest or not samples:
        return 0.0
    longer = 0
    for key, count in manifest.totals.lengths.items():  # such as "2^7": 300, lengths 128 to 255
        shortest = 2 ** int(key.removeprefix("2^"))
        if shortest > length:
            longer += count
    return longer / samples


def _measure_epoch(mix: Mix) -> list[StreamInEpoch]:
    return measure_epoch(mix.train, mix.yaml.batch_size)


@CHECKS.mix(
    "warning",
    "In the last step of an epoch some devices may have no batch while the others have one: "
    "training then hangs.",
)
def batching_uneven(mix: Mix) -> Findings:
    """Find a batching method that may give some devices fewer batches than others."""
    method = get_batching_method(mix.train)
    drawn = sum(stream.drawn for stream in _measure_epoch(mix))
    if method == DEVICE_PER_STREAM and drawn:
        yield Finding(
            f"train_loader sets batching_method: {method}, which deals out the batches of an epoch "
            "to one device after the other. If the number of batches is not a multiple of the "
            "number of devices, only some devices have a batch in the last step.",
            "use batching_method: random, or end the run before the last step of an epoch "
            "(max_duration); no change is needed if `mdsmix plan --nodes N --gpus N`, with the "
            "numbers of the run, does not warn of it.",
        )


@CHECKS.mix("error", "Streaming cannot shuffle and fails when the first epoch starts (ValueError).")
def shuffle_blocks(mix: Mix) -> Findings:
    """Find streams whose shuffle blocks are too small for the shuffle."""
    tiny = find_tiny_blocks_of(mix.train)
    if tiny:
        yield Finding(
            "train_loader gives {streams} shuffle blocks of too few samples: batching methods "
            "other than random give each stream its share of shuffle_block_size.",
            "set a larger shuffle_block_size, raise the weight, or use batching_method: random.",
            tiny,
        )


@CHECKS.mix(
    "warning",
    "This batching method drops samples that fill no batch, and how many depends on the batch.",
    "batching-unknown",
)
@CHECKS.mix(
    "warning",
    "Samples that fill no batch are dropped in every epoch (under stratified, all that remain when "
    "the scarcest stream ends), and the loader's length still counts them.",
    "batching-drops",
)
@CHECKS.mix(
    "error",
    "Streaming cannot build a batch and fails when the first epoch starts (ValueError).",
    "batching-infeasible",
)
def batching_method(mix: Mix) -> Findings:
    """Find a batching method that cannot fill a batch, or that drops samples. Also report it if the
    dropped samples cannot be counted, because the batch or the packing ratio is unknown.
    """
    batch = mix.yaml.batch_size
    epoch = _measure_epoch(mix)
    drawn = sum(stream.drawn for stream in epoch)
    delivered = sum(stream.delivered for stream in epoch)
    method = get_batching_method(mix.train)
    undelivered = [stream.stream for stream in epoch if stream.samples and not stream.delivered]
    if drawn and count_loader_delivered(mix.train, batch) is None:
        yield Finding(
            f"train_loader sets batching_method: {method}, and it is unknown how many samples this "
            f"drops: {mix.yaml.origin} has global_train_batch_size: {batch or 'none'} and "
            f"packing_ratio: {mix.train.dataset.get('packing_ratio') or 'none'}.",
            "check a complete training YAML that sets both as numbers (render-yaml --into), or use "
            "batching_method: random.",
            id="batching-unknown",
        )
    elif drawn and method in METHODS and undelivered:
        yield Finding(
            f"train_loader sets batching_method: {method}, and an epoch draws too few samples of "
            f"{', '.join(undelivered)} to fill the share of a batch of {batch}.",
            "raise the weight, remove a stream of weight 0 from the mix, change the batch, or use "
            "batching_method: random.",
            undelivered,
            "batching-infeasible",
        )
    elif delivered < drawn:
        yield Finding(
            f"train_loader sets batching_method: {method}, which delivers {delivered} of the "
            f"epoch's {drawn} samples in batches of {batch} (counted for one device): "
            f"{(drawn - delivered) / drawn:.1%} are dropped.",
            "set weights that give each stream a whole number of samples in a batch, or use "
            "batching_method: random.",
            [stream.stream for stream in epoch if stream.delivered < stream.drawn],
            "batching-drops",
        )

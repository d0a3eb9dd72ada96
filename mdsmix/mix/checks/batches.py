"""Whether weights draw what they seem to draw, and batches can be put together from it."""

from __future__ import annotations

from mdsmix.mix.draws import METHODS, batching, delivered_of, draws_of
from mdsmix.mix.epoch import StreamInEpoch, epoch_of, share_of
from mdsmix.mix.streams import Loader, Mix, StreamInMix, names
from mdsmix.training.findings import Finding, Findings, check
from mdsmix.training.loader_keys import whole

SKEW = 2.0
"A share in tokens this many times the share in samples, or the other way round, is worth a note."
OFTEN = 4
"Passes over the same data that still train about as well as new data (arXiv 2305.16264)."


@check("error", "Streaming rounds down without a word: the stream is never used.")
def weights_zero(loader: Loader) -> Findings:
    for stream, drawn in zip(loader.streams, draws_of(loader) or [], strict=False):
        if not drawn and stream.index.samples and any(stream.weight.values() or [1]):
            yield Finding(
                f"{{streams}} has {stream.index.samples} samples, and its weight "
                f"{stream.weighted} draws 0 of them an epoch.",
                "raise its weight, or take the stream out.",
                [stream.name],
            )


@check("warning", "The stream is in the mix and never used.")
def weights_off(mix: Mix, stream: StreamInMix) -> Findings:
    is_meant = mix.shares is not None  # `share: 0` leaves a stream out
    if stream.weight and not any(stream.weight.values()) and not is_meant:
        yield Finding(
            f"{{streams}}: {stream.weighted}.", "take the stream out, or give it a weight."
        )


@check("note", "Samples seen more than about four times teach less each time.")
def weights_repeated(mix: Mix) -> Findings:
    for each in _epoch(mix):
        if each.drawn > OFTEN * each.samples > 0:
            yield Finding(
                f"an epoch draws {each.drawn} samples of the {each.samples} of {each.stream}.",
                "lower its weight or epoch_size, unless this is wanted.",
                [each.stream],
            )


@check("note", "Weights count samples, and training counts tokens.")
def weights_tokens(mix: Mix) -> Findings:
    epoch = _epoch(mix) if mix.shares is None else []
    samples, tokens = sum(s.delivered for s in epoch), sum(s.tokens for s in epoch)
    for each in epoch:
        share, part = each.delivered / max(1, samples), share_of(each.tokens, tokens)
        if part is not None and share and not 1 / SKEW <= part / share <= SKEW:
            yield Finding(
                f"{each.stream} is {share:.1%} of an epoch's samples and {part:.1%} of its tokens.",
                "nothing, if that is wanted; else weight by share in a recipe, which counts tokens.",
                [each.stream],
            )


@check(
    "warning",
    "Without shuffling the streams are read one after the other: the last one is what the model remembers.",
)
def shuffle_off(mix: Mix) -> Findings:
    if len(mix.train.streams) > 1 and mix.train.dataset.get("shuffle") is not True:
        yield Finding(
            f"train_loader reads {len(mix.train.streams)} streams with shuffle: {mix.train.dataset.get('shuffle', 'unset')}.",
            "set shuffle: true.",
            names(mix.train.streams),
        )


@check("error", "The loader gives no batch at all, or LLM-Foundry refuses it.")
def epoch_too_small(mix: Mix) -> Findings:
    drawn, batch = sum(each.drawn for each in _epoch(mix)), mix.yaml.batch_size
    if batch and 0 < drawn < batch and mix.train.section.get("drop_last"):
        yield Finding(
            f"an epoch has {drawn} samples, and global_train_batch_size is {batch} with drop_last: true.",
            "raise the weights, add data or train with smaller batches.",
            names(mix.train.streams),
        )


@check(
    "error",
    "LLM-Foundry refuses a dataset of fewer samples than canonical nodes (DatasetTooSmallError).",
)
def canonical_nodes(loader: Loader) -> Findings:
    nodes = whole(loader.dataset.get("num_canonical_nodes"))
    samples = sum(stream.index.samples for stream in loader.streams)
    if nodes and loader.name == "finetuning" and samples < nodes:
        yield Finding(
            f"{{loader}} has {samples} samples and num_canonical_nodes: {nodes}.",
            f"set num_canonical_nodes to at most {samples}.",
            names(loader.streams),
        )


def _epoch(mix: Mix) -> list[StreamInEpoch]:
    return epoch_of(mix.train, mix.yaml.batch_size)


def _delivered(mix: Mix) -> list[StreamInEpoch]:
    """What an epoch comes to, where its batching method drops samples and how many is known."""
    is_known = delivered_of(mix.train, mix.yaml.batch_size) is not None
    return _epoch(mix) if batching(mix.train) in METHODS and is_known else []


@check(
    "error",
    "Streaming cannot put a batch together and fails when the first epoch starts (ValueError).",
)
def batching_infeasible(mix: Mix) -> Findings:
    for each in _delivered(mix):
        if each.drawn and not each.delivered:
            yield Finding(
                f"an epoch draws {each.drawn} samples of {each.stream}, too few for its part of batches of {mix.yaml.batch_size} under "
                f"batching_method: {batching(mix.train)}.",
                "raise its weight, change the batch, or use batching_method: random.",
                [each.stream],
            )


@check(
    "warning",
    "Samples that fill no batch are dropped in every epoch, under stratified all that is left when the scarcest stream ends, and the loader's "
    "length still counts them.",
)
def batching_drops(mix: Mix) -> Findings:
    epoch, method = _delivered(mix), batching(mix.train)
    drawn, came = sum(s.drawn for s in epoch), sum(s.delivered for s in epoch)
    if came < drawn and all(s.delivered for s in epoch):  # else batching-infeasible
        yield Finding(
            f"batching_method: {method} delivers {came} of the epoch's {drawn} samples in batches of {mix.yaml.batch_size} (counted for one "
            f"device): {(drawn - came) / drawn:.1%} are dropped.",
            "use batching_method: random, or weights that divide the batch evenly.",
            [s.stream for s in epoch if s.delivered < s.drawn],
        )


@check(
    "warning",
    "This batching method drops what fills no batch, and how much that is depends on the batch.",
)
def batching_unknown(mix: Mix) -> Findings:
    method, batch = batching(mix.train), mix.yaml.batch_size
    if sum(draws_of(mix.train) or []) and delivered_of(mix.train, batch) is None:
        yield Finding(
            f"train_loader sets batching_method: {method}, and {mix.yaml.origin} has global_train_batch_size: {batch or 'none'} and packing_ratio: "
            f"{mix.train.dataset.get('packing_ratio')}.",
            "check the whole training YAML (render-yaml --into), which says both as numbers, or use batching_method: random.",
            names(mix.train.streams),
        )

"""Whether batches can be drawn as asked: enough samples, feasible batching, shuffled streams."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.mix.findings import Hit, check, names
from mdsmix.mix.streams import Loader, Mix, Stream, whole
from mdsmix.mix.weights import draws_of

PER_STREAM = ("per_stream", "device_per_stream")


def _drawn(loader: Loader) -> list[tuple[Stream, int]]:
    return list(zip(loader.streams, draws_of(loader) or [], strict=False))


@check(
    "shuffle-off",
    "warning",
    "Without shuffling the streams are read one after the other: the last one is what the model remembers.",
)
def shuffle_off(mix: Mix) -> Iterator[Hit]:
    if len(mix.train.streams) > 1 and mix.train.dataset.get("shuffle") is not True:
        yield Hit(
            names(mix.train.streams),
            f"train_loader reads {len(mix.train.streams)} streams with shuffle: {mix.train.dataset.get('shuffle', 'unset')}.",
            "set shuffle: true.",
        )


@check("epoch-too-small", "error", "The loader gives no batch at all, or LLM-Foundry refuses it.")
def epoch_too_small(mix: Mix) -> Iterator[Hit]:
    drawn = sum(n for _, n in _drawn(mix.train))
    batch = mix.batch_size
    if batch and 0 < drawn < batch and mix.train.section.get("drop_last"):
        yield Hit(
            names(mix.train.streams),
            f"an epoch has {drawn} samples, and global_train_batch_size is {batch} with drop_last: true.",
            "raise the weights, add data or train with smaller batches.",
        )


@check(
    "canonical-nodes",
    "error",
    "LLM-Foundry refuses a dataset of fewer samples than canonical nodes (DatasetTooSmallError).",
)
def canonical_nodes(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders:
        nodes = whole(loader.dataset.get("num_canonical_nodes"))
        samples = sum(stream.index.samples for stream in loader.streams)
        if nodes and not loader.is_text and samples < nodes:
            yield Hit(
                names(loader.streams),
                f"{loader.label} has {samples} samples and num_canonical_nodes: {nodes}.",
                f"set num_canonical_nodes to at most {samples}.",
            )


@check(
    "batching-infeasible",
    "error",
    "Streaming cannot put a batch together and fails when the first epoch starts (ValueError).",
)
def batching_infeasible(mix: Mix) -> Iterator[Hit]:
    method, batch = mix.train.dataset.get("batching_method"), mix.batch_size
    drawn = _drawn(mix.train)
    total = sum(n for _, n in drawn)
    for stream, n in drawn if batch else ():
        if method == "stratified" and n > 0 and _portion(n, total, batch or 0, drawn) < 1:
            yield Hit(
                [stream.name],
                f"{stream.name} is {n} of {total} samples, less than one of a batch of {batch} under batching_method: stratified.",
                "raise its weight or the batch, or use batching_method: random.",
            )
        if method in PER_STREAM and n < (batch or 0):
            yield Hit(
                [stream.name],
                f"{stream.name} draws {n} samples an epoch, less than a batch of {batch} under batching_method: {method}.",
                "raise its weight, train with smaller batches, or use batching_method: random.",
            )


def _portion(n: int, total: int, batch: int, drawn: list[tuple[Stream, int]]) -> int:
    """Samples of the stream in each batch: rounded down, the largest remainders rounded up."""
    exact = [batch * k / total for _, k in drawn]
    left = batch - sum(map(int, exact))
    bar = sorted((x - int(x) for x in exact), reverse=True)[:left]
    mine = batch * n / total
    return int(mine) + (1 if bar and mine - int(mine) >= bar[-1] else 0)


@check(
    "batching-drops",
    "warning",
    "Samples that do not fill such a batch are dropped in every epoch, and the loader's length still counts them.",
)
def batching_drops(mix: Mix) -> Iterator[Hit]:
    method, batch = mix.train.dataset.get("batching_method"), mix.batch_size
    if method not in PER_STREAM or not batch:
        return
    for stream, n in _drawn(mix.train):
        if n >= batch and n % batch:
            yield Hit(
                [stream.name],
                f"{stream.name} draws {n} samples an epoch, which is not a multiple of the batch of {batch}: {n % batch} are dropped.",
                "use batching_method: random, or choose a multiple of the batch.",
            )


@check(
    "batching-clips",
    "warning",
    "Every stream ends where the scarcest does: the rest of the epoch is never drawn.",
)
def batching_clips(mix: Mix) -> Iterator[Hit]:
    method, batch = mix.train.dataset.get("batching_method"), mix.batch_size
    drawn = [(s, n) for s, n in _drawn(mix.train) if n]
    total = sum(n for _, n in drawn)
    if method != "stratified" or not batch or not total:
        return
    parts = [_portion(n, total, batch, drawn) for _, n in drawn]
    if min(parts) < 1:
        return
    batches = min(n // part for (_, n), part in zip(drawn, parts, strict=True))
    if batches * batch < total - batch:
        yield Hit(
            names(s for s, _ in drawn),
            f"batching_method: stratified gives {batches * batch} of the epoch's {total} samples.",
            "use batching_method: random, or weights that divide the batch evenly.",
        )

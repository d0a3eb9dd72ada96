"""Whether batches can be drawn as asked: enough samples, feasible batching, shuffled streams."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.mix.delivered import METHODS
from mdsmix.mix.findings import Hit, check, names
from mdsmix.mix.streams import Loader, Mix, Stream, whole
from mdsmix.mix.weights import batching, delivered_of, devices_of, draws_of


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
    method, batch = batching(mix.train), mix.batch_size
    came = delivered_of(mix.train, batch) or []
    is_dropping = method in METHODS
    for (stream, n), kept in zip(_drawn(mix.train), came, strict=False):
        if is_dropping and n and not kept:
            yield Hit(
                [stream.name],
                f"{stream.name} draws {n} of the {sum(k for _, k in _drawn(mix.train))} samples of an epoch, too few for "
                f"a batch of {batch} under batching_method: {method}.",
                "raise its weight, change the batch, or use batching_method: random.",
            )


@check(
    "batching-drops",
    "warning",
    "Samples that do not fill such a batch are dropped in every epoch, and the loader's length still counts them.",
)
def batching_drops(mix: Mix) -> Iterator[Hit]:
    came = delivered_of(mix.train, mix.batch_size)
    if batching(mix.train) not in METHODS[1:] or not all(came or [0]):
        return
    for (stream, n), kept in zip(_drawn(mix.train), came or [], strict=True):
        if kept < n:
            yield Hit(
                [stream.name],
                f"{stream.name} draws {n} samples an epoch, and batching_method: {batching(mix.train)} delivers {kept} of "
                f"them in batches of {mix.batch_size} (counted for one device).",
                "use batching_method: random, or choose a multiple of the batch.",
            )


@check(
    "batching-clips",
    "warning",
    "Every stream ends where the scarcest does: the rest of the epoch is never drawn, and the loader's length still counts it.",
)
def batching_clips(mix: Mix) -> Iterator[Hit]:
    came, drawn = delivered_of(mix.train, mix.batch_size), [n for _, n in _drawn(mix.train)]
    if batching(mix.train) != "stratified" or not came or not all(came):
        return
    if (dropped := sum(drawn) - sum(came)) > 0:
        yield Hit(
            names(mix.train.streams),
            f"batching_method: stratified delivers {sum(came)} of the epoch's {sum(drawn)} samples in batches of "
            f"{mix.batch_size} (counted for one device): {dropped / sum(drawn):.1%} are dropped.",
            "use batching_method: random, or weights that divide the batch evenly.",
        )


@check(
    "batching-unknown",
    "warning",
    "This batching method drops what fills no batch, and how much that is depends on the batch.",
)
def batching_unknown(mix: Mix) -> Iterator[Hit]:
    method = batching(mix.train)
    if method in METHODS and any(n > 0 for _, n in _drawn(mix.train)):
        if not mix.batch_size:
            yield Hit(
                names(mix.train.streams),
                f"train_loader sets batching_method: {method}, and {mix.origin} has no global_train_batch_size.",
                "check the whole training YAML (render-yaml --into), which has it, or use batching_method: random.",
            )
        elif devices_of(mix.train, mix.batch_size) is None:
            yield Hit(
                names(mix.train.streams),
                f"train_loader sets batching_method: {method}, and packing_ratio: {mix.train.dataset.get('packing_ratio')} "
                "is no number.",
                "set packing_ratio to a number, or use batching_method: random.",
            )

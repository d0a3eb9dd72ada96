"""Whether batches can be drawn as asked: enough samples, feasible batching, shuffled streams."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.mix.delivered import METHODS
from mdsmix.mix.draws import batching, delivered_of, world_of
from mdsmix.mix.epoch import StreamInEpoch, epoch_of
from mdsmix.mix.streams import Loader, Mix, names
from mdsmix.training.findings import Finding, check, check_loaders
from mdsmix.training.keys import whole


@check(
    "warning",
    "Without shuffling the streams are read one after the other: the last one is what the model remembers.",
)
def shuffle_off(mix: Mix) -> Iterator[Finding]:
    if len(mix.train.streams) > 1 and mix.train.dataset.get("shuffle") is not True:
        yield Finding(
            f"train_loader reads {len(mix.train.streams)} streams with shuffle: {mix.train.dataset.get('shuffle', 'unset')}.",
            "set shuffle: true.",
            names(mix.train.streams),
        )


@check("error", "The loader gives no batch at all, or LLM-Foundry refuses it.")
def epoch_too_small(mix: Mix) -> Iterator[Finding]:
    drawn, batch = sum(each.drawn for each in _epoch(mix)), mix.yaml.batch_size
    if batch and 0 < drawn < batch and mix.train.section.get("drop_last"):
        yield Finding(
            f"an epoch has {drawn} samples, and global_train_batch_size is {batch} with drop_last: true.",
            "raise the weights, add data or train with smaller batches.",
            names(mix.train.streams),
        )


@check_loaders(
    "error",
    "LLM-Foundry refuses a dataset of fewer samples than canonical nodes (DatasetTooSmallError).",
)
def canonical_nodes(mix: Mix, loader: Loader) -> Iterator[Finding]:
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
def batching_infeasible(mix: Mix) -> Iterator[Finding]:
    shares = _delivered(mix)
    for each in shares:
        if each.drawn and not each.delivered:
            yield Finding(
                f"{each.stream} draws {each.drawn} of the {sum(s.drawn for s in shares)} samples of an epoch, too few for "
                f"a batch of {mix.yaml.batch_size} under batching_method: {batching(mix.train)}.",
                "raise its weight, change the batch, or use batching_method: random.",
                [each.stream],
            )


@check(
    "warning",
    "Samples that do not fill such a batch are dropped in every epoch, and the loader's length still counts them.",
)
def batching_drops(mix: Mix) -> Iterator[Finding]:
    shares = _delivered(mix)
    if batching(mix.train) == "stratified" or not all(s.delivered for s in shares):
        return
    for each in shares:
        if each.delivered < each.drawn:
            yield Finding(
                f"{each.stream} draws {each.drawn} samples an epoch, and batching_method: {batching(mix.train)} delivers "
                f"{each.delivered} of them in batches of {mix.yaml.batch_size} (counted for one device).",
                "use batching_method: random, or choose a multiple of the batch.",
                [each.stream],
            )


@check(
    "warning",
    "Every stream ends where the scarcest does: the rest of the epoch is never drawn, and the loader's length still counts it.",
)
def batching_clips(mix: Mix) -> Iterator[Finding]:
    shares = _delivered(mix)
    drawn, came = sum(s.drawn for s in shares), sum(s.delivered for s in shares)
    if batching(mix.train) == "stratified" and all(s.delivered for s in shares) and came < drawn:
        yield Finding(
            f"batching_method: stratified delivers {came} of the epoch's {drawn} samples in batches of "
            f"{mix.yaml.batch_size} (counted for one device): {(drawn - came) / drawn:.1%} are dropped.",
            "use batching_method: random, or weights that divide the batch evenly.",
            names(mix.train.streams),
        )


@check(
    "warning",
    "This batching method drops what fills no batch, and how much that is depends on the batch.",
)
def batching_unknown(mix: Mix) -> Iterator[Finding]:
    method, batch = batching(mix.train), mix.yaml.batch_size
    if method not in METHODS or not any(each.drawn > 0 for each in _epoch(mix)):
        return
    if not batch:
        yield Finding(
            f"train_loader sets batching_method: {method}, and {mix.yaml.origin} has no global_train_batch_size.",
            "check the whole training YAML (render-yaml --into), which has it, or use batching_method: random.",
            names(mix.train.streams),
        )
    elif world_of(mix.train, batch) is None:
        yield Finding(
            f"train_loader sets batching_method: {method}, and packing_ratio: {mix.train.dataset.get('packing_ratio')} "
            "is no number.",
            "set packing_ratio to a number, or use batching_method: random.",
            names(mix.train.streams),
        )

"""What a person should know of a preview, in sentences: a mix that drifts, what is dropped, what was only estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mdsmix.load.layout import NOBODY, Ids, Layout
from mdsmix.preview.asked import Asked
from mdsmix.preview.step_rows import Step
from mdsmix.preview.windows import Floats, SampleTokens, Windows
from mdsmix.words import does, listed, plural


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch, or what is left of it."""

    epoch: int
    first: int
    "The step that it is entered at."
    ids: Ids
    "int64 [steps, ranks, drawn]."


@dataclass(frozen=True, kw_only=True)
class Preview:
    """All that is shown."""

    asked: Asked
    layout: Layout
    streams: Sequence[str]
    shards: Sequence[Sequence[str]]
    "Their files, by stream."
    ratio: float
    positions: int
    "Of a step: its rows times max_seq_len."
    epochs: Sequence[Epoch]
    "Those that the steps lie in."
    steps: Sequence[Step]
    lengths: Sequence[SampleTokens | None]
    windows: Windows
    "Of the first epoch."
    planned: Sequence[float]
    "The streams' shares of the samples that the weights draw."
    read: int
    "Bytes."

    @property
    def tokens(self) -> Floats | None:
        """float64 [streams]: of the first epoch; None where a stream's are not known."""
        return self.windows.tokens


ONE_STREAM = {"per_stream": "Every step", "device_per_stream": "Every device's batch"}
"Batching method -> what of a run is of one stream."


class Said(NamedTuple):
    """One sentence, and its name for programs."""

    id: str
    sentence: str


def verdict(preview: Preview) -> list[Said]:
    """What is wrong first, what was not looked at last."""
    parts = (
        _drifts,
        _overfull,
        _of_one_stream,
        _uneven,
        _dropped,
        _unknown,
        _unread,
    )
    return [said for part in parts for said in part(preview)]


def _drifts(preview: Preview) -> Iterator[Said]:
    windows, layout = preview.windows, preview.layout
    if layout.batching_method in ONE_STREAM or not (drifts := windows.drifts):
        return
    names, shares = [preview.streams[stream] for stream in drifts], windows.shares[:, drifts[0]]
    of, first = "tokens" if preview.tokens is not None else "samples", preview.epochs[0].first
    low, high = (
        f"{shares[at]:.1%} of the {of} of steps {start + first:,} to {end + first - 1:,}"
        for at in (shares.argmin(), shares.argmax())
        for start, end in [windows.edges[at : at + 2]]
    )
    others = f" So it is with {listed(names[1:])} too." if names[1:] else ""
    remedy = "shuffle is false, so the streams come in their order, one after the other: set shuffle: true."
    if layout.shuffle:
        part = layout.epoch_size // max(1, layout.num_canonical_nodes)
        remedy = (
            f"{layout.shuffle_algo} within {layout.shuffle_block_size:,} samples leaves those of a shard near each other: set shuffle_algo: "
            f"py1br, and raise shuffle_block_size where it is below {part:,}, a canonical node's part of the epoch."
        )
    whole = f"{windows.epoch[drifts[0]]:.1%} of the epoch's"
    yield Said(
        "drift", f"The mix drifts: {names[0]} makes {low}, {high} and {whole}. {remedy}{others}"
    )


def _overfull(preview: Preview) -> Iterator[Said]:
    """More than fits is drawn: the epoch's figures, which are of what is drawn, are then not those of the rows."""
    if preview.ratio == 1 or preview.tokens is None:
        return
    drawn = float(preview.tokens.sum()) / len(preview.epochs[0].ids)
    if drawn > preview.positions:
        yield Said(
            "overfull",
            f"packing_ratio {preview.ratio:g} draws on average {drawn:,.0f} tokens a step for {preview.positions:,} positions, and "
            "figures of the epoch are of what is drawn: what does not fit waits for later steps, the shortest samples longest, and "
            "is dropped in the end; take a smaller ratio.",
        )


def _of_one_stream(preview: Preview) -> Iterator[Said]:
    method = preview.layout.batching_method
    if (whose := ONE_STREAM.get(method)) and len(preview.streams) > 1:
        yield Said(
            "one-stream",
            f"{whose} is of one stream (batching_method: {method}); random or stratified batches mix the streams in every step.",
        )


def _uneven(preview: Preview) -> Iterator[Said]:
    is_empty = (preview.epochs[0].ids == NOBODY).all(axis=2)
    uneven = np.flatnonzero(is_empty.any(axis=1) & ~is_empty.all(axis=1))
    if len(uneven):
        step, lacking = preview.epochs[0].first + int(uneven[0]), int(is_empty[uneven[0]].sum())
        yield Said(
            "uneven",
            f"From step {step:,} of the epoch on {plural(lacking, 'device')} of {is_empty.shape[1]:,} {'has' if lacking == 1 else 'have'} "
            "no batch while others have: training waits for them for ever. Streaming lays out device_per_stream so; end the "
            "epoch before by max_duration, or use another batching_method.",
        )


def _dropped(preview: Preview) -> Iterator[Said]:
    if preview.epochs[0].first:
        return
    came, drawn = preview.windows.samples.sum(axis=0), preview.layout.planned
    lacking = [
        f"{name} {int(n - c):,} of {n:,}"
        for name, n, c in zip(preview.streams, drawn, came, strict=True)
        if c < n
    ]
    if lacking:
        method = preview.layout.batching_method
        why = "drop_last" if method == "random" else f"batching_method: {method}"
        yield Said(
            "dropped",
            f"Samples that the weights draw and no batch of the epoch holds ({why}): {listed(lacking, 5)}.",
        )


def _unknown(preview: Preview) -> Iterator[Said]:
    pairs = list(zip(preview.streams, preview.lengths, strict=True))
    if raw := [name for name, lengths in pairs if lengths is None]:
        yield Said(
            "tokenized-later",
            f"{listed(raw)}: the loader itself tokenizes {does(raw, 'its', 'their')} text, so tokens are not known here and shares are of "
            "samples; convert the text to see them.",
        )
    for how in dict.fromkeys(each.how for _, each in pairs if each and not each.is_exact):
        names = [name for name, each in pairs if each and each.how == how]
        yield Said("estimated", f"Tokens of {listed(names, 5)} in the epoch are estimated: {how}.")


def _unread(preview: Preview) -> Iterator[Said]:
    raw = {n for n, lengths in enumerate(preview.lengths) if lengths is None}
    lacking = sum(step.drawn - step.looked for step in preview.steps)
    lacking -= sum(p.stream in raw for step in preview.steps for r in step.ranks for p in r.places)
    if lacking > 0:
        yield Said(
            "unread",
            f"{plural(lacking, 'sample')} of these steps were not read, since more than {preview.asked.read:,} bytes would have been: "
            "what is said of those steps counts the others; raise --read.",
        )

"""What an epoch draws of each stream, and what a person should know of a preview, in sentences.

Tokens of an epoch are told without reading a sample: a stream's samples times the mean that its manifest counted, else that of its
first samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.load.layout import NOBODY, Ids, Layout
from mdsmix.mix.stream_counts import row_length, tokens_of, trained_of
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.preview.asked import Asked
from mdsmix.preview.step_rows import Step
from mdsmix.shards.token_ids import layout_of
from mdsmix.table import UNKNOWN, Estimate, about
from mdsmix.words import does, listed, plural

Floats = NDArray[np.float64]
SCATTERS = 6.5
"Standard deviations of a window's samples, drawn at random: of ten windows so drawn, one stream in hundreds lies so far apart."
APART = 0.1
"Of a stream's share: windows that lie nearer change no training."


def has_ids(stream: StreamInMix) -> bool:
    """Whether it holds token ids; of others the loader tokenizes the text."""
    return bool(layout_of(stream.columns)) and "text" not in stream.columns


def sample_tokens(stream: StreamInMix, loader: Loader) -> tuple[float, float]:
    """Tokens of a sample as the model sees them, plain where each has so many, and those of them that give a loss; not known where the
    loader itself tokenizes."""
    if not has_ids(stream):
        return UNKNOWN, UNKNOWN
    samples, is_exact = max(1, stream.index.samples), row_length(stream) is not None
    tokens = about(tokens_of(stream, loader)[0] / samples, is_exact)
    return tokens, Estimate(trained_of(stream, loader) / samples)


@dataclass(frozen=True, slots=True)
class Windows:
    """What windows of an epoch's steps hold of each stream."""

    edges: NDArray[np.int64]
    "int64 [windows + 1]: the steps at which they begin, and the end."
    samples: Floats
    "float64 [windows, streams]."
    means: Floats | None
    "float64 [streams]: tokens of a sample; None where a stream's are not known."

    @property
    def unit(self) -> str:
        return "samples" if self.means is None else "tokens"

    @property
    def sizes(self) -> Floats:
        """float64 [windows, streams]: tokens, where these are known of every stream, else samples."""
        return self.samples if self.means is None else self.samples * self.means

    @property
    def shares(self) -> Floats:
        """float64 [windows, streams]."""
        return np.asarray(self.sizes / self.sizes.sum(axis=1, keepdims=True))

    @property
    def epoch(self) -> Floats:
        """float64 [streams]: the shares in the whole epoch."""
        return np.asarray(self.sizes.sum(axis=0) / self.sizes.sum())

    @property
    def drifts(self) -> list[int]:
        """The streams whose windows lie farther apart than chance puts them, the one that drifts most before the others."""
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.ptp(self.shares, axis=0) / self.epoch
            least = np.maximum(APART, SCATTERS / np.sqrt(self.samples.mean(axis=0)))
        return [int(stream) for stream in np.argsort(-apart) if apart[stream] > least[stream]]


def samples_by_step(layout: Layout, ids: Ids) -> Floats:
    """float64 [steps, streams]: what the steps hold of each stream. `ids`: int64 [steps, ranks, drawn]."""
    drawn = (layout.stream_of(step[step != NOBODY]) for step in ids)
    return np.array([np.bincount(step, minlength=len(layout.names)) for step in drawn], float)


def windows_of(samples: Floats, lengths: Sequence[tuple[float, float]], most: int) -> Windows:
    """The epoch cut into at most so many windows. `samples`: float64 [steps, streams]; `lengths`: as of `sample_tokens`."""
    edges = np.linspace(0, len(samples), min(most, len(samples)) + 1).astype(np.int64)
    means = np.array([tokens for tokens, _ in lengths])
    return Windows(
        edges=edges,
        samples=np.add.reduceat(samples, edges[:-1], axis=0),
        means=None if np.isnan(means).any() else means,
    )


class Epoch(NamedTuple):
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
    streams: Sequence[StreamInMix]
    ratio: float
    max_seq_len: int
    epochs: Sequence[Epoch]
    "Those that the steps lie in."
    steps: Sequence[Step]
    lengths: Sequence[tuple[float, float]]
    "Of each stream, as of `sample_tokens`."
    windows: Windows
    "Of the first epoch."
    read: int
    "Bytes."


ONE_STREAM = {"per_stream": "Every step", "device_per_stream": "Every device's batch"}
"Batching method -> what of a run is of one stream."


def verdict(preview: Preview) -> dict[str, str]:
    """A name for programs -> a sentence: what is wrong first, what was not looked at last."""
    said = {
        "drift": _drift(preview),
        "overfull": _overfull(preview),
        "one-stream": _one_stream(preview),
        "uneven": _uneven(preview.epochs[0]),
        "dropped": _dropped(preview),
        "tokenized-later": _tokenized_later(preview),
        "unread": _unread(preview),
    }
    return {id: sentence for id, sentence in said.items() if sentence}


def _drift(preview: Preview) -> str | None:
    windows, layout = preview.windows, preview.layout
    if layout.batching_method in ONE_STREAM or not (drifts := windows.drifts):
        return None
    names, shares = [layout.names[stream] for stream in drifts], windows.shares[:, drifts[0]]
    edges = windows.edges + preview.epochs[0].first
    low, high = (
        f"{shares[at]:.1%} of the {windows.unit} of steps {edges[at]:,} to {edges[at + 1] - 1:,}"
        for at in (shares.argmin(), shares.argmax())
    )
    remedy = "shuffle is false, so the streams come in their order, one after the other: set shuffle: true."
    if layout.shuffle:
        part = layout.epoch_size // max(1, layout.num_canonical_nodes)
        remedy = (
            f"{layout.shuffle_algo} within {layout.shuffle_block_size:,} samples leaves those of a shard near each other: set shuffle_algo: "
            f"py1br, and raise shuffle_block_size where it is below {part:,}, a canonical node's part of the epoch."
        )
    others = f" So it is with {listed(names[1:])} too." if names[1:] else ""
    whole = f"{windows.epoch[drifts[0]]:.1%} of the epoch's"
    return f"The mix drifts: {names[0]} makes {low}, {high} and {whole}. {remedy}{others}"


def _overfull(preview: Preview) -> str | None:
    """More than fits is drawn: the epoch's figures, which are of what is drawn, are then not those of the rows."""
    windows, positions = preview.windows, preview.asked.world.batch * preview.max_seq_len
    drawn = windows.sizes.sum() / len(preview.epochs[0].ids)
    if preview.ratio == 1 or windows.means is None or drawn <= positions:
        return None
    return (
        f"packing_ratio {preview.ratio:g} draws on average {drawn:,.0f} tokens a step for {positions:,} positions, and "
        "figures of the epoch are of what is drawn: what does not fit waits for later steps, the shortest samples longest, and "
        "is dropped in the end; take a smaller ratio."
    )


def _one_stream(preview: Preview) -> str | None:
    method = preview.layout.batching_method
    if method not in ONE_STREAM or len(preview.streams) == 1:
        return None
    return f"{ONE_STREAM[method]} is of one stream (batching_method: {method}); random or stratified batches mix the streams in every step."


def _uneven(epoch: Epoch) -> str | None:
    lacking, devices = (epoch.ids == NOBODY).all(axis=2).sum(axis=1), epoch.ids.shape[1]
    uneven = np.flatnonzero((lacking > 0) & (lacking < devices))
    if not len(uneven):
        return None
    return (
        f"From step {epoch.first + int(uneven[0]):,} of the epoch on {lacking[uneven[0]]:,} of {devices:,} devices have no batch "
        "while others have: training waits for them for ever. Streaming lays out device_per_stream so; end the epoch before by max_duration, or "
        "use another batching_method."
    )


def _dropped(preview: Preview) -> str | None:
    counts = preview.windows.samples.sum(axis=0), preview.layout.planned
    lacking = [
        f"{name} {int(planned - held):,} of {planned:,}"
        for name, held, planned in zip(preview.layout.names, *counts, strict=True)
        if held < planned
    ]
    if preview.epochs[0].first or not lacking:
        return None
    method = preview.layout.batching_method
    why = "drop_last" if method == "random" else f"batching_method: {method}"
    return f"Samples that the weights draw and no batch of the epoch holds ({why}): {listed(lacking, 5)}."


def _tokenized_later(preview: Preview) -> str | None:
    raw = [stream.name for stream in preview.streams if not has_ids(stream)]
    if not raw:
        return None
    return (
        f"{listed(raw)}: the loader itself tokenizes {does(raw, 'its', 'their')} text, so tokens are not known here and shares are of "
        "samples; convert the text to see them."
    )


def _unread(preview: Preview) -> str | None:
    lacking = sum(step.unread for step in preview.steps)
    if not lacking:
        return None
    return (
        f"{plural(lacking, 'sample')} of these steps were not read, since more than {preview.asked.read:,} bytes would have been: "
        "what is said of those steps counts the others; raise --read."
    )

"""What an epoch draws of each stream, and what a person should know of a preview, in sentences.

Tokens of an epoch are told without reading a sample: a stream's samples times the mean that its manifest counted, else that of its
first samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsmix.load.layout import NOBODY, Ids, Layout
from mdsmix.mix.stream_counts import row_length, tokens_of
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.preview.asked import Asked
from mdsmix.preview.shard_reader import has_ids
from mdsmix.preview.step_rows import Step
from mdsmix.table import UNKNOWN, about, is_known
from mdsmix.words import does, listed, plural

Floats = NDArray[np.float64]
SCATTERS = 6.5
"Standard deviations of a window's samples, drawn at random: of ten windows so drawn, one stream in hundreds lies so far apart."
APART = 0.1
"Of a stream's share: windows that lie nearer change no training."


def sample_tokens(stream: StreamInMix, loader: Loader) -> float:
    """Tokens of a sample as the model sees them, plain where each has so many; not known where the loader itself tokenizes."""
    if not has_ids(stream):
        return UNKNOWN
    tokens = tokens_of(stream, loader)[0] / max(1, stream.index.samples)
    return about(tokens, row_length(stream) is not None)


@dataclass(frozen=True, slots=True)
class Windows:
    """What windows of an epoch's steps hold of each stream."""

    edges: NDArray[np.int64]
    "int64 [windows + 1]: the steps at which they begin, and the end."
    samples: Floats
    "float64 [windows, streams]."
    sizes: Floats
    "float64 [windows, streams]: tokens, where these are known of every stream, else samples."
    unit: str
    "Of the sizes: tokens or samples."

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


def windows_of(samples: Floats, tokens: Sequence[float], most: int, first: int = 0) -> Windows:
    """The epoch from its step `first` on, cut into at most so many windows.

    Args:
        samples: float64 [steps, streams].
        tokens: of a sample of each stream.
    """
    starts = np.linspace(0, len(samples), min(most, len(samples)) + 1).astype(np.int64)
    held, has_tokens = np.add.reduceat(samples, starts[:-1], axis=0), all(map(is_known, tokens))
    sizes = held * np.array(tokens) if has_tokens else held
    return Windows(starts + first, held, sizes, "tokens" if has_tokens else "samples")


@dataclass(frozen=True, kw_only=True)
class Preview:
    """All that is shown."""

    asked: Asked
    layout: Layout
    streams: Sequence[StreamInMix]
    ratio: float
    max_seq_len: int
    first: int
    "The step at which the epoch is entered."
    ids: Ids
    "int64 [steps, ranks, drawn]: what is left of the epoch."
    steps: Sequence[Step]
    tokens: Sequence[float]
    "Of each stream, as of `sample_tokens`."
    windows: Windows
    read: int
    "Bytes."


def verdict(preview: Preview) -> dict[str, str]:
    """A name for programs -> a sentence: what is wrong first, what was not looked at last."""
    said = {
        "drift": _drift(preview),
        "overfull": _overfull(preview),
        "uneven": uneven(preview.ids, preview.first),
        "tokenized-later": _tokenized_later(preview),
        "unread": _unread(preview),
    }
    return {id: sentence for id, sentence in said.items() if sentence}


def _drift(preview: Preview) -> str | None:
    windows, layout = preview.windows, preview.layout
    if "per_stream" in layout.batching_method or not (drifts := windows.drifts):
        return None
    shares, edges = windows.shares[:, drifts[0]], windows.edges
    low, high = (
        f"{shares[at]:.1%} of the {windows.unit} of steps {edges[at]:,} to {edges[at + 1] - 1:,}"
        for at in (shares.argmin(), shares.argmax())
    )
    part = layout.epoch_size // max(1, layout.num_canonical_nodes)
    return (
        f"The mix drifts: {', '.join(layout.names[n] for n in drifts)}. {layout.names[drifts[0]]} makes {low}, {high} and "
        f"{windows.epoch[drifts[0]]:.1%} of the epoch's. Set shuffle: true and shuffle_algo: py1br, and raise shuffle_block_size where it is "
        f"below {part:,}, a canonical node's part of the epoch."
    )


def _overfull(preview: Preview) -> str | None:
    """More than fits is drawn: the epoch's figures, which are of what is drawn, are then not those of the rows."""
    windows, positions = preview.windows, preview.asked.world.batch * preview.max_seq_len
    drawn = windows.sizes.sum() / len(preview.ids)
    if preview.ratio == 1 or windows.unit != "tokens" or drawn <= positions:
        return None
    return (
        f"packing_ratio {preview.ratio:g} draws on average {drawn:,.0f} tokens a step for {positions:,} positions, and "
        "figures of the epoch are of what is drawn: what does not fit waits for later steps, and is dropped in the end; take a smaller ratio."
    )


def uneven(ids: Ids, first: int) -> str | None:
    """Devices without a batch in a step in which others have one. `ids`: int64 [steps, ranks, drawn]."""
    lacking = (ids == NOBODY).all(axis=2).sum(axis=1)
    found = np.flatnonzero((lacking > 0) & (lacking < ids.shape[1]))
    if not len(found):
        return None
    return (
        f"From step {first + int(found[0]):,} of the epoch on {lacking[found[0]]:,} of {ids.shape[1]:,} devices have no batch "
        "while others have: training waits for them for ever. Streaming lays out device_per_stream so; end the epoch before by max_duration, or "
        "use another batching_method."
    )


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

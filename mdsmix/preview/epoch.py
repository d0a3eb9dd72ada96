"""What an epoch draws of each stream, in windows of its steps: the lowest and the highest window say whether the mix is steady.

A stream drifts where the shares of its lowest and highest window lie farther apart than a tenth of its share, and than 6.5 times
the standard deviation that a window's share has where samples are drawn at random: of ten windows drawn so, one stream in hundreds
lies there. Where a batch is of one stream, such a batch is what is drawn. Streams that windows hold a handful of are not judged.

Tokens are told without reading a sample: rows of one length by their column, others by their bytes in the tables of their shards,
brought to the mean that the manifest counted, else to that of the first samples. The latter are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.load.layout import NOBODY, Ids, Layout
from mdsmix.mix.stream_counts import row_length, tokens_of, trained_of
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.preview.reading import ShardReader
from mdsmix.shards.token_ids import has_images
from mdsmix.table import Estimate, is_known

Floats = NDArray[np.float64]
SCATTERS = 6.5
FEWEST = 4
"Samples of a stream in a window, on average: of fewer the scatter says little."
APART = 0.1
"Of a stream's share: windows that lie nearer change no training."


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Tokens of a stream's samples as the model sees them."""

    tokens: Floats
    "float64 [samples], or [1] where all count as the same."
    is_exact: bool
    how: str
    trained: float | None
    "The share of them that gives a loss; None where that is not known."

    def of(self, positions: NDArray[np.int64]) -> Floats:
        """float64 [n]: of the samples at these positions of the stream."""
        if len(self.tokens) == 1:
            return np.full(len(positions), self.tokens[0])
        return self.tokens[positions]


def sample_tokens(
    number: int, stream: StreamInMix, loader: Loader, reader: ShardReader
) -> SampleTokens | None:
    """None where nobody can tell, since the loader itself tokenizes."""
    tokens, losses = tokens_of(stream, loader), trained_of(stream, loader)
    trained = losses / tokens if is_known(losses) and is_known(tokens) and tokens else None
    if (fixed := row_length(stream)) is not None and "text" not in stream.columns:
        rows = np.array([min(fixed, loader.max_seq_len or fixed)], np.float64)
        return SampleTokens(rows, True, "rows of one length", trained)
    if not is_known(tokens):
        return None
    mean = float(tokens) / max(1, stream.index.samples)
    tables = list(_sizes(number, stream, reader)) if _is_worth(stream) else []
    if len(tables) < len(stream.shards):
        source = "of the first samples" if isinstance(tokens, Estimate) else "in the manifest"
        return SampleTokens(np.array([mean]), False, f"the mean {source}", trained)
    sizes = np.concatenate(tables).astype(np.float64)
    scaled = sizes * (mean / max(1e-9, float(sizes.mean())))
    return SampleTokens(scaled, False, "bytes of its samples, brought to the mean", trained)


def _is_worth(stream: StreamInMix) -> bool:
    """Where there are images the bytes are theirs, and say little of tokens."""
    return (
        not has_images(stream.columns)
        and all(shard.samples for shard in stream.shards)
        and stream.index.samples <= 1 << 26
    )


def _sizes(number: int, stream: StreamInMix, reader: ShardReader) -> Iterator[NDArray[np.int64]]:
    keys = [(number, at) for at in range(len(stream.shards))]
    reader.look(keys)
    yield from (np.diff(reader.tables[key]) for key in keys if key in reader.tables)


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums by step and stream, float64 [steps, streams]."""

    samples: Floats
    tokens: Floats | None
    "None where a stream's are not known."
    squares: Floats
    "float64 [streams]: the sum of squared sizes over the epoch's samples."


class Drift(NamedTuple):
    """A stream that comes unevenly: the numbers of the stream and of its lowest and highest window."""

    stream: int
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Windows:
    """Shares by window, float64 [windows, streams]: of tokens, where these are known of every stream, else of samples."""

    edges: NDArray[np.int64]
    "int64 [windows + 1]: the steps at which they begin, and the end."
    samples: Floats
    shares: Floats
    epoch: Floats
    "float64 [streams]: the shares in the whole epoch."
    scatter: Floats
    "float64 [streams]: the standard deviation of a window's share, where samples are drawn at random."
    of_tokens: bool

    @property
    def drifts(self) -> list[Drift]:
        """The streams that drift, the one that drifts most before the others."""
        apart = np.ptp(self.shares, axis=0)
        least = np.maximum(APART * self.epoch, SCATTERS * self.scatter)
        least[self.samples.mean(axis=0) < FEWEST] = np.inf
        low, high = self.shares.argmin(axis=0), self.shares.argmax(axis=0)
        order = np.argsort(least - apart)
        return [Drift(int(s), int(low[s]), int(high[s])) for s in order if apart[s] > least[s]]


def count(layout: Layout, ids: Ids, lengths: Sequence[SampleTokens | None]) -> Counts:
    """What the steps hold of each stream. `ids`: int64 [steps, ranks, drawn]."""
    steps, streams = len(ids), len(lengths)
    samples, tokens = np.zeros((steps, streams)), np.zeros((steps, streams))
    squares, known = np.zeros(streams), not any(each is None for each in lengths)
    flat = ids.reshape(steps, -1)
    for first in range(0, steps, chunk := max(1, (1 << 22) // max(1, flat.shape[1]))):
        some = flat[first : first + chunk]
        step, at = np.nonzero(some != NOBODY)
        drawn = some[step, at]
        stream_of = layout.stream_of(drawn)
        for s, each in enumerate(lengths):
            mine = stream_of == s
            of = drawn[mine] - layout.sample_offset_per_stream[s]
            size = each.of(of) if known and each else np.ones(len(of))
            end = first + len(some)
            samples[first:end, s] = np.bincount(step[mine], minlength=len(some))
            tokens[first:end, s] = np.bincount(step[mine], size, minlength=len(some))
            squares[s] += float(size @ size)
    return Counts(samples, tokens if known else None, squares)


def windows_of(counts: Counts, most: int, unit: int) -> Windows:
    """The epoch cut into at most so many windows. `unit`: samples that are drawn as one, since they are of one stream."""
    steps = len(counts.samples)
    edges = np.linspace(0, steps, min(most, steps) + 1).astype(np.int64)
    sizes = counts.samples if counts.tokens is None else counts.tokens
    sums = np.add.reduceat(sizes, edges[:-1], axis=0)
    epoch = sizes.sum(axis=0) / sizes.sum()
    others = counts.squares.sum() - counts.squares
    variance = (1 - epoch) ** 2 * counts.squares + epoch**2 * others
    return Windows(
        edges=edges,
        samples=np.add.reduceat(counts.samples, edges[:-1], axis=0),
        shares=sums / sums.sum(axis=1, keepdims=True),
        epoch=epoch,
        scatter=np.sqrt(unit * (len(sums) - 1) * variance) / sizes.sum(),
        of_tokens=counts.tokens is not None,
    )

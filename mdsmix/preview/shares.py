"""What an epoch draws of each stream, window by window of its steps, beside what chance would draw.

A window of m samples out of an epoch's M holds a stream of share p with a standard deviation of
sqrt(p (1 - p) / m * (M - m) / (M - 1)). Of tokens the same is said of e = t (x - p) / mean(t), t being a sample's tokens and
x whether it is of the stream. Where a batch of a device or of all devices is of one stream, it is what is drawn at random,
and samples are counted in such batches. What is told as a drift is both beyond chance (the sum of squared deviations of a
stream's windows, one false alarm in some thousand previews) and large enough to matter (a point, or a tenth of its share).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsmix.preview.layout import NOBODY, Ids, Layout
from mdsmix.preview.lengths import Lengths

Floats = NDArray[np.float64]
BEYOND = 4.0
"Standard deviations of a normal distribution that chance does not explain: 1 in 30,000."
LEAST = 0.01
"A point of the share; of a stream with less than a tenth, a tenth of its share."


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums by step and stream, float64 [steps, streams]."""

    samples: Floats
    tokens: Floats | None
    "None where a stream's are not known."
    squares: Floats
    "float64 [streams]: the sum of t * t over the epoch's samples, t being tokens, or 1 where these are not known."


@dataclass(frozen=True, slots=True)
class Drift:
    """The window of a stream that is farthest from its share in the epoch."""

    stream: int
    window: int
    found: float
    expected: float
    surprise: float
    "Of all windows of the stream, as standard deviations of a normal distribution."

    @property
    def matters(self) -> bool:
        away = abs(self.found - self.expected)
        return self.surprise > BEYOND and away > min(LEAST, 0.1 * self.expected)


@dataclass(frozen=True, slots=True)
class Windows:
    """Shares by window, float64 [windows, streams]: of tokens, where these are known of every stream, else of samples."""

    edges: NDArray[np.int64]
    "int64 [windows + 1]: the steps at which they begin, and the end."
    samples: Floats
    shares: Floats
    epoch: Floats
    "float64 [streams]: the shares in the whole epoch."
    chance: Floats
    "float64 [windows, streams]: the standard deviation of a window by chance."
    step_spread: Floats
    "float64 [streams]: the standard deviation from step to step."
    step_chance: Floats
    of_tokens: bool

    @property
    def farthest(self) -> list[Drift]:
        """One for each stream."""
        ratio = deviations(self.shares, self.epoch, self.chance)
        at, beyond = np.abs(ratio).argmax(axis=0), surprise(ratio)
        return [
            Drift(s, int(w), float(self.shares[w, s]), float(self.epoch[s]), float(beyond[s]))
            for s, w in enumerate(at)
        ]


def count(layout: Layout, ids: Ids, lengths: Sequence[Lengths | None]) -> Counts:
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
    weights = counts.samples if counts.tokens is None else counts.tokens
    epoch = weights.sum(axis=0) / weights.sum()
    samples = np.add.reduceat(counts.samples, edges[:-1], axis=0)
    sums = np.add.reduceat(weights, edges[:-1], axis=0)
    shares, by_step = (
        sums / sums.sum(axis=1, keepdims=True),
        weights / weights.sum(axis=1, keepdims=True),
    )
    per_step = counts.samples.sum(axis=1)
    return Windows(
        edges=edges,
        samples=samples,
        shares=shares,
        epoch=epoch,
        chance=_chance(counts, epoch, samples.sum(axis=1), unit),
        step_spread=np.sqrt(((by_step - epoch) ** 2).mean(axis=0)),
        step_chance=_chance(counts, epoch, np.array([per_step.mean()]), unit)[0],
        of_tokens=counts.tokens is not None,
    )


def deviations(shares: Floats, epoch: Floats, chance: Floats) -> Floats:
    """float64 [windows, streams]: standard deviations from the epoch's share, by Anscombe's arcsine, which keeps its tails where
    a window holds a handful of a rare stream's samples."""
    odds = epoch * (1 - epoch)
    n = np.divide(odds, chance**2, out=np.zeros_like(shares), where=chance > 1e-12)

    def angle(share: Floats) -> Floats:
        found: Floats = np.arcsin(np.sqrt(np.clip((share * n + 3 / 8) / (n + 3 / 4), 0, 1)))
        return found

    away: Floats = angle(shares) - angle(np.broadcast_to(epoch, shares.shape))
    away *= 2 * np.sqrt(n + 1 / 2)
    return away


def surprise(ratio: Floats) -> Floats:
    """float64 [streams]: the sum of squares of [windows, streams] as a standard normal deviate, by Wilson and Hilferty."""
    free = max(1, len(ratio) - 1)
    unit = 2 / (9 * free)
    found: Floats = (np.cbrt((ratio**2).sum(axis=0) / free) - (1 - unit)) / np.sqrt(unit)
    return found


def _chance(counts: Counts, epoch: Floats, drawn: Floats, unit: int) -> Floats:
    """float64 [windows, streams]: the standard deviation of a share in so many samples drawn at random."""
    total = float(counts.samples.sum())
    weights = counts.samples if counts.tokens is None else counts.tokens
    mean = float(weights.sum()) / total
    others = counts.squares.sum() - counts.squares
    variance = ((1 - epoch) ** 2 * counts.squares + epoch**2 * others) / total / mean**2
    left = np.clip((total - drawn) / max(1.0, total - 1), 0, None)
    spread: Floats = np.sqrt(variance[None, :] * (left * unit / np.maximum(1, drawn))[:, None])
    return spread

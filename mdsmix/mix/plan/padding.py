"""How long the rows of a batch are once they are padded, from the counted lengths of a stream's samples.

A manifest counts samples by powers of two of their length, all their tokens, and the longest. Within a power, lengths are taken to
rise or fall alike in all powers, just so that they sum to the tokens that were counted. So the mean longest row of a batch is an
estimate, within a seventh, unless all rows are of one length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STEPS = 64
"Points at which a power of two is looked at."
STEEPEST, HALVINGS = 40.0, 40
Points = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long the samples of a stream are, as far as the loader takes them."""

    mean: float
    longest: int
    histogram: Mapping[str, int]
    "Samples by length: `2^k` counts those of 2^k to 2^(k+1) - 1 tokens; empty where nobody counted."

    @property
    def is_one(self) -> bool:
        """All rows are of one length."""
        return self.mean >= self.longest

    def up_to(self, lengths: Points) -> Points:
        """The share of samples of at most so many tokens."""
        if self.is_one:
            return (lengths >= self.longest).astype(np.float64)
        known, weights = self._points()
        cumulated = np.cumsum(weights)
        return np.interp(lengths, known, cumulated, left=0.0, right=1.0)

    def share_within(self, limit: int) -> float:
        """The share of the tokens that stand before this place of their rows."""
        lengths, weights = self._points()
        return float(np.minimum(lengths, limit) @ weights / max(1e-9, float(lengths @ weights)))

    def _points(self) -> tuple[Points, Points]:
        """Lengths, ascending, and the share of samples at each."""
        if not self.histogram:  # nobody counted: even from nothing to twice the mean
            top = max(1.0, min(self.longest or 2 * self.mean, 2 * self.mean))
            return np.linspace(0, top, STEPS), np.full(STEPS, 1 / STEPS)
        powers = sorted((int(key[2:]), n) for key, n in self.histogram.items())
        counts = np.array([n for _, n in powers], np.float64)[:, None]
        edges = [(min(1 << k, self.longest), min((2 << k) - 1, self.longest)) for k, _ in powers]
        lengths = np.array([np.linspace(low, high, STEPS) for low, high in edges])
        weights = _tilted(lengths, counts / counts.sum(), self.mean)
        return lengths.reshape(-1), weights.reshape(-1)


def _tilted(lengths: Points, counts: Points, mean: float) -> Points:
    """Weights of the points, the same slope within each power, such that their mean is the one that was counted."""
    at, low, high = np.linspace(0, 1, lengths.shape[1]), -STEEPEST, STEEPEST
    weights = np.broadcast_to(counts / len(at), lengths.shape)
    for _ in range(HALVINGS):
        slope = np.exp((low + high) / 2 * at)
        weights = counts * (slope / slope.sum())
        low, high = (
            ((low + high) / 2, high)
            if (weights * lengths).sum() < mean
            else (low, (low + high) / 2)
        )
    return weights


def mean_longest(streams: Sequence[tuple[Lengths, float]], rows: int, multiple: int = 1) -> float:
    """Tokens of the longest of so many rows, on average, drawn from streams by their shares of samples, rounded up to a multiple."""
    total = sum(share for _, share in streams)
    top = max((lengths.longest for lengths, share in streams if share), default=0)
    if not total or not top:
        return 0.0
    widths = np.arange(0, top + multiple, multiple, dtype=np.float64)
    if len(widths) > 1 << 16:
        widths = np.linspace(0, top, 1 << 16)
    shorter = sum(lengths.up_to(widths) * (share / total) for lengths, share in streams)
    misses = 1 - np.minimum(1.0, shorter) ** rows  # that some row is longer
    return float(misses[:-1] @ np.diff(widths))

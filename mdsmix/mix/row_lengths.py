"""How long the samples of a stream are, and how long the longest row of a batch is, from counts by powers of two.

A manifest counts samples by powers of two of their length. Between two powers lengths are taken to be spread evenly, so the mean longest
row of a batch is an estimate, within a fifth, unless all rows have one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsmix.shards.counts import Totals


@dataclass(frozen=True, slots=True)
class LengthCounts:
    """How long samples are. A manifest counts them by powers of two; between two powers they are taken to be spread evenly."""

    bins: Sequence[tuple[int, int, int]]
    "Least and largest length, and how many samples are between the two."

    @classmethod
    def of(cls, totals: Totals) -> LengthCounts:
        longest, powers = totals.longest, dict[str, int](totals.lengths)
        return cls([(*_between(key, longest), n) for key, n in powers.items()])

    @property
    def longest(self) -> int:
        return max((high for _, high, _ in self.bins), default=0)

    def cut_at(self, limit: int) -> LengthCounts:
        return LengthCounts([(min(low, limit), min(high, limit), n) for low, high, n in self.bins])

    def within(self, limit: int) -> float:
        """The share of the tokens that stand before this place of their rows."""
        whole = sum(n * (low + high) / 2 for low, high, n in self.bins)
        kept = sum(n * _mean_within(low, high, limit) for low, high, n in self.bins)
        return kept / max(1.0, whole)

    def up_to(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of the samples that have at most so many tokens."""
        found = np.zeros(len(lengths))
        for low, high, n in self.bins:
            found += n * np.clip((lengths - low + 1) / (high - low + 1), 0, 1)
        return found / max(1, sum(n for _, _, n in self.bins))


def _between(key: str, longest: int) -> tuple[int, int]:
    power = int(key.removeprefix("2^"))
    return min(1 << power, longest), min((2 << power) - 1, longest)


def _mean_within(low: int, high: int, limit: int) -> float:
    """The mean of lengths from `low` to `high`, each counted up to `limit`."""
    if limit <= low or high == low:
        return min(limit, high)
    top = min(high, limit)
    return ((low + top) / 2 * (top - low) + limit * (high - top)) / (high - low)


def mean_longest(
    streams: Sequence[tuple[LengthCounts, float]], rows: int, multiple: int = 1
) -> float:
    """Tokens of the longest of so many rows, on average, rounded up to a multiple. `streams`: lengths, and how many of the rows' samples
    are of them."""
    total = sum(n for _, n in streams)
    top = max((lengths.longest for lengths, n in streams if n), default=0)
    step = max(multiple, top >> 16)
    widths = np.arange(0, top, step, dtype=np.float64)
    shorter = sum(
        (lengths.up_to(widths) * (n / total) for lengths, n in streams), np.zeros(len(widths))
    )
    return step * float((1 - np.minimum(1.0, shorter) ** rows).sum())

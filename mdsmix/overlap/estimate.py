"""What share of one stream's grams stands in another, estimated from their marks, with its standard error.

Every different gram is kept or not by itself, whatever passages it comes from, so that so many of the kept ones are found in the other
mark as of so many draws: the error is a binomial one. It is a lower bound of what is shared: text that was worded anew, or
that another tokenizer cut, has other grams, and grams that stand in many samples of a unit were left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from mdsmix.overlap.grams import Hashes
from mdsmix.overlap.marks import Merged

FEW = 100
"Fewer kept grams than this tell nothing: one that is found by chance would be a percent of them."
ENOUGH = 1 << 17
"Of more than this the bound is halved once more: an error below 0.2 % is of no use, and 50 streams are 2,450 comparisons."


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of the kept grams of one stream, those in another."""

    found: int
    of: int

    @property
    def share(self) -> float:
        return self.found / max(self.of, 1)

    @property
    def error(self) -> float:
        """The standard error of the share; not 0 where none or all were found, as of one more draw of each outcome."""
        p, n = (self.found + 1) / (self.of + 2), self.of + 2
        return sqrt(p * (1 - p) / n)

    @property
    def is_few(self) -> bool:
        return self.of < FEW


def containment(one: Merged, other: Merged) -> Estimate:
    """What share of the different grams of `one` stands in `other`."""
    halvings = max(one.halvings, other.halvings)
    mine = one.below(halvings)
    halvings += max(0, (max(len(mine), 1) - 1).bit_length() - (ENOUGH - 1).bit_length())
    mine, its = one.below(halvings), other.below(halvings)
    return Estimate(found=int(is_among(mine, its).sum()), of=len(mine))


def is_among(hashes: Hashes, others: Hashes) -> NDArray[np.bool_]:
    """bool [n]: the hashes that stand among the others, which ascend."""
    if not len(others):
        return np.zeros(len(hashes), bool)
    at = np.minimum(np.searchsorted(others, hashes), len(others) - 1)
    return np.asarray(others[at] == hashes)

"""Which samples are drawn, and in which order they come out: a random number a sample, worked out and never stored.

The numbers are SplitMix64's. Its n-th number follows from n alone, so any part of the sequence is made again where it is
needed, at 100 M numbers a second, and no permutation of a stream is ever held in memory. All numbers of one seed differ, so
sorting by them is a shuffle without ties. numpy's own generators promise neither, nor the same numbers in every version.
Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

BLOCK = 1 << 20
"Numbers made at a time: 8 MB."
_TOP_BITS = 16

Keys = NDArray[np.uint64]


def seed_of(*parts: object) -> int:
    """64 bits from what a sequence is for, so that no two purposes share numbers."""
    return xxhash.xxh64_intdigest("\0".join(map(str, parts)))


def random_keys(seed: int, start: int, stop: int) -> Keys:
    """uint64 [stop - start]: the numbers `start` to `stop` of the seed's sequence, all different."""
    z = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Draw:
    """How often each sample of one stream is drawn: as often as all the others, and some of them once more.

    Those some are the samples with the smallest random keys: a choice without replacement, each sample as likely.
    """

    def __init__(self, samples: int, drawn: int, seed: int) -> None:
        self._copies, more = divmod(drawn, samples)
        self._seed = seed
        self._last = _kth_smallest(seed, samples, more) if more else None

    def copies(self, start: int, stop: int) -> NDArray[np.int64]:
        """int64 [stop - start]: of the samples `start` to `stop`, how often each is drawn."""
        copies = np.full(stop - start, self._copies, np.int64)
        if self._last is not None:
            copies += random_keys(self._seed, start, stop) <= self._last
        return copies


def _kth_smallest(seed: int, n: int, k: int) -> np.uint64:
    """The k-th smallest (from 1) of the first n keys, in memory for a 65,536th of them."""
    shift = np.uint64(64 - _TOP_BITS)
    counts = np.zeros(1 << _TOP_BITS, np.int64)
    for keys in _blocks(seed, n):
        counts += np.bincount((keys >> shift).astype(np.int64), minlength=len(counts))
    ends = np.cumsum(counts)
    top = int(np.searchsorted(ends, k))
    near = [keys[keys >> shift == np.uint64(top)] for keys in _blocks(seed, n)]
    within = k - 1 - int(ends[top] - counts[top])
    return np.uint64(np.sort(np.concatenate(near))[within])


def _blocks(seed: int, n: int) -> Iterator[Keys]:
    for start in range(0, n, BLOCK):
        yield random_keys(seed, start, min(n, start + BLOCK))

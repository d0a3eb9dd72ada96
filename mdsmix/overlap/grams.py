"""Runs of n token ids (grams), as 64-bit hashes: all of some rows, or the 1 of 256 that a mark keeps.

Which grams a mark keeps is decided by their ids alone, so the same gram is kept in every stream or in none, and what share of one
mark is in another estimates what share of one stream's grams is in the other (FracMinHash). The choice is a polynomial of the ids in
16 bits, worked out for all positions of a block at once from halves: conversion pays for it with every token. Sums of ids
would be cheaper, and are not enough: grams of the same few tokens in another order (numbers, tables, sequences of letters) would be
kept or left together, and an estimate of them lay 20 of its standard errors off. Only what is kept is hashed by 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.ragged import Ragged

Hashes = NDArray[np.uint64]
GRAM = 8
"Tokens of a gram of a mark: about six words."
RATE = 256
"One gram of so many is kept."
BLOCK = 1 << 15
"Positions that are looked at together: what is worked out of them stays in the second-level cache."
FLAGS = 1 << 20
"Positions whose flags are looked through at once."
BASE = 40503
"Of the polynomial, odd; from it follows which grams a mark keeps, so marks of another one are not compared."
_POWERS = tuple(np.uint16(pow(BASE, n, 1 << 16)) for n in (1, 2, 4))
_KEPT = np.uint16((1 << 16) // RATE)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
"As SplitMix64 ends: each bit of the sum shapes each bit of the hash."


@dataclass(frozen=True, slots=True)
class Kept:
    """The kept grams of some rows, each time that one stands there."""

    hashes: Hashes
    rows: NDArray[np.int64]
    "The row that each stands in."


def kept(rows: Ragged, images: Sequence[int] = ()) -> Kept:
    """The grams of the rows that a mark keeps; none reaches over the end of its row, or holds one of the ids that stand for images."""
    at = _kept_places(rows.values)
    row = np.searchsorted(rows.offsets, at, "right") - 1
    inside = at + GRAM <= rows.offsets[row + 1]
    if images:
        inside &= are_text(rows.values, at, GRAM, images)
    return Kept(hashes(rows.values, at[inside], GRAM), row[inside])


def _kept_places(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Where a kept gram begins, ends of rows not looked at."""
    found = [np.empty(0, np.int64)]
    flags = np.empty(min(FLAGS, len(ids) + 7 & ~7), bool)
    one, other = np.empty((2, BLOCK + GRAM), np.uint16)
    for first in range(0, len(ids) - GRAM + 1, FLAGS):
        last = min(first + FLAGS, len(ids) - GRAM + 1)
        flags[last - first :] = False
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            _flag(ids[start : stop + GRAM - 1], one, other, flags[start - first : stop - first])
        found.append(_where(flags) + first)
    return np.concatenate(found)


def _flag(
    ids: NDArray[Any], one: NDArray[np.uint16], other: NDArray[np.uint16], out: NDArray[np.bool_]
) -> None:
    """Says of each gram whether it is kept, by the polynomial of 2, 4, then 8 ids. Two buffers take turns: NumPy copies what an output
    would overwrite before it is read."""
    block, n = ids.astype(np.uint16, copy=False), len(ids)
    np.multiply(block[: n - 1], _POWERS[0], out=one[: n - 1])
    np.add(one[: n - 1], block[1:], out=one[: n - 1])
    np.multiply(one[: n - 3], _POWERS[1], out=other[: n - 3])
    np.add(other[: n - 3], one[2 : n - 1], out=other[: n - 3])
    np.multiply(other[: n - 7], _POWERS[2], out=one[: n - 7])
    np.add(one[: n - 7], other[4 : n - 3], out=one[: n - 7])
    np.less(one[: n - 7], _KEPT, out=out)


def _where(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The places of the few flags that are set, looked for by eights: a third of the time of numpy.flatnonzero."""
    eights = np.flatnonzero(flags.view(np.uint64) != 0)
    within = np.flatnonzero(flags.reshape(-1, 8)[eights])
    return np.asarray((eights[within >> 3] << 3) + (within & 7))


def are_text(
    ids: NDArray[Any], at: NDArray[np.int64], length: int, images: Sequence[int]
) -> NDArray[np.bool_]:
    """Whether the gram from each place on holds no placeholder of an image: that is the same whatever is to be seen."""
    before = np.append(0, np.cumsum(np.isin(ids, images)))
    return np.asarray(before[at] == before[at + length])


def hashes(ids: NDArray[Any], at: NDArray[np.int64], length: int) -> Hashes:
    """uint64: a hash of the `length` ids from each place on, whatever integers they are stored as."""
    value = np.ones(len(at), np.uint64)
    for offset in range(length):
        value *= _FACTOR
        value += ids[at + offset].astype(np.uint64)
    for shift, factor in _MIX:
        value ^= value >> shift
        value *= factor
    return value ^ (value >> np.uint64(32))

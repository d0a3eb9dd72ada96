"""Runs of token ids (grams) as 64-bit hashes, and which of them may be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard
from mdsmix.shards.token_ids import PACKED, Tokens, layout_of

Hashes = NDArray[np.uint64]
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
"As SplitMix64 ends: each bit of the sum shapes each bit of the hash."


def rows_of(shard: Shard, tokens: Tokens) -> Ragged:
    """The tokens of each sample of a shard; of packed rows, of each of their documents."""
    if layout_of(shard.columns) != PACKED:
        return tokens.ids
    return Ragged.from_lengths(tokens.ids.values, tokens.responses)


def are_text(
    ids: NDArray[Any], at: NDArray[np.int64], length: int, images: Sequence[int]
) -> NDArray[np.bool_]:
    """Whether the gram from each place on holds no placeholder of an image: placeholders are equal whatever the image shows."""
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

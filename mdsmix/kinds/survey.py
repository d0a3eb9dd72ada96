"""Estimates of an unconverted source: the beginnings of a few of its splits are encoded as a
conversion would encode them.

A plan estimates from these how many tokens a stream will hold, and a conversion which part of a
source fills its share of a budget. Documents differ in length by orders of magnitude, but hardly in
tokens per byte, so counts are taken per byte. Nothing is written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix import sources
from mdsmix.encode.backends import Unequal
from mdsmix.encode.encoded import Encoded
from mdsmix.kinds.read_records import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSample:
    """The beginning of one split."""

    encoded: Encoded
    weight: float
    "The bytes of its records, as `size_of` counts those of all files."
    left_out: Counter[str]
    "Reason code -> records that became no sample."
    tokens: int
    """Tokens that a model sees: images count with the processor's tokens, and tokens that the
    loader cuts off do not count.
    """
    by_record: NDArray[Any]
    "Tokens of each record that becomes samples; tokens that the loader cuts off count."


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens per byte and per record of a source, estimated from the splits that were read."""

    each: float
    "Tokens per byte, as `size_of` counts bytes."
    error: float
    """The relative standard error of `each`, from the differences between splits; 0 where one split
    was read.
    """
    mean: float
    "Tokens per record, on average."
    spread: float
    "The standard deviation of the tokens of a record, as a part of their mean."
    places: int
    "How many splits were read."


def look(
    units: Sequence[sources.Unit],
    open_reading: Callable[[str], Reading],
    backend: str,
    reads_beside: bool,
    size: int | None = None,
) -> list[SplitSample]:
    """Reads and encodes the beginnings of units.

    Args:
        open_reading: opens the Reading that encodes, with the backend of a name.
        backend: the backend's name. Where its ids differ from the reference's, all is encoded again
        by the reference.
        reads_beside: images lie beside the files of the records, and are read.
        size: source bytes to read of each split; None: the default of `read_beginnings`.
    """
    reading, looks = open_reading(backend), list[SplitSample]()
    try:
        for beginning in sources.read_beginnings(units, size):
            made = reading.encode(
                beginning.records,
                folders=[beginning.folder] * len(beginning.records) if reads_beside else [],
            )
            # A stored image is one token.
            more = [sum(max(0, image.tokens - 1) for image in of) for of in made.images]
            grown = made.lengths + (np.array(more, np.int64) if more else 0)
            _, records = np.unique(made.positions, return_inverse=True)
            looks.append(
                SplitSample(
                    encoded=made,
                    weight=beginning.weight,
                    left_out=Counter(map(str, made.rejected.values())) + beginning.bad,
                    tokens=made.totals.seen_tokens + sum(more),
                    by_record=np.bincount(records, grown),
                )
            )
    except Unequal:
        return look(units, open_reading, "reference", reads_beside, size)
    return looks


def rates_of(looks: Sequence[SplitSample]) -> Rates | None:
    """The rates of the splits together; None where no token was seen."""
    tokens = np.array([each.tokens for each in looks])
    weights = np.array([each.weight for each in looks])
    if not tokens.sum():
        return None
    lengths = np.concatenate([each.by_record for each in looks])
    places, rate = len(looks), float(tokens.sum() / weights.sum())
    off = float(np.sum((tokens - weights * rate) ** 2)) * places / max(1, places - 1)
    return Rates(
        each=rate,
        error=math.sqrt(off) / float(tokens.sum()) if places > 1 else 0.0,
        mean=float(np.mean(lengths)),
        spread=float(np.std(lengths) / np.mean(lengths)),
        places=places,
    )

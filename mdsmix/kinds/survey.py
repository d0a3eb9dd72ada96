"""About what a source that is not converted holds: the beginnings of a few of its splits, made into samples as a conversion would.

A plan takes from it what a stream will hold, and a conversion which part of a source its share of a budget is. Documents differ in
length by orders of magnitude, but hardly in tokens per byte, so what is seen counts per byte. Nothing is written.
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
    "What its records are of what `size_of` says of all files."
    left_out: Counter[str]
    "Reason -> records that became no sample."
    tokens: int
    "With those that its images become, without those that the loader cuts off."
    by_record: NDArray[Any]
    "Tokens of each record that becomes samples, cut off or not."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens by bytes, which hold however many other splits there are."""

    each: float
    "Tokens of a byte, as `size_of` counts bytes."
    error: float
    "The relative standard error of that, by how far the splits differ; 0 where there is one."
    mean: float
    "Tokens of a record."
    spread: float
    "The standard deviation of the tokens of a record, as a part of their mean."
    places: int
    "Splits that were read from."


def look(
    units: Sequence[sources.Unit],
    open_reading: Callable[[str], Reading],
    backend: str,
    reads_beside: bool,
    size: int | None = None,
) -> list[SplitSample]:
    """Reads and encodes the beginnings of units.

    Args:
        open_reading: opens what encodes, with a backend of that name.
        backend: its name; where it turns out to differ from the reference, that does it again.
        reads_beside: images lie beside the files of the records, and are read.
        size: bytes of each split.
    """
    reading, looks = open_reading(backend), list[SplitSample]()
    try:
        for beginning in sources.read_beginnings(units, size):
            folders = [beginning.folder] * len(beginning.records) if reads_beside else []
            made = reading.encode(beginning.records, folders=folders)
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
    """None where no token was seen."""
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

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
from mdsmix.encode.backends import Backend, Unequal
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.kinds.read_records import Reading, open_reading
from mdsmix.shards.manifest import Encoding
from mdsmix.storage import Location


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
    encoding: Encoding,
    tokenizer: Tokenizer,
    backend: str,
    open_backend: Callable[[str], Backend],
    root: Location | None,
    reads_images: bool,
    size: int | None = None,
) -> list[SplitSample]:
    """`backend`: by its name; where it turns out to differ from the reference, that does it again. `root`: where the paths of images
    begin; `size`: bytes of each split."""
    images = root if reads_images else None
    reading = open_reading(encoding, tokenizer, open_backend(backend), root=images)
    try:
        return [
            _look(reading, beginning, reads_images and not root)
            for beginning in sources.read_beginnings(units, size)
        ]
    except Unequal:
        return look(units, encoding, tokenizer, "reference", open_backend, root, reads_images, size)


def _look(reading: Reading, beginning: sources.Beginning, are_beside: bool) -> SplitSample:
    folders = [beginning.folder] * len(beginning.records) if are_beside else []
    made = reading.encode(beginning.records, folders=folders)
    more = [sum(max(0, image.tokens - 1) for image in of) for of in made.images]
    grown = np.array(more or [0], np.int64)  # a stored image is one token
    _, records = np.unique(made.positions, return_inverse=True)
    return SplitSample(
        encoded=made,
        weight=beginning.weight,
        left_out=Counter(map(str, made.rejected.values())) + beginning.bad,
        tokens=made.totals.seen_tokens + sum(more),
        by_record=np.bincount(records, made.lengths + grown),
    )


def rates_of(looks: Sequence[SplitSample]) -> Rates | None:
    """None where no token was seen."""
    tokens, weights = [each.tokens for each in looks], [each.weight for each in looks]
    if not sum(tokens):
        return None
    lengths = np.concatenate([each.by_record for each in looks])
    return Rates(
        each=sum(tokens) / sum(weights),
        error=_error(np.array(tokens), np.array(weights)),
        mean=float(np.mean(lengths)),
        spread=float(np.std(lengths) / np.mean(lengths)),
        places=len(tokens),
    )


def _error(tokens: NDArray[Any], weights: NDArray[Any]) -> float:
    """The relative standard error of the ratio of the sums."""
    n, total = len(tokens), tokens.sum()
    if n < 2:
        return 0.0
    off = tokens - weights * (total / weights.sum())
    return math.sqrt(n / (n - 1) * float((off**2).sum())) / float(total)

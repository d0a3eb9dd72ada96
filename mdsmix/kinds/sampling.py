"""`sample: 5%`: which records a stream is made of, where it takes a share of its source. The others are read and not tokenized.

The record's fingerprint decides, so records that say the same are in or out together, wherever they stand; a source that grows or
moves changes no record's side, and a larger share only adds. A holdout asks another hash, and so holds out its share of what is
sampled. What has no fingerprint (a bad record, one that `where` leaves out) is in by its raw content: the stream is what a source
of these records alone would have made, and its share of bad records is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import xxhash

from mdsmix.kinds.fingerprints import fingerprint
from mdsmix.record import canonical
from mdsmix.shards.counts import NOT_SAMPLED


@dataclass(frozen=True, slots=True)
class Sample:
    """A share of all possible records, above 0 and below 1."""

    share: Fraction

    def of(self, records: Sequence[Any], found: Sequence[Any]) -> list[Any]:
        """What the shape `found` in the records, with a reason in place of what is not in the sample."""
        end = -(-self.share.numerator << 64) // self.share.denominator
        return [
            each if _place(record, each) < end else NOT_SAMPLED
            for record, each in zip(records, found, strict=True)
        ]

    def has_raw(self, raw: bytes) -> bool:
        """Whether an item that is no record is in the sample; one that was too long to be kept is."""
        place = xxhash.xxh3_64_intdigest(raw)
        return not raw or place * self.share.denominator < self.share.numerator << 64


def _place(record: Any, found: Any) -> int:
    """Of 2^64. The half of the fingerprint by which duplicates are not thrown into buckets."""
    if type(found) is not str:
        return int.from_bytes(fingerprint(found)[8:], "big")
    try:
        return xxhash.xxh3_64_intdigest(canonical(record))
    except (
        UnicodeEncodeError,
        RecursionError,
    ):  # half a character; nested deeper than JSON is written
        return 0

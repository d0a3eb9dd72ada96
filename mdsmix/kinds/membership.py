"""Which records a stream is made of: the `sample` of its source, and one side of its `holdout`.

What a record says decides, not its bytes or its place: records that say the same are in or out together, in two files or with other
spaces, and a source that grows or moves changes no record's side. A larger share only adds. Sample and holdout ask two hashes that
know nothing of each other, so a holdout holds out its share of what is sampled. What has no fingerprint (a bad record, one that
`where` leaves out) is in the sample by its raw content: the stream is what a source of these records alone would have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import xxhash

from mdsmix.kinds.fingerprints import fingerprint
from mdsmix.record import Record, canonical
from mdsmix.shards.counts import NOT_SAMPLED

HELD_OUT, NOT_HELD_OUT = "held_out", "not_held_out"
"Why a record is not in the stream that is trained on, and why it is not in the one for evaluation."


@dataclass(frozen=True, slots=True)
class Holdout:
    """One side of a stream of which a share is held out."""

    share: Fraction
    is_eval: bool
    "The side that was held out."

    def refused(self, record: Record) -> str | None:
        """Why the record is not on this side; None where it is."""
        if is_held_out(record, self.share) == self.is_eval:
            return None
        return NOT_HELD_OUT if self.is_eval else HELD_OUT


def is_held_out(record: Record, share: Fraction) -> bool:
    """Whether the record is among the share of all possible records that is held out."""
    return xxhash.xxh64_intdigest(canonical(record)) * share.denominator < share.numerator << 64


@dataclass(frozen=True, slots=True)
class RecordSample:
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
    if not isinstance(found, str):
        return int.from_bytes(fingerprint(found)[8:], "big")
    try:
        return xxhash.xxh3_64_intdigest(canonical(record))
    except (
        UnicodeEncodeError,
        RecursionError,
    ):  # half a character; nested deeper than JSON is written
        return 0

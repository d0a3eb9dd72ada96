"""Which records are held out for evaluation: chosen by what they say, so that no record is ever on both sides.

What the shape read is hashed, not the bytes, so a record that stands in two files or with other spaces is the same record.
The choice does not depend on other records, so a source that grows moves no record to the other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import xxhash

from mdsmix.record import Record, canonical

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

"""The records of a source that are in a stream: those in its `sample`, on one side of its
`holdout`, and no duplicate of an earlier record.

The content of a record decides, as the shape read it, not its bytes or its place. A record in two
files, in two formats, or with its keys in another order is the same record, and a source that grows
or moves changes no record's side. A larger share only adds records. Sample and holdout use two
independent hashes, so a holdout holds out its share of the sampled records. A record without a
fingerprint (a bad one, or one that `where` leaves out) is sampled by its raw content, so counts of
bad records are those of a source that held the sampled records alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from operator import add
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from xxhash import xxh3_128_digest as _hash

from mdsmix.record import Document, Pair, Record, canonical
from mdsmix.shards.counts import NOT_SAMPLED
from mdsmix.shards.manifest import Encoding

SIZE = 16
DUPLICATE = "duplicate"
"The reason code of a record that equals an earlier one of the stream."
HELD_OUT, NOT_HELD_OUT = "held_out", "not_held_out"
"""The reason codes of records on the other side: held out of the training stream, and not held out
for the evaluation stream.
"""


def fingerprints(records: Sequence[Any]) -> Iterator[bytes]:
    """The xxh3_128 of each record, 16 bytes; the records are of one type. A text is hashed itself:
    0.1 us and 10 GB/s, where its JSON would take 1 GB/s.
    """
    types = {*map(type, records)}
    if not types <= {Document, Pair}:
        return map(_hash, map(canonical, records))
    hashes = map(_hash, chain.from_iterable(records))
    return map(_hash, map(add, hashes, hashes)) if Pair in types else hashes


def told_apart(found: Sequence[Any]) -> tuple[NDArray[np.int64], list[Any], dict[int, str]]:
    """The positions of records among reason codes (int64), these records, and position -> reason
    code.
    """
    texts = {each for each in {*map(type, found)} if issubclass(each, str)}
    reasons = {at: why for at, why in enumerate(found) if type(why) in texts} if texts else {}
    good = np.delete(np.arange(len(found)), [*reasons])
    return good, [found[at] for at in good.tolist()] if reasons else [*found], reasons


@dataclass(slots=True, kw_only=True)
class Membership:
    """Tells which records of a window are in the stream, and keeps their fingerprints."""

    sample: Fraction | None = None
    "The share of all possible records that is sampled; None: all of them."
    holdout: Fraction | None = None
    "The share that is held out; None: no record is."
    is_eval: bool = False
    "The stream holds the records that were held out."
    duplicates: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """bool: whether each record of the window is dropped as a duplicate; records beyond the last
    flag stay.
    """
    _fingerprints: bytearray = field(default_factory=bytearray)

    @staticmethod
    def of(encoding: Encoding, dropped: bytes = b"") -> Membership:
        """The membership of a stream. `dropped`: the flags of a window's duplicates, eight a byte,
        the lowest bit first.
        """
        share, sample = encoding.holdout, encoding.sample
        return Membership(
            sample=Fraction(sample) if sample else None,
            holdout=Fraction(share) if share else None,
            is_eval=encoding.held_out,
            duplicates=np.unpackbits(np.frombuffer(dropped, np.uint8), bitorder="little") > 0,
        )

    def judge(self, records: Sequence[Any], found: list[Any], first: int) -> list[Any]:
        """`found`, the shape's result for each record, with a reason code in place of each record
        that is not in the stream. `first`: the position in the window of the first record.
        """
        if (sample := self.sample) is not None:
            each = zip(records, found, strict=True)
            found = [
                read if _is_in(_number(raw, read), sample) else NOT_SAMPLED for raw, read in each
            ]
        if (share := self.holdout) is not None:
            why = NOT_HELD_OUT if self.is_eval else HELD_OUT
            found = [
                read if isinstance(read, str) or is_held_out(read, share) == self.is_eval else why
                for read in found
            ]
        self._fingerprints += bytes(max(0, SIZE * first - len(self._fingerprints)))
        good, read, _ = told_apart(found)
        hashes = np.zeros((len(found), SIZE), np.uint8)
        hashes[good] = np.frombuffer(b"".join(fingerprints(read)), np.uint8).reshape(-1, SIZE)
        self._fingerprints += hashes.data
        for position in np.flatnonzero(self.duplicates[first : first + len(found)]).tolist():
            found[position] = DUPLICATE
        return found

    def fingerprints(self, count: int) -> bytes:
        """The fingerprints of the window's `count` decoded records in order, 16 bytes each; zeros
        for a record without one.
        """
        return bytes(self._fingerprints.ljust(SIZE * count, b"\0"))

    def samples_raw(self, raw: bytes) -> bool:
        """Whether an item that could not be decoded to a record is in the sample. An item too long
        to be kept, empty here, always is.
        """
        if self.sample is None or not raw:
            return True
        return _is_in(xxhash.xxh3_64_intdigest(raw), self.sample)


def is_held_out(record: Record, share: Fraction) -> bool:
    """Whether the record's hash puts it into the held-out share."""
    return _is_in(xxhash.xxh64_intdigest(canonical(record)), share)


def _is_in(number: int, share: Fraction) -> bool:
    """Whether a hash of 64 bits lies in the lowest `share` of all of them."""
    return number * share.denominator < share.numerator << 64


def _number(record: Any, found: Any) -> int:
    """64 bits that decide about the sample: the second half of the fingerprint, since its first
    half picks the bucket of the search for duplicates; for a record without a fingerprint a hash of
    its JSON.
    """
    if not isinstance(found, str):
        return int.from_bytes(next(fingerprints([found]))[8:], "big")
    try:
        return xxhash.xxh3_64_intdigest(canonical(record))
    except (UnicodeEncodeError, RecursionError):  # half a character; nested deeper than JSON
        return 0

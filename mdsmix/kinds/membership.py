"""Decides which records of a source are in a stream: those in its `sample`, on the right side of
its `holdout`, and not a duplicate of an earlier record.

The content of a record decides, as the shape has read it, not its bytes or its position. So a
record that is in two files, in two formats, or with its keys in another order is the same record,
and no record changes sides if a source grows or moves. A larger share only adds records. Sample and
holdout use two independent hashes, so a holdout takes its share of the sampled records.

A fingerprint is a hash of a record's content. A record without a fingerprint (a bad one, or one
that `where` leaves out) is sampled by its raw content. So the counts of bad records are those of a
source that contains only the sampled records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from operator import add
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from xxhash import xxh3_128_digest as _hash

from mdsmix.record import Document, Pair, Record, canonical
from mdsmix.shards.counts import NOT_SAMPLED
from mdsmix.shards.manifest import Encoding

SIZE = 16
"Bytes of a fingerprint."
DUPLICATE = "duplicate"
"The reason code of a record that equals an earlier one of the stream."
HELD_OUT = "held_out"
"The reason code, in the training stream, of a record that is held out."
NOT_HELD_OUT = "not_held_out"
"The reason code, in the evaluation stream, of a record that is not held out."


def fingerprints(records: Sequence[Any]) -> Iterator[bytes]:
    """Return the fingerprint of each record: its xxh3_128, 16 bytes. All records have one type.

    The text of a document or pair is hashed directly: 0.1 us and 10 GB/s, instead of 1 GB/s by way
    of JSON.
    """
    types = {*map(type, records)}
    if not types <= {Document, Pair}:
        return map(_hash, map(canonical, records))
    hashes = map(_hash, chain.from_iterable(records))
    if Pair not in types:
        return hashes
    # Passing the same iterator twice takes the hashes by twos: of a prompt, then of its response.
    # A pair's fingerprint is the hash of both.
    return map(_hash, map(add, hashes, hashes))


class SplitResults(NamedTuple):
    """The results of a shape, split into records and reason codes of refused records."""

    positions: NDArray[np.int64]
    "int64 [n]: the position of each record among the results."
    records: list[Any]
    rejected: dict[int, str]
    "Position of a result that is not a record -> its reason code."


def split_rejected(results: Sequence[Any]) -> SplitResults:
    """Split the results of a shape into records and reason codes. A result that is a string is the
    reason code of a refused record.
    """
    reason_types = {kind for kind in {*map(type, results)} if issubclass(kind, str)}
    if not reason_types:
        return SplitResults(np.arange(len(results)), [*results], {})
    rejected = {
        position: result for position, result in enumerate(results) if type(result) in reason_types
    }
    positions = np.delete(np.arange(len(results)), [*rejected])
    return SplitResults(positions, [results[position] for position in positions.tolist()], rejected)


@dataclass(slots=True, kw_only=True)
class Membership:
    """Selects the records that are in the stream, and collects their fingerprints, for one window
    (a slice of a source file that one worker converts).
    """

    sample: Fraction | None = None
    "The share of the records that is sampled; None: all records."
    holdout: Fraction | None = None
    "The share of the records that is held out for evaluation; None: no records."
    is_eval: bool = False
    "Whether this is the evaluation stream, of the records that are held out."
    duplicates: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """bool: whether each record of the window is dropped as a duplicate. If there are fewer flags
    than records, the records after the last flag stay.
    """
    _fingerprints: bytearray = field(default_factory=bytearray)

    @staticmethod
    def of(encoding: Encoding, dropped: bytes = b"") -> Membership:
        """Return the membership of a stream.

        Args:
            encoding: the settings of the stream.
            dropped: a bit for each record of the window, 1 if it is dropped as a duplicate; eight
                a byte, the lowest bit first.
        """
        return Membership(
            sample=Fraction(encoding.sample) if encoding.sample else None,
            holdout=Fraction(encoding.holdout) if encoding.holdout else None,
            is_eval=encoding.held_out,
            duplicates=np.unpackbits(np.frombuffer(dropped, np.uint8), bitorder="little") > 0,
        )

    def select(self, records: Sequence[Any], results: list[Any], first: int) -> list[Any]:
        """Return the results with a reason code in place of each record that is not in the stream.

        Args:
            records: raw records of the window.
            results: the shape's result for each of them: a record, or a string, which is the
                reason code of a refused record.
            first: the position of the first record in the window.
        """
        if self.sample is not None:
            results = self._sample(records, results, self.sample)
        if self.holdout is not None:
            results = self._hold_out(results, self.holdout)
        self._keep_fingerprints(results, first)
        flags = self.duplicates[first : first + len(results)]
        for position in np.flatnonzero(flags).tolist():
            results[position] = DUPLICATE
        return results

    def _sample(self, records: Sequence[Any], results: Sequence[Any], share: Fraction) -> list[Any]:
        return [
            result if _is_in_share(_sampling_hash(record, result), share) else NOT_SAMPLED
            for record, result in zip(records, results, strict=True)
        ]

    def _hold_out(self, results: Sequence[Any], share: Fraction) -> list[Any]:
        reason = NOT_HELD_OUT if self.is_eval else HELD_OUT
        return [
            result
            if isinstance(result, str) or is_held_out(result, share) == self.is_eval
            else reason
            for result in results
        ]

    def _keep_fingerprints(self, results: Sequence[Any], first: int) -> None:
        """Keep the fingerprint of each result; zeros for a reason code, which has none. Records of
        the window that were skipped before the first result get zeros too.
        """
        missing = SIZE * first - len(self._fingerprints)
        self._fingerprints += bytes(max(0, missing))
        positions, records, _ = split_rejected(results)
        hashes = np.zeros((len(results), SIZE), np.uint8)
        hashes[positions] = np.frombuffer(b"".join(fingerprints(records)), np.uint8).reshape(
            -1, SIZE
        )
        self._fingerprints += hashes.data

    def fingerprints(self, count: int) -> bytes:
        """Return the fingerprints of the window's `count` decoded records in order, 16 bytes each;
        zeros for a record without one.
        """
        return bytes(self._fingerprints.ljust(SIZE * count, b"\0"))

    def samples_raw(self, raw: bytes) -> bool:
        """Check whether an item that could not be decoded to a record is in the sample.

        Args:
            raw: the bytes of the item. Empty if it was too long to be kept: it then always is in
                the sample.
        """
        if self.sample is None or not raw:
            return True
        return _is_in_share(xxhash.xxh3_64_intdigest(raw), self.sample)


def is_held_out(record: Record, share: Fraction) -> bool:
    """Check whether the record's hash puts it into the held-out share."""
    return _is_in_share(xxhash.xxh64_intdigest(canonical(record)), share)


def _is_in_share(hashed: int, share: Fraction) -> bool:
    """Check whether a 64-bit hash is below `share` of 2^64."""
    return hashed * share.denominator < share.numerator << 64


def _sampling_hash(record: Any, result: Any) -> int:
    """Return the 64-bit hash that decides whether a record is in the sample.

    It is the second half of the record's fingerprint, because the first half decides in which
    bucket duplicates of it are searched. A refused record has no fingerprint: the hash of its JSON
    decides.

    Args:
        record: the raw record.
        result: the shape's result for it: a record, or a string, which is the reason code of a
            refused record.
    """
    if not isinstance(result, str):
        return int.from_bytes(next(fingerprints([result]))[8:], "big")
    try:
        return xxhash.xxh3_64_intdigest(canonical(record))
    except (UnicodeEncodeError, RecursionError):  # a lone surrogate, or nested too deeply
        return 0  # always in the sample

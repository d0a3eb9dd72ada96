"""The records of a source that are in a stream: those in its `sample`, on one side of its
`holdout`, and not a duplicate of an earlier record.

The content of a record decides, as the shape read it, not its bytes or its position. A record in
two files, in two formats, or with its keys in another order is the same record, and a source that
grows or moves changes no record's side. A larger share only adds records. Sample and holdout use
two independent hashes, so a holdout takes its share of the sampled records. A record without a
fingerprint (a bad one, or one that `where` leaves out) is sampled by its raw content, so counts of
bad records are those of a source that contains only the sampled records.
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
    """Return the xxh3_128 of each record, 16 bytes; the records are of one type. Text is hashed
    itself: 0.1 us and 10 GB/s, against 1 GB/s for its JSON.
    """
    types = {*map(type, records)}
    if not types <= {Document, Pair}:
        return map(_hash, map(canonical, records))
    hashes = map(_hash, chain.from_iterable(records))
    if Pair not in types:
        return hashes
    # The same iterator twice: the hashes of prompt and response, then the hash of both together.
    return map(_hash, map(add, hashes, hashes))


class SplitResults(NamedTuple):
    """The records among the results of a shape, and the reason codes among them."""

    positions: NDArray[np.int64]
    "int64 [n]: the position of each record among the results."
    records: list[Any]
    rejected: dict[int, str]
    "Position of a result that is not a record -> its reason code."


def split_rejected(results: Sequence[Any]) -> SplitResults:
    """Split the results of a shape into records and reason codes."""
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
    """Selects the records of a window that are in the stream, and keeps their fingerprints."""

    sample: Fraction | None = None
    "The share of all possible records that is sampled; None: all of them."
    holdout: Fraction | None = None
    "The share that is held out; None: no record is."
    is_eval: bool = False
    "The stream consists of the records that were held out."
    duplicates: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """bool: whether each record of the window is dropped as a duplicate; records beyond the last
    flag stay.
    """
    _fingerprints: bytearray = field(default_factory=bytearray)

    @staticmethod
    def of(encoding: Encoding, dropped: bytes = b"") -> Membership:
        """Return the membership of a stream.

        Args:
            encoding: the settings of the stream.
            dropped: the flags of a window's duplicates, eight a byte, the lowest bit first.
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
            results: the shape's result for each of them.
            first: the position in the window of the first record.
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
        """Keep the fingerprints of these results; zeros for those without one, and for records of
        the window before the first that were never selected.
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
        """Check whether an item that could not be decoded to a record is in the sample. An item too
        long to be kept, empty here, always is.
        """
        if self.sample is None or not raw:
            return True
        return _is_in_share(xxhash.xxh3_64_intdigest(raw), self.sample)


def is_held_out(record: Record, share: Fraction) -> bool:
    """Check whether the record's hash puts it into the held-out share."""
    return _is_in_share(xxhash.xxh64_intdigest(canonical(record)), share)


def _is_in_share(hashed: int, share: Fraction) -> bool:
    """Check whether a hash of 64 bits is in the lowest `share` of all of them."""
    return hashed * share.denominator < share.numerator << 64


def _sampling_hash(record: Any, result: Any) -> int:
    """Return the 64 bits that decide about the sample: the second half of the fingerprint, since
    its first half picks the bucket of the search for duplicates; for a record without a fingerprint
    a hash of its JSON.
    """
    if not isinstance(result, str):
        return int.from_bytes(next(fingerprints([result]))[8:], "big")
    try:
        return xxhash.xxh3_64_intdigest(canonical(record))
    except (UnicodeEncodeError, RecursionError):  # half a character; nested deeper than JSON
        return 0

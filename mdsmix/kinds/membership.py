"""Decides which records of a source are in a stream: those in its `sample`, on the right side of
its `holdout`, and not a duplicate of an earlier record.

A hash of the record decides. It is made of the content that the shape has read, not of the record's
bytes or position. So a record is the same record in another file, in another format, or with its
keys in another order, and stays on its side if the source grows or moves. A larger share only adds
records. The sample and the holdout use two independent hashes, so a holdout of 5 % takes 5 % of the
sampled records.

A fingerprint is the hash of a record's content. Bad records and records that `where` leaves out
have no fingerprint; a hash of their raw content decides whether they are sampled. So bad records
are counted as if the source contained only the sampled records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import add
from typing import Any, NamedTuple

import xxhash
from xxhash import xxh3_128_digest as _hash

from mdsmix.lazy_numpy import NDArray, np
from mdsmix.record import (
    Document,
    Pair,
    Record,
    canonical,
    canonical_forms,
    find_types,
    list_texts,
)
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
    """Return the fingerprint of each record: its xxh3_128, 16 bytes.

    The texts of documents and pairs are hashed directly, at 10 GB/s. The way through JSON, which
    all other records take, has 1 GB/s.

    Args:
        records: documents, pairs, conversations, preferences or prompts, all of one type.
    """
    types = find_types(records)
    if not types <= {Document, Pair}:
        return map(_hash, canonical_forms(records))
    hashes = map(_hash, list_texts(records))
    if Pair not in types:
        return hashes
    # The hashes are those of a prompt, its response, the next prompt, and so on. `map` takes two of
    # them at a time, since it gets the same iterator twice. A pair's fingerprint is the hash of
    # both.
    return map(_hash, map(add, hashes, hashes))


class SplitResults(NamedTuple):
    """What a shape (which reads raw records) returned for some records, split in two: the records
    that it could read, and the reason codes of those that it refused.
    """

    positions: NDArray[np.int64]
    "int64 [n]: the position of each of `records` among the results."
    records: Sequence[Any]
    "The n results that are records."
    rejected: dict[int, str]
    "Position of each other result -> its reason code."


def split_rejected(results: Sequence[Any]) -> SplitResults:
    """Split what a shape (which reads raw records) returned into records and reason codes.

    Args:
        results: an entry for each raw record: the record as it was read, or a string, which is the
            reason code of a refused record.
    """
    # Usually no record is refused: look at the few types of the results, not at each result.
    types = find_types(results)
    reason_types = {result_type for result_type in types if issubclass(result_type, str)}
    if not reason_types:
        return SplitResults(np.arange(len(results)), results, {})
    rejected = {
        position: result for position, result in enumerate(results) if type(result) in reason_types
    }
    positions = np.delete(np.arange(len(results)), [*rejected])
    return SplitResults(positions, [results[position] for position in positions.tolist()], rejected)


@dataclass(slots=True, kw_only=True)
class Membership:
    """Selects the records of one window that are in the stream, and collects the fingerprints of
    all its records. A window is a slice of a source file that one task converts.
    """

    sample: Fraction | None = None
    "The share of the records that is sampled; None: all records."
    holdout: Fraction | None = None
    "The share of the records that is held out for evaluation; None: no records."
    is_eval: bool = False
    "Whether the stream is the evaluation stream, which has only the records that are held out."
    duplicates: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """bool: whether each record of the window is dropped as a duplicate. There may be fewer flags
    than records: the records after the last flag are not dropped.
    """
    _fingerprints: bytearray = field(default_factory=bytearray)
    "The fingerprints of the records so far, 16 bytes each."

    @staticmethod
    def of(encoding: Encoding, dropped: bytes = b"") -> Membership:
        """Return an object that selects the records of a stream in one window, as the stream's
        settings say.

        Args:
            encoding: the settings of the stream.
            dropped: a bit for each record of the window (a slice of a source file): 1 if the record
                is dropped as a duplicate. Each byte has eight of these bits, the lowest bit first.
        """
        return Membership(
            sample=Fraction(encoding.sample) if encoding.sample else None,
            holdout=Fraction(encoding.holdout) if encoding.holdout else None,
            is_eval=encoding.held_out,
            duplicates=np.unpackbits(np.frombuffer(dropped, np.uint8), bitorder="little") > 0,
        )

    def select(self, records: Sequence[Any], results: Sequence[Any], first: int) -> Sequence[Any]:
        """Return the results with a reason code in place of each record that is not in the stream:
        one that is not sampled, is on the other side of the holdout, or is a duplicate.

        Args:
            records: some successive raw records of the window.
            results: each of these records as the shape has read it. A string is the reason code of
                a refused record.
            first: the position in the window (a slice of a source file) of the first of these
                records.
        """
        if self.sample is not None:
            results = self._sample(records, results, self.sample)
        if self.holdout is not None:
            results = self._hold_out(results, self.holdout)
        self._keep_fingerprints(results, first)
        flags = self.duplicates[first : first + len(results)]
        if not flags.any():
            return results
        selected = [*results]
        for position in np.flatnonzero(flags).tolist():
            selected[position] = DUPLICATE
        return selected

    def _sample(self, records: Sequence[Any], results: Sequence[Any], share: Fraction) -> list[Any]:
        """Return the results with a reason code in place of each record outside the sample."""
        return [
            result if _is_in_share(_sampling_hash(record, result), share) else NOT_SAMPLED
            for record, result in zip(records, results, strict=True)
        ]

    def _hold_out(self, results: Sequence[Any], share: Fraction) -> list[Any]:
        """Return the results with a reason code in place of each record on the other side of the
        holdout: a held-out record in the training stream, any other record in the evaluation
        stream.
        """
        reason = NOT_HELD_OUT if self.is_eval else HELD_OUT
        selected = list[Any]()
        for result in results:
            is_refused = isinstance(result, str)
            if is_refused or is_held_out(result, share) == self.is_eval:
                selected.append(result)
            else:
                selected.append(reason)
        return selected

    def _keep_fingerprints(self, results: Sequence[Any], first: int) -> None:
        """Keep the fingerprint of each result: a hash of the record, which is the same for
        duplicates. A reason code has no fingerprint: zeros are kept instead.

        Args:
            results: the results of successive records.
            first: the position in the window (a slice of a source file) of the first of these
                records. Zeros are kept for records before it that were skipped.
        """
        positions, records, _ = split_rejected(results)
        hashes = np.zeros((len(results), SIZE), np.uint8)
        joined = b"".join(fingerprints(records))
        hashes[positions] = np.frombuffer(joined, np.uint8).reshape(-1, SIZE)
        self.add_fingerprints(first, hashes.tobytes())

    def fingerprints(self, count: int) -> bytes:
        """Return the fingerprints of all records of the window (a slice of a source file) in order,
        16 bytes each. Duplicates are found by these hashes. A record without a fingerprint has
        zeros.

        Args:
            count: the number of decoded records of the window.
        """
        return bytes(self._fingerprints.ljust(SIZE * count, b"\0"))

    def for_part(self, first: int, count: int) -> Membership:
        """Return an object that selects some successive records of the window (a slice of a source
        file) in the same way, and has no fingerprints yet. For this object they begin at 0.

        Args:
            first: the position in the window of the first of these records.
            count: the number of records.
        """
        flags = self.duplicates[first : first + count]
        return replace(self, duplicates=flags, _fingerprints=bytearray())

    def add_fingerprints(self, first: int, fingerprints: bytes) -> None:
        """Add the fingerprints that an object of `for_part` has kept. Parts are added in order.

        Args:
            first: the position in the window (a slice of a source file) of the part's first record.
                Zeros are kept for records before it that are in no part.
            fingerprints: 16 bytes for each record of the part.
        """
        missing_bytes = SIZE * first - len(self._fingerprints)
        self._fingerprints += bytes(max(0, missing_bytes))
        self._fingerprints += fingerprints

    def samples_raw(self, raw: bytes) -> bool:
        """Check whether a record that could not be decoded is in the sample.

        Args:
            raw: the bytes of the record. Empty for a record that was too long to keep, which
                is always in the sample.
        """
        if self.sample is None or not raw:
            return True
        return _is_in_share(xxhash.xxh3_64_intdigest(raw), self.sample)


def is_held_out(record: Record, share: Fraction) -> bool:
    """Check whether a record is held out: whether its hash is in the held-out share."""
    return _is_in_share(xxhash.xxh64_intdigest(canonical(record)), share)


def _is_in_share(hashed: int, share: Fraction) -> bool:
    """Check whether a 64-bit hash is below `share` of 2^64."""
    # This compares hashed / 2^64 with the share, in exact whole numbers.
    return hashed * share.denominator < share.numerator << 64


def _sampling_hash(record: Any, result: Any) -> int:
    """Return the 64-bit hash that decides whether a record is in the sample.

    It is the second half of the record's fingerprint (the hash of its content). The first half
    already chooses the record's bucket in the search for duplicates. A refused record has no
    fingerprint: its hash is made of its JSON.

    Args:
        record: the raw record.
        result: the shape's result for the raw record. A string is the reason code of a refused
            record.
    """
    is_refused = isinstance(result, str)
    if not is_refused:
        fingerprint = next(fingerprints([result]))
        second_half = fingerprint[SIZE // 2 :]
        return int.from_bytes(second_half, "big")
    try:
        return xxhash.xxh3_64_intdigest(canonical(record))
    except (UnicodeEncodeError, RecursionError):  # a lone surrogate, or nested too deeply
        return 0  # always in the sample

"""Fingerprints: 16 bytes for what each record says, by which exact duplicates inside a stream are found.

What the shape read is hashed, not the bytes of the source, so a record that stands in two files, in two formats, with its keys
in another order or with other spaces is the same record. A holdout chooses by the same words, so duplicates are on one side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest as _hash

from mdsmix.encode.encoded import Encoded, Rejected
from mdsmix.record import Document, Pair, Record, canonical

SIZE = 16
NONE = bytes(SIZE)
"Stands for a record that has no fingerprint: it is bad, on the other side of the holdout, or set aside unseen."
DUPLICATE = "duplicate"
"Why a record that an earlier one of the stream equals is dropped."


def fingerprint(record: Record) -> bytes:
    """The xxh3_128 of the record. 0.1 us and 10 GB/s for a text, where its JSON would take 1 GB/s."""
    if type(record) is Document:
        return _hash(record.text)
    if type(record) is Pair:
        return _hash(_hash(record.prompt) + _hash(record.response))
    return _hash(canonical(record))


@dataclass(slots=True)
class Fingerprints:
    """Of all records of a window that its format could decode, in their order; `dropped` says which of them are dropped."""

    dropped: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    "One a record, or fewer: the others stay."
    _content: bytearray = field(default_factory=bytearray)

    def look(
        self, first: int, found: Sequence[Any], rejected: Sequence[Rejected]
    ) -> Iterator[Rejected]:
        """Takes the fingerprints of the records that stand in the window from `first` on, and yields those that are dropped.
        `rejected`: those that have none."""
        prints = [NONE if isinstance(record, str) else fingerprint(record) for record in found]
        for each in rejected:
            prints[each.position] = NONE
        self._content += bytes(SIZE * first - len(self._content))  # set aside unseen
        self._content += b"".join(prints)
        for position in np.flatnonzero(self.dropped[first : first + len(found)]):
            yield Rejected(int(position), DUPLICATE, True)

    def finish(self, count: int) -> bytes:
        """Those of all `count` records of the window."""
        return bytes(self._content) + bytes(SIZE * count - len(self._content))


class NoSamples:
    """An encoder for those who read records only to know them again."""

    def encode(self, records: list[Any]) -> Encoded:
        return Encoded(columns={}, tokens=0, loss_tokens=0, lengths=(), largest_id=-1)

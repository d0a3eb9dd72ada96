"""Counts what the records' writer most likely meant otherwise: fields that nothing reads, and placeholders that are trained as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mdsmix.encode.encoded import Encoded
from mdsmix.shapes.image_parts import NOTHING
from mdsmix.shapes.merging import holds_null

MOST_FIELDS = 64
"Fields that are counted by name in a work unit; a record may have any names, and the rest are counted as `...`."
OTHERS = "..."


class Oddities:
    """Counts, over the records of a work unit in their order."""

    def __init__(self, read: Iterable[str] = (), one_of: Sequence[str] = ()) -> None:
        """`one_of`: of these fields the first is read that is not empty."""
        self._read, self._one_of = frozenset(read), one_of
        self.unread: dict[str, int] = {}
        'Field -> records in which it is there, not read, and not empty (null, "", [] or {}).'
        self.unseen: dict[str, int] = {}
        "Field of a columnar file -> records that have it, where nothing tells whether it is empty."
        self.placeholders: dict[str, int] = {}
        "Placeholder -> records whose texts hold it."
        self.nulls: dict[str, int] = {}
        "Key of the source -> records with null entries inside that field."

    @property
    def counts(self) -> dict[str, Any]:
        """By the names that a manifest's `Records` have for them."""
        return {
            "unread": self.unread,
            "unseen": self.unseen,
            "placeholders": self.placeholders,
            "nulls": self.nulls,
        }

    def look_at_fields(self, records: Sequence[Any]) -> None:
        """Raw records, bad ones too."""
        read, unread = self._read, self.unread
        for record in records:
            if type(record) is dict and not read.issuperset(record):
                for name, value in record.items():
                    # 0 and False are not empty: they may be a label.
                    if name not in read and (value or isinstance(value, (int, float))):
                        known = name in unread or len(unread) < MOST_FIELDS
                        name = name if known else OTHERS
                        unread[name] = unread.get(name, 0) + 1
            if self._one_of and type(record) is dict:
                filled = [name for name in self._one_of if record.get(name) not in NOTHING]
                for name in filled[1:]:
                    unread[name] = unread.get(name, 0) + 1

    def look_at_columns(self, filled: Mapping[str, int], unseen: Mapping[str, int]) -> None:
        """What a format says of fields that it passed over; of those `unseen` nothing tells whether they are empty."""
        for into, said in ((self.unread, filled), (self.unseen, unseen)):
            for name in (name for name, count in said.items() if count):
                known = name if name in into or len(into) < MOST_FIELDS else OTHERS
                into[known] = into.get(known, 0) + said[name]

    def look_at_nulls(self, key: str, value: Any) -> None:
        """The messages or the tools of a record."""
        if holds_null(value):
            self.nulls[key] = self.nulls.get(key, 0) + 1

    def look_at_samples(self, encoded: Encoded) -> None:
        """What the kind says of the records that it was given; a document may well be about placeholders."""
        self.look_at_columns(encoded.unread, {})
        for placeholder, count in encoded.placeholders.items():
            self.placeholders[placeholder] = self.placeholders.get(placeholder, 0) + count

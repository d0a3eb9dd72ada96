"""The interface of a shape: how it reads a record, and what a recipe and `mdsmix init`
know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any, Literal, NamedTuple

from mdsmix.record import RecordRefused, is_encodable
from mdsmix.shapes.fields import value_at

Fields = Mapping[str, str]
"A shape's key in the recipe (`text`, `prompt`, ...) -> the record's field."


class RawRecord(NamedTuple):
    """A record as its format decodes it, with the fields and options by which a shape reads it."""

    record: Mapping[str, Any]
    fields: Fields
    options: Mapping[str, Any]
    "Name -> value, of the shape's options that are not at their defaults."

    @property
    def merges(self) -> bool:
        """Whether messages of one role in a row become one message."""
        return self.options.get("consecutive_roles") == "merge"

    def value(self, key: str) -> Any:
        """The value of an optional key's field; None where the recipe names no field or the record
        lacks it.
        """
        return self.record.get(self.fields[key]) if key in self.fields else None

    def extra(self, name: str) -> Any:
        """The value of a field that no key of the recipe names; None if the record lacks it. It is
        at the top of the record, or beside a field that a path leads to: `json.loss_mask` for
        `json.messages`.
        """
        if name in self.record:
            return self.record[name]
        beside = (
            f"{path.rpartition('.')[0]}.{name}" for path in self.fields.values() if "." in path
        )
        found = (value_at(path, self.record) for path in beside if "{" not in path)
        return next((value for value in found if value is not None), None)

    def held(self, key: str) -> Any:
        """The value of a key's field; RecordRefused (missing_field) where the record lacks it."""
        if self.fields[key] not in self.record:
            raise RecordRefused("missing_field", missing=self.fields[key])
        return self.record[self.fields[key]]

    def text(self, key: str) -> str:
        """The text in a key's field; RecordRefused where the field is missing or holds no encodable
        text.
        """
        text = self.held(key)
        if type(text) is not str:
            raise RecordRefused("field_not_text")
        if not is_encodable(text):
            raise RecordRefused("lone_surrogate")
        return text


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One way to write a record."""

    name: str
    "The shape's name in the recipe's `shape:`."
    version: int = 1
    """Raised when a record of the shape gives another result, or is refused where it was not, or
    the other way.
    """
    gives: type
    "The class of its records: Document, Pair, Conversation or Preference."
    fields: tuple[str, ...] = ()
    """The keys of `source:` that name its fields. Where a recipe gives all of these, and no others
    but `optional` ones, the shape follows from them. Where a recipe names the shape and no field,
    each field bears its key's name.
    """
    optional: tuple[str, ...] = ()
    "Keys of fields that a record may lack."
    structured: tuple[str, ...] = ()
    """Keys whose values are lists or objects: written as JSON where cells can only be texts, as in
    csv.
    """
    options: tuple[str, ...] = ()
    "Keys of the source or the stream that change how the shape reads a record."
    also_called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key -> other names of its field in common data sets. `mdsmix init` finds a field by these,
    and by the synonyms in SourceSpec.
    """
    guess: Callable[[Sequence[Any], Fields], Iterable[Mapping[str, Any]]] = lambda *_: ()
    """(records, fields) -> sets of options that `mdsmix init` tries beside the defaults, as the
    records suggest them.
    """
    has_images: Literal["", "beside", "inside"] = ""
    """Place of images in records of a shape that always has images: beside the texts, or inside,
    where the shape itself reads them.
    """
    extras: tuple[str, ...] = ()
    """Fields that are read by their own names wherever a record has them; a recipe does not name
    them.
    """
    images_first: bool = False
    "Images that no text places come before the first question."
    image_fields: tuple[str, ...] | None = None
    "The fields of a record that may hold its images; None where none are read."
    reasons: Mapping[str, str] = field(default_factory=dict)
    "Reason codes that only this shape and shapes like it give -> their explanations."
    parse: Callable[[RawRecord], Any]
    "Reads one raw record; RecordRefused with the reason why it is none."
    plain: Callable[[Sequence[Any], Fields], list[Any] | None] | None = None
    """(records, fields) -> the results of `parse`, worked out for all records at once; None,
    LookupError or TypeError where a record is odd.
    """

    @property
    def own_fields(self) -> dict[str, str]:
        """Key -> field, where each field bears its key's name."""
        return {key: key for key in (*self.fields, *self.optional)}

    def is_told_by(self, keys: Set[str]) -> bool:
        """Whether the shape follows from these keys."""
        return bool(self.fields) and set(self.fields) <= keys <= self.own_fields.keys()

    def read(self, record: Any, fields: Fields, **options: Any) -> Any:
        """The record, or a `NoRecord` with the reason why it is none. A bare list of messages is
        the record's messages; a list of other objects counts as a whole file in one array.
        """
        try:
            if isinstance(record, dict):
                return self.parse(RawRecord(record, fields, options))
            if (key := key_of_list(record)) in fields:
                return self.parse(RawRecord({fields[key]: record}, fields, options))
            is_array = isinstance(record, list) and record and isinstance(record[0], dict)
            raise RecordRefused("json_array" if is_array else "not_an_object")
        except RecordRefused as refused:
            return refused.why

    def read_plain(self, records: Sequence[Any], fields: Fields) -> list[Any] | None:
        """The records, read field by field in half the time of `read`, which saves a tenth of a
        conversion of short texts. None where a record is odd: then the caller reads each by itself.
        """
        try:
            return self.plain(records, fields) if self.plain else None
        except (LookupError, TypeError):
            return None


_KEYS_OF_LISTS = {"role": "messages", "from": "conversations"}
"A key that each message has -> the key of a recipe that names such messages."


def key_of_list(record: Any) -> str:
    """Return the key of a recipe that names the messages of a record which is nothing but their
    list; empty for any other.
    """
    if not isinstance(record, list) or not record:
        return ""
    shared = set[str](record[0]) if isinstance(record[0], dict) else set[str]()
    for message in record:
        shared &= message.keys() if isinstance(message, dict) else set()
    return next((key for mark, key in _KEYS_OF_LISTS.items() if mark in shared), "")


def are_texts(values: Sequence[Any]) -> bool:
    """Whether all values are texts that have a UTF-8 form; false without values."""
    is_text = {*map(type, values)} == {str}
    return is_text and all(map(is_encodable, filterfalse(str.isascii, values)))

"""The interface of a shape: how it reads a record, and what a recipe and `mdsmix init` need to know
about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any, Literal, NamedTuple

from mdsmix.record import RecordRefused, is_encodable
from mdsmix.shapes.fields import find_value

Fields = Mapping[str, str]
"A shape's key in the recipe (`text`, `prompt`, ...) -> the record's field."


class RawRecord(NamedTuple):
    """A record as its format decodes it, with the fields and options of its stream."""

    record: Mapping[str, Any]
    fields: Fields
    options: Mapping[str, Any]
    "Name -> value, of the shape's options that are not at their defaults."

    @property
    def merges(self) -> bool:
        """Whether messages of one role in a row become one message."""
        return self.options.get("consecutive_roles") == "merge"

    def value(self, key: str) -> Any:
        """Return the value of the field that the recipe names under an optional key.

        None if the recipe does not set the key, or the record lacks the field.

        Args:
            key: a key of `source:`, such as `system`.
        """
        return self.record.get(self.fields[key]) if key in self.fields else None

    def extra(self, name: str) -> Any:
        """Return the value of a field that no key of the recipe names; None if the record lacks it.

        The field is at the top of the record, or next to a field that the recipe names by a path:
        `json.loss_mask` if the recipe names `json.messages`.
        """
        if name in self.record:
            return self.record[name]
        # Search next to each field that is named by a path. A template has braces: skip it.
        for path in self.fields.values():
            if "." not in path:
                continue
            sibling = f"{path.rpartition('.')[0]}.{name}"
            value = None if "{" in sibling else find_value(sibling, self.record)
            if value is not None:
                return value
        return None

    def required_value(self, key: str) -> Any:
        """Return the value of the field that the recipe names under a key.

        Raises RecordRefused (missing_field) if the record lacks it.
        """
        if self.fields[key] not in self.record:
            raise RecordRefused("missing_field", missing=self.fields[key])
        return self.record[self.fields[key]]

    def text(self, key: str) -> str:
        """Return the string in the field that the recipe names under a key.

        Raises RecordRefused if the field is missing, is not a string, or cannot be encoded as
        UTF-8.
        """
        text = self.required_value(key)
        if type(text) is not str:
            raise RecordRefused("field_not_text")
        if not is_encodable(text):
            raise RecordRefused("lone_surrogate")
        return text


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One way to write a record, such as `{"prompt": ..., "response": ...}`: its fields, and the
    function that reads it.
    """

    name: str
    "The shape's name in the recipe's `shape:`."
    version: int = 1
    """Increased when a change of code gives a record another result, refuses a record that was read
    before, or reads one that was refused.
    """
    gives: type
    "The class of its records: Document, Pair, Conversation or Preference."
    fields: tuple[str, ...] = ()
    """The keys of `source:` that name its required fields. A recipe that sets all of these keys,
    and besides them only keys in `optional`, has this shape without naming it. If a recipe names
    the shape and no field, each field has the name of its key.
    """
    optional: tuple[str, ...] = ()
    "Keys of fields that a record may lack."
    structured: tuple[str, ...] = ()
    """Keys whose values are lists or objects: written as JSON in a format whose cells are strings,
    such as csv.
    """
    options: tuple[str, ...] = ()
    "Keys of the source or the stream that change how the shape reads a record."
    also_called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key -> other names of its field in common data sets. `mdsmix init` recognises a field by
    these, and by the synonyms in SourceSpec.
    """
    guess: Callable[[Sequence[Any], Fields], Iterable[Mapping[str, Any]]] = lambda *_: ()
    """(records, fields) -> sets of options that the records suggest, which `mdsmix init` tries in
    addition to the defaults.
    """
    has_images: Literal["", "outside", "inside"] = ""
    """Where the images are, in a shape whose records always have images: `outside` the texts, in a
    field of their own, or `inside` the texts. Images inside are read by the shape's own `parse`.
    Empty for all other shapes.
    """
    extras: tuple[str, ...] = ()
    """Fields that are read by their own names from every record that has them; a recipe does not
    name them.
    """
    images_first: bool = False
    "If no text has a placeholder for an image, all images come before the first question."
    image_fields: tuple[str, ...] | None = None
    "The fields of a record that may contain its images; None if no images are read."
    reasons: Mapping[str, str] = field(default_factory=dict)
    "Reason codes of bad records that only this shape and similar ones use -> explanations."
    parse: Callable[[RawRecord], Any]
    "Reads one raw record. Raises RecordRefused with the reason if it cannot be read."
    plain: Callable[[Sequence[Any], Fields], list[Any] | None] | None = None
    """(records, fields) -> the results of `parse` for all records at once; None, LookupError or
    TypeError if a record needs `parse`.
    """

    @property
    def own_fields(self) -> dict[str, str]:
        """Key -> field, for a source that names no field: each field has the name of its key."""
        return {key: key for key in (*self.fields, *self.optional)}

    def follows_from(self, keys: Set[str]) -> bool:
        """Return whether a source with these keys, and without `shape:`, is of this shape."""
        return bool(self.fields) and set(self.fields) <= keys <= self.own_fields.keys()

    def read(self, record: Any, fields: Fields, **options: Any) -> Any:
        """Return the record as an object of type `gives`, or a `NoRecord` with the reason why it
        cannot be read.

        A bare list of messages is read as the record's messages. A list of other objects is
        refused as `json_array`: it is probably a whole file in one array.
        """
        try:
            if isinstance(record, dict):
                return self.parse(RawRecord(record, fields, options))
            key = key_of_list(record)
            if key in fields:
                return self.parse(RawRecord({fields[key]: record}, fields, options))
            is_array = isinstance(record, list) and record and isinstance(record[0], dict)
            raise RecordRefused("json_array" if is_array else "not_an_object")
        except RecordRefused as refused:
            return refused.why

    def read_plain(self, records: Sequence[Any], fields: Fields) -> list[Any] | None:
        """Return all records read at once, or None if one of them must be read with `read`.

        Fields are read as columns, in half the time of `read`. That saves a tenth of a conversion
        of short texts.
        """
        try:
            return self.plain(records, fields) if self.plain else None
        except (LookupError, TypeError):
            return None


_KEY_OF_MESSAGES = {"role": "messages", "from": "conversations"}
"A key that every message of a form has -> the recipe's key for messages of this form."


def key_of_list(record: Any) -> str:
    """Return `messages` or `conversations`, the recipe's key for messages of this form, if a record
    is a bare list of messages. Return an empty string for any other record.
    """
    if not isinstance(record, list) or not record:
        return ""
    shared_keys = set[str](record[0]) if isinstance(record[0], dict) else set[str]()
    for message in record:
        shared_keys &= message.keys() if isinstance(message, dict) else set()
    return next((key for mark, key in _KEY_OF_MESSAGES.items() if mark in shared_keys), "")


def are_texts(values: Sequence[Any]) -> bool:
    """Check whether all values are strings that can be encoded as UTF-8; False without values."""
    is_text = {*map(type, values)} == {str}
    return is_text and all(map(is_encodable, filterfalse(str.isascii, values)))

"""The interface of a shape: how it reads a record, and what a recipe and `mdsmix init` need to know
about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import field
from typing import Any, Literal, NamedTuple

from mdsmix.frozen import frozen
from mdsmix.record import NoRecord, RecordRefused, are_encodable, is_encodable
from mdsmix.shapes.fields import find_value, parse_field

Fields = Mapping[str, str]
"""Key of `source:` in the recipe, such as `prompt` -> the field of the record that it names, such
as `question`.
"""


class RawRecord(NamedTuple):
    """A decoded record, with what the recipe says on how to read it: the names of its fields, and
    options such as `nulls`.
    """

    record: Mapping[str, Any]
    "The decoded JSON object."
    fields: Fields
    "The keys of the recipe, with the fields that they name."
    options: Mapping[str, Any]
    "The shape's options that are not at their defaults: key -> value."

    @property
    def merges(self) -> bool:
        """Whether messages in a row that have the same role are merged into one message."""
        return self.options.get("consecutive_roles") == "merge"

    @property
    def drops_nulls(self) -> bool:
        """Whether null entries of objects are dropped from messages and tools."""
        return self.options.get("nulls") == "drop"

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

        Args:
            name: the name of the field, such as `loss_mask`.
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

        Raises RecordRefused (missing_field) if the record lacks the field.

        Args:
            key: a key of `source:`, such as `messages`.
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


@frozen(kw_only=True)
class Shape:
    """One way to write a record, such as `{"prompt": ..., "response": ...}`: its fields, and the
    function that reads it.
    """

    name: str
    "The shape's name in the recipe's `shape:`."
    version: int = 1
    """The version of the shape's rules. It is increased when a change of code gives a record
    another result, refuses a record that was read before, or reads a record that was refused
    before.
    """
    gives: type
    """The class of its records: Document, Pair, Conversation, Preference, UnpairedPreference or
    Prompt.
    """
    fields: tuple[str, ...] = ()
    """The keys of `source:` that name its required fields.

    A recipe need not name the shape if its source has all of these keys, and otherwise only keys in
    `optional`. If a recipe names the shape and no field, each field has the name of its key.
    """
    optional: tuple[str, ...] = ()
    "The keys of `source:` that name fields which a record may lack."
    structured: tuple[str, ...] = ()
    """The keys of `source:` that name fields with lists or objects. In a format whose cells are
    strings, such as CSV, these fields contain JSON.
    """
    text_or_messages: tuple[str, ...] = ()
    """Those keys of `structured` whose fields contain either a string or messages. In a format
    whose cells are strings, a cell with a JSON list or object contains messages, and any other cell
    is a string.
    """
    skipped_if_false: tuple[str, ...] = ()
    """Those keys of `optional` whose fields are left out if they have 0 or false in place of a
    string, as LLaMA-Factory leaves them out. Such records are counted.
    """
    options: tuple[str, ...] = ()
    "Keys of the source or the stream that change how the shape reads a record."
    also_called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key of `source:` -> other names that its field has in common data sets. `mdsmix init`
    recognises fields by these names, and by the synonyms in SourceSpec.
    """
    guess: Callable[[Sequence[Any], Fields], Iterable[Mapping[str, Any]]] = lambda *_: ()
    """(records, fields) -> sets of options that fit the records, such as `[{"nulls": "drop"}]`.
    `mdsmix init` tries these in addition to the defaults.
    """
    has_images: Literal["", "outside", "inside"] = ""
    """Where records have their images: `outside` the texts, in a field of their own, or `inside`
    the texts, where the shape's own `parse` reads them. Empty if records of the shape need not have
    images.
    """
    extras: tuple[str, ...] = ()
    """Names of fields that are read from every record that has them, although no key of the recipe
    names them, such as `loss_mask`.
    """
    images_first: bool = False
    """Whether all images of a record come before its first question if no text has a placeholder
    for an image. Without this, such a record is bad.
    """
    image_fields: tuple[str, ...] | None = None
    "The fields of a record that may contain its images; None if no images are read."
    reasons: Mapping[str, str] = field(default_factory=dict)
    "Reason codes of bad records that only this shape and similar shapes use -> explanations."
    parse: Callable[[RawRecord], Any]
    "Reads one raw record. Raises RecordRefused with the reason if the record cannot be read."
    plain: Callable[..., Sequence[Any] | None] | None = None
    """(records, fields, options) -> the results of `parse` for all records, read at once, which is
    faster. It gets those options of the recipe that are not at their defaults.

    Returns None, or raises LookupError or TypeError, if a record must be read by `parse`. None in
    place of a function: all records must be read by `parse`.
    """
    plain_options: tuple[str, ...] = ()
    "Those of `options` that `plain` can take. With any other option records are read by `parse`."

    @property
    def own_fields(self) -> dict[str, str]:
        """Key of `source:` -> name of the field, for a recipe that names no field: each field has
        the name of its key. Example: `{"prompt": "prompt", "response": "response"}`.
        """
        return {key: key for key in (*self.fields, *self.optional)}

    def follows_from(self, keys: Set[str]) -> bool:
        """Check whether a source that sets no `shape:` has this shape, because of the keys of
        `source:` that it sets: all required fields of the shape, and otherwise only optional ones.

        Args:
            keys: the keys that name fields, such as `prompt` and `response`.
        """
        return bool(self.fields) and set(self.fields) <= keys <= self.own_fields.keys()

    def find_text_or_messages(self, fields: Fields) -> tuple[str, ...]:
        """Return the names of the top-level fields that contain either a string or messages, in
        alphabetical order. Fields that are named by a path are left out: JSON has their types.

        Args:
            fields: key of the recipe -> name of the record's field.
        """
        names = {fields[key] for key in self.text_or_messages if key in fields}
        return tuple(sorted(name for name in names if not parse_field(name).entered))

    def has_only_required(
        self, records: Iterable[Any], fields: Fields, allowed: Set[str] = frozenset()
    ) -> bool:
        """Check whether no record has a field that an optional key of the recipe names, or one of
        the `extras`.

        Args:
            records: the decoded records.
            fields: key of the recipe -> name of the record's field.
            allowed: extras that records may have nevertheless.
        """
        named = {fields[key] for key in self.optional if key in fields}
        other_fields = named.union(self.extras) - allowed
        return all(map(other_fields.isdisjoint, records))

    def read(self, record: Any, fields: Fields, **options: Any) -> Any:
        """Return the record as an object of the class `gives`, such as a Document. If it cannot be
        read, return a `NoRecord` (a str), which is the reason code.

        A bare list of messages is read as the record's messages. A list of other objects is refused
        as `json_array`: it is probably a whole file in one array.

        Args:
            record: the decoded JSON value, or a NoRecord, which is returned.
            fields: key of the recipe -> name of the record's field.
            options: the recipe's options that change how the shape reads, such as `nulls="drop"`.
        """
        if isinstance(record, NoRecord):
            return record
        try:
            if isinstance(record, dict):
                return self.parse(RawRecord(record, fields, options))
            key = find_list_key(record)
            if key in fields:
                return self.parse(RawRecord({fields[key]: record}, fields, options))
            is_array = isinstance(record, list) and bool(record) and isinstance(record[0], dict)
            raise RecordRefused("json_array" if is_array else "not_an_object")
        except RecordRefused as refused:
            return refused.why

    def read_plain(
        self, records: Sequence[Any], fields: Fields, **options: Any
    ) -> Sequence[Any] | None:
        """Return for all records what `read` would return, read at once. Return None if the shape
        cannot do this, or if one of the records is not plain, such as one without a field. The
        caller then calls `read` for each record.

        Fields are read as columns, in half the time of `read`. This saves a tenth of a conversion
        of short texts.
        """
        if self.plain is None or not options.keys() <= {*self.plain_options}:
            return None
        try:
            return self.plain(records, fields, **options)
        except (LookupError, TypeError):
            return None


_KEY_OF_MESSAGES = {"role": "messages", "from": "conversations"}
"""A key that tells how messages are written, as OpenAI or as ShareGPT do -> the key of the recipe's
`source:` for a list of such messages.
"""


def find_list_key(record: Any) -> str:
    """Return the key of the recipe's `source:` for a record that is a bare list of messages:
    `messages` for `[{"role": ..., ...}, ...]`, `conversations` for `[{"from": ..., ...}, ...]`.
    Return an empty string for any other record.
    """
    if not isinstance(record, list) or not record:
        return ""
    # Find the keys that all messages have.
    shared_keys = set[str](record[0]) if isinstance(record[0], dict) else set[str]()
    for message in record:
        shared_keys &= message.keys() if isinstance(message, dict) else set()
    for role_key, key in _KEY_OF_MESSAGES.items():
        if role_key in shared_keys:
            return key
    return ""


def are_texts(values: Sequence[Any]) -> bool:
    """Check whether all values are strings that can be encoded as UTF-8. False if there are no
    values.
    """
    is_text = {*map(type, values)} == {str}
    return is_text and are_encodable(values)

"""What a shape is, and what shapes of texts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mdsmix.record import RecordRefused, is_encodable

Fields = Mapping[str, str]
"A shape's key in the recipe (`text`, `prompt`, ...) -> the record's field."


class RawRecord(NamedTuple):
    """An object as its format decodes it, and how it is to be read."""

    record: Mapping[str, Any]
    fields: Fields
    options: Mapping[str, Any]
    "Of the shape, by their names: those that are not at their defaults."

    @property
    def merges(self) -> bool:
        """Messages of one role in a row become one."""
        return self.options.get("consecutive_roles") == "merge"

    def value(self, key: str) -> Any:
        """What the field of an optional key holds; None where the recipe names none or the record lacks it."""
        return self.record.get(self.fields[key]) if key in self.fields else None

    def held(self, key: str) -> Any:
        """What the field of a key holds; RecordRefused where the record lacks it."""
        if self.fields[key] not in self.record:
            raise RecordRefused("missing_field", missing=self.fields[key])
        return self.record[self.fields[key]]

    def text(self, key: str) -> str:
        """The text in the field of a key; RecordRefused where there is none."""
        text = self.held(key)
        if type(text) is not str:
            raise RecordRefused("field_not_text")
        if not is_encodable(text):
            raise RecordRefused("lone_surrogate")
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to write a record."""

    name: str
    "What the recipe's `shape:` says."
    gives: type
    "Document, Pair or Conversation."
    fields: tuple[str, ...] = ()
    """The keys of `source:` that name its fields. Where these are given, and no others but `optional` ones, the shape follows
    from them. Where the shape is named and no field is, each field bears its key's name."""
    optional: tuple[str, ...] = ()
    "Keys of fields that a record may lack."
    structured: tuple[str, ...] = ()
    "Keys whose values are lists or objects: where cells can only be texts, as in csv, theirs are JSON."
    options: tuple[str, ...] = ()
    "Keys of the source or the stream that say how it is read."
    also_called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key -> other names that its field has in data that people have: by them, and those that SourceSpec knows, `mdsmix init`
    finds it."""
    guess: Callable[[Sequence[Any], Fields], Iterable[Mapping[str, Any]]] = lambda *_: ()
    "(records, fields) -> options that `mdsmix init` tries beside the defaults: what the records show of them."
    has_images: Literal["", "beside", "inside"] = ""
    "Its records have images, whether the stream says `images` or not: beside the texts, or inside of them, which it reads itself."
    parse: Callable[[RawRecord], Any]
    "What an object says as a record; RecordRefused with the reason why it is none."
    plain: Callable[[Sequence[Any], Fields], list[Any] | None] | None = None
    "(records, fields) -> what `parse` makes of each, where one look at all of them shows that none is odd; else None, LookupError or TypeError."

    def is_told_by(self, keys: Set[str]) -> bool:
        """Whether the shape follows from these keys."""
        return bool(self.fields) and set(self.fields) <= keys <= {*self.fields, *self.optional}

    def read(self, record: Any, fields: Fields, **options: Any) -> Any:
        """The record, or the reason of why it is none: a `NoRecord`. A list of objects is a whole file in one array."""
        try:
            if isinstance(record, dict):
                return self.parse(RawRecord(record, fields, options))
            is_array = isinstance(record, list) and record and isinstance(record[0], dict)
            raise RecordRefused("json_array" if is_array else "not_an_object")
        except RecordRefused as refused:
            return refused.why

    def read_plain(self, records: Sequence[Any], fields: Fields) -> list[Any] | None:
        """The records, read field by field in half the time: a tenth of a conversion of short texts. None where a record is odd: then
        each is read by itself."""
        try:
            return self.plain(records, fields) if self.plain else None
        except (LookupError, TypeError):
            return None


def are_texts(values: Sequence[Any]) -> bool:
    """Whether all values are texts that have a UTF-8 form, and there are any."""
    return {*map(type, values)} == {str} and all(map(is_encodable, values))

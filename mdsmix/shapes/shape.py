"""What a shape is, and what shapes of texts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal

from mdsmix.record import RecordRefused, is_encodable

Fields = Mapping[str, str]
"A shape's key in the recipe (`text`, `prompt`, ...) -> the record's field."


Plain = Callable[[Sequence[Any], Fields], list[Any] | None]


def _one_by_one(records: Sequence[Any], fields: Fields) -> None:
    """Of a shape that looks at each record by itself."""


def refusing(read: Callable[..., Any]) -> Callable[..., Any]:
    """A shape's function that raises RecordRefused, as one that returns the reason. A record that is no object is refused too: a list of
    objects is a whole file in one array."""

    @wraps(read)
    def refuse(record: Any, fields: Fields, **options: Any) -> Any:
        if not isinstance(record, dict):
            if isinstance(record, list) and record and isinstance(record[0], dict):
                return "json_array"
            return "not_an_object"
        try:
            return read(record, fields, **options)
        except RecordRefused as refused:
            return refused.why

    return refuse


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
    "Keys of the source or the stream that say how it is read: `read` takes them by name where they are not at their defaults."
    also_called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key -> other names that its field has in data that people have: by them, and those that SourceSpec knows, `mdsmix init`
    finds it."""
    guess: Callable[[Sequence[Any], Fields], Iterable[Mapping[str, Any]]] = lambda *_: ()
    "(records, fields) -> options that `mdsmix init` tries beside the defaults: what the records show of them."
    has_images: Literal["", "beside", "inside"] = ""
    "Its records have images, whether the stream says `images` or not: beside the texts, or inside of them, which it reads itself."
    plain: Plain = _one_by_one
    "(records, fields) -> what `read` makes of each, where one look at all of them shows that none is odd; else None, LookupError or TypeError."
    read: Callable[..., Any]
    "(record, fields, **options) -> the record, or the reason code of why it is none: a `str`, a NoRecord where more is known."

    def reading(self, read: Callable[..., Any], **others: Any) -> Shape:
        """The shape with another `read`, of which `plain` knows nothing; `others`: fields of Shape."""
        return replace(self, plain=_one_by_one, read=read, **others)

    def is_told_by(self, keys: Set[str]) -> bool:
        """Whether the shape follows from these keys."""
        return bool(self.fields) and set(self.fields) <= keys <= {*self.fields, *self.optional}


def read_plain(shape: Shape, records: Sequence[Any], fields: Fields) -> list[Any] | None:
    """The records of a shape, read field by field in half the time: a tenth of a conversion of short texts. None where a record is
    odd: then each is read by itself."""
    try:
        return shape.plain(records, fields)
    except (LookupError, TypeError):
        return None


def are_texts(values: Sequence[Any]) -> bool:
    """Whether all values are texts that have a UTF-8 form, and there are any."""
    return {*map(type, values)} == {str} and all(map(is_encodable, values))


def value_of(record: Mapping[str, Any], fields: Fields, key: str) -> Any:
    """What the field of an optional key holds; None where the recipe names none or the record lacks it."""
    return record.get(fields[key]) if key in fields else None


def text_of(record: Mapping[str, Any], field: str) -> str:
    """The text in a field; RecordRefused where there is none."""
    if field not in record:
        raise RecordRefused("missing_field", missing=field)
    if type(text := record[field]) is not str:
        raise RecordRefused("field_not_text")
    if not is_encodable(text):
        raise RecordRefused("lone_surrogate")
    return text

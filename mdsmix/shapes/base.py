"""What a shape is, and what shapes of plain texts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

from mdsmix.record import NoRecord, is_encodable
from mdsmix.shapes.fields import missing

Fields = Mapping[str, str]
"A shape's key in the recipe (`text`, `prompt`, ...) -> the record's field."


class Fault(Exception):
    """A record that cannot be read; `why` says so."""

    def __init__(self, reason: str, **detail: str | int) -> None:
        super().__init__(reason)
        self.why = reason if isinstance(reason, NoRecord) else NoRecord(reason, **detail)


def refusing(read: Callable[..., Any]) -> Callable[..., Any]:
    """A shape's function that raises Fault as one that gives the reason; for records that are no objects too."""

    @wraps(read)
    def refuse(record: Any, fields: Fields, **options: Any) -> Any:
        if not isinstance(record, dict):
            return not_an_object(record)
        try:
            return read(record, fields, **options)
        except Fault as fault:
            return fault.why

    return refuse


ABSENT: Any = object()
"What `value_of` gives for a field that is not there."


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
    "Those of its keys whose values are lists or objects: where cells can only be texts, as in csv, theirs are JSON."
    options: tuple[str, ...] = ()
    "Keys of the source or the stream that say how it is read: `read` takes them by name where they are not at their defaults."
    also_called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key -> other names that its field has in data that people have: by them, and those that SourceSpec knows, `mdsmix init`
    finds it."""
    guess: Callable[[Sequence[Any], Fields], Iterable[Mapping[str, Any]]] = lambda *_: ()
    "(records, fields) -> options that `mdsmix init` tries beside the defaults: what the records show of them."
    has_images: Literal["", "beside", "inside"] = ""
    "Its records have images, whether the stream says `images` or not: beside the texts, or inside of them, which it reads itself."
    read: Callable[..., Any]
    "(record, fields, **options) -> the record, or the reason code of why it is none: a `str`, a NoRecord where more is known."

    def is_told_by(self, keys: Set[str]) -> bool:
        """Whether the shape follows from these keys."""
        return bool(self.fields) and set(self.fields) <= keys <= {*self.fields, *self.optional}


def value_of(record: Any, field: str) -> Any:
    """What a field holds, ABSENT where it is not there."""
    return record.get(field, ABSENT) if isinstance(record, dict) else ABSENT


def text_of(record: Any, field: str) -> tuple[str, str]:
    """The text in a field, and the reason code of why there is none; one of the two is empty or both are.

    Asking for forgiveness costs a good record, nearly every one, 0.15 us.
    """
    try:
        text = record[field]
        if type(text) is str and is_encodable(text):
            return text, ""
    except (KeyError, TypeError, IndexError):
        pass
    return "", _fault(record, field)


MOST_LEVELS = 200
"Of lists and objects inside one another in messages and tools: templates and Python itself follow some 900."


def is_deep(value: Any) -> bool:
    """Whether more lists and objects than MOST_LEVELS lie inside one another."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def not_an_object(record: Any) -> str:
    """The reason code of a value that is no JSON object; of several in a list, the line is a whole file in one array."""
    if isinstance(record, list) and record and isinstance(record[0], dict):
        return "json_array"
    return "not_an_object"


def _fault(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        return not_an_object(record)
    if field not in record:
        return missing(field)
    if isinstance(record[field], str):
        return "lone_surrogate"
    return "field_not_text"

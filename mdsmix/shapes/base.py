"""What a shape is, and what shapes of plain texts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mdsmix.record import is_encodable

Fields = Mapping[str, str]
"A shape's key in the recipe (`text`, `prompt`, ...) -> the record's field."


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to write a record."""

    name: str
    "What the recipe's `shape:` says."
    gives: type
    "Document, Pair or Conversation."
    fields: tuple[str, ...] = ()
    "The keys of `source:` that name its fields; where just these are given, the shape follows from them."
    read: Callable[[Any, Fields], Any]
    "The record, or the reason code (a str) of why it is none."


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


def not_an_object(record: Any) -> str:
    """The reason code of a value that is no JSON object; of several in a list, the line is a whole file in one array."""
    if isinstance(record, list) and record and isinstance(record[0], dict):
        return "json_array"
    return "not_an_object"


def _fault(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        return not_an_object(record)
    if field not in record:
        return "missing_field"
    if isinstance(record[field], str):
        return "lone_surrogate"
    return "field_not_text"

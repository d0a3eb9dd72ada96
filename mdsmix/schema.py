"""Reads a mapping into a dataclass, as the dataclass's annotations require.

The recipe, the manifest and the unit records are all read by this one reader, so a new key is one
line in its dataclass. Only the annotations that these dataclasses use are known: builtin types,
Literal, unions, lists, mappings, dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

import orjson

from mdsmix.messages import suggest_key

T = TypeVar("T")

Bound = tuple[str, Callable[[Any], object]]
"""A bound on a field's value, in the field's metadata (`must`): the words that follow "it must be",
and a test of the value. The test returns false or raises ValueError for a value out of bounds.
"""
MOST_SHOWN = 60
"Characters of a value or a key in a message."


class Misfit(Exception):
    """A value that does not fit; the message is one sentence that names the key."""


def parse_mapping(cls: type[T], values: Any, where: str = "") -> T:
    """Return an instance of the dataclass `cls` from a mapping.

    Raises Misfit for an unknown key (with the nearest known one), a missing key, or a wrong type or
    value.

    Args:
        where: the keys that lead to the mapping, such as `streams.web`.
    """
    if not isinstance(values, Mapping):
        name = where or "the top level"
        raise Misfit(f"{name} must contain keys and values, not {shorten_value(values)}.")
    schema = _make_schema(typing.cast(Any, cls))
    fields = {}
    for key, value in values.items():
        reader = schema.readers.get(key)
        if reader is None:
            remedy = _suggest_field(cls, where, str(key))
            raise Misfit(f"{_join_keys(where, key)} is not a known key; {remedy}")
        if type(value) not in reader.plain:
            value = reader.read(value, _join_keys(where, key))
        fields[key] = value
    missing = schema.required - fields.keys()
    if missing:
        raise Misfit(f"{_join_keys(where, min(missing))} is missing.")
    for name, (words, is_within) in schema.bounds.items():
        value = fields.get(name)
        if value is not None and not _passes(is_within, value):
            path = _join_keys(where, name)
            raise Misfit(f"{path} is {shorten_value(value)}; it must be {words}.")
    return cls(**fields)


def _passes(is_within: Callable[[Any], object], value: Any) -> bool:
    """Apply the test of a bound. A ValueError from the test means that it fails."""
    try:
        return bool(is_within(value))
    except ValueError:
        return False


class _Schema(NamedTuple):
    """The fields of a dataclass, by name."""

    readers: dict[str, Reader]
    required: set[str]
    "Fields without a default."
    bounds: dict[str, Bound]


@functools.cache
def _make_schema(cls: Any) -> _Schema:
    """Return the fields of a dataclass with their readers, once for each class."""
    fields = list_fields(cls)
    hints = typing.get_type_hints(cls)
    return _Schema(
        readers={field.name: _reader(hints[field.name]) for field in fields},
        required={field.name for field in fields if not _has_default(field)},
        bounds={f.name: f.metadata["must"] for f in fields if "must" in f.metadata},
    )


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def list_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields that a file may contain: all except those that the reader sets itself
    (metadata `set by`).
    """
    return [f for f in dataclasses.fields(cls) if f.init and "set by" not in f.metadata]


def _suggest_field(cls: Any, where: str, key: str) -> str:
    """Return the end of a sentence on an unknown key: the field that has it as a synonym (`also
    called`), otherwise the field with the most similar name.
    """
    fields = list_fields(cls)
    for field in fields:
        if key in field.metadata.get("also called", ()):
            return f"write {_join_keys(where, field.name)}."
    return suggest_key(key, [field.name for field in fields])


class Reader:
    """Reads the values of one annotation."""

    def __init__(self, hint: Any) -> None:
        self.hint = hint
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        self.plain = frozenset(options) & {bool, int, float, str, type(None)}
        """Classes whose values are returned unchanged. Most values in an index of a hundred
        thousand shards belong to one of them.
        """
        self._containers = [_split_annotation(o) for o in options if o not in self.plain]

    def read(self, value: Any, where: str) -> Any:
        """Return the value as the annotation requires it. Sections become dataclasses, also in
        lists and mappings. A single string becomes a list of one if the annotation is a list of
        strings.

        Raises Misfit if it does not fit.
        """
        if type(value) in self.plain:
            return value
        for outer, args in self._containers:
            if outer is Literal:
                if value in args:
                    return value
            elif isinstance(value, outer):
                return _read_elements(value, args, where)
            elif isinstance(value, dict) and dataclasses.is_dataclass(outer):
                return parse_mapping(typing.cast(Any, outer), value, where)
            elif outer is list and args == (str,) and isinstance(value, str):
                return [value]
        raise Misfit(f"{where} is {shorten_value(value)}; it must be {_describe_type(self.hint)}.")


_reader = functools.cache(Reader)


def _split_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the class of a value and the annotations inside: `list[str]` -> (list, (str,))."""
    if annotation is Any:
        return object, ()
    return typing.get_origin(annotation) or annotation, typing.get_args(annotation)


def _read_elements(value: Any, args: Sequence[Any], where: str) -> Any:
    """Return the elements of a list or a mapping as its annotation requires them."""
    if not args:
        return value
    reader = _reader(args[-1])
    is_list = isinstance(value, list)
    elements = value if is_list else value.values()
    if reader.plain.issuperset(map(type, elements)):
        return value
    if is_list:
        return [reader.read(element, f"{where}[{i}]") for i, element in enumerate(value)]
    return {key: reader.read(element, _join_keys(where, key)) for key, element in value.items()}


def parse_json(cls: type[T], content: bytes) -> T:
    """Return an instance of the dataclass `cls` from JSON bytes.

    Raises Misfit as `parse_mapping` does, and if the bytes are not JSON.
    """
    try:
        return parse_mapping(cls, orjson.loads(content))
    except orjson.JSONDecodeError as error:
        raise Misfit(f"it is not valid JSON: {error}.") from None


def parse_json_if_fit(cls: type[T], content: bytes) -> T | None:
    """Return an instance as `parse_json` does; None if the content does not fit."""
    with suppress(Misfit):
        return parse_json(cls, content)
    return None


def shorten_value(value: Any) -> str:
    """Return the value as Python writes it, truncated to 60 characters. Otherwise a message could
    contain a whole file that was read by mistake.
    """
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _join_keys(where: str, key: Any) -> str:
    """Return the path of a key: `streams.web`."""
    name = str(key)[:MOST_SHOWN]
    return f"{where}.{name}" if where else name


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    type(None): "null",
}


def _describe_type(hint: Any) -> str:
    """Return a type in the words of a user: `a number or null`."""
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if _is_union(hint):
        options = typing.get_args(hint)
        if float in options:  # every whole number is a number
            options = tuple(option for option in options if option is not int)
        return " or ".join(map(_describe_type, options))
    return _NAMES.get(typing.get_origin(hint) or hint, "keys and values")

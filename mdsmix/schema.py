"""A mapping -> a dataclass, by the dataclass's own annotations.

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
from typing import Any, Literal, TypeVar

import orjson

from mdsmix.messages import suggest_key

T = TypeVar("T")


Bound = tuple[str, Callable[[Any], object]]
"""A bound on a field's value, kept in the field's metadata (`must`): the words that follow "it must
be", and a test of the value. The test returns false or raises ValueError for a value out of bounds.
"""


class Misfit(Exception):
    """A value that does not fit; the message is one sentence that names the key."""


def parse_mapping(cls: type[T], values: Any, where: str = "") -> T:
    """The dataclass `cls` from a mapping; Misfit names an unknown key (and the nearest), a missing
    key, or a wrong type or value. `where`: the keys that lead to the mapping, such as
    `streams.web`.
    """
    if not isinstance(values, Mapping):
        raise Misfit(
            f"{where or 'the top level'} must hold keys and values, not {shorten(values)}."
        )
    readers, needed, bounds = _known(typing.cast(Any, cls))
    found = {}
    for key, value in values.items():
        if (reader := readers.get(key)) is None:
            meant = _meant(cls, where, str(key))
            raise Misfit(f"{_at(where, key)} is not a known key; {meant}")
        is_plain = type(value) in reader.plain
        found[key] = value if is_plain else reader.read(value, _at(where, key))
    if not found.keys() >= needed:
        raise Misfit(f"{_at(where, min(needed - found.keys()))} is missing.")
    for name, (wanted, holds) in bounds.items():
        if (value := found.get(name)) is not None:
            with suppress(ValueError):
                if holds(value):
                    continue
            raise Misfit(f"{_at(where, name)} is {shorten(value)}; it must be {wanted}.")
    return cls(**found)


@functools.cache
def _known(cls: Any) -> tuple[dict[str, Reader], set[str], dict[str, Bound]]:
    """The readers of a dataclass's fields, the names of required fields, and the bounds of values,
    by field.
    """
    fields, hints = list_fields(cls), typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    needed = {f.name for f in fields if f.default is missing and f.default_factory is missing}
    bounds = {f.name: f.metadata["must"] for f in fields if "must" in f.metadata}
    return {f.name: _reader(hints[f.name]) for f in fields}, needed, bounds


def list_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The fields that a file may hold: all but those that the reader sets itself (metadata `set
    by`).
    """
    return [f for f in dataclasses.fields(cls) if f.init and "set by" not in f.metadata]


def _meant(cls: Any, where: str, key: str) -> str:
    """The end of a sentence on an unknown key: the key with this word as a synonym (`also called`),
    else the key spelled most like it.
    """
    fields = list_fields(cls)
    called = [f.name for f in fields if key in f.metadata.get("also called", ())]
    return (
        f"write {_at(where, called[0])}." if called else suggest_key(key, [f.name for f in fields])
    )


class Reader:
    """Reads the values of one annotation."""

    def __init__(self, hint: Any) -> None:
        self.hint = hint
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        self.plain = frozenset(options) & {bool, int, float, str, type(None)}
        """Classes whose values stay as they are. Most values in an index of a hundred thousand
        shards are of these.
        """
        self.others = [
            (object if o is Any else typing.get_origin(o) or o, typing.get_args(o))
            for o in options
            if o not in self.plain
        ]

    def read(self, value: Any, where: str) -> Any:
        """The value as the annotation wants it; Misfit where it does not fit. Sections become
        dataclasses, also in lists and mappings. A single text becomes a list of one where the
        annotation is a list of texts.
        """
        if type(value) in self.plain:
            return value
        for outer, args in self.others:
            if outer is Literal:
                if value in args:
                    return value
            elif isinstance(value, outer):
                return _inside(value, args, where)
            elif isinstance(value, dict) and dataclasses.is_dataclass(outer):
                return parse_mapping(typing.cast(Any, outer), value, where)
            elif outer is list and args == (str,) and isinstance(value, str):
                return [value]
        raise Misfit(f"{where} is {shorten(value)}; it must be {_said(self.hint)}.")


_reader = functools.cache(Reader)


def _inside(value: Any, args: Sequence[Any], where: str) -> Any:
    """The elements of a list or a mapping, read by its annotation."""
    if not args:
        return value
    each, is_list = _reader(args[-1]), isinstance(value, list)
    if each.plain.issuperset(map(type, value if is_list else value.values())):
        return value
    if is_list:
        return [each.read(v, f"{where}[{i}]") for i, v in enumerate(value)]
    return {key: each.read(v, _at(where, key)) for key, v in value.items()}


def parse_json(cls: type[T], content: bytes) -> T:
    """The dataclass `cls` from JSON bytes; Misfit as for `read`, or where the bytes are no JSON."""
    try:
        return parse_mapping(cls, orjson.loads(content))
    except orjson.JSONDecodeError as error:
        raise Misfit(f"it is no JSON: {error}.") from None


def parse_json_if_fit(cls: type[T], content: bytes) -> T | None:
    """As `load`; None where the content does not fit."""
    with suppress(Misfit):
        return parse_json(cls, content)
    return None


def shorten(value: Any) -> str:
    """The value as Python writes it, cut to 60 characters: a message must not hold a whole file
    that was read by mistake.
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _at(where: str, key: Any) -> str:
    return f"{where}.{str(key)[:60]}" if where else str(key)[:60]


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


def _said(hint: Any) -> str:
    """A type as a user would say it."""
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if _is_union(hint):
        return " or ".join(map(_said, typing.get_args(hint)))
    return _NAMES.get(typing.get_origin(hint) or hint, "keys and values")

"""A mapping -> a dataclass, by the dataclass's own annotations.

The recipe, the manifest and the unit records are all read by this one reader, so a new key is one line in its
dataclass. Only the annotations that those use are known: builtin types, Literal, unions, lists, mappings, dataclasses.
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

from mdsmix.words import hint

T = TypeVar("T")


Bound = tuple[str, Callable[[Any], object]]
"""What the value of a field must be, as metadata of the field (`must`): in a sentence, it must be ...; and a function that is false, or raises a
ValueError, of a value that is not."""


class Misfit(Exception):
    """A value that does not fit; the message is one sentence that names the key."""


def read(cls: type[T], values: Any, where: str = "") -> T:
    """The dataclass `cls` from `values`; Misfit names an unknown key (and the nearest), a missing one, a wrong type."""
    if not isinstance(values, Mapping):
        raise Misfit(f"{where or 'the top level'} must hold keys and values, not {brief(values)}.")
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
            raise Misfit(f"{_at(where, name)} is {brief(value)}; it must be {wanted}.")
    return cls(**found)


@functools.cache
def _known(cls: Any) -> tuple[dict[str, Reader], set[str], dict[str, Bound]]:
    """The readers of a dataclass's fields, the names of those that must be given, and what their values must be."""
    fields, hints = known_fields(cls), typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    needed = {f.name for f in fields if f.default is missing and f.default_factory is missing}
    bounds = {f.name: f.metadata["must"] for f in fields if "must" in f.metadata}
    return {f.name: _reader(hints[f.name]) for f in fields}, needed, bounds


def known_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The fields that a file may hold: not those that are set by whoever reads it."""
    return [f for f in dataclasses.fields(cls) if f.init and "set by" not in f.metadata]


def _meant(cls: Any, where: str, key: str) -> str:
    """The end of a sentence on an unknown key: what a section calls it whose users call it so too, or the key that is spelled most like it."""
    fields = known_fields(cls)
    called = [f.name for f in fields if key in f.metadata.get("also called", ())]
    return f"write {_at(where, called[0])}." if called else hint(key, [f.name for f in fields])


class Reader:
    """Reads the values of one annotation."""

    def __init__(self, hint: Any) -> None:
        self.hint = hint
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        self.plain = frozenset(options) & {bool, int, float, str, type(None)}
        "The classes of text, numbers and None that stay as they are: most of what an index of a hundred thousand shards holds."
        self.others = [
            (object if o is Any else typing.get_origin(o) or o, typing.get_args(o))
            for o in options
            if o not in self.plain
        ]

    def read(self, value: Any, where: str) -> Any:
        """Sections become dataclasses, also in lists and mappings, and a text where texts are listed a list of one; all else stays."""
        if type(value) in self.plain:
            return value
        for outer, args in self.others:
            if outer is Literal:
                if value in args:
                    return value
            elif isinstance(value, outer):
                return _inside(value, args, where)
            elif isinstance(value, dict) and dataclasses.is_dataclass(outer):
                return read(typing.cast(Any, outer), value, where)
            elif outer is list and args == (str,) and isinstance(value, str):
                return [value]
        raise Misfit(f"{where} is {brief(value)}; it must be {_said(self.hint)}.")


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


def load(cls: type[T], content: bytes) -> T:
    """The same from JSON; Misfit where it is none."""
    try:
        return read(cls, orjson.loads(content))
    except orjson.JSONDecodeError as error:
        raise Misfit(f"it is no JSON: {error}.") from None


def brief(value: Any) -> str:
    """The value as Python writes it, cut: a file read by mistake must not be poured into a message."""
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

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
from typing import Any, Literal, TypeVar

import orjson

from mdsmix.words import hint

T = TypeVar("T")


class Must(typing.NamedTuple):
    """What the value of a field must be, as metadata of the field: `field(metadata={"must": Must(...)})`."""

    be: str
    "In a sentence: it must be ..."
    holds: Callable[[Any], object]


class Misfit(Exception):
    """A value that does not fit; the message is one sentence that names the key."""


class UnknownKey(Misfit):
    """A key that a section does not have; `is_synonym`: it has one that people call so."""

    def __init__(self, sentence: str, where: str, key: Any, is_synonym: bool) -> None:
        super().__init__(sentence)
        self.where, self.key, self.is_synonym = where, key, is_synonym


def read(cls: type[T], values: Any, where: str = "") -> T:
    """The dataclass `cls` from `values`; Misfit names an unknown key (and the nearest), a missing one, a wrong type."""
    if not isinstance(values, Mapping):
        raise Misfit(f"{where or 'the top level'} must hold keys and values, not {brief(values)}.")
    readers, needed, bounds = _known(typing.cast(Any, cls))
    if not readers.keys() >= values.keys():
        raise _unknown(cls, values, where)
    for name in needed:
        if name not in values or (values[name] is None and not readers[name].allows_none):
            raise Misfit(f"{_at(where, name)} is missing.")
    found = {}
    for key, value in values.items():
        reader = readers[key]
        is_plain = type(value) in reader.plain
        found[key] = value if is_plain else reader.read(value, _at(where, key))
    for name, must in bounds.items():
        if (value := found.get(name)) is not None and not must.holds(value):
            raise Misfit(f"{_at(where, name)} is {brief(value)}; it must be {must.be}.")
    return cls(**found)


@functools.cache
def _known(cls: Any) -> tuple[dict[str, Reader], list[str], dict[str, Must]]:
    """The readers of a dataclass's fields, the names of those that must be given, and what their values must be."""
    fields, hints = dataclasses.fields(cls), typing.get_type_hints(cls)
    bounds = {f.name: f.metadata["must"] for f in fields if "must" in f.metadata}
    needed = [f.name for f in fields if _is_required(f)]
    return {f.name: _reader(hints[f.name]) for f in fields}, needed, bounds


class Reader:
    """Reads the values of one annotation."""

    def __init__(self, hint: Any) -> None:
        self.hint = hint
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        self.plain = frozenset(options) & {bool, int, float, str, type(None)}
        "The classes of text, numbers and None that stay as they are: most of what an index of a hundred thousand shards holds."
        self.sections = [option for option in options if dataclasses.is_dataclass(option)]
        self.others = [
            (object if o is Any else typing.get_origin(o) or o, typing.get_args(o))
            for o in options
            if o not in self.plain
        ]
        self.allows_none = hint is Any or type(None) in options

    def read(self, value: Any, where: str) -> Any:
        """Sections become dataclasses, also in lists and mappings; everything else stays."""
        if type(value) in self.plain:
            return value
        if self.sections and (isinstance(value, Mapping) or self.hint in self.sections):
            return read(typing.cast(Any, self.sections[0]), value, where)
        for outer, args in self.others:
            if outer is Literal:
                if any(value == each and type(value) is type(each) for each in args):
                    return value
            elif isinstance(value, outer):
                return _inside(value, args, where)
        raise Misfit(f"{where} is {brief(value)}; it must be {type_name(self.hint)}.")


_reader = functools.cache(Reader)


def _inside(value: Any, args: Sequence[Any], where: str) -> Any:
    """The elements of a list or a mapping, read by its annotation."""
    if not args:
        return value
    each, is_list = _reader(args[-1]), isinstance(value, list)
    if all(type(v) in each.plain for v in (value if is_list else value.values())):
        return value
    if is_list:
        return [each.read(v, f"{where}[{i}]") for i, v in enumerate(value)]
    return {key: each.read(v, _at(where, key)) for key, v in value.items()}


def _unknown(cls: Any, values: Mapping[Any, Any], where: str) -> UnknownKey:
    """The first key that the dataclass has not."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    key = next(key for key in values if key not in fields)
    known = [n for n, f in fields.items() if "set by" not in f.metadata]
    also = [n for n, f in fields.items() if key in f.metadata.get("also called", ())]
    meant = f"did you mean {also[0]}?" if also else hint(str(key), known)
    return UnknownKey(f"{_at(where, key)} is not a known key; {meant}", where, key, bool(also))


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
    name = key if isinstance(key, str) and len(key) <= 60 else brief(key)
    return f"{where}.{name}" if where else str(name)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return (
        field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.init
    )


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def type_name(hint: Any) -> str:
    """A type as a user would say it."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, args))
    if _is_union(hint):
        return " or ".join(map(type_name, args))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    kind = typing.get_origin(hint) or hint
    return names.get(
        kind, "a list" if kind is list else "null" if kind is type(None) else "keys and values"
    )

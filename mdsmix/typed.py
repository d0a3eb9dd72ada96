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
    hints, needed, bounds = _known(typing.cast(Any, cls))
    if not hints.keys() >= values.keys():
        raise _unknown(cls, values, where)
    for name in needed:
        if name not in values or (values[name] is None and not _allows_none(hints[name])):
            raise Misfit(f"{_at(where, name)} is missing.")
    # Text and numbers, most of what there is, are looked at here: an index has a hundred thousand shards.
    found = {
        k: v if _is_plain(v, hints[k]) else _value(v, hints[k], _at(where, k))
        for k, v in values.items()
    }
    for name, must in bounds.items():
        if (value := found.get(name)) is not None and not must.holds(value):
            raise Misfit(f"{_at(where, name)} is {brief(value)}; it must be {must.be}.")
    return cls(**found)


@functools.cache
def _known(cls: Any) -> tuple[dict[str, Any], list[str], dict[str, Must]]:
    """The annotations of a dataclass's fields, the names of those that must be given, and what their values must be."""
    fields, hints = dataclasses.fields(cls), typing.get_type_hints(cls)
    bounds = {f.name: f.metadata["must"] for f in fields if "must" in f.metadata}
    needed = [f.name for f in fields if _is_required(f)]
    return {f.name: hints[f.name] for f in fields}, needed, bounds


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


def _value(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotation wants it: sections become dataclasses, everything else stays."""
    if _is_plain(value, hint):
        return value
    options, sections = _options(hint)
    if hint in sections:
        return read(hint, value, where)
    if sections and isinstance(value, Mapping):
        return read(sections[0], value, where)
    if not any(_fits(value, option) for option in options):
        raise Misfit(f"{where} is {brief(value)}; it must be {type_name(hint)}.")
    return _inside(value, options, where)


def _is_plain(value: Any, hint: Any) -> bool:
    """Whether the value stays as it is: text, a number or None where the annotation has that, or a list or a mapping of nothing else."""
    if type(value) in _scalars(hint):
        return True
    outer, inner = _container(hint)
    return type(value) is outer and all(
        type(v) in inner for v in (value.values() if outer is dict else value)
    )


@functools.cache
def _scalars(hint: Any) -> frozenset[Any]:
    """The classes of text and numbers, and of None, that a value may be of."""
    return frozenset(_options(hint)[0]) & {bool, int, float, str, type(None)}


@functools.cache
def _container(hint: Any) -> tuple[Any, frozenset[Any]]:
    """list or dict, and the classes of its elements where each may be of text, numbers and None alone."""
    args, outer = typing.get_args(hint), typing.get_origin(hint)
    is_one = outer is list or (outer is dict and args[0] is str)
    return outer, _scalars(args[-1]) if is_one else frozenset()


@functools.cache
def _options(hint: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What a value may be, and which of that are sections."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    return options, tuple(o for o in options if dataclasses.is_dataclass(o))


def _inside(value: Any, options: Sequence[Any], where: str) -> Any:
    """Reads the elements of a list or a mapping by the annotation of the option that fits."""
    option = next(o for o in options if _fits(value, o))
    args = typing.get_args(option)
    if isinstance(value, Mapping) and len(args) == 2:
        return {k: _value(v, args[1], _at(where, k)) for k, v in value.items()}
    if isinstance(value, list) and args:
        if all(type(v) is args[0] for v in value):
            return value
        return [_value(v, args[0], f"{where}[{i}]") for i, v in enumerate(value)]
    return value


def _allows_none(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if typing.get_origin(hint) is Literal:
        return any(value == arg and type(value) is type(arg) for arg in typing.get_args(hint))
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, typing.get_origin(hint) or hint)


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

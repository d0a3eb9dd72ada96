"""Makes an instance of a dataclass from a mapping, and checks the values by the dataclass's
annotations.

The recipe, the manifest and the records of work units are all read in this way, so a new key is one
line in a dataclass. Only the annotations that these dataclasses use are known: builtin types,
Literal, unions, lists, mappings, dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

import orjson

from mdsmix.messages import find_nearest

T = TypeVar("T")

Bound = tuple[str, Callable[[Any], object]]
"""A bound on the value of a field: the words for a message, and a test of the value. For example
`("above 0", lambda value: value > 0)`; a message then says "it must be above 0".

The test returns false or raises ValueError for a value out of bounds. A dataclass sets the bound as
`must` in the metadata of its field.
"""
MOST_SHOWN = 60
"The most characters of a value or a key that a message shows."


class ShortForm(NamedTuple):
    """A string that replaces a whole section: `tokenizer: gpt2` for `tokenizer: {name: gpt2}`. A
    dataclass has it as its class variable SHORT_FORM.
    """

    key: str
    "The field that gets the string as its value. All other fields have their defaults."
    words: str
    "What a value of the section must be, for a message: `it must be WORDS`."
    pattern: str | None = None
    "A regular expression that the whole text must match; None: any text is the short form."

    def fits(self, text: str) -> bool:
        """Check whether a text is the short form of the section."""
        return self.pattern is None or re.fullmatch(self.pattern, text) is not None


class Misfit(Exception):
    """Raised for a value that does not fit a dataclass. The message is one sentence that names the
    key.
    """


class UnknownKey(Misfit):
    """Raised for an unknown key."""

    def __init__(self, path: str, remedy: str, key: str = "") -> None:
        """Make the sentence.

        Args:
            path: the key with those that lead to it, such as `mix.web.layout`.
            remedy: what to write instead, or the keys that are known.
            key: the key itself if it resembles no key of its section, or of the sections in it.
        """
        super().__init__(f"{path} is not a known key; {remedy}")
        self.path = path
        self.key = key


def parse_mapping(cls: type[T], values: Any, where: str = "") -> T:
    """Return an instance of a dataclass from a mapping of field name -> value.

    Raises Misfit if a key is unknown or missing, or a value has a wrong type or is out of bounds.

    Args:
        cls: the dataclass.
        values: the mapping, as YAML or JSON contains it.
        where: the keys that lead to the mapping, such as `streams.web`, for messages.
    """
    if not isinstance(values, Mapping):
        name = where or "the top level"
        raise Misfit(f"{name} must contain keys and values, not {shorten_value(values)}.")
    schema = _make_schema(typing.cast(Any, cls))
    fields = {}
    for key, value in values.items():
        reader = schema.readers.get(key)
        if reader is None:
            path = _join_keys(where, key)
            remedy = _suggest_field(cls, where, str(key))
            if remedy:
                raise UnknownKey(path, remedy)
            raise UnknownKey(path, f"the keys are {', '.join(schema.readers)}.", str(key))
        # The usual case first: a value of a plain class is taken unchanged.
        is_plain = type(value) in reader.plain
        fields[key] = value if is_plain else reader.read(value, _join_keys(where, key))
    missing = schema.required.keys() - fields.keys()
    if missing:
        name = min(missing)
        example = schema.required[name]
        remedy = f"; add it, for example {name}: {example}" if example else ""
        raise Misfit(f"{_join_keys(where, name)} is missing{remedy}.")
    for name, (words, is_within) in schema.bounds.items():
        value = fields.get(name)
        if value is not None and not _passes(is_within, value):
            path = _join_keys(where, name)
            raise Misfit(f"{path} is {describe_value(value)}; it must be {words}.")
    return cls(**fields)


def _passes(is_within: Callable[[Any], object], value: Any) -> bool:
    """Check a value by the test of a bound. If the test raises ValueError, the value fails it."""
    try:
        return bool(is_within(value))
    except ValueError:
        return False


class _Schema(NamedTuple):
    """What `parse_mapping` knows about the fields of a dataclass, by their names."""

    readers: dict[str, Reader]
    "Name of a field -> the reader of its annotation."
    required: dict[str, str]
    "Name of a field without a default -> an example of its value; empty without an example."
    bounds: dict[str, Bound]
    "Name of a field -> the bound on its value, for fields that have a bound."


@functools.cache
def _make_schema(cls: Any) -> _Schema:
    """Return what `parse_mapping` needs of the dataclass `cls`: for each field the Reader of its
    annotation, whether it is required, and its bound. Each class is examined only once (cached).
    """
    fields = list_fields(cls)
    hints = typing.get_type_hints(cls)
    return _Schema(
        readers={field.name: _reader(hints[field.name]) for field in fields},
        required={
            field.name: field.metadata.get("example", "")
            for field in fields
            if not has_default(field)
        },
        bounds={field.name: field.metadata["must"] for field in fields if "must" in field.metadata},
    )


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Check whether a field of a dataclass has a default or a function that makes one."""
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def list_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that a file may contain.

    A field with the metadata `set by` is left out: the code that reads the file sets it.
    """
    return [f for f in dataclasses.fields(cls) if f.init and "set by" not in f.metadata]


def list_set_values(section: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as a file would contain
    them: dataclasses inside become mappings too. `parse_mapping` of the result gives an equal
    dataclass.
    """
    values = {}
    for field in list_fields(section):
        value = getattr(section, field.name)
        if not (has_default(field) and value == get_default(field)):
            values[field.name] = _as_tree(value)
    return values


def get_default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; `dataclasses.MISSING` if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _as_tree(value: Any) -> Any:
    """Return a value of a field as a file would contain it."""
    if dataclasses.is_dataclass(value):
        return list_set_values(value)
    if isinstance(value, Mapping):
        return {key: _as_tree(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_tree(element) for element in value]
    return value


def _suggest_field(cls: Any, where: str, key: str) -> str:
    """Return the end of a sentence on an unknown key: `write source.path.` or `did you mean path?`
    Return an empty string if no key fits.

    The first form names the field that has the key among its synonyms (metadata `also called`), or
    the field of this name in a section inside this mapping. If there is none, the second form names
    the field with the most similar name.

    Args:
        cls: the dataclass.
        where: the keys that lead to its mapping.
        key: the unknown key.
    """
    fields = list_fields(cls)
    for field in fields:
        if key in field.metadata.get("also called", ()):
            return f"write {_join_keys(where, field.name)}."
    readers = _make_schema(cls).readers
    for field in fields:
        if readers[field.name].reads_section_with(key):
            return f"write {_join_keys(where, field.name)}.{key}."
    similar = find_nearest(key, [field.name for field in fields])
    return f"did you mean {similar}?" if similar else ""


def find_place(cls: Any, key: str) -> str | None:
    """Return the path of a field in a dataclass or in its sections, the one nearest the top:
    `streams.NAME.pack` for `pack` in a recipe. Return None if there is no such field.

    Args:
        cls: the dataclass of the whole tree.
        key: the name of the field.
    """
    sections = [(cls, "")]
    for section, where in sections:  # the list grows meanwhile
        for field in list_fields(section):
            path = _join_keys(where, field.name)
            if field.name == key:
                return path
            reader = _make_schema(section).readers[field.name]
            sections += [(inner, path) for inner in reader.sections]
            sections += [(inner, f"{path}.NAME") for inner in reader.named_sections]
    return None


class Reader:
    """Checks and converts the values of fields with one annotation, such as `list[str] | None`."""

    def __init__(self, hint: Any) -> None:
        """Split an annotation into the types that it allows: `list[str] | None` into `list[str]`
        and `None`.

        Args:
            hint: the annotation.
        """
        self.hint = hint
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        self.plain = frozenset(options) & {bool, int, float, str, type(None)}
        """The plain classes among the options, such as `str`: their values are returned unchanged.
        Most values in an index of a hundred thousand shards are of such a class.
        """
        self._containers = [
            _split_annotation(option) for option in options if option not in self.plain
        ]
        "All other options, each with the annotations inside: `list[str]` is `(list, (str,))`."

    def read(self, value: Any, where: str) -> Any:
        """Return the value as the annotation requires it.

        A mapping, or the short form of a dataclass, becomes an instance of the dataclass, inside
        lists and mappings too. For a list of strings, a single string becomes a list of one.

        Raises Misfit if the value does not fit the annotation.

        Args:
            value: the value, as YAML or JSON contains it.
            where: the keys that lead to the value, such as `streams.web.source`.
        """
        if isinstance(value, os.PathLike):  # of a recipe that was built in Python
            value = os.fspath(value)
        if type(value) in self.plain:
            return value
        # Try each option of the annotation. `outer` is its class, `args` are the annotations
        # inside.
        for outer, args in self._containers:
            if outer is Literal:
                if value in args:
                    return value
            elif isinstance(value, outer):
                return _read_elements(value, args, where)
            elif isinstance(value, dict) and dataclasses.is_dataclass(outer):
                return parse_mapping(typing.cast(Any, outer), value, where)
            elif isinstance(value, str) and outer is list and args == (str,):
                return [value]
            elif isinstance(value, str):
                short_form = get_short_form(outer)
                if short_form and short_form.fits(value):
                    return parse_mapping(typing.cast(Any, outer), {short_form.key: value}, where)
        raise Misfit(f"{where} is {describe_value(value)}; it must be {_describe_type(self.hint)}.")

    @property
    def sections(self) -> list[Any]:
        """The dataclasses that the value may be."""
        return [outer for outer, _ in self._containers if dataclasses.is_dataclass(outer)]

    @property
    def named_sections(self) -> list[Any]:
        """The dataclasses that the values of a mapping may be: `Stream` for `dict[str, Stream]`."""
        mappings = [args[-1] for outer, args in self._containers if len(args) == 2]
        return [inner for inner in mappings if dataclasses.is_dataclass(inner)]

    def reads_section_with(self, key: str) -> bool:
        """Return whether the value may be a dataclass that has a field of this name."""
        return any(field.name == key for section in self.sections for field in list_fields(section))


_reader = functools.cache(Reader)


def get_short_form(cls: Any) -> ShortForm | None:
    """Return the short form of a dataclass; None for a class that has none."""
    return getattr(cls, "SHORT_FORM", None)


def _split_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the class of a value and the annotations inside: `list[str]` -> (list, (str,))."""
    if annotation is Any:
        return object, ()
    return typing.get_origin(annotation) or annotation, typing.get_args(annotation)


def _read_elements(value: Any, args: Sequence[Any], where: str) -> Any:
    """Return a list or a mapping with its elements as the annotation requires them.

    Args:
        value: the list or the mapping.
        args: the annotations inside its own annotation: `(str,)` for `list[str]`, `(str, int)` for
            `dict[str, int]`, empty for `list`.
        where: the keys that lead to the value.
    """
    if not args:
        return value
    reader = _reader(args[-1])  # the last annotation is that of the elements
    is_list = isinstance(value, list)
    elements = value if is_list else value.values()
    are_all_plain = reader.plain.issuperset(map(type, elements))
    if are_all_plain:
        return value
    if is_list:
        return [reader.read(element, f"{where}[{i}]") for i, element in enumerate(value)]
    return {key: reader.read(element, _join_keys(where, key)) for key, element in value.items()}


def parse_json(cls: type[T], content: bytes) -> T:
    """Return an instance of the dataclass `cls` from JSON bytes.

    Raises Misfit if the bytes are not JSON, or for a reason of `parse_mapping`.
    """
    try:
        return parse_mapping(cls, orjson.loads(content))
    except orjson.JSONDecodeError as error:
        raise Misfit(f"it is not valid JSON: {error}.") from None


def parse_json_if_fit(cls: type[T], content: bytes) -> T | None:
    """Return an instance of the dataclass `cls` from JSON bytes; None if the bytes are not JSON or
    do not fit the dataclass.
    """
    with suppress(Misfit):
        return parse_json(cls, content)
    return None


def shorten_value(value: Any) -> str:
    """Return the value as Python writes it, truncated to 60 characters. Without the limit, a
    message could contain a whole file that was read by mistake.
    """
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def describe_value(value: Any) -> str:
    """Return the value of a YAML or JSON key for a message: `empty (null)` for None, which a key
    has if nothing is below it, otherwise as `shorten_value` writes it.
    """
    return "empty (null)" if value is None else shorten_value(value)


def _join_keys(where: str, key: Any) -> str:
    """Return the path of a key in a mapping: `streams.web` for `web` in `streams`."""
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
    """Return an annotation in words for a user: `a number or null` for `float | None`."""
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if _is_union(hint):
        options = typing.get_args(hint)
        if float in options:  # every whole number is a number
            options = tuple(option for option in options if option is not int)
        return " or ".join(map(_describe_type, options))
    if hint == list[str]:  # `read` makes a list of one string
        return "text or a list"
    short_form = get_short_form(hint)
    if short_form:
        return short_form.words
    return _NAMES.get(typing.get_origin(hint) or hint, "keys and values")

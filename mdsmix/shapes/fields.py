"""A recipe's fields beyond a plain name: a path into nested records (`meta.body`,
`conversations[0].value`), and a template over several fields (`"{title}\\n\\n{body}"`).

The value of a path or template is put into a copy of the record, under the string that the recipe
writes. So a shape reads every field by its name, and records are not copied if a recipe has only
plain names. A field with exactly this name wins: `meta.body` is the field `meta.body` of a record
that has one, otherwise `body` in `meta`. A string that cannot be read as a path, such as
`score[en]`, is always a plain name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any

from mdsmix.record import RecordRefused

_NAME = r"[^.\[\]{}]+"
_STEP = _NAME + r"(?:\[-?\d{1,9}\])*"
_PATH = re.compile(rf"{_STEP}(?:\.{_STEP})*")
_STEPS = re.compile(r"\[(-?\d+)\]|(" + _NAME + ")")
_IMAGE = "<image>"
"""A field with this placeholder is a template even without braces. It then gives all records the
same text, such as one question about many captioned images.
"""


class BadField(ValueError):
    """A field of a recipe cannot be read as a template; the message says where it is wrong."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a recipe: a plain name, a path or a template."""

    name: str
    "The field as the recipe writes it."
    roots: frozenset[str]
    "The record's top-level names that the field reads."
    find: Callable[[Mapping[str, Any]], Any]
    "Record -> the field's value. Raises RecordRefused if the record lacks it."
    entered: frozenset[str]
    "The roots that a path such as `meta.body` enters: their values are lists or objects."
    is_template: bool = False


@lru_cache(maxsize=256)
def parse_field(name: str) -> Field:
    """Parse a field as a recipe writes it. Raises BadField if it is a template with an error."""
    if "{" in name or "}" in name or _IMAGE in name:
        return _parse_template(name)
    steps: list[Any] = [name]
    if _PATH.fullmatch(name):
        steps = [int(index) if index else step for index, step in _STEPS.findall(name)]

    def find(record: Mapping[str, Any]) -> Any:
        """Return the value of the field. Raises RecordRefused (missing_field) if the record lacks
        it.
        """
        if name in record:
            return record[name]
        value: Any = record
        try:
            for step in steps:
                if type(value) is not (dict if type(step) is str else list):
                    raise LookupError  # "abc"[0] must not count as an entry of a list
                value = value[step]
        except LookupError:
            raise RecordRefused("missing_field", missing=name) from None
        return value

    # A record may also have a field of exactly this name: so the whole name is a root too.
    root = frozenset(steps[:1])
    return Field(name, root | {name}, find, entered=root if steps[1:] else frozenset())


def _parse_template(template: str) -> Field:
    """Parse a template: text, and fields in braces. Its value is a string; `find` raises
    RecordRefused if one of its fields is missing or not a string.
    """
    try:
        pieces = [*Formatter().parse(template)]
        for _, name, format_spec, conversion in pieces:
            if name == "" or "{" in (name or "") or format_spec or conversion:
                raise ValueError("braces contain the name of a field and nothing else")
    except ValueError as error:
        raise BadField(
            f"{error}: write {{title}} for a field, and {{{{ and }}}} for braces"
        ) from None
    fields = [parse_field(name) for _, name, *_ in pieces if name]

    def find(record: Mapping[str, Any]) -> Any:
        if template in record:
            return record[template]
        values = [field.find(record) for field in fields]
        for field, value in zip(fields, values, strict=True):
            if type(value) is not str:
                raise RecordRefused("field_not_text", **{"not text": field.name})
        unused = iter(values)
        return "".join([text + (next(unused) if name else "") for text, name, *_ in pieces])

    roots = frozenset([template]).union(*(field.roots for field in fields))
    entered = frozenset[str]().union(*(field.entered for field in fields))
    return Field(template, roots, find, entered, is_template=True)


Deriver = Callable[[Any], Any]


def make_deriver(names: Iterable[str]) -> Deriver | None:
    """Return a function that copies a record and adds the values of paths and templates. Return
    None if there are neither, so that records need no copy.

    The function adds each value under the string that the recipe writes, such as `meta.body`. If
    the record lacks a field of a template, it returns a NoRecord, the reason why the record is
    bad. If the record lacks a path, nothing is added, and the shape then decides whether the field
    is required.

    Args:
        names: fields as a recipe writes them: plain names, paths and templates.
    """
    fields = [field for field in map(parse_field, names) if field.entered or field.is_template]
    if not fields:
        return None

    def derive(record: Any) -> Any:
        """Return a copy of the record with the values of `fields`; a NoRecord if a template fails.
        A value that is not an object is returned as it is.
        """
        if type(record) is not dict:
            return record
        derived = dict(record)
        for field in fields:
            try:
                derived[field.name] = field.find(record)
            except RecordRefused as error:
                if field.is_template:
                    return error.why
        return derived

    return derive


def find_value(name: str, record: Any) -> Any:
    """Return the value of a field; None if the record lacks the field or is not an object."""
    try:
        return parse_field(name).find(record) if type(record) is dict else None
    except RecordRefused:
        return None

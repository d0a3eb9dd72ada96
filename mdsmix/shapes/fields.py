"""A recipe's fields beyond a plain name: a path into nested records (`meta.body`,
`conversations[0].value`), and a template over several (`"{title}\\n\\n{body}"`).

Their values are put into a copy of the record, under the name in the recipe, so a shape reads every
field by its name, and a plain name costs nothing. A field of exactly this name wins: `meta.body` is
that field in a record that has it, and else `body` in `meta`. A name that is no path, such as
`score[en]`, is always a field of this name.
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
"""A text with this mark and without braces names no field: it is the same for all records, as one
question about many captioned images.
"""


class BadField(ValueError):
    """A field of a recipe that cannot be read as a path or a template; the message says where it is
    wrong.
    """


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a recipe: a plain name, a path or a template."""

    name: str
    "The field as the recipe writes it."
    roots: frozenset[str]
    "The record's top-level names that the field reads."
    find: Callable[[Mapping[str, Any]], Any]
    "Record -> the field's value; RecordRefused where the record lacks it."
    entered: frozenset[str]
    "The roots that hold lists or objects, since a path goes into them."
    is_template: bool = False


@lru_cache(maxsize=256)
def parse(name: str) -> Field:
    """The field of a recipe's words; BadField for a template that cannot be read."""
    if "{" in name or "}" in name or _IMAGE in name:
        return _template(name)
    steps: list[Any] = [name]
    if _PATH.fullmatch(name):
        steps = [int(index) if index else step for index, step in _STEPS.findall(name)]

    def find(record: Mapping[str, Any]) -> Any:
        if name in record:
            return record[name]
        value: Any = record
        try:
            for step in steps:
                if type(value) is not (dict if type(step) is str else list):
                    raise LookupError  # a letter of a text is no item of a list
                value = value[step]
        except LookupError:
            raise RecordRefused("missing_field", missing=name) from None
        return value

    root = frozenset(steps[:1])
    return Field(name, root | {name}, find, entered=root if steps[1:] else frozenset())


def _template(template: str) -> Field:
    """A template: texts, and fields in braces. RecordRefused where one of its fields is missing or
    holds no text.
    """
    try:
        pieces = [*Formatter().parse(template)]
        if any(name == "" or "{" in (name or "") or form or how for _, name, form, how in pieces):
            raise ValueError("a field has a name and nothing else")
    except ValueError as error:
        raise BadField(f"{error}: {{title}} is a field, {{{{ and }}}} are braces") from None
    fields = [parse(name) for _, name, *_ in pieces if name]

    def find(record: Mapping[str, Any]) -> Any:
        if template in record:
            return record[template]
        texts = [field.find(record) for field in fields]
        for field, text in zip(fields, texts, strict=True):
            if type(text) is not str:
                raise RecordRefused("field_not_text", **{"not text": field.name})
        left = iter(texts)
        return "".join([text + (next(left) if name else "") for text, name, *_ in pieces])

    roots = frozenset([template]).union(*(field.roots for field in fields))
    entered = frozenset[str]().union(*(field.entered for field in fields))
    return Field(template, roots, find, entered, is_template=True)


Derive = Callable[[Any], Any]


def derived(names: Iterable[str]) -> Derive | None:
    """A function that copies a record and adds the values of paths and templates, under their names
    in the recipe; None where all names are plain. The function returns a NoRecord where a record
    lacks a part of a template.
    """
    fields = [field for field in map(parse, names) if field.entered or field.is_template]
    if not fields:
        return None

    def derive(record: Any) -> Any:
        if type(record) is not dict:
            return record
        found = dict(record)
        for field in fields:
            try:
                found[field.name] = field.find(record)
            except RecordRefused as error:
                if field.is_template:
                    return error.why
        return found

    return derive


def value_at(name: str, record: Any) -> Any:
    """The value of a field; None where a record lacks it."""
    try:
        return parse(name).find(record) if type(record) is dict else None
    except RecordRefused:
        return None

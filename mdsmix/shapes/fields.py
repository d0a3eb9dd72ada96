"""A recipe's fields beyond a plain name: a path into nested records (`meta.body`, `conversations[0].value`), and a template
over several (`"{title}\\n\\n{body}"`).

They are put under the recipe's own words into a copy of the record, so a shape reads every field by its name, and a plain
name costs nothing. A field that is named just so wins: `meta.body` is that field in a record that has it, and else `body` in
`meta`; so is whatever is no path, such as `score[en]`.
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
"Names no field: a text without braces that holds it is the same for all records, as the question about each of many captioned images."


class BadField(ValueError):
    """A field of a recipe that cannot be read as a path or a template; the message says where it is wrong."""


@dataclass(frozen=True, slots=True)
class Field:
    """What a recipe says of one field."""

    name: str
    "As the recipe says it."
    roots: frozenset[str]
    "The names at the top of a record that it reads."
    find: Callable[[Mapping[str, Any]], Any]
    "Its value in a record; RecordRefused."
    entered: frozenset[str] = frozenset()
    "Those of the roots that it goes into: they hold lists or objects."
    is_plain: bool = False
    is_template: bool = False


@lru_cache(maxsize=256)
def parse(name: str) -> Field:
    """A field as a recipe names it; BadField where it is a template that cannot be read."""
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

    root, is_plain = frozenset(steps[:1]), len(steps) == 1
    return Field(name, root | {name}, find, frozenset() if is_plain else root, is_plain)


def _template(template: str) -> Field:
    """Texts and fields in braces; all its fields must be there and hold text, or no text is made of a part of them."""
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
    """What puts the values of paths and templates into a copy of a record, under the names that the recipe gives them; None
    where all are plain names. It answers a NoRecord where a record lacks a part of a template."""
    fields = [field for name in names if not (field := parse(name)).is_plain]
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

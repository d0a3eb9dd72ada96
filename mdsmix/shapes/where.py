"""A recipe's `where:`, a condition on a record's fields: `lang == 'en' and len(text) > 200 and not matches(url, '^https?://x')`.

It is written as Python writes it, read by `ast`, and made of the few things below, each a plain function: nothing is
evaluated by Python itself. There is no arithmetic, so no power or repeated text can grow, and regular expressions are RE2's,
whose time is linear in the text: one of the standard library may take years for a record of thirty characters.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mdsmix.shapes.fields import BadField, Field, Unfound, parse, path

NO_MATCH, NO_FIELD, NO_ORDER = "where", "where_missing_field", "where_not_comparable"
LEFT_OUT = (NO_MATCH, NO_FIELD, NO_ORDER)
"Why a record is left out: the condition is false, or cannot be judged since a field is not there, or types do not compare."
EXAMPLE = "a condition is written as lang == 'en' and score > 0.5"
ALLOWED = (
    "it may hold fields, constants, ==, !=, <, <=, >, >=, in, is None, and, or, not, len(field), matches(field, 'regex'), "
    "exists(field) and field('any name')"
)
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_JSON = {"true": "True", "false": "False", "null": "None"}
"How a person who thinks in JSON or YAML writes what is no field."

Value = Callable[[dict[str, Any]], Any]
"A part of a condition, of a record; Unfound, TypeError."


class BadCondition(ValueError):
    """A condition that cannot be read; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Where:
    """A condition that was read."""

    roots: frozenset[str]
    "The names at the top of a record that it reads."
    entered: frozenset[str]
    "Those of them that hold lists or objects, since it goes into them."
    holds: Value

    def refused(self, record: Any) -> str | None:
        """The reason code of why a record is left out; None where it stays, or is no object: whose shape then says so."""
        if type(record) is not dict:
            return None
        try:
            return None if self.holds(record) else NO_MATCH
        except Unfound:
            return NO_FIELD
        except (TypeError, RecursionError, UnicodeEncodeError):
            return NO_ORDER


@lru_cache(maxsize=64)
def parse_where(expression: str) -> Where:
    """A condition as a recipe says it; BadCondition."""
    text = expression.strip().replace("\n", " ")
    if not text:
        raise BadCondition(f"it is empty; {EXAMPLE}")
    reader = _Reader(text)
    try:
        holds = reader.value(_tree(text))
        return Where(frozenset(reader.roots), frozenset(reader.entered), holds)
    except RecursionError:
        raise BadCondition(f"it nests too deeply; {EXAMPLE}") from None


def _tree(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # '\d' in a regular expression
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise BadCondition(_at(text, (error.offset or 1) - 1, f"{error.msg}; {EXAMPLE}")) from None
    except MemoryError:  # what the parser says of more parentheses than it holds
        raise RecursionError from None
    except ValueError as error:
        raise BadCondition(f"{error}; {EXAMPLE}") from None


def _at(text: str, place: int, why: str) -> str:
    place = max(0, min(place, len(text) - 1))
    return f"at character {place + 1}, {text[place : place + 20]!r}: {why}"


class _Reader:
    """Makes a function of each node, and notes which fields are read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.roots, self.entered = set[str](), set[str]()

    def value(self, node: ast.expr) -> Value:
        make = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if make is None:
            raise self._bad(node, ALLOWED)
        return make(node)  # type: ignore[no-any-return]

    def _bad(self, node: ast.expr, why: str) -> BadCondition:
        line = self._text.encode()[: node.col_offset]
        return BadCondition(_at(self._text, len(line.decode()), why))

    def _of_boolop(self, node: ast.BoolOp) -> Value:
        parts = [self.value(part) for part in node.values]
        join = all if isinstance(node.op, ast.And) else any
        return lambda record: join(part(record) for part in parts)

    def _of_unaryop(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            part = self.value(node.operand)
            return lambda record: not part(record)
        if isinstance(node.op, ast.USub) and _is_number(node.operand):
            return _always(-ast.literal_eval(node.operand))
        raise self._bad(node, ALLOWED)

    def _of_compare(self, node: ast.Compare) -> Value:
        for op, other in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, (ast.Is, ast.IsNot)) and not _is_none(other):
                raise self._bad(other, "is compares with None alone: write ==")
        values = [self.value(each) for each in (node.left, *node.comparators)]
        compare = [_COMPARISONS[type(op)] for op in node.ops]
        if len(compare) == 1:
            (left, right), (only,) = values, compare
            return lambda record: only(left(record), right(record))
        return lambda record: _chain(record, values, compare)

    def _of_constant(self, node: ast.Constant) -> Value:
        if not isinstance(node.value, (str, int, float, type(None))):
            raise self._bad(node, "a constant is text, a number, True, False or None")
        return _always(node.value)

    def _of_list(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        parts = [self.value(part) for part in node.elts]
        if all(isinstance(part, ast.Constant) for part in node.elts):
            return _always([part({}) for part in parts])
        return lambda record: [part(record) for part in parts]

    _of_tuple = _of_set = _of_list

    def _of_name(self, node: ast.Name) -> Value:
        if node.id in _JSON:
            raise self._bad(
                node, f"write {_JSON[node.id]}, or field('{node.id}') where it is a field"
            )
        return self._field(node.id, [node.id])

    def _of_attribute(self, node: ast.Attribute | ast.Subscript) -> Value:
        steps = list(self._steps(node))
        return self._field("".join(_written(steps)), steps)

    _of_subscript = _of_attribute

    def _steps(self, node: ast.expr) -> Iterator[str | int]:
        """The steps of a path, from the record on."""
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield from self._steps(node.value)
            yield node.attr
        elif isinstance(node, ast.Subscript):
            yield from self._steps(node.value)
            yield self._index(node.slice)
        else:
            raise self._bad(node, "only a field has parts, as in meta.lang or turns[0]")

    def _index(self, node: ast.expr) -> str | int:
        try:
            index = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            index = None
        if type(index) not in (str, int):
            raise self._bad(
                node, "the place in a list is a whole number, a field's name is text in quotes"
            )
        return index  # type: ignore[no-any-return]

    def _field(self, name: str, steps: list[str | int]) -> Value:
        return self._noted(path(name, steps))

    def _noted(self, field: Field) -> Value:
        self.roots |= field.roots
        self.entered |= field.entered
        return field.find

    def _of_call(self, node: ast.Call) -> Value:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        make: dict[str, Callable[..., Value]] = {
            "len": self._len,
            "matches": self._matches,
            "exists": self._exists,
            "field": self._named,
        }
        wanted = 2 if name == "matches" else 1
        if name not in make or node.keywords or len(node.args) != wanted:
            raise self._bad(node, ALLOWED)
        return make[name](*node.args)

    def _len(self, of: ast.expr) -> Value:
        value = self.value(of)
        return lambda record: len(value(record))

    def _exists(self, of: ast.expr) -> Value:
        value = self.value(of)

        def exists(record: dict[str, Any]) -> bool:
            try:
                return value(record) is not None
            except Unfound:
                return False

        return exists

    def _named(self, of: ast.expr) -> Value:
        try:
            return self._noted(
                parse(self._said(of, "field('any name') takes a field's name in quotes"))
            )
        except BadField as error:
            raise self._bad(of, str(error)) from None

    def _matches(self, of: ast.expr, pattern: ast.expr) -> Value:
        value, regex = self.value(of), self._regex(pattern)

        def matches(record: dict[str, Any]) -> bool:
            text = value(record)
            if type(text) is not str:
                raise TypeError
            return regex.search(text) is not None

        return matches

    def _regex(self, node: ast.expr) -> Any:
        import re2

        options = re2.Options()
        options.log_errors, options.never_capture = False, True
        said = self._said(node, "matches(field, 'regex') takes the regular expression in quotes")
        try:
            return re2.compile(said, options)
        except re2.error as error:
            why = error.args[0] if error.args else "it is too large"
            why = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
            raise self._bad(node, f"RE2 does not read this regular expression: {why}") from None
        except UnicodeEncodeError:
            raise self._bad(node, "the regular expression has no UTF-8 form") from None

    def _said(self, node: ast.expr, otherwise: str) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        raise self._bad(node, otherwise)


def _always(value: Any) -> Value:
    return lambda record: value


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _written(steps: list[str | int]) -> Iterator[str]:
    for number, step in enumerate(steps):
        if isinstance(step, int):
            yield f"[{step}]"
        else:
            yield f".{step}" if number else step


def _chain(
    record: dict[str, Any], values: list[Value], compare: list[Callable[[Any, Any], Any]]
) -> bool:
    """`a < b < c`, each operand once and none behind a false comparison, as in Python."""
    left = values[0](record)
    for value, one in zip(values[1:], compare, strict=True):
        right = value(record)
        if not one(left, right):
            return False
        left = right
    return True

"""A recipe's `where:`, a condition on a record's fields: `lang == 'en' and len(text) > 200 and not matches(url, '^https?://x')`.

It is written as Python writes it, read by `ast`, and held against the few things below: only what is made of them is compiled, and its
fields are read by functions of ours. There is no arithmetic, so no power or repeated text can grow, and regular expressions are RE2's,
whose time is linear in the text: one of the standard library may take years for a record of thirty characters.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mdsmix.shapes.fields import BadField, Field, FieldMissing, parse, path

NO_MATCH, NO_FIELD, NO_ORDER = "where", "where_missing_field", "where_not_comparable"
LEFT_OUT = (NO_MATCH, NO_FIELD, NO_ORDER)
"Why a record is left out: the condition is false, or cannot be judged since a field is not there, or types do not compare."
EXAMPLE = "a condition is written as lang == 'en' and score > 0.5"
ALLOWED = (
    "it may hold fields, constants, ==, !=, <, <=, >, >=, in, is None, and, or, not, len(field), matches(field, 'regex'), "
    "exists(field) and field('any name')"
)
_AS_PYTHON = (
    *(ast.BoolOp, ast.And, ast.Or, ast.Not, ast.Compare, ast.List, ast.Tuple, ast.Set, ast.Load),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot),
)
"What a condition means as Python does."
_JSON = {"true": "True", "false": "False", "null": "None"}
"How a person who thinks in JSON or YAML writes what is no field."


class BadCondition(ValueError):
    """A condition that cannot be read; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that was read."""

    roots: frozenset[str]
    "The names at the top of a record that it reads."
    entered: frozenset[str]
    "Those of them that hold lists or objects, since it goes into them."
    holds: Callable[[dict[str, Any]], Any]
    "Of a record; FieldMissing, TypeError."

    def refused(self, record: Any) -> str | None:
        """The reason code of why a record is left out; None where it stays, or is no object: whose shape then says so."""
        if type(record) is not dict:
            return None
        try:
            return None if self.holds(record) else NO_MATCH
        except FieldMissing:
            return NO_FIELD
        except (TypeError, RecursionError, UnicodeEncodeError):
            return NO_ORDER


@lru_cache(maxsize=64)
def parse_where(expression: str) -> Condition:
    """A condition as a recipe says it; BadCondition."""
    text = expression.strip().replace("\n", " ")
    if not text:
        raise BadCondition(f"it is empty; {EXAMPLE}")
    compiler = _Compiler(text)
    try:
        holds = compiler.function(_tree(text))
    except RecursionError:
        raise BadCondition(f"it nests too deeply; {EXAMPLE}") from None
    return Condition(frozenset(compiler.roots), frozenset(compiler.entered), holds)


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


class _Compiler(ast.NodeTransformer):
    """Makes a function of a condition: what is not allowed is refused, and each field and regular expression becomes a call of a
    function of ours, so Python evaluates nothing that this class has not let in."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.roots, self.entered = set[str](), set[str]()
        self._functions: dict[str, Callable[..., Any]] = {"len": len, "exists": _exists}

    def function(self, tree: ast.expr) -> Callable[[dict[str, Any]], Any]:
        made = ast.Expression(_lambda(self.visit(tree), "record"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 'a' is None
            code = compile(ast.fix_missing_locations(made), "where", "eval")
        return eval(code, {"__builtins__": {}, **self._functions})  # type: ignore[no-any-return]

    def visit(self, node: ast.AST) -> Any:
        visit = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if visit is None and not isinstance(node, _AS_PYTHON):
            raise self._bad(node, ALLOWED)
        return (visit or self.generic_visit)(node)

    def _bad(self, node: Any, why: str) -> BadCondition:
        line = self._text.encode()[: node.col_offset]
        return BadCondition(_at(self._text, len(line.decode()), why))

    def _call(self, function: Callable[..., Any], argument: ast.expr) -> ast.expr:
        name = f"_{len(self._functions)}"
        self._functions[name] = function
        return ast.Call(_name(name), [argument], [])

    def _of_unaryop(self, node: ast.UnaryOp) -> ast.expr:
        is_number = isinstance(node.operand, ast.Constant) and type(node.operand.value) in (
            int,
            float,
        )
        if not isinstance(node.op, ast.Not) and not (isinstance(node.op, ast.USub) and is_number):
            raise self._bad(node, ALLOWED)
        node.operand = self.visit(node.operand)
        return node

    def _of_compare(self, node: ast.Compare) -> Any:
        for op, other in zip(node.ops, node.comparators, strict=True):
            is_none = isinstance(other, ast.Constant) and other.value is None
            if isinstance(op, (ast.Is, ast.IsNot)) and not is_none:
                raise self._bad(other, "is compares with None alone: write ==")
        return self.generic_visit(node)

    def _of_constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, (str, int, float, type(None))):
            raise self._bad(node, "a constant is text, a number, True, False or None")
        return node

    def _of_tuple(self, node: ast.Tuple | ast.Set) -> ast.expr:
        return ast.List([self.visit(item) for item in node.elts], ast.Load())

    _of_set = _of_tuple

    def _of_name(self, node: ast.Name) -> ast.expr:
        if node.id in _JSON:
            raise self._bad(
                node, f"write {_JSON[node.id]}, or field('{node.id}') where it is a field"
            )
        return self._field(path(node.id, [node.id]))

    def _of_attribute(self, node: ast.Attribute | ast.Subscript) -> ast.expr:
        steps = list(self._steps(node))
        written = "".join(f"[{step}]" if type(step) is int else f".{step}" for step in steps)
        return self._field(path(written.removeprefix("."), steps))

    _of_subscript = _of_attribute

    def _steps(self, node: ast.expr) -> Iterator[str | int]:
        """The steps of a path, from the record on."""
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            yield from self._steps(node.value)
            yield node.attr if isinstance(node, ast.Attribute) else self._index(node.slice)
        else:
            raise self._bad(node, "only a field has parts, as in meta.lang or turns[0]")

    def _index(self, node: ast.expr) -> str | int:
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            index = ast.literal_eval(node)
            if type(index) in (str, int):
                return index  # type: ignore[no-any-return]
        raise self._bad(
            node, "the place in a list is a whole number, a field's name is text in quotes"
        )

    def _field(self, field: Field) -> ast.expr:
        self.roots |= field.roots
        self.entered |= field.entered
        return self._call(field.find, _name("record"))

    def _of_call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(ast.Name("len"), [value], []):
                return ast.Call(_name("len"), [self.visit(value)], [])
            case ast.Call(ast.Name("exists"), [value], []):
                return ast.Call(_name("exists"), [_lambda(self.visit(value))], [])
            case ast.Call(ast.Name("field"), [name], []):
                return self._named(name)
            case ast.Call(ast.Name("matches"), [value, regex], []):
                return self._call(self._matches(regex), self.visit(value))
        raise self._bad(node, ALLOWED)

    def _named(self, node: ast.expr) -> ast.expr:
        said = self._said(node, "field('any name') takes a field's name in quotes")
        try:
            return self._field(parse(said))
        except BadField as error:
            raise self._bad(node, str(error)) from None

    def _matches(self, node: ast.expr) -> Callable[[Any], bool]:
        import re2

        options = re2.Options()
        options.log_errors, options.never_capture = False, True
        said = self._said(node, "matches(field, 'regex') takes the regular expression in quotes")
        try:
            search = re2.compile(said, options).search
        except re2.error as error:
            why = error.args[0] if error.args else "it is too large"
            why = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
            raise self._bad(node, f"RE2 does not read this regular expression: {why}") from None
        except UnicodeEncodeError:
            raise self._bad(node, "the regular expression has no UTF-8 form") from None

        def matches(text: Any) -> bool:
            if type(text) is not str:
                raise TypeError
            return search(text) is not None

        return matches

    def _said(self, node: ast.expr, otherwise: str) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        raise self._bad(node, otherwise)


def _name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _lambda(body: ast.expr, *names: str) -> ast.expr:
    return ast.Lambda(
        ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, []), body
    )


def _exists(value: Callable[[], Any]) -> bool:
    try:
        return value() is not None
    except FieldMissing:
        return False

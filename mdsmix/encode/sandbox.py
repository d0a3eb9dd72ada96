"""Where chat templates run: the jinja2 sandbox that transformers runs them in, with the same extras.

A template comes with a tokenizer from anywhere. It reaches no file, no other template and no attribute of Python's
machinery, and has a budget of steps and of text for each rendering. What draws at random (`lipsum`, `random`) is
taken out, since the same input must give the same bytes.

jinja2 is imported here at the top, so this module is imported only where a template is opened.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes, pass_context, pass_environment
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mdsmix.encode.budget import (
    CALL,
    GROWING,
    UNWATCHED,
    Budget,
    Overrun,
    is_namespace,
    power_bits,
    product,
    size_of,
)
from mdsmix.encode.counted import HELD, JOINED, SHARED, STEPPED, Counted

_PIECES = 64
"Pieces of output that are made before they are counted."


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what an assistant writes; the text is what is inside."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Template(Template):
    def render(self, *args: Any, **variables: Any) -> str:
        environment: Any = self.environment
        environment.budget.begin(variables)
        return str(environment.concat(self.root_render_func(self.new_context(variables))))


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment with a budget. It renders one template at a time."""

    intercepted_binops = frozenset({"*", "**", "%"})
    template_class = _Template

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.budget = Budget()

    def _generate(self, source: nodes.Template, *args: Any, **settings: Any) -> str:
        counted = Counted().visit(source).set_environment(self)
        return super()._generate(counted, *args, **settings)

    def concat(self, pieces: Iterable[str]) -> str:
        if isinstance(pieces, list) and len(pieces) <= _PIECES:
            return "".join(pieces)
        left = iter(pieces)
        parts, size = ["".join(islice(left, _PIECES))], 0
        while more := "".join(islice(left, _PIECES)):
            parts.append(more)
            size += len(more)
            self.budget.hold(size)
        return "".join(parts) if size else parts[0]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is int and operator == "%":
            return left % right
        power_bits(operator, left, right)
        if operator in GROWING and not (isinstance(left, int) and isinstance(right, int)):
            self.budget.hold(GROWING[operator]((left, right)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(obj)
        if kind is Macro or kind is BlockReference:
            self.budget.step(CALL)
        elif kind is LoopContext:
            self.budget.step(CALL)
            args = (self.budget.stepped(args[0]), *args[1:])
        elif (name := getattr(obj, "__name__", None)) in GROWING:
            owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
            owned = () if owner is None else (owner,)
            self.budget.hold(GROWING[name]((*owned, *args, *kwargs.values())))
        return super().call(context, obj, *args, **kwargs)


def template_sandbox(day: datetime) -> Sandbox:
    """The environment of transformers' chat templates, on `day`."""
    sandbox = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    sandbox.filters["tojson"] = _to_json(sandbox.budget)
    for name in GROWING.keys() & sandbox.filters.keys():
        sandbox.filters[name] = _bounded(sandbox.budget, name, sandbox.filters[name])
    sandbox.filters.update(_counting(sandbox.budget))
    sandbox.globals.update(
        range=_bounded_range, raise_exception=_raise_exception, strftime_now=day.strftime
    )
    return sandbox


def _counting(budget: Budget) -> dict[str, Callable[..., Any]]:
    """The filters of `Counted`. They ask for the context so that no constant is worked out before the budget is there."""

    @pass_context
    def held(_: Context, value: Any) -> Any:
        kind = type(value)
        if kind is str:
            if len(value) > UNWATCHED:
                budget.hold(len(value))
        elif kind is not bool and kind is not int and not is_namespace(value):
            budget.hold(size_of(value))
        return value

    @pass_context
    def shared(context: Context, value: Any) -> Any:
        """What is put into a namespace: none of these, or the text of them could double with each."""
        if is_namespace(value):
            raise Overrun("a chat template may not put a namespace into another")
        return held(context, value)

    @pass_context
    def joined(_: Context, values: list[Any]) -> str:
        """What `~` does."""
        texts = list(map(str, values))
        budget.hold(sum(map(len, texts)))
        return "".join(texts)

    @pass_context
    def stepped(_: Context, items: Any) -> Any:
        return budget.stepped(items)

    return {HELD: held, JOINED: joined, SHARED: shared, STEPPED: stepped}


def _bounded(budget: Budget, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts what it is about to make."""

    @functools.wraps(apply)
    def bounded(*given: Any, **named: Any) -> Any:
        given = tuple(list(v) if isinstance(v, Iterator) else v for v in given)
        values = [v for v in given if not isinstance(v, (Context, EvalContext, Environment))]
        budget.hold(GROWING[name]([*values, *named.values()]))
        return apply(*given, **named)

    return bounded


@pass_environment
def _bounded_range(sandbox: Sandbox, *bounds: int) -> range:
    numbers = range(*bounds)
    sandbox.budget.draw(len(numbers))
    return numbers


def _to_json(budget: Budget) -> Callable[..., str]:
    """Plain JSON, where jinja2's own filter would escape for HTML."""

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent:
            budget.hold(product((value, indent)))
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        budget.hold(len(text))
        return text

    return to_json


def _raise_exception(message: str) -> None:
    raise TemplateError(message)

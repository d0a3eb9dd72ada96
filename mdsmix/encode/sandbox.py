"""Where chat templates run: the jinja2 sandbox that transformers runs them in, with the same extras.

A template comes with a tokenizer from anywhere. It reaches no file, no other template and no
attribute of Python's machinery, and one rendering may draw RANGE_LIMIT numbers from `range` in all.
Loops nested over one list, and text multiplied by a large number, are not bounded: such a template
holds up the conversion until it is stopped. What draws at random (`lipsum`, `random`) is taken out,
since the same input must give the same bytes.

jinja2 is imported here at the top, so this module is imported only where a template is opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RANGE_LIMIT = 100_000
"The sandbox's own limit for one call; here for all calls of a rendering together."


class _Rendering(Context):
    """The state of one rendering, with the numbers that it has drawn from `range`."""

    drawn = 0


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what an assistant writes; the text is what is inside."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def template_sandbox(day: datetime) -> ImmutableSandboxedEnvironment:
    """The environment of transformers' chat templates, on `day`."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.context_class = _Rendering
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    sandbox.filters["tojson"] = _to_json
    sandbox.globals.update(
        range=_bounded_range, raise_exception=_raise_exception, strftime_now=day.strftime
    )
    return sandbox


@pass_context
def _bounded_range(rendering: _Rendering, *bounds: int) -> range:
    numbers = range(*bounds)
    rendering.drawn += len(numbers)
    if rendering.drawn > RANGE_LIMIT:
        raise OverflowError(f"a chat template may draw {RANGE_LIMIT} numbers from range()")
    return numbers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, where jinja2's own filter would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)

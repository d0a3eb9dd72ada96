"""Where chat templates run: the jinja2 sandbox that transformers runs them in, with the same extras.

A template comes with a tokenizer from anywhere. It reaches no file, no other template and no attribute of Python's
machinery. Compiling it evaluates no expression, so that every process may do it; `bounds` limits the rendering.
Random functions (`lipsum`, `random`) are removed, since the same input must give the same bytes.

jinja2 is imported here at the top, so this module is imported only where a template is opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BITS = 4096
"The limit for whole numbers: C code computes with larger ones for hours, and no alarm interrupts it."


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what an assistant writes; the text is what is inside."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Compiler(CodeGenerator):
    """Leaves every expression to the rendering: jinja2 would work out `'a' | center(10 ** 10)` when it compiles."""

    def _output_child_to_const(self, node: nodes.Expr, *where: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, *where)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Any) -> None:  # noqa: N802
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            self.fail("autoescape takes true or false", node.lineno)
        super().visit_EvalContextModifier(node, frame)


class _Reader(_Compiler, TrackingCodeGenerator):
    """Notes the variables that a template reads."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates."""

    code_generator_class = _Compiler
    intercepted_binops = frozenset({"*", "**"})
    rendered: Sequence[Mapping[str, Any]] = ()
    "The messages that are rendered now, or were last: another list for each rendering."

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * right if operator == "**" else bits + right.bit_length()
            if bits > MOST_BITS:
                raise SecurityError(f"a chat template may work out numbers of {MOST_BITS} bits")
        return super().call_binop(context, operator, left, right)


def template_sandbox() -> Sandbox:
    """The environment of transformers' chat templates."""
    sandbox = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    return sandbox


def variables_read(sandbox: Sandbox, source: str) -> frozenset[str]:
    """The variables that a template reads and does not set before."""
    reader = _Reader(sandbox)
    reader.optimizer = None
    reader.visit(sandbox.parse(source))
    return frozenset(reader.undeclared_identifiers)


def names_in(sandbox: Sandbox, source: str) -> frozenset[str]:
    """The attributes that a template asks for, and the texts that its expressions hold."""
    tree = sandbox.parse(source)
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(attributes | texts)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, where jinja2's own filter would escape for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)

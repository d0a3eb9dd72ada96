"""Chat templates as jinja2 compiles them: the sandbox that transformers runs them in, and one rendering per conversation where that is proved.

A template comes with a tokenizer from anywhere. It reaches no file, no other template and no attribute of Python's
machinery. Compiling it evaluates no expression, so that every process may do it; `bounds` limits the rendering.
Random functions (`lipsum`, `random`) are removed, since the same input must give the same bytes.

Foundry renders a conversation of k answers 2k times, each time from its beginning. Most templates
are one loop over the messages and a closing line for the generation prompt; then the text of the
first messages is the beginning of the text of all of them, and one rendering with a mark at each
message gives every turn: a whole conversion of chats under the templates of ChatML and Llama 3 takes 1.2 to 1.8 times the processor
time without. Whether a template has that form is read from its syntax tree, by rules that admit too little rather than too much: what
they do not admit is rendered prefix by prefix. jinja2 is imported here at the top, so this file is imported only where a template is opened.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mdsmix.encode.bounds import EXHAUSTED, Messages, render

MARK = f"\x1f\x00{secrets.token_hex(12)}\x00\x1f"
"Printed where the loop reaches a message. No conversation holds it, since each process draws another."

_MESSAGES = nodes.Name("messages", "load")
_LOOKS_BACK = frozenset({"index", "index0", "first", "previtem"})
"The attributes of `loop` that no later message changes."
_LEAVES = (nodes.Break, nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
"What leaves the loop, or brings text from elsewhere."
_GROWS: Any = (nodes.Call, nodes.Filter, nodes.Mul, nodes.Pow, nodes.Mod)
"What may make a long text of a short one: refused after the loop, since that text is rendered when the template is opened, outside of any limit."


@dataclass(frozen=True, slots=True)
class CausalTemplate:
    """A template up to the end of its loop over the messages, with marks, and what it prints after."""

    marked: Template
    opening: str
    "The generation prompt: all that is printed after the loop, and only where one is asked for."

    def turns(
        self, messages: Messages, variables: Mapping[str, Any]
    ) -> list[tuple[str, str]] | None:
        """The (prompt, response) turns of a valid conversation; None where only prefixes can tell."""
        try:
            parts = render(self.marked, messages, False, variables).split(MARK)
        except EXHAUSTED:
            raise
        except Exception:  # a template may raise anything
            return None
        # 1 where the loop leaves out the first message, which the template has printed before it.
        skipped = len(messages) + 1 - len(parts)
        return _cut(messages, parts, skipped, self.opening) if skipped in (0, 1) else None


def causal_form(
    environment: Environment, source: str, variables: Mapping[str, Any]
) -> CausalTemplate | None:
    """The template in these two parts where its form allows that, else None."""
    tree: Any = environment.parse(source)
    aliases = [assign for assign in tree.find_all(nodes.Assign) if _is_alias(assign)]
    lists = {"messages", *(assign.target.name for assign in aliases)}
    loops = [at for at, node in enumerate(tree.body) if _is_plain_loop(node, lists)]
    if len(loops) != 1 or tree.find(_LEAVES):
        return None
    before, after = tree.body[: loops[0] + 1], nodes.Template(tree.body[loops[0] + 1 :])
    sound = {id(name) for name in _sound_uses(tree, aliases, after)}  # equal nodes compare equal
    sound.add(id(before[-1].iter))
    watched = lists | {"loop", "add_generation_prompt"}
    if any(n.name in watched and id(n) not in sound for n in tree.find_all(nodes.Name)):
        return None
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    if not _is_constant(after, {"add_generation_prompt", *variables} - stored):
        return None
    tail = _compiled(environment, after.body)
    try:
        closing, opening = (render(tail, [], asked, variables) for asked in (False, True))
    except Exception:  # a template may raise anything
        return None
    before[-1].body.insert(0, nodes.Output([nodes.TemplateData(MARK)]))
    return None if closing else CausalTemplate(_compiled(environment, before), opening)


def flat_globals(template: Template) -> Template:
    """The template with its globals in one dict: every rendering copies them, 4 us from jinja2's chain of two."""
    template.globals = dict(template.globals)
    return template


def _cut(
    messages: Messages, parts: list[str], skipped: int, opening: str
) -> list[tuple[str, str]] | None:
    """Turns from the parts: message i is parts[i + 1 - skipped], parts[0] stands before the loop."""
    turns, done = [], 0
    for at, message in enumerate(messages, 1 - skipped):
        if message["role"] == "assistant":
            if not parts[at].startswith(opening):
                return None
            turns.append(("".join(parts[done:at]) + opening, parts[at][len(opening) :]))
            done = at + 1
    return turns


def _is_plain_loop(node: Any, lists: Collection[str]) -> bool:
    """Whether the node is a loop over all of one of the lists."""
    is_over = isinstance(node, nodes.For) and isinstance(node.iter, nodes.Name)
    return is_over and node.iter.name in lists and not (node.test or node.else_ or node.recursive)


def _is_alias(assign: Any) -> bool:
    """Whether it sets a name to `messages` or `messages[1:]`."""
    rest = nodes.Getitem(_MESSAGES, nodes.Slice(nodes.Const(1), None, None), "load")
    return isinstance(assign.target, nodes.Name) and assign.node in (_MESSAGES, rest)


def _sound_uses(tree: Any, aliases: Sequence[Any], after: Any) -> Iterator[Any]:
    """The occurrences of the watched names, beside the loop's own, that look at no message after the one that is printed."""
    for assign in aliases:
        if assign.target.name != "messages":
            yield from (assign.target, getattr(assign.node, "node", assign.node))
    for item in tree.find_all((nodes.Getitem, nodes.Getattr)):
        if isinstance(item, nodes.Getitem):
            is_sound = item.node == _MESSAGES and item.arg == nodes.Const(0)
        else:
            is_sound = item.node == nodes.Name("loop", "load") and item.attr in _LOOKS_BACK
        if is_sound:
            yield item.node
    for name in after.find_all(nodes.Name):
        if name == nodes.Name("add_generation_prompt", "load"):
            yield name


def _is_constant(tail: Any, names: Collection[str]) -> bool:
    """True where what follows the loop depends on nothing but these names, and is no more than it says."""
    is_plain = all(isinstance(node, (nodes.Output, nodes.If)) for node in tail.find_all(nodes.Stmt))
    reads = {name.name for name in tail.find_all(nodes.Name)}
    return is_plain and tail.find(_GROWS) is None and reads <= set(names)


def _compiled(environment: Environment, body: list[nodes.Node]) -> Template:
    tree: Any = nodes.Template(body, lineno=1).set_environment(environment)
    return flat_globals(environment.from_string(tree))


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


class _LazyCompiler(CodeGenerator):
    """Leaves every expression to the rendering: jinja2 would work out `'a' | center(10 ** 10)` when it compiles."""

    def _output_child_to_const(self, node: nodes.Expr, *where: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, *where)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Any) -> None:  # noqa: N802
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            self.fail("autoescape takes true or false", node.lineno)
        super().visit_EvalContextModifier(node, frame)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates."""

    code_generator_class = _LazyCompiler
    intercepted_binops = frozenset({"*", "**"})
    rendered: Sequence[Mapping[str, Any]] = ()
    "The messages that are rendered now, or were last: another list for each rendering."
    is_rendering = False

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


def words_in(sandbox: Sandbox, source: str) -> tuple[frozenset[str], frozenset[str]]:
    """The variables that a template reads; the attributes that it asks for, with the texts that its expressions hold."""
    tree = sandbox.parse(source)
    reads = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"}
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(reads), frozenset(attributes | texts)


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

"""Chat templates as jinja2 compiles them: the sandbox that transformers runs them in, and one rendering per conversation where that is proved.

A template comes with a tokenizer from anywhere. It reaches no file, no other template and no attribute of Python's machinery. Random
functions (`lipsum`, `random`) are removed, since the same input must give the same bytes. A template that never ends is noticed by the
engine, as any record at which a worker hangs.

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
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MARK = f"\x1f\x00{secrets.token_hex(12)}\x00\x1f"
"Printed where the loop reaches a message. No conversation holds it, since each process draws another."

_MESSAGES, _LOOP = nodes.Name("messages", "load"), nodes.Name("loop", "load")
_FIRST = nodes.Getitem(_MESSAGES, nodes.Const(0), "load")
_REST = nodes.Getitem(_MESSAGES, nodes.Slice(nodes.Const(1), None, None), "load")
_LOOKS_BACK = frozenset({"index", "index0", "first", "previtem"})
"The attributes of `loop` that no later message changes."
_LEAVES = (nodes.Break, nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
"What leaves the loop, or brings text from elsewhere."


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what an assistant writes; the text is what is inside."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def template_sandbox() -> Environment:
    """The environment of transformers' chat templates."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    # Plain JSON, where jinja2's own filter would escape for HTML.
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    sandbox.globals["raise_exception"] = _raise_exception
    return sandbox


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def compiled(environment: Environment, code: str | list[Any]) -> Template:
    """The template of a source or of nodes, with its globals in one dict: every rendering copies them, 4 us from jinja2's chain of two."""
    tree: Any = code
    if isinstance(code, list):
        tree = nodes.Template(code, lineno=1).set_environment(environment)
    template = environment.from_string(tree)
    template.globals = dict(template.globals)
    return template


def split_at_messages(
    environment: Environment, source: str, variables: Mapping[str, Any]
) -> tuple[Template, str] | None:
    """The template up to the end of its loop over the messages, with a mark at each, and the generation prompt, which is all that it
    prints after, and only where it is asked for; None where its form is another."""
    tree: Any = environment.parse(source)
    lists = {
        "messages",
        *(each.target.name for each in tree.find_all(nodes.Assign) if _is_alias(each)),
    }
    loops = [at for at, node in enumerate(tree.body) if _is_plain_loop(node, lists)]
    if len(loops) != 1 or tree.find(_LEAVES):
        return None
    *before, loop = tree.body[: loops[0] + 1]
    after = tree.body[loops[0] + 1 :]
    watched = lists | {"loop", "add_generation_prompt"}
    if any(_looks_ahead(node, watched) for node in (*before, loop.target, *loop.body)):
        return None
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    if not _is_constant(nodes.Template(after), {"add_generation_prompt", *variables} - stored):
        return None
    tail = compiled(environment, after)
    try:
        closing, opening = (tail.render(variables, add_generation_prompt=a) for a in (False, True))
    except Exception:  # a template may raise anything
        return None
    loop.body.insert(0, nodes.Output([nodes.TemplateData(MARK)]))
    return None if closing else (compiled(environment, [*before, loop]), opening)


def _is_plain_loop(node: Any, lists: Collection[str]) -> bool:
    """Whether the node is a loop over all of one of the lists."""
    is_over = isinstance(node, nodes.For) and isinstance(node.iter, nodes.Name)
    return is_over and node.iter.name in lists and not (node.test or node.else_ or node.recursive)


def _is_alias(node: Any) -> bool:
    """Whether it sets another name to `messages` or `messages[1:]`."""
    is_set = isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name)
    return is_set and node.target.name != "messages" and node.node in (_MESSAGES, _REST)


def _looks_ahead(node: Any, watched: Collection[str]) -> bool:
    """Whether it has one of the watched names in a use that may show a message after the one that is printed."""
    is_back = isinstance(node, nodes.Getattr) and node.node == _LOOP and node.attr in _LOOKS_BACK
    if is_back or node == _FIRST or _is_alias(node):
        return False
    if isinstance(node, nodes.Name) and node.name in watched:
        return True
    return any(_looks_ahead(child, watched) for child in node.iter_child_nodes())


def _is_constant(tail: nodes.Template, names: Collection[str]) -> bool:
    """True where what follows the loop depends on nothing but these names."""
    is_plain = all(isinstance(node, (nodes.Output, nodes.If)) for node in tail.find_all(nodes.Stmt))
    return is_plain and {name.name for name in tail.find_all(nodes.Name)} <= set(names)

"""Chat templates compiled by jinja2: transformers' sandbox for them, and their form for one rendering per conversation.

A tokenizer and its template may come from a stranger. In the sandbox a template reaches no file, no other template and no attribute of
Python's machinery. Random functions (`lipsum`, `random`) are removed, since the same input must give the same bytes. The engine ends a
worker whose template never ends, as at any record over which a worker hangs.

Foundry renders a conversation of k answers 2k times, each time from its beginning. Most templates
are one loop over the messages and a closing line for the generation prompt; then the text of the
first messages is the beginning of the text of all of them, and one rendering with a mark at each
message gives every turn. Without it a whole conversion of chats under the templates of ChatML and Llama 3 takes 1.2 to 1.8 times the
processor time. Whether a template has that form is read from its syntax tree, by rules that admit too little rather than too much; any
other template is rendered prefix by prefix. This file imports jinja2 at the top, so it is imported only where a template is opened.
"""

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
"Printed at the beginning of each message. No conversation holds this string, since each process draws a random one."

_MESSAGES, _LOOP = nodes.Name("messages", "load"), nodes.Name("loop", "load")
_FIRST = nodes.Getitem(_MESSAGES, nodes.Const(0), "load")
_REST = nodes.Getitem(_MESSAGES, nodes.Slice(nodes.Const(1), None, None), "load")
_LOOKS_BACK = frozenset({"index", "index0", "first", "previtem"})
"The attributes of `loop` that no later message changes."
_LEAVES = (nodes.Break, nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
"Statements that leave the loop, or bring text from elsewhere."


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` around an assistant's text. Only the text inside is printed."""

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
    """The template of a source or of nodes. Its globals are one dict, since each rendering copies them: 4 us from jinja2's two."""
    tree: Any = code
    if isinstance(code, list):
        tree = nodes.Template(code, lineno=1).set_environment(environment)
    template = environment.from_string(tree)
    template.globals = dict(template.globals)
    return template


def split_at_messages(
    environment: Environment, source: str, variables: Mapping[str, Any]
) -> tuple[Template, str] | None:
    """The template up to the end of its loop over the messages, with a mark at each message; and its generation prompt. None where the
    template has another form, or prints anything but the generation prompt after the loop."""
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
    """Whether the node sets another name to `messages` or `messages[1:]`."""
    is_set = isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name)
    return is_set and node.target.name != "messages" and node.node in (_MESSAGES, _REST)


def _looks_ahead(node: Any, watched: Collection[str]) -> bool:
    """Whether the node uses one of the watched names in a way that may read a message after the current one."""
    is_back = isinstance(node, nodes.Getattr) and node.node == _LOOP and node.attr in _LOOKS_BACK
    if is_back or node == _FIRST or _is_alias(node):
        return False
    if isinstance(node, nodes.Name) and node.name in watched:
        return True
    return any(_looks_ahead(child, watched) for child in node.iter_child_nodes())


def _is_constant(tail: nodes.Template, names: Collection[str]) -> bool:
    """Whether the text printed after the loop depends on no names but these."""
    is_plain = all(isinstance(node, (nodes.Output, nodes.If)) for node in tail.find_all(nodes.Stmt))
    return is_plain and {name.name for name in tail.find_all(nodes.Name)} <= set(names)

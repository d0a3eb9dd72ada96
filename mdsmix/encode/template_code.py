"""Chat templates as jinja2 compiles them, and stand-ins for contents, by which a template is
rendered once for many conversations.

Foundry renders a conversation with k answers 2k times, each time from its beginning. But most
templates decide by roles alone, and print each content as it is, or stripped. Then what stands
between the contents is the same for all conversations of the same roles. A template is such a one
for these roles where it renders stand-ins, which fail whatever else it does with them: 17 us of the
85 us that a chat of 5 messages takes were spent on rendering. This file imports jinja2 at the top,
so it is imported only where a template is opened.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import do_trim
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mdsmix.record import Message

KEY = secrets.token_hex(12)
SPACE = "".join(secrets.choice("\x1c\x1d\x1e\x1f") for _ in range(48))
"A word and white space that no template holds, since each process draws random ones."
PRINTED = f"({SPACE})?{KEY}([0-9]+){KEY}({SPACE})?"
"A stand-in as it is printed: the space before it, the number of its message, the space behind it."
_CAPTURES = (
    *(nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block),
    nodes.EvalContextModifier,
)
"Statements that make a text of what is printed inside them, or print in another way."


class InspectedContent(BaseException):
    """A template does something with a content. Neither templates nor filters of jinja2 catch a
    BaseException.
    """


def _look(*_: Any, **__: Any) -> Any:
    raise InspectedContent


class Placeholder:
    """Stands for any content that is not blank. It is printed, joined to texts and stripped, it is
    true, and it equals nothing that is no text or blank. Anything else raises InspectedContent or
    TypeError, since it is not a string.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __add__(self, other: Any) -> Placeholder:
        return Placeholder(self._text + _printed(other))

    def __radd__(self, other: Any) -> Placeholder:
        return Placeholder(_printed(other) + self._text)

    def strip(self) -> Placeholder:
        return Placeholder(self._text.strip())

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Placeholder) or (isinstance(other, str) and other.strip()):
            raise InspectedContent
        return False

    __str__ = __repr__ = __hash__ = __len__ = __iter__ = __getitem__ = __index__ = _look
    __getattr__ = _look


class PlaceholderMessage(dict[str, Any]):
    """A message whose keys stand in no order."""

    __iter__ = __reversed__ = keys = values = items = copy = _look


def make_placeholders(roles: Sequence[str]) -> list[Message]:
    """Messages of these roles, each with a stand-in that prints its number."""
    texts = (f"{SPACE}{KEY}{at}{KEY}{SPACE}" for at in range(len(roles)))
    each = zip(roles, map(Placeholder, texts), strict=True)
    return [PlaceholderMessage(role=role, content=content) for role, content in each]


def _printed(value: Any) -> Any:
    return value._text if isinstance(value, Placeholder) else value


def _trimmed(value: Any, chars: str | None = None) -> Any:
    is_plain = isinstance(value, Placeholder) and chars is None
    return value.strip() if is_plain else do_trim(value, chars)


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` around an assistant's text. Only the text inside
    is printed.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def make_template_sandbox() -> Environment:
    """The environment of transformers' chat templates."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    return sandbox


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON, where jinja2's own filter would escape for HTML. The arguments have the
    order of transformers' filter, in which `tojson(2)` asks for ASCII and not for an indent of 2.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def compile_template(environment: Environment, source: str) -> Template:
    """The template of a source. Its globals are one dict, since each rendering copies them: 4 us
    from jinja2's two.
    """
    template = environment.from_string(source)
    template.globals = dict(template.globals)
    return template


def compile_placeholder_template(source: str) -> Template | None:
    """The template as it renders stand-ins. None where it captures what it prints as a text, which
    it could look into.
    """
    sandbox = make_template_sandbox()
    sandbox.finalize = _printed
    # `sum` refuses texts to begin with, and `sameas` tells whether two equal texts are one object.
    sandbox.filters |= {"trim": _trimmed, "sum": _look}
    sandbox.tests |= {
        "string": lambda value: isinstance(value, (str, Placeholder)),
        "sameas": _look,
    }
    tree: Any = sandbox.parse(source)
    loops = tree.find_all(nodes.For)
    is_captured = tree.find(_CAPTURES) or any(loop.recursive for loop in loops)
    return None if is_captured else compile_template(sandbox, source)

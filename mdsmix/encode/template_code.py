"""Compiles chat templates with jinja2, and makes placeholders for the contents of messages.

Foundry renders a conversation with k answers 2k times, each time from its beginning. But most
templates decide by roles alone, and print each content unchanged or stripped. Then the text between
the contents is the same for all conversations with the same roles, and one rendering is enough for
all of them. To find out whether a template does this for a list of roles, it is rendered with
placeholders in the place of contents. A placeholder raises an error if the template does more with
it than strip and print it. This saves 17 us of the 85 us that a chat of 5 messages takes.

This file imports jinja2 at the top, so it is only imported when a template is opened.
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
SPACE_BEFORE = "".join(secrets.choice("\x1c\x1d\x1e\x1f") for _ in range(48))
SPACE_AFTER = "".join(secrets.choice("\x1c\x1d\x1e\x1f") for _ in range(48))
"""A placeholder prints the word KEY, with white space before and after it. All three are random in
each process, so that no template contains them. The two spaces differ, since a template may print
one placeholder directly after another: a space between them belongs to only one of the two.
"""
PLACEHOLDER_PATTERN = f"({SPACE_BEFORE})?{KEY}([0-9]+){KEY}({SPACE_AFTER})?"
"""Pattern of a printed placeholder. Its groups are the space before the placeholder, the number of
its message, and the space after it. A space is missing if the template stripped it.
"""
_CAPTURES = (
    *(nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block),
    nodes.EvalContextModifier,
)
"""Statements of jinja2 that make a value of the text that is printed inside them, or change
printing.
"""

_ATTRIBUTES_OF_DICTS = frozenset(dir(dict))


class InspectedContent(BaseException):
    """Raised if a template does more with a content than strip and print it. It is a BaseException,
    since templates and filters of jinja2 may catch an Exception.
    """


def _inspect(*_: Any, **__: Any) -> Any:
    """Raise InspectedContent. This is the method for every operation that could inspect a
    content.
    """
    raise InspectedContent


class Placeholder:
    """A substitute for any content that is not blank.

    A template may print a placeholder, join it to strings and strip it. A placeholder is true. It
    is unequal to blank strings and to values that are not strings. Any other use raises
    InspectedContent, or TypeError because a placeholder is not a string.
    """

    def __init__(self, text: str) -> None:
        """Keep the text that the placeholder prints."""
        self._text = text

    def __add__(self, suffix: Any) -> Placeholder:
        return Placeholder(self._text + _to_text(suffix))

    def __radd__(self, prefix: Any) -> Placeholder:
        return Placeholder(_to_text(prefix) + self._text)

    def strip(self) -> Placeholder:
        return Placeholder(self._text.strip())

    def __bool__(self) -> bool:
        return True

    def __eq__(self, value: object) -> bool:
        if isinstance(value, Placeholder) or (isinstance(value, str) and value.strip()):
            raise InspectedContent
        return False

    __str__ = __repr__ = __hash__ = __len__ = __iter__ = __getitem__ = __index__ = _inspect
    __getattr__ = _inspect


class PlaceholderMessage(dict[str, Any]):
    """A message with a placeholder as content. Listing its keys raises InspectedContent, since real
    messages have their keys in different orders.
    """

    __iter__ = __reversed__ = keys = values = items = copy = _inspect


def make_placeholders(roles: Sequence[str]) -> list[Message]:
    """Return messages with these roles. The content of each is a placeholder that prints the number
    of the message, from 0.
    """
    contents = [
        Placeholder(f"{SPACE_BEFORE}{KEY}{number}{KEY}{SPACE_AFTER}")
        for number in range(len(roles))
    ]
    return [
        PlaceholderMessage(role=role, content=content)
        for role, content in zip(roles, contents, strict=True)
    ]


def _to_text(value: Any) -> Any:
    """Return the text of a placeholder, and any other value unchanged."""
    return value._text if isinstance(value, Placeholder) else value


def _trim(value: Any, chars: str | None = None) -> Any:
    """Strip a value as jinja2's filter `trim` does. A placeholder is stripped too."""
    if isinstance(value, Placeholder) and chars is None:
        return value.strip()
    return do_trim(value, chars)


def _is_string(value: Any) -> bool:
    """Return whether a value is a string, as jinja2's test `string` does. A placeholder counts as a
    string.
    """
    return isinstance(value, (str, Placeholder))


class _Generation(Extension):
    """The statement `{% generation %}` ... `{% endgeneration %}`, which templates write around an
    assistant's text. It only prints what is inside.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the statements inside, as a block of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a faster look-up of attributes. A template that has to be rendered for
    each conversation spends most of its time on such look-ups: with a template like Qwen 3's, a
    conversion of 12 MB of chats takes 0.88 s of CPU time instead of 1.40.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe_attributes = dict[tuple[type, str], bool]()

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the attribute of a value, or its key of this name if it lacks the attribute. In a
        dict, such as a message, only the key is looked up, unless a method has this name.
        """
        if type(obj) is not dict or attribute in _ATTRIBUTES_OF_DICTS:
            return super().getattr(obj, attribute)
        try:
            return obj[attribute]
        except KeyError:
            return self.undefined(obj=obj, name=attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Check whether a template may use an attribute. jinja2 compares the type of the object
        with a dozen others. The answer depends only on this type and the name, so it is kept.
        """
        key = (type(obj), attr)
        if key not in self._safe_attributes:
            self._safe_attributes[key] = super().is_safe_attribute(obj, attr, value)
        return self._safe_attributes[key]


def make_template_sandbox() -> Environment:
    """Return the environment of transformers' chat templates, without its random functions."""
    sandbox = _Sandbox(
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
    """Return plain JSON. jinja2's own filter `tojson` would escape it for HTML.

    The arguments have the same order as in transformers' filter: `tojson(2)` sets ensure_ascii, not
    an indent of 2.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    """Raise a TemplateError. Templates call this as `raise_exception(...)`."""
    raise TemplateError(message)


def compile_template(environment: Environment, source: str) -> Template:
    """Compile a template. Its globals are merged into one dict, since each rendering copies them,
    and copying the two dicts of jinja2 takes 4 us.
    """
    template = environment.from_string(source)
    template.globals = dict(template.globals)
    return template


def compile_placeholder_template(source: str) -> Template | None:
    """Compile a template so that it can render placeholders, which stand for the contents of
    messages. Return None if the template stores printed text in a variable, as a block of `set` or
    a macro does: it could then inspect contents unnoticed.
    """
    sandbox = make_template_sandbox()
    sandbox.finalize = _to_text
    # `sum` would accept a placeholder as its start value, but not a string. `sameas` would show
    # whether two equal strings are the same object.
    sandbox.filters |= {"trim": _trim, "sum": _inspect}
    sandbox.tests |= {"string": _is_string, "sameas": _inspect}
    tree: Any = sandbox.parse(source)
    # A recursive loop returns the text that its inner calls print, as a value.
    has_recursive_loop = any(loop.recursive for loop in tree.find_all(nodes.For))
    if has_recursive_loop or tree.find(_CAPTURES):
        return None
    return compile_template(sandbox, source)

"""Compiles chat templates with jinja2, also so that they render placeholders (`placeholders`).

This file imports jinja2 at the top, so it is only imported when a template is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import do_indent, do_trim
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import test_iterable, test_sequence

from mdsmix.encode.placeholders import (
    KEY,
    InspectedContent,
    Notes,
    ObjectPlaceholder,
    Placeholder,
    Step,
    TextPlaceholder,
    refuse_inspection,
    to_json,
    to_text,
)

_ATTRIBUTES_OF_DICTS = frozenset(dir(dict))


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


def _is_mapping(value: Any) -> bool:
    """Return whether a value is an object, as jinja2's test `mapping` does. The placeholder of an
    object counts as an object.
    """
    return isinstance(value, (Mapping, ObjectPlaceholder))


def _is_iterable(value: Any) -> bool:
    """Return whether a value is iterable, as jinja2's test `iterable` does. Placeholders count as
    the strings and objects that they stand for.
    """
    return isinstance(value, (Placeholder, ObjectPlaceholder)) or test_iterable(value)


def _is_sequence(value: Any) -> bool:
    """Return whether a value has a length and entries, as jinja2's test `sequence` does. That of
    strings and objects is true, and so is that of placeholders.
    """
    return isinstance(value, (Placeholder, ObjectPlaceholder)) or test_sequence(value)


def _is_constant(argument: Any) -> bool:
    """Check whether an argument of `tojson` can be part of a Step. Steps with equal arguments must
    give equal JSON: an indent of 1.0 equals one of 1, but is an error.
    """
    if type(argument) is tuple:
        return all(type(separator) is str for separator in argument)
    return argument is None or type(argument) in (bool, int, str)


def _to_placeholder_json(value: Any, *arguments: Any, **named_arguments: Any) -> Any:
    """Return JSON as the filter `tojson` does; of a placeholder a placeholder.

    Raises what the filter raises for the arguments.
    """
    if not isinstance(value, (TextPlaceholder, ObjectPlaceholder)):
        return to_json(value, *arguments, **named_arguments)
    if not all(map(_is_constant, (*arguments, *named_arguments.values()))):
        raise InspectedContent
    to_json({"key": ["text"]}, *arguments, **named_arguments)
    return value._take(Step("tojson", arguments, tuple(sorted(named_arguments.items()))))


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


class _PlaceholderSandbox(_Sandbox):
    """A sandbox for templates that render placeholders."""

    notes: Notes | None = None
    "The notes of the rendering, if its placeholders are of the sort that notes something."

    def concat(self, pieces: Iterable[str]) -> Any:
        """Join the text that a template prints inside a macro, a recursive loop or a block of
        `set`, and that becomes a value. If it has a placeholder, the value is a placeholder.
        """
        text = "".join(pieces)
        if KEY not in text:
            return text
        if self.notes is None:
            raise InspectedContent
        return TextPlaceholder(text, self.notes)


def make_template_sandbox(kind: type[_Sandbox] = _Sandbox) -> _Sandbox:
    """Return the environment of transformers' chat templates, without its random functions."""
    sandbox = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    sandbox.filters |= {"tojson": to_json, "indent": _indent}
    sandbox.globals["raise_exception"] = _raise_exception
    return sandbox


def _indent(value: Any, *arguments: Any, **named_arguments: Any) -> Any:
    """Indent a text as jinja2's filter `indent` does. That filter fails on a list, but adds a line
    break to it before: other conversations with the same tools would have one more tool.

    Raises AttributeError for a list, as jinja2's filter does.
    """
    if isinstance(value, list):
        raise AttributeError(f"{type(value).__name__!r} object has no attribute 'splitlines'")
    return do_indent(value, *arguments, **named_arguments)


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
    messages. Return None if the template has blocks, whose text it may use as a value, or
    changes how text is printed.
    """
    sandbox = make_template_sandbox(_PlaceholderSandbox)
    sandbox.finalize = to_text
    # `sum` would accept a placeholder as its start value, but not a string. `sameas` would show
    # whether two equal strings are the same object.
    sandbox.filters |= {"trim": _trim, "sum": refuse_inspection, "tojson": _to_placeholder_json}
    sandbox.tests |= {"string": _is_string, "sameas": refuse_inspection, "mapping": _is_mapping}
    sandbox.tests |= {"iterable": _is_iterable, "sequence": _is_sequence}
    tree: Any = sandbox.parse(source)
    if tree.find((nodes.Block, nodes.EvalContextModifier)):
        return None
    return compile_template(sandbox, source)

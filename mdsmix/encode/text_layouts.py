"""Renders the first messages of a conversation without the template, from a layout.

LLM-Foundry's turns take two renderings for each answer, and a template with tools spends most of
its time on look-ups and on JSON. But most conversations of a stream have the same structure as
others: the same roles, and the same keys with values of the same sort. If a template only prints
these values, or asks a question about them that has the same answer for each conversation, then
their texts are equal except for the values. So one rendering with placeholders
(`placeholders.py`) in the place of the values gives a layout, with which the texts of all these
conversations are made. If the template does anything else with a value, its conversations have no
layout.

A layout is valid only for values that give the noted answers: Qwen 3's template looks for
`</think>` in each content, so a conversation with that tag is rendered by the template.

A conversion of 20 MB with tools takes 5.3 instead of 9.4 s of CPU time with Qwen 3's template, and
2.7 instead of 4.3 s with Qwen 2.5's.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mdsmix.record import Conversation, Message, RecordRefused, Tools

if TYPE_CHECKING:
    from jinja2 import Template

    from mdsmix.encode.placeholders import Assumption, Notes, PrintedValue

TEXT, OBJECT, EMPTY_OBJECT = 2, 3, 4
"""The sorts of values in a structure: a string that is not blank, the arguments of a call, and
arguments without entries. They are numbers, since true and false equal 1 and 0.
"""
LITERAL_KEYS = frozenset({"role", "type"})
"Keys whose strings are part of the structure, since templates compare them."
LISTS = frozenset({"tool_calls", "content"})
"Keys whose lists are part of the structure: of calls, and of texts and images."
MOST_KEYS = 65_536
"The largest number of keys that are remembered as seen, and of descriptions that have a number."
MOST_SIZE = 32_000_000
"""The largest size of a template's layouts and of its messages' descriptions, in bytes. The text of
all tools can be in each layout. 20 MB of conversations with calls in many orders need 17 MB.
"""
VALUE_SIZE = 200
"The memory of a value in a layout, with the assumptions on it, in bytes."
CHARACTER_SIZE = 8
"""The memory of a message's description, in bytes for each character of its repr: a description of
60 calls takes 26 KB.
"""
MOST_MESSAGES = 100
"""The longest structure that has layouts. A layout of each beginning of a conversation takes time
and memory in proportion to the square of its length: 1,000 messages took 8 s and 150 MB.
"""
MOST_FAILURES = 64
"After so many layouts that a template does not allow, and none that it does, no more are tried."


class RenderingTemplate(Protocol):
    """What is needed here of a `ChatTemplate`."""

    @property
    def template(self) -> Template: ...

    @property
    def with_placeholders(self) -> RenderingTemplate | None: ...

    def render(
        self, messages: list[Message], add_generation_prompt: bool, tools: list[Any] | None = None
    ) -> str: ...

    def __hash__(self) -> int: ...


class Unsupported(Exception):
    """Raised for a value that has no place in a structure, such as a number."""


class Structure(NamedTuple):
    """The structure of a conversation's messages, and the values that it leaves out."""

    messages: tuple[Any, ...]
    "For each message a tuple that describes it (`_describe`)."
    values: list[Any]
    "The texts and the arguments of calls, in the order of the messages."


def read_structure(messages: Sequence[Message]) -> Structure | None:
    """Return the structure of messages. Return None if a message has a value that is not a string,
    a call of a tool, a part of a content, null, true or false.
    """
    values = list[Any]()
    try:
        return Structure(tuple([_describe("", message, values) for message in messages]), values)
    except Unsupported:
        return None


def _describe(key: str, value: Any, values: list[Any]) -> Any:
    """Return a hashable description of a value, from which a placeholder can be made: TEXT, OBJECT,
    EMPTY_OBJECT, a value that is a part of the structure, or a tuple of the descriptions of all
    entries of an object or a list.

    Raises Unsupported if a value has no description, such as a number.

    Args:
        key: the key under which the value is.
        value: the value.
        values: the texts and arguments that are described as TEXT and OBJECT are added here.
    """
    if type(value) is str:
        if key in LITERAL_KEYS or not value or value.isspace():
            return value
        values.append(value)
        return TEXT
    if value is None or value is True or value is False:
        return value
    if type(value) is dict:
        if key != "arguments":
            entries = [(name, _describe(name, inner, values)) for name, inner in value.items()]
            return ("object", *entries)
        if not value:
            return EMPTY_OBJECT
        values.append(value)
        return OBJECT
    if type(value) is list and key in LISTS:
        return ("list", *[_describe("", call, values) for call in value])
    raise Unsupported


class TextLayout(NamedTuple):
    """The text of messages of one structure, without their values."""

    pieces: list[str]
    "The text before the first value, between each two values, and after the last one."
    printed: list[PrintedValue]
    "The values between the pieces."
    assumptions: frozenset[Assumption]
    "What must be true of the values."


class LayoutCache:
    """The layouts of a template. One is made when its structure comes for the second time, since
    making it takes as long as five renderings with Qwen 3's template.
    """

    def __init__(self, template: RenderingTemplate) -> None:
        self._with_placeholders = template.with_placeholders
        self._numbers = dict[Any, int]()
        "Description of a message -> its number."
        self._next_number = count()
        "Gives each description a new number. No number is given twice, so keys stay different."
        self._seen = set[int]()
        "The hashes of the keys that `find` was asked for at least once."
        self._layouts = dict[tuple[Any, ...], TextLayout | None]()
        """Key (numbers of messages, generation prompt, tools) -> its layout; None if the template
        does not allow one.
        """
        self._size = 0
        "The memory of all layouts and descriptions, in bytes."
        self._failures = 0
        "How many layouts in a row the template did not allow."
        self._inspects_tools = False
        "Whether the template does more with tools than print their JSON: then they are rendered."

    def number(self, structure: tuple[Any, ...]) -> tuple[int, ...]:
        """Return a number for each message's description. Equal descriptions have equal numbers.

        Keys contain these numbers, since each beginning of a conversation has a key: to hash the
        descriptions for it took a seventh of a conversion with tools.

        Args:
            structure: the structure of the messages.
        """
        self._make_room()
        for description in structure:
            if description not in self._numbers:
                self._numbers[description] = next(self._next_number)
                self._size += CHARACTER_SIZE * len(repr(description))
        return tuple([self._numbers[description] for description in structure])

    def find(
        self,
        structure: tuple[Any, ...],
        numbers: tuple[int, ...],
        add_generation_prompt: bool,
        tools: Tools | None,
    ) -> TextLayout | None:
        """Return the layout of messages; None if the template does not allow one, or if messages of
        this structure come for the first time.

        Args:
            structure: the structure of the messages.
            numbers: its numbers.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            tools: the tools of the conversation.
        """
        if len(structure) > MOST_MESSAGES:
            return None
        key = (numbers, add_generation_prompt, self._describe_tools(tools))
        layout = self._layouts.get(key)
        if layout or key in self._layouts:
            return layout
        if self._with_placeholders is None or self._failures >= MOST_FAILURES:
            return None
        self._make_room()
        if hash(key) not in self._seen:
            self._seen.add(hash(key))
            return None
        layout = self._make(structure, add_generation_prompt, tools)
        if layout is None and tools is not None and not self._inspects_tools:
            # Try again with the tools themselves. Such a layout is right for these tools only, and
            # is kept under another key.
            self._inspects_tools = True
            layout = self._make(structure, add_generation_prompt, tools)
            self._inspects_tools = layout is not None
            key = (numbers, add_generation_prompt, self._describe_tools(tools))
        self._keep(key, layout)
        return layout

    def _keep(self, key: tuple[Any, ...], layout: TextLayout | None) -> None:
        """Keep a layout, or that the template does not allow one, and count its memory."""
        if layout:
            self._failures = 0
            self._size += sum(map(len, layout.pieces)) + VALUE_SIZE * len(layout.pieces)
        else:
            self._failures += 1
        self._layouts[key] = layout

    def _make_room(self) -> None:
        """Delete all numbers and layouts if there are too many, so that they do not take more and
        more memory.
        """
        if max(len(self._numbers), len(self._seen)) >= MOST_KEYS or self._size >= MOST_SIZE:
            self._numbers.clear()
            self._seen.clear()
            self._layouts.clear()
            self._size = 0

    def _describe_tools(self, tools: Tools | None) -> Any:
        """Return the part of a key that tools are. If the template only prints their JSON, this is
        their number. Otherwise it is a reference to these very tools, which does not keep them in
        memory, and which no other tools equal after their end.
        """
        if tools is None:
            return None
        return weakref.ref(tools) if self._inspects_tools else len(tools)

    def _make(
        self, structure: tuple[Any, ...], add_generation_prompt: bool, tools: Tools | None
    ) -> TextLayout | None:
        """Render placeholders, and return the layout that they show. Return None if the template
        does something with a value that a placeholder does not allow. The arguments are those of
        `find`.
        """
        from mdsmix.encode import placeholders

        # Render placeholders, which note in `notes` what the template does with them. The tools
        # have the first numbers, also if they are not placeholders.
        assert self._with_placeholders is not None
        sandbox: Any = self._with_placeholders.template.environment
        notes = placeholders.Notes()
        numbers = count()
        shown_tools: list[Any] | None = None
        if tools is not None:
            printed_tools = [placeholders.PrintedValue(next(numbers)) for _ in tools]
            shown_tools = [placeholders.ObjectPlaceholder(value, notes) for value in printed_tools]
            if self._inspects_tools:
                shown_tools = [*tools]
        messages = [_make_placeholder(message, numbers, notes) for message in structure]
        sandbox.notes = notes
        try:
            text = self._with_placeholders.render(messages, add_generation_prompt, shown_tools)
        except (RecordRefused, placeholders.InspectedContent):
            return None
        finally:
            sandbox.notes = None
        # Split the text at the placeholders: plain text, then three groups of the pattern for each.
        parts = re.split(placeholders.PLACEHOLDER_PATTERN, text)
        groups = zip(parts[1::4], parts[2::4], parts[3::4], strict=True)
        printed = [placeholders.find_printed(group, notes) for group in groups]
        # The template fails on a value that has no JSON, even if it does not print that JSON: so
        # the layout assumes that this JSON can be written.
        as_json = {value for value in notes.printed if value.steps}
        not_printed = as_json.difference(printed)
        is_writable = {placeholders.Assumption(value, "__eq__", "") for value in not_printed}
        return TextLayout(
            pieces=parts[::4],
            printed=printed,
            assumptions=frozenset(notes.assumptions | is_writable),
        )


@lru_cache(maxsize=64)
def open_layouts(template: RenderingTemplate) -> LayoutCache:
    """Return the layouts of a template, the same object for the same template."""
    return LayoutCache(template)


def _make_placeholder(description: Any, numbers: Iterator[int], notes: Notes) -> Any:
    """Return a value with placeholders.

    Args:
        description: what `_describe` returns for a message or a value in it.
        numbers: gives each text and each object its number.
        notes: where the placeholders note what the template does with them.
    """
    from mdsmix.encode import placeholders

    if description == TEXT:
        return placeholders.make_text_placeholder(placeholders.PrintedValue(next(numbers)), notes)
    if description == OBJECT:
        return placeholders.ObjectPlaceholder(placeholders.PrintedValue(next(numbers)), notes)
    if description == EMPTY_OBJECT:
        return {}
    if not isinstance(description, tuple):
        return description
    if description[0] == "list":
        return [_make_placeholder(inner, numbers, notes) for inner in description[1:]]
    entries = [(name, _make_placeholder(inner, numbers, notes)) for name, inner in description[1:]]
    return placeholders.PlaceholderMessage(entries)


class PrefixTexts:
    """The texts that a template prints for the first messages of a conversation."""

    def __init__(self, template: RenderingTemplate, conversation: Conversation) -> None:
        self._template = template
        self._conversation = conversation
        self._texts: dict[PrintedValue, str] = {}
        "A value of a message, as it is printed -> its text."
        self._checked: set[Assumption] = set()
        "What is known to be true of the values."
        self._structure: Structure | None = None
        "The structure of all messages; None if the template renders them."
        tools = conversation.tools
        # Tools that are not shared, or were made by a user's function, may have any values.
        if tools is None or isinstance(tools, Tools):
            self._shared_tools = tools
            self._structure = read_structure(conversation.messages)
        if self._structure:
            self._layouts = open_layouts(template)
            self._numbers = self._layouts.number(self._structure.messages[:MOST_MESSAGES])
            self._values = [*(tools or ()), *self._structure.values]

    def render(self, end: int, add_generation_prompt: bool) -> str:
        """Return the text that the template prints for the first messages.

        Raises RecordRefused (template_error) if the template fails.

        Args:
            end: the number of messages.
            add_generation_prompt: whether the text ends with the beginning of an answer.
        """
        if self._structure:
            layout = self._layouts.find(
                self._structure.messages[:end],
                self._numbers[:end],
                add_generation_prompt,
                self._shared_tools,
            )
            # A value without JSON, such as a date or one of 1,000 levels: the template fails on it
            # too.
            with suppress(TypeError, ValueError, RecursionError):
                if layout and self._is_valid(layout):
                    return self._fill(layout)
        messages = self._conversation.messages[:end]
        return self._template.render(messages, add_generation_prompt, self._conversation.tools)

    def _is_valid(self, layout: TextLayout) -> bool:
        """Check whether the assumptions of a layout are true of the conversation's values."""
        unknown = layout.assumptions - self._checked
        if not all(assumption.holds(self._values) for assumption in unknown):
            return False
        self._checked |= unknown
        return True

    def _fill(self, layout: TextLayout) -> str:
        """Return the text of a layout with the conversation's values."""
        parts = [layout.pieces[0]]
        for value, piece in zip(layout.printed, layout.pieces[1:], strict=True):
            parts += (self._print(value) if value.steps else self._values[value.number], piece)
        return "".join(parts)

    def _print(self, value: PrintedValue) -> str:
        """Return a value as it is printed. This text is made once: the JSON of a tool for all
        conversations with the same tools.
        """
        texts = self._texts
        if self._shared_tools and value.number < len(self._shared_tools):
            texts = self._shared_tools.printed
        if value not in texts:
            texts[value] = value.print(self._values)
        return texts[value]

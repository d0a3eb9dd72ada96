"""Conversations as text: renders the chat template by jinja2 alone, and splits the text into the
turns that are trained.

The text is the same as from `apply_chat_template(tokenize=False)` of transformers 4.51 to 4.57,
without the seconds that importing transformers takes.

`open_template.py` compiles a template. `rewritten_history.py` makes rows if a template prints
earlier messages differently once later ones follow.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from mdsmix.encode.control_words import ControlWords
from mdsmix.encode.text_layouts import PrefixTexts
from mdsmix.record import Conversation, Message, PlainConversations, RecordRefused

if TYPE_CHECKING:
    from jinja2 import Template


OTHER_TEMPLATE = (
    "name a tokenizer whose chat template prints tools, calls and results, as those of Qwen2.5 "
    "and Llama 3.1 do"
)
"What the user can do about `tools_not_printed`; the end of a sentence."


SHOWN_ERROR = 240
"Characters of an error message in a bad record's detail."
SHOWN_BEFORE, SHOWN_AFTER = 60, 240
"""Characters of two texts in a bad record's detail, before and after the beginning of their first
difference.
"""

Turn = tuple[str, str]
"""Prompt and response. The prompt is all text from the end of the previous turn up to and including
the generation prompt; the response is the text of the assistant.
"""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A compiled template with the variables that every rendering gets. Made by `open_template`."""

    template: Template
    placeholder_template: Template | None
    """The same template, compiled so that it can render placeholders instead of contents
    (`placeholders.py`); None if that is not possible.
    """
    variables: Mapping[str, Any]
    source: str
    "The text of the template."
    reads: Set[str]
    "Names of the variables that the template or `tool_use` reads."
    tool_use: ChatTemplate | None = None
    """The tokenizer's template named `tool_use`, for conversations with tools; None if the
    tokenizer has no such template.
    """

    @property
    def with_placeholders(self) -> ChatTemplate | None:
        """The template that renders placeholders; None if that is not possible."""
        if self.placeholder_template is None:
            return None
        return replace(self, template=self.placeholder_template)

    @property
    def prints_date(self) -> bool:
        """Whether the rendered text may depend on the date."""
        return not self.reads.isdisjoint({"date_string", "strftime_now"})

    def for_tools(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """Return the template for a conversation with these tools, as transformers'
        `get_chat_template` does: `tool_use` if it exists and there are tools. An empty list counts
        as tools, None does not.
        """
        if tools is None or self.tool_use is None:
            return self
        return self.tool_use

    def render_turns(self, conversation: Conversation) -> list[Turn]:
        """Return the turns of a conversation, one for each answer that is trained.

        Raises RecordRefused if the template fails on the conversation (template_error), or prints
        the first messages differently when more follow (not_prefix_stable).
        """
        if _is_plain(conversation) and conversation.trained is None:
            messages = conversation.messages
            layout = find_layout_for_roles(self, tuple([message["role"] for message in messages]))
            contents = [message["content"] for message in messages]
            if layout and not _has_blank(contents):
                (turns,) = layout.fill([contents])
                return list(turns)
        return self.render_turns_by_prefix(conversation)

    def render_turns_by_prefix(self, conversation: Conversation) -> list[Turn]:
        """Return the turns as Foundry makes them. For each answer the template is rendered twice:
        for the messages before the answer, and for the same messages with the answer.
        """
        texts = PrefixTexts(self, conversation)
        turns = list[Turn]()
        text_before = ""
        for answer in find_trained_answers(conversation):
            prompt = texts.render(answer, add_generation_prompt=True)
            full = texts.render(answer + 1, add_generation_prompt=False)
            _require_prefix(text_before, prompt)
            _require_prefix(prompt, full)
            turns.append((prompt[len(text_before) :], full[len(prompt) :]))
            text_before = full
        return turns

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        tools: list[Any] | None = None,
    ) -> str:
        """Return the text that the template prints for `messages`.

        Raises RecordRefused (template_error) if the template fails.

        This does the same as jinja2's `Template.render`, which also copies the globals twice and
        rewrites tracebacks: that took a twentieth of a conversion of chats.

        Args:
            messages: the messages to render.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            tools: the tools that the template gets; None: no tools.
        """
        template = self.template
        variables = {
            **template.globals,
            "documents": None,
            **self.variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        environment: Any = template.environment
        context = environment.context_class(environment, variables, template.name, template.blocks)
        try:
            return "".join(template.root_render_func(context))
        except MemoryError:  # a fault of the machine, not of the conversation
            raise
        except Exception as error:  # a template may raise anything, RecursionError too
            raise RecordRefused("template_error", template=str(error)[:SHOWN_ERROR]) from error


def _is_plain(conversation: Conversation) -> bool:
    """Check whether each message has only a role and a content, and the conversation has no tools.
    The text of such a conversation is made from the layout that all conversations with the same
    roles share, without a rendering.
    """
    if type(conversation) is not Conversation or {*map(len, conversation.messages)} != {2}:
        return False
    return conversation.tools is None


def _has_blank(contents: Sequence[str]) -> bool:
    """Check whether a content has only white space. Layouts were found with contents that are not
    blank, and are only valid for these.
    """
    return not all(contents) or any(map(str.isspace, contents))


class PlainPart(NamedTuple):
    """The plain conversations of a batch."""

    positions: Sequence[int]
    "The position of each of them in the batch."
    conversations: PlainConversations


def find_plain(conversations: Sequence[Conversation]) -> PlainPart:
    """Return the plain conversations of a batch, without those that have variables of their own."""
    if isinstance(conversations, PlainConversations):
        return PlainPart(range(len(conversations)), conversations)
    positions = [
        position
        for position, conversation in enumerate(conversations)
        if _is_plain(conversation) and not conversation.variables
    ]
    chosen = [conversations[position] for position in positions]
    plain = PlainConversations.of([conversation.messages for conversation in chosen])
    trained = [conversation.trained for conversation in chosen]
    losses = [conversation.losses for conversation in chosen]
    return PlainPart(positions, replace(plain, trained=trained, losses=losses))


def render_alike(
    template: ChatTemplate, plain: PlainPart, words: ControlWords
) -> dict[int, Sequence[Turn]]:
    """Return the turns of plain conversations by their positions in the batch: those of the answers
    that are trained. A conversation is left out if it has to be rendered by itself, or if a control
    word would be split between two texts of its turns.

    All plain conversations with the same roles are rendered together, message by message, from the
    layout that `find_layout_for_roles` returns for these roles. This takes 3 us a conversation
    instead of 7, a tenth of the time for chats.

    Args:
        template: the template.
        plain: the conversations.
        words: the control words of the tokenizer.
    """
    conversations = plain.conversations
    contents = conversations.contents
    rendered = dict[int, Sequence[Turn]]()
    numbers_by_roles = defaultdict[tuple[str, ...], list[int]](list)
    for number, roles in enumerate(conversations.roles):
        numbers_by_roles[roles].append(number)
    has_any_blank = _has_blank(conversations.all_contents)
    for roles, numbers in numbers_by_roles.items():
        # A layout takes two renderings for each answer, `render_turns_by_prefix` two for each
        # answer that is trained. For a single long conversation of which only the last answer is
        # trained, the layout takes 100 times as long.
        renders_all = any(conversations.trained[number] is None for number in numbers)
        if not renders_all and len(numbers) < roles.count("assistant"):
            continue
        layout = find_layout_for_roles(template, roles)
        if layout is None:
            continue
        if has_any_blank:
            numbers = [number for number in numbers if not _has_blank(contents[number])]
        filled = layout.fill([contents[number] for number in numbers])
        may_split = layout.may_split(words)
        for number, turns in zip(numbers, filled, strict=True):
            joined: Sequence[Turn] = turns
            if conversations.trained[number] is not None:
                joined = join_untrained(turns, conversations[number])
            if may_split and words.are_split([*chain.from_iterable(joined)]):
                continue
            rendered[plain.positions[number]] = joined
    return rendered


def join_untrained(turns: Sequence[Turn], conversation: Conversation) -> Sequence[Turn]:
    """Return the turns of the answers that are trained: an answer that is not trained becomes a
    part of the prompt after it, together with its own prompt. Text after the last trained answer is
    left out.

    `render_turns_by_prefix` would return the same turns. Each text that it renders begins with
    the one before, whichever answers are trained.

    Args:
        turns: the turns of all answers, as the template prints them if all are trained.
        conversation: the conversation, with flags that say which messages are trained.
    """
    trained = {*find_trained_answers(conversation)}
    answers = find_answers(conversation)
    joined = list[Turn]()
    text_before = ""
    for answer, (prompt, response) in zip(answers, turns, strict=True):
        prompt = text_before + prompt
        if answer in trained:
            joined.append((prompt, response))
            text_before = ""
        else:
            text_before = prompt + response
    return joined


def _require_prefix(printed: str, later: str) -> None:
    """Raise RecordRefused (not_prefix_stable) if `later` does not begin with `printed`: the
    template has changed the text of earlier messages after more messages were added.
    """
    if not later.startswith(printed):
        raise RecordRefused("not_prefix_stable", **show_difference(printed, later))


class SideLayout(NamedTuple):
    """The text of one side of a turn, a prompt or a response, without the messages' contents."""

    pieces: list[str]
    "The text before the first content, between each two contents, and after the last one."
    contents: slice
    "The range of the layout's `contents` that are printed between the pieces."


class PrintedContent(NamedTuple):
    """The place where a template prints the content of a message, and how it strips the content."""

    message: int
    "The position of the message in the conversation."
    strip: Callable[[str], str]
    "Function that makes the printed text from the content, such as `str.strip`."


class PrintedAnswer(NamedTuple):
    """The place of an answer's content in its response, and how the template strips the content."""

    start: int
    "The number of characters before the content."
    strip: Callable[[str], str]
    "Function that makes the printed text from the content, such as `str.strip`."


class TemplateLayout(NamedTuple):
    """What a chat template prints around the contents of messages. It is the same for all
    conversations with the same roles (such as user, assistant) and without blank contents, so they
    need no rendering.
    """

    sides: list[SideLayout]
    "The prompt and the response of each turn."
    contents: list[PrintedContent]
    "The contents of all sides, in the order that they are printed in."

    def fill(self, contents: Sequence[Sequence[str]]) -> list[tuple[Turn, ...]]:
        """Return the turns of conversations.

        Args:
            contents: for each conversation the content of each message.
        """
        if not contents or not self.sides:
            return [() for _ in contents]
        messages = [*zip(*contents, strict=True)]  # first messages, second messages, ...
        # Every content as it is printed; `filling` is the range of these that one side contains.
        printed = [
            messages[message] if strip is str else [*map(strip, messages[message])]
            for message, strip in self.contents
        ]
        # A side is joined from piece, content, piece, content, piece: in 75 ns. With `%s` in one
        # text for all pieces it takes 200 ns.
        sides = list[list[str]]()
        for (first_piece, *later_pieces), filling in self.sides:
            columns: list[Iterable[str]] = [repeat(first_piece, len(contents))]
            for column, piece in zip(printed[filling], later_pieces, strict=True):
                columns += [column, repeat(piece, len(contents))]
            sides.append([*map("".join, zip(*columns, strict=True))])
        # A prompt and the response after it are a turn.
        turns = [
            [*zip(prompts, responses, strict=True)]
            for prompts, responses in zip(sides[::2], sides[1::2], strict=True)
        ]
        return [*zip(*turns, strict=True)]

    def find_answers(self, answers: Sequence[int]) -> dict[int, PrintedAnswer]:
        """Return the answers whose responses have their content once, and no other content, by
        their positions in the conversation.

        Args:
            answers: the positions of all answers.
        """
        printed = dict[int, PrintedAnswer]()
        for answer, (pieces, filling) in zip(answers, self.sides[1::2], strict=True):
            contents = self.contents[filling]
            if [content.message for content in contents] == [answer]:
                printed[answer] = PrintedAnswer(len(pieces[0]), contents[0].strip)
        return printed

    def may_split(self, words: ControlWords) -> bool:
        """Check whether a control word may be split between two texts of the turns: a text ends in
        a message's content, or in a letter after which the next text may continue a control word.
        """
        ends = [side.pieces[-1] for side in self.sides[:-1]]
        return not all(ends) or any(map(words.may_begin_in, ends))


_STRIPS: dict[tuple[bool, bool], Callable[[str], str]] = {
    (False, False): str.strip,
    (False, True): str.lstrip,
    (True, False): str.rstrip,
    (True, True): str,
}
"""(Was the white space before a placeholder printed?, was the white space after it printed?) -> the
function that strips a content in the same way.
"""


@lru_cache(maxsize=256)
def find_layout_for_roles(template: ChatTemplate, roles: tuple[str, ...]) -> TemplateLayout | None:
    """Return what the template prints around the contents of messages with these roles, such as
    ("user", "assistant"). It is found by rendering placeholders in the place of contents.

    Return None if the template does more with a content than strip and print it.
    """
    from mdsmix.encode import placeholders

    with_placeholders = template.with_placeholders
    if with_placeholders is None:
        return None
    try:
        probe = Conversation(placeholders.make_placeholders(roles))
        turns = with_placeholders.render_turns_by_prefix(probe)
    except (RecordRefused, placeholders.InspectedContent):
        return None
    layout = TemplateLayout([], [])
    for text in chain.from_iterable(turns):
        # The pieces repeat in fours: plain text, space before a placeholder, its number, space
        # after it; then plain text again.
        pieces = re.split(placeholders.PLACEHOLDER_PATTERN, text)
        plain = pieces[::4]
        # A turn ends between a placeholder and the space next to it: the space is then in `plain`.
        if any(
            placeholders.SPACE_BEFORE in piece or placeholders.SPACE_AFTER in piece
            for piece in plain
        ):
            return None
        first = len(layout.contents)
        printed = zip(pieces[1::4], pieces[2::4], pieces[3::4], strict=True)
        for space_before, number, space_after in printed:
            strip = _STRIPS[bool(space_before), bool(space_after)]
            layout.contents.append(PrintedContent(int(number), strip))
        layout.sides.append(SideLayout(plain, slice(first, len(layout.contents))))
    return layout


ROLES_TRIED = (
    ("user", "assistant", "user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
)
"Roles with which `joins_contents` tries a template."


def joins_contents(template: ChatTemplate) -> bool:
    """Return whether the template prints a content whose end it strips, and directly after it,
    without any text between, a content whose beginning it does not strip.
    """
    layouts = [find_layout_for_roles(template, roles) for roles in ROLES_TRIED]
    for layout in filter(None, layouts):
        for (_, *later_pieces), filling in layout.sides:
            contents = layout.contents[filling]
            neighbours = zip(later_pieces, contents, contents[1:], strict=False)
            for separator, first, second in neighbours:
                strips_end = first.strip("x ") == "x"
                keeps_beginning = second.strip(" x") == " x"
                if not separator and strips_end and keeps_beginning:
                    return True
    return False


def find_answers(conversation: Conversation) -> list[int]:
    """Return the positions of the assistant's messages."""
    return [
        position
        for position, message in enumerate(conversation.messages)
        if message["role"] == "assistant"
    ]


def find_trained_answers(conversation: Conversation) -> list[int]:
    """Return the positions of the assistant's messages that are trained. If the conversation does
    not say which messages are trained, all are.
    """
    answers = find_answers(conversation)
    flags = conversation.trained
    if not flags:
        return answers
    return [answer for answer in answers if flags[answer]]


def show_difference(printed: str, later: str) -> dict[str, Any]:
    """Return excerpts of both texts around their first difference, for a bad record's detail.

    Args:
        printed: the text that the template prints for some messages.
        later: what it prints for the same messages once others follow.
    """
    around = slice_around_difference([printed, later])
    return {"printed": printed[around], "printed_later": later[around]}


def slice_around_difference(texts: Sequence[str]) -> slice:
    """Return the range around the first difference of the texts, as a slice for each of the texts.
    Excerpts of this range are shown in a bad record's detail.
    """
    start = len(find_common_start(texts))
    return slice(max(0, start - SHOWN_BEFORE), start + SHOWN_AFTER)


def find_common_start(texts: Sequence[str]) -> str:
    """Return the longest text with which all of the texts begin."""
    # In sorted order, the first and the last text differ most: all texts share their common start.
    smallest = min(texts)
    largest = max(texts)
    # Search by bisection for the first position at which these two differ.
    end = bisect_left(
        range(len(smallest)),
        True,
        key=lambda last: smallest[: last + 1] != largest[: last + 1],
    )
    return smallest[:end]

"""Conversations as text: renders the chat template by jinja2 alone, and splits the text into the
turns that are trained.

The text is the same as from `apply_chat_template(tokenize=False)` of transformers 4.51 to 4.57,
without the seconds that importing transformers takes. Some templates print the date. It is fixed
when a template is opened and not read from the clock again, so the same input gives the same bytes.

Some templates print earlier messages differently once later ones follow. Templates of reasoning
models drop the reasoning of earlier answers (DeepSeek-R1, Qwen3, gpt-oss), others move the system
prompt or the tools to the last question (Mistral v3) or end every text with EOS (Phi-3). Then no
single row can contain every turn as the model sees it at inference, and LLM-Foundry refuses the
conversation. But mdsmix can make a separate row for one answer: the row's prompt is the text that
the template prints for all messages before the answer, and ends where the model begins to write.
"""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mdsmix.encode.control_words import ControlWords
from mdsmix.encode.text_layouts import PrefixTexts
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, Message, PlainConversations, RecordRefused
from mdsmix.schema import shorten_value

if TYPE_CHECKING:
    from jinja2 import Template

    from mdsmix.shards.manifest import Encoding
    from mdsmix.tokenizer.card import Tokenizer

FOUNDRY_DATE = "%d %b %Y"
"The format of the day that Foundry passes to templates as `date_string`: `01 Jan 2026`."

DEFAULT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"ChatML, Foundry's template for a tokenizer that has none."
NO_TEMPLATE = (
    "the tokenizer has no chat template, so conversations are rendered as ChatML, as LLM-Foundry "
    "does; <|im_start|> and <|im_end|> are ordinary text unless they are special tokens of this "
    "tokenizer: write the model's chat template into the tokenizer's tokenizer_config.json, as "
    "chat_template"
)
"The warning for a tokenizer without a chat template."
OTHER_TEMPLATE = (
    "name a tokenizer whose chat template prints tools, calls and results, as those of Qwen2.5 "
    "and Llama 3.1 do"
)
"What the user can do about `tools_not_printed`; the end of a sentence."

NO_DEFAULT = (
    "the tokenizer has the chat templates {names}, and none is named default, but conversations "
    "without tools need the template default: rename one of them to default in the tokenizer's "
    "files, or give its text in the recipe as tokenizer.kwargs.chat_template"
)
"The error for a tokenizer whose chat templates have other names than `default`."

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
    (`template_code.py`); None if that is not possible.
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

    def turns(self, conversation: Conversation) -> list[Turn]:
        """Return the turns of a conversation, one for each answer that is trained.

        Raises RecordRefused if the template fails on the conversation (template_error), or prints
        the first messages differently when more follow (not_prefix_stable).
        """
        if _is_plain(conversation) and conversation.trained is None:
            messages = conversation.messages
            layout = layout_for_roles(self, tuple([message["role"] for message in messages]))
            contents = [message["content"] for message in messages]
            if layout and not _has_blank(contents):
                (turns,) = layout.fill([contents])
                return list(turns)
        return self.turns_by_prefix(conversation)

    def turns_by_prefix(self, conversation: Conversation) -> list[Turn]:
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


class RenderedAlike(NamedTuple):
    """The turns of a plain conversation that was rendered together with others."""

    turns: Sequence[Turn]
    "The turns of the answers that are trained."
    layout: TemplateLayout
    "The layout that all of them share, with the turns of all answers."


def render_alike(
    template: ChatTemplate, plain: PlainPart, words: ControlWords
) -> dict[int, RenderedAlike]:
    """Return the turns of plain conversations by their positions in the batch. A conversation is
    left out if it has to be rendered by itself, or if a control word would be split between two
    texts of its turns.

    All plain conversations with the same roles are rendered together, message by message. This
    takes 3 us a conversation instead of 7, a tenth of the time for chats.

    Args:
        template: the template.
        plain: the conversations.
        words: the control words of the tokenizer.
    """
    conversations = plain.conversations
    contents = conversations.contents
    rendered = dict[int, RenderedAlike]()
    numbers_by_roles = defaultdict[tuple[str, ...], list[int]](list)
    for number, roles in enumerate(conversations.roles):
        numbers_by_roles[roles].append(number)
    has_any_blank = _has_blank(conversations.all_contents)
    for roles, numbers in numbers_by_roles.items():
        # A layout takes two renderings for each answer, `turns_by_prefix` two for each answer that
        # is trained. For a single long conversation of which only the last answer is trained, the
        # layout takes 100 times as long.
        renders_all = any(conversations.trained[number] is None for number in numbers)
        if not renders_all and len(numbers) < roles.count("assistant"):
            continue
        layout = layout_for_roles(template, roles)
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
            rendered[plain.positions[number]] = RenderedAlike(joined, layout)
    return rendered


def join_untrained(turns: Sequence[Turn], conversation: Conversation) -> Sequence[Turn]:
    """Return the turns of the answers that are trained: an answer that is not trained becomes a
    part of the prompt after it, together with its own prompt. Text after the last trained answer is
    left out.

    `turns_by_prefix` would return the same turns. Each text that it renders begins with the one
    before, whichever answers are trained.

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
        printed = [[*map(strip, messages[message])] for message, strip in self.contents]
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
def layout_for_roles(template: ChatTemplate, roles: tuple[str, ...]) -> TemplateLayout | None:
    """Return what the template prints around the contents of messages with these roles, such as
    ("user", "assistant"). It is found by rendering placeholders in the place of contents.

    Return None if the template does more with a content than strip and print it.
    """
    from mdsmix.encode import template_code as code

    with_placeholders = template.with_placeholders
    if with_placeholders is None:
        return None
    try:
        turns = with_placeholders.turns_by_prefix(Conversation(code.make_placeholders(roles)))
    except (RecordRefused, code.InspectedContent):
        return None
    layout = TemplateLayout([], [])
    for text in chain.from_iterable(turns):
        # The pieces repeat in fours: plain text, space before a placeholder, its number, space
        # after it; then plain text again.
        pieces = re.split(code.PLACEHOLDER_PATTERN, text)
        plain = pieces[::4]
        # A turn ends between a placeholder and the space next to it: the space is then in `plain`.
        if any(code.SPACE_BEFORE in piece or code.SPACE_AFTER in piece for piece in plain):
            return None
        first = len(layout.contents)
        placeholders = zip(pieces[1::4], pieces[2::4], pieces[3::4], strict=True)
        for space_before, number, space_after in placeholders:
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
    layouts = [layout_for_roles(template, roles) for roles in ROLES_TRIED]
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


def open_stream_template(encoding: Encoding, tokenizer: Tokenizer) -> ChatTemplate:
    """Compile the chat template of a stream, with the stream's template variables and date.

    Raises RecipeError if the template is not valid, or if the tokenizer has only named templates
    that mdsmix does not use (`open_tokenizer_template`).
    """
    variables = tokenizer.template_variables | encoding.template
    return open_tokenizer_template(tokenizer, variables, encoding.date_string)


def open_tokenizer_template(
    tokenizer: Tokenizer, variables: Mapping[str, Any], date_string: str | None = None
) -> ChatTemplate:
    """Compile a tokenizer's chat template, and its template for tools if it has one.

    If the tokenizer has a template named `tool_use` but none named `default`, the returned template
    raises NO_DEFAULT for every conversation without tools.
    Raises RecipeError if the tokenizer has named templates and none of them is `default` or
    `tool_use`, if the template is not valid, or if `date_string` is not a day.

    Args:
        tokenizer: the tokenizer.
        variables: the variables that the template gets.
        date_string: the day that the template prints, such as `2026-01-01`; None: today.
    """
    source = tokenizer.chat_template
    if source is None and tokenizer.named_templates:
        names = ", ".join(sorted(tokenizer.named_templates))
        reason = NO_DEFAULT.format(names=names)
        if tokenizer.tool_template is None:
            raise RecipeError(f"{tokenizer.name}: {reason}.")
        # A template that only raises the error: {{ raise_exception("...") }}
        source = f"{{{{ raise_exception({json.dumps(reason)}) }}}}"
    return open_template(source, variables, date_string, tokenizer.tool_template)


def open_template(
    source: str | None,
    variables: Mapping[str, Any],
    date_string: str | None = None,
    tool_source: str | None = None,
) -> ChatTemplate:
    """Compile a tokenizer's chat template. The same template is compiled only once in a process.

    Args:
        source: the text of the template; None: ChatML.
        variables: the variables that transformers passes to the template: bos_token, eos_token ...
        date_string: the day that the template prints, as `2026-01-01` or `01 Jan 2026`; None:
            today, as in Foundry. A run that must give the same bytes after midnight calls
            `format_today()` once and always passes that day.
        tool_source: the tokenizer's template named `tool_use`.

    Raises:
        RecipeError: the template is not valid Jinja or uses a function that mdsmix does not have,
            or `date_string` is not a day.
    """
    day = parse_day(date_string or format_today())
    text = DEFAULT_TEMPLATE if source is None else source
    return _compile(text, json.dumps(dict(variables)), day, tool_source)


@lru_cache(maxsize=16)
def _compile(
    source: str, json_variables: str, day: datetime, tool_source: str | None = None
) -> ChatTemplate:
    """Compile a template as `open_template` describes.

    Args:
        source: the template.
        json_variables: the variables of the template as JSON, since a dict cannot be an argument
            of a cached function.
        day: the day that the template prints.
        tool_source: the template named `tool_use`.
    """
    from jinja2 import meta

    from mdsmix.encode import template_code as code

    environment = code.make_template_sandbox()
    dates = {"date_string": day.strftime(FOUNDRY_DATE), "strftime_now": day.strftime}
    variables = json.loads(json_variables) | dates
    try:
        template = code.compile_template(environment, source)
        placeholder_template = code.compile_placeholder_template(source)
        reads = meta.find_undeclared_variables(environment.parse(source))
    # Not only jinja2's errors: Python's compiler has limits of depth and digits.
    except Exception as error:
        raise RecipeError(
            f"The chat template of the tokenizer cannot be compiled ({shorten_value(str(error))}), "
            "so no conversation can be rendered: correct the template in the tokenizer's files."
        ) from error
    tool_use = None
    if tool_source is not None:
        tool_use = _compile(tool_source, json_variables, day)
        reads |= tool_use.reads
    return ChatTemplate(template, placeholder_template, variables, source, reads, tool_use)


def add_variables(template: ChatTemplate, variables: Mapping[str, Any] | None) -> ChatTemplate:
    """Return the template with a record's own variables added. They override the recipe's variables
    of the same name, as in transformers.
    """
    if not variables:
        return template
    return _add_json_variables(template, json.dumps(variables, default=str))


@lru_cache(maxsize=64)
def _add_json_variables(template: ChatTemplate, json_variables: str) -> ChatTemplate:
    """Return the template with more variables. The same variables give the same object, since
    `layout_for_roles` caches its layouts by template object.
    """
    return replace(template, variables={**template.variables, **json.loads(json_variables)})


def format_today() -> str:
    """Return today's date as Foundry passes it to templates: `01 Jan 2026`."""
    return datetime.now().strftime(FOUNDRY_DATE)


def parse_day(date_string: str) -> datetime:
    """Return the day of `2026-01-01` or `01 Jan 2026`. Raises RecipeError for any other text."""
    for form in ("%Y-%m-%d", FOUNDRY_DATE):
        with contextlib.suppress(ValueError):
            return datetime.strptime(date_string, form)
    raise RecipeError(
        f"date_string is {date_string!r}, which is not a day, so chat templates cannot print it: "
        "write a day as 2026-01-01."
    )


_OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
"""Pattern of an unfinished control word at the end of a text, such as `<`: both `<think>` and
`</think>` begin like this. A control word is one token, so it must not be split.
"""
RewrittenHistory = Literal["reject", "last", "each"]
"""The recipe's `rewritten_history`: what happens to a conversation if the template prints earlier
messages differently once later ones follow. reject: the conversation goes to the quarantine; last:
it gives one row, for its last answer; each: it gives a row for each answer.
"""


NO_WORDS = ControlWords(())
"The control words of a tokenizer without control tokens."


def render_rows(
    template: ChatTemplate,
    conversation: Conversation,
    rule: RewrittenHistory,
    words: ControlWords = NO_WORDS,
) -> list[list[Turn]]:
    """Return the rows of a conversation; a row is a list of turns. There is one row if the template
    prints earlier messages the same once later ones follow. Otherwise `rule` decides.

    Args:
        template: the template.
        conversation: the conversation.
        rule: what to do if the text of earlier messages changes.
        words: the tokenizer's control words. A prompt never ends inside one of them.

    Raises:
        RecordRefused: template_error: the template fails on the conversation.
        RecordRefused: not_prefix_stable: the text of earlier messages changes, and the rule is
            `reject`, or `_render_turn` finds no place to separate a prompt from its answer.
    """
    try:
        return [template.turns(conversation)]
    except RecordRefused as fault:
        if rule == "reject" or fault.why != "not_prefix_stable":
            raise
    answers = find_trained_answers(conversation)
    if rule == "last":
        answers = answers[-1:]
    texts = PrefixTexts(template, conversation)
    return [[_render_turn(template, conversation, texts, answer, words)] for answer in answers]


def _render_turn(
    template: ChatTemplate,
    conversation: Conversation,
    texts: PrefixTexts,
    answer: int,
    words: ControlWords,
) -> Turn:
    """Return the turn of one answer: the prompt as the model sees it at inference, and the answer's
    text.

    The prompt at inference is the text of all messages before the answer, with the generation
    prompt. If the text with the answer does not begin with that prompt, the turn's prompt ends
    where the two texts first differ, but never inside a control word or inside the answer. Even the
    text that comes before every answer may end inside a control word: in GLM-4.7's template it ends
    in `<`, the beginning of both `</think>` and `<think>`.

    Args:
        template: the template.
        conversation: the conversation.
        texts: the texts of its first messages.
        answer: the position of the answer in the messages.
        words: the control words of the tokenizer.
    """
    messages = conversation.messages
    prompt = texts.render(answer, add_generation_prompt=True)
    full = texts.render(answer + 1, add_generation_prompt=False)
    if full.startswith(prompt):
        return prompt, full[len(prompt) :]

    # The text with the answer differs only after the earlier messages: cut at the difference.
    history = texts.render(answer, add_generation_prompt=False)
    before_answer = _render_before_answer(template, conversation, answer)
    common = find_common_start([prompt, full, before_answer])
    start = cut_open_word(common, [prompt, full], words)
    if start.startswith(history):
        return start, full[len(start) :]

    # The answer changes how earlier messages are printed: gpt-oss drops the reasoning before a call
    # when a final answer follows. Then the prompt is the prompt at inference, and the answer begins
    # after the generation prompt in the changed text.
    generation_prompt = prompt.removeprefix(history)
    # Text such as an opening tag may come between the generation prompt and every answer. The first
    # answer of the conversation shows it.
    roles = [message["role"] for message in messages]
    first = roles.index("assistant")
    first_prompt = texts.render(first, add_generation_prompt=True)
    before_first = _render_before_answer(template, conversation, first)
    between = before_first.removeprefix(first_prompt)
    # `end`: the offset in `before_answer` at which the answer begins.
    if generation_prompt:
        is_found = before_answer.endswith(generation_prompt + between)
        end = len(before_answer) - len(between)
    else:
        # Without a generation prompt the answer begins after the message before it. Mistral-Nemo's
        # template prints no generation prompt, and the system prompt only before the last message.
        end = _find_end_of_last(messages[answer - 1], prompt, before_answer)
        is_found = end > 0
    if is_found and full.startswith(before_answer[:end]):
        return prompt, full[end:]
    raise RecordRefused("not_prefix_stable", **show_difference(history, full))


def cut_open_word(start: str, texts: Sequence[str], words: ControlWords) -> str:
    """Remove an unfinished control word from the end of `start`, such as the `<` of `<think>`.

    A word is unfinished if it continues in one of the texts, or if `start` ends in an open tag.

    Args:
        start: the common beginning of the texts.
        texts: texts that begin with `start`.
        words: the control words.
    """
    start = _OPEN_TAG.sub("", start)
    splits = [words.start_of_split(start, text[len(start) :]) for text in texts]
    return start[: min(splits)]


def prints_system_last(template: ChatTemplate) -> bool:
    """Return whether the template prints the system prompt only before the last message, and prints
    no generation prompt. Mistral-Nemo's template does both.
    """
    question = [{"role": "system", "content": "system"}, {"role": "user", "content": "question"}]
    try:
        prompt = template.render(question, add_generation_prompt=True)
        history = template.render(question, add_generation_prompt=False)
        answer = {"role": "assistant", "content": "answer"}
        full = template.render([*question, answer], add_generation_prompt=False)
    except RecordRefused:
        return False
    return prompt == history and not full.startswith(prompt)


def _find_end_of_last(last: Message, prompt: str, before_answer: str) -> int:
    """Return the offset in `before_answer` at which the text of the last message ends, including
    what the template prints after that message. Return 0 if the message is not found.

    Args:
        last: the message before the answer.
        prompt: a text that ends with the text of this message.
        before_answer: the text that the template prints before any answer.
    """
    content = last.get("content")
    text = content.strip() if isinstance(content, str) else ""
    if not text or text not in prompt or text not in before_answer:
        return 0
    message_with_ending = prompt[prompt.rindex(text) :]
    start = before_answer.rindex(text)
    if not before_answer.startswith(message_with_ending, start):
        return 0
    return start + len(message_with_ending)


def opens_control_word(template: ChatTemplate) -> bool:
    """Return whether the text that the template prints before every answer ends inside a control
    word. In GLM-4.7's template it ends in `<`, since an answer begins with `<think>` or `</think>`.
    """
    roles = ("user", "assistant")
    for content in ("x", [{"type": "text", "text": "x"}]):
        probe = Conversation([{"role": role, "content": content} for role in roles])
        # Some templates take content only as a list of parts.
        with contextlib.suppress(RecordRefused):
            return _OPEN_TAG.search(_render_before_answer(template, probe, 1)) is not None
    return False


def _render_before_answer(template: ChatTemplate, conversation: Conversation, answer: int) -> str:
    """Return the text that the template prints before any answer at this position.

    Three different answers are tried, one of them with reasoning. Their texts are the same up to
    the answer, so the result is the beginning that all three share.

    Args:
        template: the template.
        conversation: the conversation.
        answer: the position of the answer in the messages.
    """
    before = conversation.messages[:answer]
    in_parts = isinstance(conversation.messages[answer].get("content"), list)
    texts = list[str]()
    for probe in ("x", "y", "x</think>y"):
        content: Any = [{"type": "text", "text": probe}] if in_parts else probe
        messages = [*before, {"role": "assistant", "content": content}]
        text = template.render(messages, add_generation_prompt=False, tools=conversation.tools)
        texts.append(text)
    return find_common_start(texts)

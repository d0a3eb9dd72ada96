"""Conversations as text: the chat template rendered by jinja2 alone, and cut into the turns that
are trained.

The text is what `apply_chat_template(tokenize=False)` of transformers 4.51 to 4.57 gives, without
the seconds that importing transformers takes. The date that some templates print is fixed when a
template is opened, and not read from the clock again: the same input gives the same bytes.

Templates of reasoning models drop the reasoning of earlier answers once later turns follow
(DeepSeek-R1, Qwen3, gpt-oss), others move the system prompt or the tools to the last question
(Mistral v3) or end every text with EOS (Phi-3). Then no single row can hold every turn as inference
sees it, and LLM-Foundry refuses the conversation. A row of its own for an answer can: its prompt is
the text that the template prints for all messages up to the answer, cut where the model begins to
write.
"""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mdsmix.encode.control_words import ControlWords
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, Message, RecordRefused
from mdsmix.schema import shorten

if TYPE_CHECKING:
    from jinja2 import Template

    from mdsmix.tokenizer.card import Tokenizer

FOUNDRY_DATE = "%d %b %Y"
"The format of the day that Foundry passes to templates as `date_string`: `01 Jan 2026`."

DEFAULT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"ChatML, Foundry's template for a tokenizer that has none."
NO_TEMPLATE = (
    "the tokenizer has no chat template, so conversations are rendered as ChatML, as LLM-Foundry does; its <|im_start|> and <|im_end|> "
    "are ordinary text unless they are special tokens of this tokenizer: give it the template of the model (chat_template in its "
    "tokenizer_config.json)"
)

NO_DEFAULT = (
    "the tokenizer has the chat templates {names}, and none is named default, which conversations without tools "
    "take: name one of them default in its files, or give its text as tokenizer.kwargs.chat_template"
)

SHOWN_BEFORE, SHOWN = 60, 240
"""Lengths of the excerpts in a bad record's detail, in characters: 240 of an error message; of two
texts that differ, 60 before their first difference and 240 from it on.
"""

Turn = tuple[str, str]
"""Prompt and response: all text from the end of the previous turn to the generation prompt, and the
assistant's text.
"""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A compiled template with the variables that every rendering gets. Made by `open_template`."""

    template: Template
    twin: Template | None
    "The template as it renders stand-ins of contents, if it can."
    variables: Mapping[str, Any]
    source: str
    reads: Set[str]
    "The variables that the template reads, and those that `tool_use` reads."
    tool_use: ChatTemplate | None = None
    "The tokenizer's template of this name, for conversations with tools; None if it has none."

    @property
    def prints_date(self) -> bool:
        """Whether the rendered text may depend on the date."""
        return not self.reads.isdisjoint({"date_string", "strftime_now"})

    def for_tools(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """Return the template that transformers' `get_chat_template` takes for these tools. An
        empty list of tools takes `tool_use` too.
        """
        return self if tools is None or self.tool_use is None else self.tool_use

    def turns(self, conversation: Conversation) -> list[Turn]:
        """The (prompt, response) turns of a conversation, one for each answer that is trained.

        Raises:
            RecordRefused: the template fails on the conversation (template_error), or prints the
            first messages
                otherwise once more follow (not_prefix_stable).
        """
        messages = conversation.messages
        is_plain = conversation.trained is None and {*map(len, messages)} == {2}
        if is_plain and type(conversation) is Conversation and conversation.tools is None:
            printed = layout_for_roles(self, tuple([message["role"] for message in messages]))
            contents = [message["content"] for message in messages]
            is_blank = not all(contents) or any(map(str.isspace, contents))
            if printed and not is_blank:
                return printed.turns(contents)
        return self.turns_by_prefix(conversation)

    def turns_by_prefix(self, conversation: Conversation) -> list[Turn]:
        """The turns from two renderings for each answer, up to it and with it, as Foundry makes
        them.
        """
        messages, tools, turns, before = conversation.messages, conversation.tools, [], ""
        for i in find_trained_answers(conversation):
            prompt = self.render(messages[:i], True, tools)
            full = self.render(messages[: i + 1], False, tools)
            for printed, later in ((before, prompt), (prompt, full)):
                if not later.startswith(printed):
                    raise RecordRefused("not_prefix_stable", **show_difference(printed, later))
            turns.append((prompt[len(before) :], full[len(prompt) :]))
            before = full
        return turns

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        tools: list[Any] | None = None,
    ) -> str:
        """The text of `messages`; RecordRefused (template_error) where the template fails.

        jinja2's own `Template.render` copies the globals twice and rewrites tracebacks: a twentieth
        of a conversion of chats.
        """
        template = self.template
        given = {
            **template.globals,
            "documents": None,
            **self.variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        environment: Any = template.environment
        context = environment.context_class(environment, given, template.name, template.blocks)
        try:
            return environment.concat(template.root_render_func(context))  # type: ignore[no-any-return]
        except MemoryError:  # a fault of the machine, not of the conversation
            raise
        except Exception as error:  # a template may raise anything, RecursionError too
            raise RecordRefused("template_error", template=str(error)[:SHOWN]) from error


class TemplateLayout(NamedTuple):
    """What a template prints of all conversations that have the same roles and no blank content."""

    texts: list[tuple[str, slice]]
    """Of each turn the prompt and the response: with %s in place of each content, and which of the
    contents it takes.
    """
    contents: list[tuple[int, Callable[[str], str]]]
    """The contents in the order in which they are printed: of which message, and what makes the
    printed text of it.
    """

    def turns(self, contents: Sequence[str]) -> list[Turn]:
        """The turns of a conversation with these contents."""
        said = tuple([strip(contents[at]) for at, strip in self.contents])
        texts = iter([text % said[taken] for text, taken in self.texts])
        return [*zip(texts, texts, strict=True)]


@lru_cache(maxsize=256)
def layout_for_roles(template: ChatTemplate, roles: tuple[str, ...]) -> TemplateLayout | None:
    """What a template prints of conversations with these roles; None where that cannot be told
    without their contents.
    """
    from mdsmix.encode import template_code as code

    if not template.twin:
        return None
    try:
        blind = replace(template, template=template.twin)
        turns = blind.turns_by_prefix(Conversation(code.make_placeholders(roles)))
    except (RecordRefused, code.InspectedContent):
        return None
    printed, strips = TemplateLayout([], []), (str.strip, str.lstrip, str.rstrip, str)
    for text in chain.from_iterable(turns):
        first, parts = len(printed.contents), re.split(code.PRINTED, text)
        if any(code.SPACE in part for part in parts[::4]):  # a turn ends within a content's space
            return None
        for before, at, behind in zip(parts[1::4], parts[2::4], parts[3::4], strict=True):
            strip = strips[2 * bool(before) + bool(behind)]
            printed.contents.append((int(at), strip))
        whole = "%s".join(part.replace("%", "%%") for part in parts[::4])
        printed.texts.append((whole, slice(first, len(printed.contents))))
    return printed


def find_trained_answers(conversation: Conversation) -> list[int]:
    """The positions of the answers that are trained."""
    trained = conversation.trained or [True] * len(conversation.messages)
    each = enumerate(zip(conversation.messages, trained, strict=True))
    return [i for i, (message, flag) in each if flag and message["role"] == "assistant"]


def show_difference(printed: str, later: str) -> dict[str, Any]:
    """Excerpts of both texts around their first difference."""
    around = slice_around_difference([printed, later])
    return {"printed": printed[around], "printed_later": later[around]}


def slice_around_difference(texts: Sequence[str]) -> slice:
    """Return the part of each text around the first difference of the texts, as a detail
    shows it.
    """
    at = len(find_common_start(texts))
    return slice(max(0, at - SHOWN_BEFORE), at + SHOWN)


def find_common_start(texts: Sequence[str]) -> str:
    """The longest text with which all of the texts begin."""
    one, other = min(texts), max(texts)
    end = bisect_left(range(len(one)), True, key=lambda at: one[: at + 1] != other[: at + 1])
    return one[:end]


def open_tokenizer_template(
    tokenizer: Tokenizer, variables: Mapping[str, Any], date_string: str | None = None
) -> ChatTemplate:
    """Compile a tokenizer's chat template, with its template for tools if it has one.

    Without a template named `default`, conversations without tools fail with a sentence on that.

    Raises:
        RecipeError: if no conversation could be rendered, as for `open_template`; or if the
        tokenizer
            has named templates, and none of them is `default` or `tool_use`.
    """
    source = tokenizer.chat_template
    if source is None and tokenizer.named_templates:
        names = ", ".join(sorted(tokenizer.named_templates))
        why = NO_DEFAULT.format(names=names)
        if tokenizer.tool_template is None:
            raise RecipeError(f"{tokenizer.name}: {why}.")
        source = f"{{{{ raise_exception({json.dumps(why)}) }}}}"
    return open_template(source, variables, date_string, tokenizer.tool_template)


def open_template(
    source: str | None,
    variables: Mapping[str, Any],
    date_string: str | None = None,
    tool_source: str | None = None,
) -> ChatTemplate:
    """Compiles a tokenizer's template (None: ChatML) once per process.

    Args:
        variables: the variables that transformers passes to the template: bos_token, eos_token ...
        date_string: the day that the template prints, as `2026-01-01` or `01 Jan 2026`; None is
        today, as in
            Foundry. A run that must give the same bytes after midnight calls `today()` once, and
            passes that
            day from then on.
        tool_source: the tokenizer's template named `tool_use`.

    Raises:
        RecipeError: the template is not valid Jinja or uses a function that mdsmix does not offer,
        or the
            date cannot be read.
    """
    day = parse_day(date_string or format_today())
    text = DEFAULT_TEMPLATE if source is None else source
    return _open(text, json.dumps(dict(variables)), day, tool_source)


@lru_cache(maxsize=16)
def _open(
    source: str, json_variables: str, day: datetime, tool_source: str | None = None
) -> ChatTemplate:
    from jinja2 import meta

    from mdsmix.encode import template_code as code

    environment = code.make_template_sandbox()
    dated = {"date_string": day.strftime(FOUNDRY_DATE), "strftime_now": day.strftime}
    variables = json.loads(json_variables) | dated
    try:
        template = code.compile_template(environment, source)
        twin = code.compile_placeholder_template(source)
        reads = meta.find_undeclared_variables(environment.parse(source))
    except (
        Exception
    ) as error:  # not only jinja2's: Python's compiler has limits of depth and digits
        raise RecipeError(
            f"The chat template of the tokenizer cannot be compiled ({shorten(str(error))}), so that no conversation "
            "can be rendered: correct its chat_template."
        ) from error
    tool_use = None
    if tool_source is not None:
        tool_use = _open(tool_source, json_variables, day)
        reads |= tool_use.reads
    return ChatTemplate(template, twin, variables, source, reads, tool_use)


def add_variables(template: ChatTemplate, given: Mapping[str, Any] | None) -> ChatTemplate:
    """The template with the variables that a record gives, which win over the recipe's, as in
    transformers.
    """
    return _given(template, json.dumps(given, default=str)) if given else template


@lru_cache(maxsize=64)
def _given(template: ChatTemplate, json_variables: str) -> ChatTemplate:
    """Return a template of its own for each set of variables, since what is known of one
    (`layout_for_roles`) does not hold for another.
    """
    return replace(template, variables={**template.variables, **json.loads(json_variables)})


def format_today() -> str:
    """Today as Foundry passes it to templates: `01 Jan 2026`."""
    return datetime.now().strftime(FOUNDRY_DATE)


def parse_day(date_string: str) -> datetime:
    """The day that `2026-01-01` or `01 Jan 2026` names; RecipeError for any other text."""
    for form in ("%Y-%m-%d", FOUNDRY_DATE):
        with contextlib.suppress(ValueError):
            return datetime.strptime(date_string, form)
    raise RecipeError(
        f"date_string is {date_string!r}, which is no day, so that chat templates cannot print it: "
        "write it as 2026-01-01."
    )


_OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
"""An unfinished control word at the end of a text, such as the `<` that `<think>` and `</think>`
share: the word is one token as a whole.
"""
RewrittenHistory = Literal["reject", "last", "each"]
"""The recipe's `rewritten_history`, for a conversation whose earlier text changes: quarantined, a
row for its last answer, or for each.
"""


NO_WORDS = ControlWords(())


def render_rows(
    template: ChatTemplate,
    conversation: Conversation,
    rule: RewrittenHistory,
    words: ControlWords = NO_WORDS,
) -> list[list[Turn]]:
    """The rows of a conversation, each a list of turns: one row where earlier text never changes,
    else the rows of `rule`.

    `words` are the tokenizer's control tokens, inside of which no prompt ends.

    Raises:
        RecordRefused: the template fails (template_error); or earlier text changes and the rule is
        `reject`, or the messages before
            an answer are printed otherwise with that answer and none of the cuts of `_turn` fits
            (not_prefix_stable).
    """
    try:
        return [template.turns(conversation)]
    except RecordRefused as fault:
        if rule == "reject" or fault.why != "not_prefix_stable":
            raise
    wanted = find_trained_answers(conversation)
    if rule == "last":
        wanted = wanted[-1:]
    return [[_turn(template, conversation, i, words)] for i in wanted]


def _turn(
    template: ChatTemplate, conversation: Conversation, answer: int, words: ControlWords
) -> Turn:
    """The turn of one answer: the prompt as inference sees it, and the answer's text.

    Where the text with the answer does not begin with inference's prompt, the turn's prompt ends
    where the two part: before a control word that they share in part only, and never inside the
    answer. The text that the template prints before any answer may itself end in such a part: the
    `<` of GLM-4.7's `</think>` and `<think>`. Where the answer changes how earlier messages are
    printed (gpt-oss drops the reasoning before a call once a final answer follows), the prompt is
    inference's. Mistral-Nemo prints the system prompt in the last message only, if that is the
    user's, and has no generation prompt: there too the prompt is inference's, and the answer is
    what follows that message.
    """
    messages, tools = conversation.messages, conversation.tools
    prompt = template.render(messages[:answer], True, tools)
    full = template.render(messages[: answer + 1], False, tools)
    if full.startswith(prompt):
        return prompt, full[len(prompt) :]
    history = template.render(messages[:answer], False, tools)
    head = _head(template, conversation, answer)
    start = cut_open_word(find_common_start([prompt, full, head]), [prompt, full], words)
    if start.startswith(history):
        return start, full[len(start) :]
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    begins = template.render(messages[:first], True, tools)
    between = _head(template, conversation, first).removeprefix(begins)
    opening, end = prompt.removeprefix(history), len(head) - len(between)
    if not opening:
        end = _end_of_last(messages[answer - 1], prompt, head)
        is_found = end > 0
    else:
        is_found = head.endswith(opening + between)
    if is_found and full.startswith(head[:end]):
        return prompt, full[end:]
    raise RecordRefused("not_prefix_stable", **show_difference(history, full))


def cut_open_word(start: str, texts: Sequence[str], words: ControlWords) -> str:
    """Return `start`, with which all of the texts begin, without the part of a control word at its
    end that any of the texts goes on with.
    """
    start = _OPEN_TAG.sub("", start)
    return start[: min(words.start_of_split(start, text[len(start) :]) for text in texts)]


def prints_system_last(template: ChatTemplate) -> bool:
    """Tell whether the system prompt is printed before the last message only, and no generation
    prompt follows, as under Mistral-Nemo's template.
    """
    asked = [{"role": "system", "content": "system"}, {"role": "user", "content": "question"}]
    try:
        prompt = template.render(asked, True)
        history = template.render(asked, False)
        full = template.render([*asked, {"role": "assistant", "content": "answer"}], False)
    except RecordRefused:
        return False
    return prompt == history and not full.startswith(prompt)


def _end_of_last(last: Message, prompt: str, head: str) -> int:
    """Return where the text of the last message ends in `head`, printed there as `prompt` ends; 0
    if it is not there.
    """
    content = last.get("content")
    text = content.strip() if isinstance(content, str) else ""
    if not text or text not in prompt or text not in head:
        return 0
    ending = prompt[prompt.rindex(text) :]
    at = head.rindex(text)
    return at + len(ending) if head[at:].startswith(ending) else 0


def opens_control_word(template: ChatTemplate) -> bool:
    """Tell whether the text that the template prints before every answer ends within a control
    word, as that of GLM-4.7 does: `<`, since an answer begins with `<think>` or `</think>`.
    """
    asked: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    for content in ("x", [{"type": "text", "text": "x"}]):
        probe = Conversation([message | {"content": content} for message in asked])
        with contextlib.suppress(RecordRefused):
            return _OPEN_TAG.search(_head(template, probe, 1)) is not None
    return False


def _head(template: ChatTemplate, conversation: Conversation, answer: int) -> str:
    """The text that the template prints before any answer in this place: the common beginning with
    three probe answers, one a thought.
    """
    before, tools = conversation.messages[:answer], conversation.tools
    in_parts = isinstance(conversation.messages[answer].get("content"), list)
    answers: list[Any] = ["x", "y", "x</think>y"]
    if in_parts:
        answers = [[{"type": "text", "text": said}] for said in answers]
    said = ([*before, {"role": "assistant", "content": content}] for content in answers)
    return find_common_start([template.render(messages, False, tools) for messages in said])

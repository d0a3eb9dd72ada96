"""Finds the parts of an answer in its rendered text: the reasoning, the calls of tools, and the
answer itself. The recipe's `train_parts` decides which of them are trained.

The parts are found by rendering the conversation once more. In the answer, each character that is
not white space is replaced by the private character of its part. If the template only
strips, splits and prints a part, both texts have the same length and are equal at all other places.
This is compared, and so is each replaced character: it must be the character that the record has
there. If a template does anything else with an answer, the two texts differ, and the record is
refused (`parts_not_found`). So no part is guessed. This takes 0.2 ms for an answer of 1,500
characters; answers of plain text need no second rendering.

Around the parts a template prints text of its own. These rules give it to a part:
- Reasoning begins with its opening tag, and ends with the first tag after it: `<think>` and
  `</think>`, or the `<|end|>` of gpt-oss. Tags without reasoning between them are reasoning too.
- All text between a call and another part belongs to the call.
- Other text belongs to the part after it; after the last part, to the last part. So the end-of-turn
  token is trained if the last part of the answer is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

from mdsmix.encode import forms
from mdsmix.encode.chat import ChatTemplate, find_trained_answers, slice_around_difference
from mdsmix.encode.template_probes import ANSWER, QUESTION
from mdsmix.errors import RecipeError
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.record import Conversation, Message, RecordRefused, RichConversation

PARTS = ("reasoning", "calls", "answer")
"The parts of an answer, by their names in the recipe."
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"The keys of messages that templates print as reasoning."
REASONING_DETAILS = "reasoning_details"
"""OpenRouter's key of messages with a list of reasoning: texts, summaries, encrypted texts. Mostly
the message has the same text under `reasoning` too.
"""
UNREAD_REASONING = tuple(f"messages.{key}" for key in (*REASONING_KEYS, REASONING_DETAILS))
"The names under which reasoning is counted that the chat template does not print."


RECIPIENT = "messages.recipient"
"""The key in which messages of harmony, gpt-oss's format, name the tool that they call; the
arguments are their content.
"""
RECIPIENT_FIX = (
    "if it names a tool, the messages' contents are trained as answers, not as calls: write each "
    "as the `tool_calls` of its message"
)
"What to do about calls that are read as texts."


def describe_reasoning_fix(name: str) -> str:
    """Return what to do about reasoning that the chat template does not print.

    Args:
        name: its name in UNREAD_REASONING.
    """
    if name == f"messages.{REASONING_DETAILS}":
        return (
            "it is a list: write its texts under the key that the chat template prints "
            f"({' or '.join(REASONING_KEYS)}), or move them into the content"
        )
    printed_keys = [key for key in REASONING_KEYS if f"messages.{key}" != name]
    return (
        "the chat template does not print this key: rename it to the key that it prints "
        f"({' or '.join(printed_keys)}), or move its text into the content"
    )


THINK = "<think>"
THINK_END = "</think>"
"The tags around reasoning inside a content."
TAGGED_ANSWER: Message = {
    "role": "assistant",
    "content": f"{THINK}\nprobe_thought\n{THINK_END}\n\nprobe_answer",
}
"An answer with reasoning in tags, with which a chat template is tried."
CALL = "<tool_call>"
"""The tag before a call that is text inside a content, as models of Qwen and Hermes print it. Such
a call belongs to its content, and is not a part of the answer.
"""
_CALL_TEXT = re.compile(rf"{CALL}\s*[{{<]|^{CALL}\s*\w", re.MULTILINE)
"""A call in a text: JSON (Hermes, Qwen 3), a tag (Qwen 3 Coder), or at the beginning of a line a
name (GLM 4.5). A sentence that only mentions `<tool_call>` does not match.
"""
ANALYSIS = "<|channel|>analysis<|message|>"
"The text that gpt-oss' template prints before reasoning."
PARTS_REASONS = {
    "parts_not_found": (
        "The parts of an answer (train_parts) cannot be found in the text that the chat template "
        "prints; the detail says why."
    ),
}
"Reason codes of conversations whose answers cannot be divided into parts -> their explanations."

_THOUGHT = "thought"
"A text of a content before `</think>`, as long as it is not known whether a tag opens it."
_PRIVATE = dict(zip((*PARTS, _THOUGHT), map(chr, range(0xF1E01, 0xF1E05)), strict=True))
"Part -> the private character that replaces each of its characters."
_FIRST_PRIVATE = ord(min(_PRIVATE.values()))
_LAST_PRIVATE = ord(max(_PRIVATE.values()))
_ANY_PRIVATE = re.compile(f"[{''.join(_PRIVATE.values())}]")
_SPACE = re.compile(r"(\s+)")
_THINK_TAGS = re.compile(f"({re.escape(THINK)}|{re.escape(THINK_END)})")
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"A tag such as `</think>`, `<|end|>` or `[/THINK]`. The first one after reasoning closes it."
_EMPTY_THOUGHT = re.compile(rf"\s*(?:{re.escape(THINK)})?\s*{re.escape(THINK_END)}")
"Tags without reasoning, at the beginning of an answer. The prompt may have opened them."
_OPEN_THOUGHT = re.compile(
    rf"\s*{re.escape(THINK)}(?:(?!{re.escape(THINK_END)}).)*"
    rf"(?:{re.escape(THINK)}|\Z)",
    re.DOTALL,
)
"A thought at the beginning of a content that `</think>` does not close before the next tag."


class PartRange(NamedTuple):
    """A range of characters of a response, and the part of the answer that is printed there."""

    start: int
    stop: int
    "The position after the last character."
    name: str
    "The part: one of PARTS."


def find_parts(
    template: ChatTemplate, conversation: Conversation, answer: int, prompt: str, response: str
) -> list[PartRange]:
    """Return the parts of a rendered answer. They cover the response from its first to its last
    character, in order and without gaps. An empty response has none.

    Raises RecordRefused (parts_not_found) if the template does more with a part than strip, split
    and print it, or prints a part in pieces.

    Args:
        template: the template.
        conversation: the conversation, in the form that the template takes.
        answer: the position of the answer in the messages.
        prompt: the rendered text before the response.
        response: the rendered response.
    """
    message = conversation.messages[answer]
    if _has_only_text(message):
        # The content has no tag, so a tag at the beginning is the template's.
        printed = [PartRange(len(response), len(response), "answer")]
    else:
        printed = _find_printed(template, conversation, answer, response)
        printed = [
            _rename_by_opening(text_range, prompt + response[: text_range.start])
            for text_range in printed
        ]
    return _close_gaps(printed, response)


def _has_only_text(message: Message) -> bool:
    """Return whether a message has nothing but a text without tags of reasoning. Then the template
    prints an answer, and perhaps an empty pair of tags before it, and no second rendering is needed
    to find them.
    """
    content = message.get("content")
    has_more = message.get("tool_calls") or any(message.get(key) for key in REASONING_KEYS)
    return isinstance(content, str) and not has_more and _THINK_TAGS.search(content) is None


def _find_printed(
    template: ChatTemplate, conversation: Conversation, answer: int, response: str
) -> list[PartRange]:
    """Return the ranges of a response that the template prints from texts of the answer's message:
    from the first to the last character of each part, in the order of the response.

    Raises RecordRefused (parts_not_found) as `find_parts` does.
    """
    message = conversation.messages[answer]
    # Of a thought that was cut off nobody knows which text is reasoning.
    if _OPEN_THOUGHT.match(_join_texts(message.get("content"))):
        _refuse(f"the content begins with {THINK}, but {THINK_END} does not close it")
    masked = _MaskedMessage(message)
    text = _render_masked(template, conversation, answer, masked.message, response)

    # Both texts are equal, except for the private characters.
    shown = _read_characters(text)
    expected = _read_characters(response)
    is_private = (shown >= _FIRST_PRIVATE) & (shown <= _LAST_PRIVATE)
    if len(shown) != len(expected) or not ((shown == expected) | is_private).all():
        _refuse_texts(
            "the template prints other text around other texts",
            response,
            _ANY_PRIVATE.sub("*", text),
        )

    # The characters in their places are those of the record.
    positions = np.flatnonzero(is_private)
    numbers = shown[positions]
    for part_name, allowed in masked.texts.items():
        of_part = positions[numbers == ord(_PRIVATE[part_name])]
        _require_text(part_name, allowed, _write_characters(expected[of_part]))
    ranges = _join_ranges(positions, numbers)
    if masked.has_calls and not any(text_range.name == "calls" for text_range in ranges):
        _refuse("the template prints neither the name nor the id of a call")
    return ranges


def _render_masked(
    template: ChatTemplate,
    conversation: Conversation,
    answer: int,
    masked: Message,
    response: str,
) -> str:
    """Return the response with private characters in the place of the answer's texts, if the
    template prints both alike: the end of the rendered conversation, as long as the response.

    Raises RecordRefused (parts_not_found) if the template fails on these characters, or the
    conversation has one of them already.

    Args:
        template: the template.
        conversation: the conversation.
        answer: the position of the answer in the messages.
        masked: the answer's message with private characters.
        response: the rendered response.
    """
    messages = [*conversation.messages[:answer], masked]
    try:
        whole = template.render(messages, add_generation_prompt=False, tools=conversation.tools)
    except RecordRefused as refused:
        _refuse("the template fails on other texts", **refused.why.detail)
    start = max(len(whole) - len(response), 0)
    before = whole[:start]
    if any(private in response or private in before for private in _PRIVATE.values()):
        _refuse("the conversation contains a character from U+F1E01 to U+F1E04")
    return whole[start:]


def _require_text(part_name: str, allowed: set[str], printed: str) -> None:
    """Raise RecordRefused (parts_not_found) if a part is not printed once and as a whole, or not at
    all.

    Args:
        part_name: the part.
        allowed: the texts of the record that may be printed there, without white space.
        printed: the text that is printed there.
    """
    if printed in ("", *allowed):
        return
    name = "reasoning" if part_name == _THOUGHT else part_name
    _refuse_texts(f"the template changes the {name}, or prints only a piece", max(allowed), printed)


def _refuse(why: str, **detail: str | int) -> NoReturn:
    """Raise RecordRefused (parts_not_found)."""
    raise RecordRefused("parts_not_found", why=why, **detail)


def _refuse_texts(why: str, expected: str, printed: str) -> NoReturn:
    """Raise RecordRefused (parts_not_found) with excerpts of two texts that should be equal."""
    around = slice_around_difference([expected, printed])
    _refuse(why, expected=expected[around], printed=printed[around])


class _MaskedMessage:
    """An answer's message with private characters in the place of its texts, and these texts."""

    def __init__(self, message: Message) -> None:
        self.message: Message = dict(message)
        self.texts = defaultdict[str, set[str]](set)
        """Part -> the texts that a template may print there, without white space and tags. There
        are several if the message has reasoning under several keys. Calls are left out: their names
        and ids are printed in any order, or more than once.
        """
        self.has_calls = bool(message.get("tool_calls"))
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str):
                self.texts["reasoning"].add(_remove_space(message[key]))
                self.message[key] = _mask_text(message[key], "reasoning")
        content = message.get("content")
        masked = "".join(self._mask_pieces(_join_texts(content)))
        if isinstance(content, str):
            self.message["content"] = masked
        elif isinstance(content, list):
            self.message["content"] = [*_replace_texts(content, masked)]
        if self.has_calls:
            self.message["tool_calls"] = [_mask_call(call) for call in message["tool_calls"]]

    def _mask_pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces of a content between its tags of reasoning, with private characters, and
        the tags. A text between `<think>` and `</think>` is perhaps reasoning, and so is the text
        before the first `</think>`, since the prompt may end in `<think>`.
        """
        pieces = _THINK_TAGS.split(text)  # every other piece is a tag
        texts = {_THOUGHT: "", "answer": ""}
        for number, piece in enumerate(pieces):
            if number % 2:
                yield piece
                continue
            opening = pieces[number - 1] if number else THINK
            closing = pieces[number + 1] if number + 1 < len(pieces) else ""
            is_thought = (opening, closing) == (THINK, THINK_END)
            part_name = _THOUGHT if is_thought else "answer"
            texts[part_name] += _remove_space(piece)
            yield _mask_text(piece, part_name)
        for part_name, whole in texts.items():
            self.texts[part_name].add(whole)


def _replace_texts(content: Sequence[Mapping[str, Any]], text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the items of a message's content. The text of each item is replaced by as many
    characters of `text`. An item without a text, such as an image, stays as it is.

    Args:
        content: a content that is a list of items, such as `{"type": "text", "text": "Hello"}`.
        text: the new text of all items together, as long as all their texts.
    """
    start = 0
    for item in content:
        if "text" in item:
            stop = start + len(item["text"])
            yield {**item, "text": text[start:stop]}
            start = stop
        else:
            yield item


def _mask_text(text: str, part_name: str) -> str:
    """Return a text with the private character of a part in the place of each character that is not
    white space. Tags of reasoning stay, since templates look for them.
    """
    private = _PRIVATE[part_name]
    pieces = _THINK_TAGS.split(text)  # every other piece is a tag
    for number in range(0, len(pieces), 2):
        words = _SPACE.split(pieces[number])  # every other one is white space
        words[::2] = [private * len(word) for word in words[::2]]
        pieces[number] = "".join(words)
    return "".join(pieces)


def _remove_space(text: str) -> str:
    """Return a text without white space and without tags of reasoning."""
    return "".join("".join(_THINK_TAGS.split(text)[::2]).split())


def _mask_call(call: Mapping[str, Any]) -> Message:
    """Return a call with private characters in the place of its name and its id."""
    masked = dict(call)
    if isinstance(masked.get("function"), Mapping):
        masked["function"] = _mask_call(masked["function"])
    for key in ("id", "name"):
        if isinstance(masked.get(key), str):
            masked[key] = _PRIVATE["calls"] * len(masked[key])
    return masked


def _join_texts(content: Any) -> str:
    """Return the texts of a content, which is a string, a list of parts, or null."""
    if isinstance(content, list):
        return "".join(item.get("text", "") for item in content)
    return content if isinstance(content, str) else ""


def _read_characters(text: str) -> NDArray[np.uint32]:
    """Return uint32 [characters]: the number of each character of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _write_characters(numbers: NDArray[np.uint32]) -> str:
    """Return the text of characters with these numbers."""
    return numbers.tobytes().decode("utf-32-le", "surrogatepass")


def _join_ranges(positions: NDArray[np.int64], numbers: NDArray[np.uint32]) -> list[PartRange]:
    """Return a range for each run of private characters of one part. There may be other text
    between the characters of a run.

    Args:
        positions: int64, the positions of private characters, in order.
        numbers: uint32, the number of each of these characters.
    """
    if not len(positions):
        return []
    names = {ord(character): name for name, character in _PRIVATE.items()}
    changes = np.flatnonzero(np.diff(numbers))
    firsts = [0, *(changes + 1).tolist()]
    lasts = [*changes.tolist(), len(positions) - 1]
    return [
        PartRange(int(positions[first]), int(positions[last]) + 1, names[int(numbers[first])])
        for first, last in zip(firsts, lasts, strict=True)
    ]


def _rename_by_opening(text_range: PartRange, before: str) -> PartRange:
    """Return a range with the name of the part that the text before it opens.

    The text before `</think>` is reasoning if a tag opens it: an answer may write about tags. A
    content that gpt-oss prints in its channel `analysis`, next to a call, is reasoning too.

    Args:
        text_range: the range.
        before: the rendered text before the range.
    """
    before = before.rstrip()
    if text_range.name == "answer" and before.endswith(ANALYSIS):
        return text_range._replace(name="reasoning")
    if text_range.name == _THOUGHT:
        is_opened = before.endswith((THINK, ANALYSIS))
        return text_range._replace(name="reasoning" if is_opened else "answer")
    return text_range


def _close_gaps(printed: Sequence[PartRange], response: str) -> list[PartRange]:
    """Return ranges that cover the response, by the rules at the top of this file.

    Args:
        printed: the ranges of printed texts, in order.
        response: the rendered response.
    """
    ranges = list[PartRange]()
    start = 0
    first = printed[0] if printed else PartRange(len(response), len(response), "answer")
    empty_thought = _EMPTY_THOUGHT.match(response)
    if empty_thought and empty_thought.end() <= first.start and first.name != "reasoning":
        start = empty_thought.end()
        ranges.append(PartRange(0, start, "reasoning"))
    for text_range, following in pairwise([*printed]):
        stop = _find_border(text_range, following, response)
        ranges.append(PartRange(start, stop, text_range.name))
        start = stop
    last = printed[-1] if printed else first
    ranges.append(PartRange(start, len(response), last.name))
    # Join neighbours of the same part, and leave out empty ranges.
    joined = list[PartRange]()
    for text_range in ranges:
        if joined and joined[-1].name == text_range.name:
            joined[-1] = joined[-1]._replace(stop=text_range.stop)
        elif text_range.start < text_range.stop:
            joined.append(text_range)
    return joined


def _find_border(text_range: PartRange, following: PartRange, response: str) -> int:
    """Return the position in the response at which a part ends and the next one begins.

    Args:
        text_range: the range of the part's texts.
        following: the range of the next part's texts.
        response: the rendered response.
    """
    if text_range.name == "calls":
        return following.start
    if text_range.name == "reasoning":
        closing = _TAG.search(response, text_range.stop, following.start)
        if closing:
            return closing.end()
    return text_range.stop


def list_parts(conversation: Conversation) -> set[str]:
    """Return which of `reasoning` and `calls` the answers of a record seem to have, whatever a chat
    template makes of them.
    """
    parts = set[str]()
    for message in conversation.messages:
        if message["role"] != "assistant":
            continue
        if message.get("tool_calls"):
            parts.add("calls")
        has_key = any(message.get(key) for key in REASONING_KEYS)
        if has_key or THINK_END in _join_texts(message.get("content")):
            parts.add("reasoning")
    return parts


def has_earlier_call(conversation: Conversation) -> bool:
    """Check whether an answer before the last one calls tools, by `tool_calls`, in its text, or
    since the result of a tool follows it: the call is then a text of another form, such as
    ToolACE's `[weather(city="Oslo")]`. Answers that are marked as not trained do not count, neither
    as earlier ones nor as the last.
    """
    messages = conversation.messages
    for position in find_trained_answers(conversation)[:-1]:
        message = messages[position]
        if message.get("tool_calls") or messages[position + 1]["role"] == "tool":
            return True
        if _CALL_TEXT.search(_join_texts(message.get("content"))):
            return True
    return False


def require_findable_parts(template: ChatTemplate) -> None:
    """Check that the parts of answers can be found in what a template prints.

    Raises RecipeError if they cannot, for reasoning or for calls that the template prints.
    """
    thoughtful = [TAGGED_ANSWER, *({**ANSWER, key: "probe_thought"} for key in REASONING_KEYS)]
    probes = [[Conversation([QUESTION, answer]) for answer in thoughtful], []]
    template_for_tools = template.for_tools([])  # an empty list counts as tools
    call = forms.make_call_probe(template_for_tools)
    if call:
        probes[1] = [RichConversation(call[:2], None, [forms.make_tool_probe()])]
    for conversations in probes:
        problems = [_describe_problem(template, conversation) for conversation in conversations]
        if problems and all(problems):
            raise RecipeError(
                "train_parts cannot be used with the chat template of this tokenizer, since the "
                f"parts of an answer cannot be found in what it prints ({problems[0]}): remove "
                "train_parts from the stream, or use another chat template."
            )


def _describe_problem(template: ChatTemplate, conversation: Conversation) -> str:
    """Return why the parts of the last answer cannot be found; "" if they can, or if the template
    does not print the conversation.
    """
    template = template.for_tools(conversation.tools)
    try:
        ((prompt, response),) = template.render_turns_by_prefix(conversation)
    except RecordRefused:
        return ""
    try:
        find_parts(template, conversation, 1, prompt, response)
    except RecordRefused as refused:
        return str(refused.why.detail["why"])
    return ""

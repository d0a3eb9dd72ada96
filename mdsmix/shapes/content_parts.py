"""Contents that are lists of parts, as the interfaces of OpenAI and Anthropic and LLaMA-Factory 1
write them.

Parts of text are joined. Anthropic's parts become what chat templates take: `thinking` the key
`reasoning_content`, `tool_use` a call, and each `tool_result` a message of the role `tool`.
LLaMA-Factory's `reasoning` and `tool_call`, the call as JSON text, become the first two. A part
that has no such form makes the record a bad one: nothing of a content is dropped but what holds no
text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mdsmix.record import Message, RecordRefused

TEXTS = ("text", "input_text", "output_text")
"Types of parts with a text."
THOUGHTS = {"thinking": "thinking", "reasoning": "value"}
"Type of a part with a thought, Anthropic's and LLaMA-Factory's -> the key that holds it."
ANTHROPIC = frozenset({*THOUGHTS, "tool_use", "tool_call", "tool_result"})
"Types of parts that only Anthropic's and LLaMA-Factory's messages have."
WITHOUT_TEXT = frozenset({"annotations", "cache_control", "citations", "logprobs", "signature"})
"Keys of a part that no template prints: what is stored of it by a service, and notes on its text."
RESULT_KEYS = frozenset({"type", "tool_use_id", "content", "cache_control"})


def joined_parts(parts: Sequence[Any]) -> str:
    """Join the texts of a list of parts. Raises RecordRefused (content_not_text) for any other
    part.
    """
    return "".join(map(_text_of, parts))


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") in TEXTS:
        key = "text" if isinstance(part.get("text"), str) else "value"
        text = part.get(key)
        if isinstance(text, str) and not _unknown(part, {"type", key}):
            return text
    raise RecordRefused("content_not_text")


def _unknown(part: Mapping[str, Any], known: set[str] | frozenset[str]) -> list[str]:
    """Return the keys of a part that hold something, and are neither in `known` nor in
    WITHOUT_TEXT.
    """
    found = part.keys() - known - WITHOUT_TEXT
    return [key for key in found if part[key] not in (None, "", [], {})]


def result_text(content: Any) -> str:
    """Return the result of a tool as text: of parts their texts, of any other list or object its
    JSON.

    Raises RecordRefused (content_not_text) if it is neither of these nor text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, dict)):
        raise RecordRefused("content_not_text")
    if isinstance(content, list) and any(map(_is_part, content)):
        return joined_parts(content)
    return json.dumps(content, ensure_ascii=False, default=str)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in (*TEXTS, "image", "image_url")


def has_anthropic(content: Any) -> bool:
    """Whether a content is a list of parts, some of which only Anthropic's messages have."""
    if not isinstance(content, list):
        return False
    types = [part.get("type") for part in content if isinstance(part, dict)]
    return any(isinstance(each, str) and each in ANTHROPIC for each in types)


def from_anthropic(message: Message) -> Iterator[Message]:
    """Yield the messages of a chat template that one of Anthropic's messages stands for."""
    if message["role"] == "assistant":
        yield _answer(message)
        return
    texts = list[Any]()
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") == "tool_result":
            yield from _asked(message, texts)
            texts = []
            yield _result(part)
        else:
            texts.append(part)
    yield from _asked(message, texts)


def _asked(message: Message, parts: Sequence[Any]) -> Iterator[Message]:
    """Yield the message with these parts as its text, unless there are none."""
    if parts:
        yield message | {"content": joined_parts(parts)}


def _result(part: Mapping[str, Any]) -> Message:
    content = part.get("content")
    more = {key: part[key] for key in _unknown(part, RESULT_KEYS)}
    text = "" if content is None else result_text(content)
    return {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text, **more}


def _answer(message: Message) -> Message:
    """Return an assistant's message with its thoughts, its text and its calls, in this order.

    Raises RecordRefused (content_not_text) if the parts have another order, which no template
    prints.
    """
    thoughts = list[str]()
    texts = list[Any]()
    calls = list[Any]()
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_use" and not _unknown(part, {"type", "id", "name", "input"}):
            calls.append(_call(part))
        elif kind == "tool_call" and not _unknown(part, {"type", "value"}):
            calls.append(part.get("value"))
        elif isinstance(kind, str) and kind in THOUGHTS and not texts and not calls:
            thought = part.get(THOUGHTS[kind])
            if not isinstance(thought, str) or _unknown(part, {"type", THOUGHTS[kind]}):
                raise RecordRefused("content_not_text")
            thoughts.append(thought)
        elif not calls:
            texts.append(part)
        else:
            raise RecordRefused("content_not_text")
    found = message | {"content": joined_parts(texts)}
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _call(part: Mapping[str, Any]) -> Message:
    given = {} if part.get("id") is None else {"id": part["id"]}
    return {**given, "name": part.get("name"), "arguments": part.get("input")}

"""`{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": null, "tool_calls": [...]}, {"role": "tool",
"tool_call_id": "...", "content": "..."}, ...], "tools": [...]}`, as OpenAI's interfaces and those made after them write it.

Messages go to the chat template as they are, except what no template reads: `weight` and its like, which say whether a message is
trained, and content in parts, of which the texts are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mdsmix.record import Conversation, Message
from mdsmix.shapes.conversation_rules import (
    PARTLY_KEYS,
    TRAIN_KEYS,
    TRIES,
    Marked,
    calls_of,
    conversation_of,
    list_of,
    tools_for,
    trained_flag,
)
from mdsmix.shapes.shape import Fields, RecordRefused, Shape, refusing

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_FLAGS = frozenset((*TRAIN_KEYS, *PARTLY_KEYS))


@refusing
def read(
    record: Any, fields: Fields, consecutive_roles: str = "reject", nulls: str = "keep"
) -> Conversation:
    marked = [_message(message) for message in list_of(record, fields, "messages", nulls)]
    messages = [message for message, _ in marked]
    tools = tools_for(record, fields, nulls, messages)
    _look_at_answers(messages)
    return conversation_of(marked, tools, consecutive_roles)


def _message(given: Any) -> Marked:
    """The message as a template takes it, and whether it is trained."""
    if not isinstance(given, dict) or "role" not in given or given.get("function_call"):
        raise RecordRefused("bad_message_keys")
    if not isinstance(given["role"], str) or given["role"] not in ROLES:
        raise RecordRefused("unknown_role")
    flag = trained_flag(given)
    message = {key: value for key, value in given.items() if key not in _FLAGS}
    if isinstance(message.get("content"), list):
        message |= _joined(message["content"])
    content, calls = message.get("content"), message.get("tool_calls")
    if calls:
        if given["role"] != "assistant":
            raise RecordRefused("bad_message_keys")
        message["tool_calls"] = calls_of(calls)
    if not isinstance(content, str) and not (content is None and calls):
        raise RecordRefused("content_not_text")
    return message, flag


def _joined(parts: Sequence[Any]) -> Message:
    """What a list of parts says, as keys of its message: texts, reasoning and calls."""
    found: dict[str, list[Any]] = {"text": [], "reasoning": [], "tool_call": []}
    for part in parts:
        if not isinstance(part, dict) or len(part) != 2 or part.get("type") not in tuple(found):
            raise RecordRefused("content_not_text")
        found[part["type"]].append(part.get("text", part.get("value")))
    if not all(isinstance(text, str) for text in found["text"] + found["reasoning"]):
        raise RecordRefused("content_not_text")
    message: Message = {"content": "".join(found["text"])}
    if found["reasoning"]:
        message["reasoning_content"] = "".join(found["reasoning"])
    if found["tool_call"]:
        message["tool_calls"] = [call for value in found["tool_call"] for call in calls_of(value)]
    return message


def _look_at_answers(messages: Iterable[Message]) -> None:
    """RecordRefused where the result of a tool names a call that none of the messages before it holds."""
    known: list[Any] = []
    for message in messages:
        known += [call.get("id") for call in message.get("tool_calls") or ()]
        answered = message.get("tool_call_id") if message["role"] == "tool" else None
        if answered is not None and answered not in known:
            raise RecordRefused("unknown_tool_call")


SHAPE = Shape(
    name="openai",
    gives=Conversation,
    fields=("messages",),
    optional=("tools",),
    structured=("messages", "tools"),
    options=("consecutive_roles", "nulls"),
    also_called={"messages": ("conversations", "conversation", "dialogue", "dialog")},
    guess=lambda *_: TRIES,
    read=read,
)

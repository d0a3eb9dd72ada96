"""What a recipe may have done to messages before they are judged: those of one role in a row merged, nulls taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdsmix.record import Message

TRIES: tuple[dict[str, Any], ...] = (
    {"consecutive_roles": "merge"},
    {"nulls": "drop"},
    {"consecutive_roles": "merge", "nulls": "drop"},
)
"The options of which `mdsmix init` tries whether they let records be read."
BETWEEN = "\n\n"
"What stands between the texts of messages that are merged."


def merged(
    messages: Sequence[Message], trained: Sequence[bool], apart: Sequence[str] = ("tool",)
) -> tuple[list[Message], list[bool]]:
    """Messages of one role in a row as one, where both are trained or neither is and they hold nothing but texts and calls.

    Args:
        apart: roles whose messages are not merged: two calls have two results.
    """
    found: list[Message] = []
    flags: list[bool] = []
    for message, flag in zip(messages, trained, strict=True):
        is_next = found and flags[-1] == flag and message["role"] not in apart
        both = _both(found[-1], message) if is_next else None
        if both is None:
            found.append(message)
            flags.append(flag)
        else:
            found[-1] = both
    return found, flags


def _both(one: Message, other: Message) -> Message | None:
    """Two messages as one; None where they differ in their roles or hold what cannot be joined."""
    joined = {"role", "content", "tool_calls"}.issuperset((*one, *other))
    if one["role"] != other["role"] or not joined or one.get("tool_calls"):
        return None
    texts = [m["content"] for m in (one, other) if m.get("content")]
    calls = {"tool_calls": other["tool_calls"]} if other.get("tool_calls") else {}
    return {"role": one["role"], "content": BETWEEN.join(texts), **calls}


def holds_null(value: Any) -> bool:
    """Whether an object in the value has a null entry, at any depth; content that is null beside calls is none."""
    if isinstance(value, dict):
        return any(
            holds_null(inner) if inner is not None else key != "content"
            for key, inner in value.items()
        )
    return isinstance(value, list) and any(map(holds_null, value))


def without_nulls(value: Any) -> Any:
    """The value without the null entries of its objects, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value

"""`{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...], "system": "...", "tools": "[...]"}`.

`tags` renames keys and roles, in the words of LLaMA-Factory's dataset_info.json. The value under `function_call` is a call or
several, as JSON: `{"name": ..., "arguments": ...}`. What a function gave stands under `observation`, or `tool`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdsmix.record import Conversation
from mdsmix.shapes.base import Fault, Fields, Shape, refusing
from mdsmix.shapes.calls import calls_of
from mdsmix.shapes.talks import (
    PARTLY_KEYS,
    TRAIN_KEYS,
    Marked,
    conversation_of,
    list_of,
    system_of,
    tools_for,
    trained_flag,
)

TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
"The words of LLaMA-Factory's dataset_info.json, and what they stand for where `tags` does not say."
KEY_TAGS = ("role_tag", "content_tag")
"Those that name keys; the others name roles."
ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "system_tag": "system",
}


@refusing
def read(
    record: Any,
    fields: Fields,
    tags: Mapping[str, str] | None = None,
    consecutive_roles: str = "reject",
    nulls: str = "keep",
) -> Conversation:
    words = {**TAGS, **(tags or {})}
    roles = {"tool": "tool"} | {words[tag]: role for tag, role in ROLES.items()}
    items = list_of(record, fields, "conversations", nulls)
    marked = system_of(record, fields) + [_message(item, words, roles) for item in items]
    tools = tools_for(record, fields, nulls, [message for message, _ in marked])
    return conversation_of(marked, tools, consecutive_roles)


def _message(item: Any, words: Mapping[str, str], roles: Mapping[str, str]) -> Marked:
    said, value = words["role_tag"], words["content_tag"]
    if not isinstance(item, dict) or not item.keys() >= {said, value}:
        raise Fault("bad_message_keys")
    name, content, flag = item[said], item[value], trained_flag(item)
    known = (said, value, *TRAIN_KEYS, *PARTLY_KEYS)
    more = {key: inner for key, inner in item.items() if key not in known and inner is not None}
    if name == words["function_tag"]:
        calls = calls_of(content)
        return {**more, "role": "assistant", "content": "", "tool_calls": calls}, flag
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise Fault("unknown_role")
    if not isinstance(content, str):
        raise Fault("content_not_text")
    if role == "assistant" and not content:
        raise Fault("empty_answer")
    return {**more, "role": role, "content": content}, flag


SHAPE = Shape(
    name="sharegpt",
    gives=Conversation,
    fields=("conversations",),
    optional=("system", "tools"),
    structured=("conversations", "tools"),
    options=("tags", "consecutive_roles", "nulls"),
    read=read,
)

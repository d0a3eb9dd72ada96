"""`{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...], "system": "...", "tools": "[...]"}`.

A system message in the list is taken, as LLaMA-Factory takes it, and the field `system` is not read; `consecutive_roles: merge`
joins both. `tags` renames keys and roles, in the words of LLaMA-Factory's dataset_info.json. The value under `function_call` is a call or
several, as JSON: `{"name": ..., "arguments": ...}`. What a function gave stands under `observation`, or `tool`.

LLaVA and the finetuning scripts of Qwen2.5-VL and Qwen3-VL write these messages with `image` beside them, a path or a list of paths, and
`<image>` in a text for each; a record without is one of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mdsmix.record import Conversation
from mdsmix.shapes.conversation_rules import (
    PARTLY_KEYS,
    TRAIN_KEYS,
    TRIES,
    Marked,
    calls_of,
    conversation_of,
    list_of,
    system_of,
    tools_for,
    trained_flag,
)
from mdsmix.shapes.shape import Fields, RecordRefused, Shape, refusing

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
WORDS = {
    **dict.fromkeys(("human", "user", "User", "prompter", "question", "instruction"), "user_tag"),
    **dict.fromkeys(
        ("gpt", "assistant", "Assistant", "bot", "chatgpt", "model", "answer"), "assistant_tag"
    ),
    **dict.fromkeys(
        ("observation", "tool", "tool_response", "function_response"), "observation_tag"
    ),
    **dict.fromkeys(("function_call", "tool_call"), "function_tag"),
    **dict.fromkeys(("system", "System"), "system_tag"),
}
"What roles are called in data that people have -> the tag that it then is."
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
    marked = [_message(item, words, roles) for item in items]
    has_system = bool(marked) and marked[0][0]["role"] == "system"
    if consecutive_roles == "merge" or not has_system:
        marked = system_of(record, fields) + marked
    tools = tools_for(record, fields, nulls, [message for message, _ in marked])
    return conversation_of(marked, tools, consecutive_roles)


def _message(item: Any, words: Mapping[str, str], roles: Mapping[str, str]) -> Marked:
    said, value = words["role_tag"], words["content_tag"]
    if not isinstance(item, dict) or not item.keys() >= {said, value}:
        raise RecordRefused("bad_message_keys")
    name, content, flag = item[said], item[value], trained_flag(item)
    known = (said, value, *TRAIN_KEYS, *PARTLY_KEYS)
    more = {key: inner for key, inner in item.items() if key not in known and inner is not None}
    if name == words["function_tag"]:
        calls = calls_of(content)
        return {**more, "role": "assistant", "content": "", "tool_calls": calls}, flag
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise RecordRefused("unknown_role")
    if not isinstance(content, str):
        raise RecordRefused("content_not_text")
    return {**more, "role": role, "content": content}, flag


def guess(records: Sequence[Any], fields: Fields) -> Iterator[dict[str, Any]]:
    """Roles merged, nulls dropped, and the `tags` that the messages show: the key under which just known words for roles stand, the other one, and these words."""
    yield from TRIES
    messages = [m for record in records for m in _listed(record, fields) if isinstance(m, dict)]
    for key in dict.fromkeys(key for message in messages for key in message):
        said = {word for message in messages if isinstance(word := message.get(key), str)}
        others = {k for m in messages for k, v in m.items() if k != key and isinstance(v, str)}
        if said and said <= WORDS.keys() and len(others) == 1:
            words = {"role_tag": key, "content_tag": others.pop()}
            words |= {WORDS[word]: word for word in sorted(said)}
            tags = {"tags": {tag: word for tag, word in words.items() if TAGS[tag] != word}}
            yield from (tags | tried for tried in ({}, *TRIES))


def _listed(record: Any, fields: Fields) -> list[Any]:
    found = record.get(fields["conversations"]) if isinstance(record, dict) else None
    return found if isinstance(found, list) else []


SHAREGPT = Shape(
    name="sharegpt",
    gives=Conversation,
    fields=("conversations",),
    optional=("system", "tools"),
    structured=("conversations", "tools"),
    options=("tags", "consecutive_roles", "nulls"),
    also_called={
        "conversations": ("conversation", "messages", "chat", "turns", "dialogue", "dialog")
    },
    guess=guess,
    read=read,
)
LLAVA = replace(
    SHAREGPT,
    name="llava",
    optional=("system",),
    structured=("conversations",),
    has_images="beside",
    also_called={},
    guess=lambda *_: (),
)

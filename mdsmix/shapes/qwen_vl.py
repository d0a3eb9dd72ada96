"""`{"conversations": [{"from": "user", "value": "Picture 1: <img>a.jpg</img>\\nWhat is it?"}, {"from": "assistant", "value":
"..."}]}`, as Qwen-VL's finetuning reads it, or the same as `input` and `output`.

The path stands in the text, where Qwen-VL itself hands it to the tokenizer (its issue 147). Here an image takes its place;
what stands around it, `Picture 1: ` too, is text.
"""

from __future__ import annotations

import re
from typing import Any

from mdsmix.record import Conversation, Message
from mdsmix.shapes.conversation_rules import (
    Marked,
    conversation_of,
    list_of,
    system_of,
    trained_flag,
)
from mdsmix.shapes.image_parts import PLACEHOLDER, image_of, placed
from mdsmix.shapes.shape import Fields, RecordRefused, Shape, refusing

_TAGGED = re.compile(r"<img>(.*?)</img>", re.DOTALL)
_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt"), "assistant"),
    "system": "system",
}


@refusing
def read(
    record: Any, fields: Fields, consecutive_roles: str = "reject", nulls: str = "keep"
) -> Conversation:
    if fields["conversations"] in record:
        items = list_of(record, fields, "conversations", nulls)
    else:
        items = [
            _said("user", record, fields, "input"),
            _said("assistant", record, fields, "output"),
        ]
    marked = system_of(record, fields) + [_message(item) for item in items]
    conversation = conversation_of(marked, None, consecutive_roles)
    return _with_images(conversation)


def _said(role: str, record: Any, fields: Fields, key: str) -> Message:
    if key not in fields or fields[key] not in record:
        raise RecordRefused("missing_field")
    return {"from": role, "value": record[fields[key]]}


def _message(item: Any) -> Marked:
    if not isinstance(item, dict) or not item.keys() >= {"from", "value"}:
        raise RecordRefused("bad_message_keys")
    role = _ROLES.get(item["from"]) if isinstance(item["from"], str) else None
    if role is None:
        raise RecordRefused("unknown_role")
    if not isinstance(item["value"], str):
        raise RecordRefused("content_not_text")
    return {"role": role, "content": item["value"]}, trained_flag(item)


def _with_images(conversation: Conversation) -> Conversation:
    """With an image for each path between tags; a tag without its other half is text that nobody meant."""
    mark = PLACEHOLDER
    while mark in conversation.said:
        mark = f"\0{mark}"
    found, messages = list[str | bytes](), list[Message]()
    for message in conversation.messages:
        found += [image_of(path.strip()) for path in _TAGGED.findall(message["content"])]
        content = _TAGGED.sub(lambda _: mark, message["content"])
        if "<img>" in content or "</img>" in content:
            raise RecordRefused("bad_image", why="a tag <img> or </img> is without its other half")
        messages.append(message | {"content": content})
    return placed(conversation._replace(messages=messages), found, mark)


SHAPE = Shape(
    name="qwen_vl",
    gives=Conversation,
    fields=("conversations",),
    optional=("input", "output", "system"),
    structured=("conversations",),
    options=("consecutive_roles", "nulls"),
    has_images="inside",
    read=read,
)

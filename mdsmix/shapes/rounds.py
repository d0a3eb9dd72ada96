"""`{"conversation": [{"human": "...", "assistant": "..."}, ...], "system": "..."}`: question and answer in one object, as
ms-swift reads ShareGPT."""

from __future__ import annotations

from typing import Any

from mdsmix.record import Conversation, Message
from mdsmix.shapes.alpaca import exchange
from mdsmix.shapes.base import Fault, Fields, Shape, refusing
from mdsmix.shapes.talks import conversation_of, list_of, system_of


@refusing
def read(record: Any, fields: Fields) -> Conversation:
    said = list_of(record, fields, "conversation", nulls="keep")
    messages = [message for each in said for message in _exchange(each)]
    marked = [*system_of(record, fields), *((message, None) for message in messages)]
    return conversation_of(marked, None, "reject")


def _exchange(each: Any) -> list[Message]:
    if not isinstance(each, dict) or set(each) != {"human", "assistant"}:
        raise Fault("bad_message_keys")
    if not all(isinstance(text, str) for text in each.values()):
        raise Fault("content_not_text")
    return exchange(each["human"], each["assistant"])


SHAPE = Shape(
    name="rounds",
    gives=Conversation,
    fields=("conversation",),
    optional=("system",),
    structured=("conversation",),
    also_called={"conversation": ("conversations", "history", "dialogue")},
    read=read,
)

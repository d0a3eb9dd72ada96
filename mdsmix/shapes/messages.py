"""`{"messages": [{"role": "user", "content": "..."}, ...]}`, by LLM-Foundry's strict rules.

Source: `_validate_chat_formatted_example` of llmfoundry/data/finetuning/tasks.py: two messages or more, each of exactly
`role` and `content`, no role twice in a row, the last one the assistant's.
"""

from __future__ import annotations

from typing import Any

from mdsmix.record import Conversation, is_encodable
from mdsmix.shapes.conversation_rules import ROLES, TRIES, merged, roles_fault, without_nulls
from mdsmix.shapes.fields import missing
from mdsmix.shapes.shape import Fields, Shape, refusing


@refusing
def read(
    record: Any, fields: Fields, consecutive_roles: str = "reject", nulls: str = "keep"
) -> Conversation | str:
    if fields["messages"] not in record:
        return missing(fields["messages"])
    messages = record[fields["messages"]]
    if nulls == "drop":
        messages = without_nulls(messages, nulls)
    if consecutive_roles == "merge" and isinstance(messages, list):
        if fault := next(filter(None, map(_message_fault, messages)), None):
            return fault
        messages, _ = merged(messages, [True] * len(messages), apart=())
    if fault := conversation_fault(messages):
        return fault
    if not is_encodable("\n".join([message["content"] for message in messages])):
        return "lone_surrogate"
    return Conversation(messages)


def conversation_fault(messages: Any) -> str | None:
    """The reason code of the first rule of Foundry's that `messages` breaks; None for a valid conversation.

    A valid conversation is seen from its sets of types and its tuple of roles, which few corpora have many of: 1 us,
    where looking at message by message took 4.
    """
    if not isinstance(messages, list):
        return "messages_not_a_list"
    if len(messages) < 2:
        return "too_few_messages" if messages else "no_messages"
    try:
        contents = {type(message["content"]) for message in messages}
        if (
            set(map(len, messages)) == {2}
            and set(map(type, messages)) == {dict}
            and contents == {str}
        ):
            return roles_fault(tuple([message["role"] for message in messages]))
    except (KeyError, TypeError):
        pass
    return next(filter(None, map(_message_fault, messages)), None)


def _message_fault(message: Any) -> str | None:
    if not isinstance(message, dict) or len(message) != 2:
        return "bad_message_keys"
    if "role" not in message or "content" not in message:
        return "bad_message_keys"
    if not isinstance(message["role"], str) or message["role"] not in ROLES:
        return "unknown_role"
    if not isinstance(message["content"], str):
        return "content_not_text"
    return None


SHAPE = Shape(
    name="messages",
    gives=Conversation,
    fields=("messages",),
    structured=("messages",),
    options=("consecutive_roles", "nulls"),
    also_called={"messages": ("conversations", "conversation", "dialogue", "dialog")},
    guess=lambda *_: TRIES,
    read=read,
)

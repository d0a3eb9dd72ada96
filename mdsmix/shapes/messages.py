"""`{"messages": [{"role": "user", "content": "..."}, ...]}`, by LLM-Foundry's strict rules, or as OpenAI's interfaces write it.

LLM-Foundry's rules, from `_validate_chat_formatted_example` of llmfoundry/data/finetuning/tasks.py: two messages or more, each with
exactly `role` and `content`, no role twice in a row, the last message the assistant's.

OpenAI's records have `tools` beside the messages, and messages with calls, names and flags. Messages go to the chat template as they are,
with two exceptions: `weight` and its like, which say whether a message is trained, are taken out, and the texts of content in parts are
joined.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from mdsmix.record import Conversation, Message, RecordRefused, is_encodable
from mdsmix.shapes.conversation_rules import (
    ROLES,
    TRIES,
    calls_of,
    conversation_of,
    joined_parts,
    list_of,
    merged,
    roles_fault,
)
from mdsmix.shapes.shape import Fields, RawRecord, Shape, are_texts


def parse_messages(raw: RawRecord) -> Conversation:
    messages = list_of(raw, "messages")
    for message in messages:
        if type(message) is not dict or message.keys() != {"role", "content"}:
            raise RecordRefused("bad_message_keys")
        if message["role"] not in ROLES:
            raise RecordRefused("unknown_role")
        if type(message["content"]) is not str:
            raise RecordRefused("content_not_text")
    if raw.merges:
        messages, _ = merged(messages, [True] * len(messages), apart="")
    if fault := roles_fault(tuple([message["role"] for message in messages])):
        raise RecordRefused(fault)
    if not is_encodable("\n".join([message["content"] for message in messages])):
        raise RecordRefused("lone_surrogate")
    return Conversation(messages)


def _plain(records: Sequence[Any], fields: Fields) -> list[Any] | None:
    """The records as conversations, where none breaks a rule of Foundry's; else None."""
    lists = [record[fields["messages"]] for record in records]
    messages = [*chain.from_iterable(lists)]
    said = [message["content"] for message in messages]
    roles = iter([message["role"] for message in messages])
    faults = {*map(roles_fault, {tuple(islice(roles, len(each))) for each in lists})}
    is_plain = faults == {None} and {*map(len, messages)} == {2} and are_texts(said)
    return [*map(Conversation, lists)] if is_plain else None


def parse_openai(raw: RawRecord) -> Conversation:
    messages = [_message(message) for message in list_of(raw, "messages")]
    known = [None, *(call.get("id") for m in messages for call in m.get("tool_calls") or ())]
    if any(m["role"] == "tool" and m.get("tool_call_id") not in known for m in messages):
        raise RecordRefused("unknown_tool_call")
    return conversation_of(raw, messages)


def _message(given: Any) -> Message:
    """The message as a template takes it."""
    if not isinstance(given, dict) or "role" not in given or given.get("function_call"):
        raise RecordRefused("bad_message_keys")
    if given["role"] not in (*ROLES, "developer"):
        raise RecordRefused("unknown_role")
    message, content, calls = {**given}, given.get("content"), given.get("tool_calls")
    if isinstance(content, list):
        message["content"] = content = joined_parts(content)
    if calls:
        if message["role"] != "assistant":
            raise RecordRefused("bad_message_keys")
        message["tool_calls"] = calls_of(calls)
    if not isinstance(content, str) and not (content is None and calls):
        raise RecordRefused("content_not_text")
    return message


MESSAGES = Shape(
    name="messages",
    gives=Conversation,
    fields=("messages",),
    structured=("messages",),
    options=("consecutive_roles", "nulls"),
    also_called={"messages": ("conversations", "conversation", "dialogue", "dialog")},
    guess=lambda *_: TRIES,
    plain=_plain,
    parse=parse_messages,
)
OPENAI = replace(
    MESSAGES,
    name="openai",
    optional=("tools",),
    structured=("messages", "tools"),
    parse=parse_openai,
    plain=None,
)

"""What shapes of conversations with tools share: which messages are trained, and what holds of them together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from mdsmix.record import Conversation, Message, RichConversation, is_encodable
from mdsmix.shapes.base import ABSENT, Fault, Fields, is_deep, text_of, value_of
from mdsmix.shapes.calls import tools_of
from mdsmix.shapes.fields import missing
from mdsmix.shapes.merging import merged, without_nulls
from mdsmix.shapes.messages import roles_fault

TRAIN_KEYS = ("train", "weight", "loss", "loss_weight")
"Keys of a message that say whether it is trained, by true and false or 1 and 0."
PARTLY_KEYS = ("train_detail", "loss_scale")
"Keys that train a part of a message or weigh it, which no labels of LLM-Foundry's loader can say."
PLAIN_ROLES = frozenset({"system", "user", "assistant"})
Marked = tuple[Message, bool | None]
"A message, and whether it is trained; None where the record does not say."


def conversation_of(
    marked: Iterable[Marked], tools: list[Message] | None, consecutive_roles: str
) -> Conversation:
    """The conversation of messages in the form of chat templates; Fault where something is wrong with them together."""
    pairs = list(marked)
    if any(flag and message["role"] != "assistant" for message, flag in pairs):
        raise Fault("trained_prompt")
    messages, trained = [m for m, _ in pairs], [flag is not False for _, flag in pairs]
    if consecutive_roles == "merge":
        messages, trained = merged(messages, trained)
    if any(
        m["role"] == "assistant" and not (m.get("content") or m.get("tool_calls")) for m in messages
    ):
        raise Fault("empty_answer")
    if fault := order_fault(messages):
        raise Fault(fault)
    is_plain = tools is None and all(map(_is_plain, messages))
    kind = Conversation if is_plain else RichConversation
    found = kind(messages, None if all(trained) else trained, tools)
    if not is_encodable(found.said):
        raise Fault("lone_surrogate")
    return found


def _is_plain(message: Message) -> bool:
    """Whether any template takes the message as it is: a text of one of the roles that all of them know."""
    is_text = len(message) == 2 and isinstance(message.get("content"), str)
    return is_text and message["role"] in PLAIN_ROLES


def list_of(record: Any, fields: Fields, key: str, nulls: str) -> list[Any]:
    """The list that holds the messages of a record."""
    found = value_of(record, fields[key])
    if not isinstance(found, list):
        raise Fault(missing(fields[key]) if found is ABSENT else "messages_not_a_list")
    messages: list[Any] = _readable(found, nulls)
    return messages


def tools_for(
    record: Any, fields: Fields, nulls: str, messages: Iterable[Message]
) -> list[Message] | None:
    """The tools of a record, None where it has none; Fault where its messages call some all the same."""
    if "tools" not in fields:
        return None
    given = value_of(record, fields["tools"])
    tools = tools_of(_readable(given, nulls))
    if tools is None and any(message.get("tool_calls") for message in messages):
        raise Fault("missing_tools")
    return tools


def _readable(value: Any, nulls: str) -> Any:
    """The value without what `nulls: drop` takes out; Fault where it is nested too deep to be followed."""
    if is_deep(value):
        raise Fault("too_deep")
    return without_nulls(value) if nulls == "drop" else value


def system_of(record: Any, fields: Fields) -> list[Marked]:
    """The message that the field `system` holds, if it holds one."""
    if "system" not in fields or value_of(record, fields["system"]) in (None, ABSENT, ""):
        return []
    text, fault = text_of(record, fields["system"])
    if fault:
        raise Fault(fault)
    return [({"role": "system", "content": text}, None)]


def trained_flag(message: Message) -> bool | None:
    """Whether the message says that it is trained, None where it does not say; Fault (bad_weight)."""
    given = [message[key] for key in TRAIN_KEYS if message.get(key) is not None]
    is_partly = any(message.get(key) is not None for key in PARTLY_KEYS)
    if is_partly or any(value not in (0, 1) or value != given[0] for value in given):
        raise Fault("bad_weight")
    return bool(given[0]) if given else None


def order_fault(messages: Sequence[Message]) -> str | None:
    """The reason code of messages out of order: LLM-Foundry's rules, but that several results of tools may follow a call."""
    if len(messages) < 2:
        return "too_few_messages" if messages else "no_messages"
    roles = ["system" if m["role"] == "developer" else m["role"] for m in messages]
    runs = ((role, len(list(run))) for role, run in groupby(roles))
    counts = ((role, 1 if role == "tool" else count) for role, count in runs)
    return roles_fault(tuple(role for role, count in counts for _ in range(count)))

"""What shapes of conversations share: the order of roles, messages merged, nulls dropped, flags of training, tools and calls of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NoReturn

from mdsmix.record import Conversation, Message, RichConversation, is_encodable
from mdsmix.shapes.fields import missing
from mdsmix.shapes.shape import Fields, RecordRefused, text_of, value_of

TRAIN_KEYS = ("train", "weight", "loss", "loss_weight")
"Keys of a message that say whether it is trained, by true and false or 1 and 0."
PARTLY_KEYS = ("train_detail", "loss_scale")
"Keys that train a part of a message or weigh it, which no labels of LLM-Foundry's loader can say."
ROLES = frozenset({"user", "assistant", "system", "tool"})
"Those that LLM-Foundry takes."
PLAIN_ROLES = ROLES - {"tool"}
BETWEEN = "\n\n"
"What stands between the texts of messages that are merged."
MOST_LEVELS = 200
"Of lists and objects inside one another in messages and tools: templates and Python itself follow some 900."
TRIES: tuple[dict[str, Any], ...] = (
    {"consecutive_roles": "merge"},
    {"nulls": "drop"},
    {"consecutive_roles": "merge", "nulls": "drop"},
)
"The options of which `mdsmix init` tries whether they let records be read."
Marked = tuple[Message, bool | None]
"A message, and whether it is trained; None where the record does not say."


def conversation_of(
    marked: Sequence[Marked], tools: list[Message] | None, consecutive_roles: str
) -> Conversation:
    """The conversation of messages in the form of chat templates; RecordRefused where something is wrong with them together."""
    if any(flag and message["role"] != "assistant" for message, flag in marked):
        raise RecordRefused("trained_prompt")
    messages, trained = [m for m, _ in marked], [flag is not False for _, flag in marked]
    if consecutive_roles == "merge":
        messages, trained = merged(messages, trained)
    answers = (message for message in messages if message["role"] == "assistant")
    if not all(message.get("content") or message.get("tool_calls") for message in answers):
        raise RecordRefused("empty_answer")
    if fault := _order_fault(messages):
        raise RecordRefused(fault)
    is_plain = tools is None and all(map(_is_plain, messages))
    kind = Conversation if is_plain else RichConversation
    conversation = kind(messages, None if all(trained) else trained, tools)
    if not is_encodable(conversation.said):
        raise RecordRefused("lone_surrogate")
    return conversation


def _is_plain(message: Message) -> bool:
    """Whether any template takes the message as it is: a text of one of the roles that all of them know."""
    is_text = len(message) == 2 and isinstance(message.get("content"), str)
    return is_text and message["role"] in PLAIN_ROLES


def _order_fault(messages: Sequence[Message]) -> str | None:
    """The reason code of messages out of order: LLM-Foundry's rules, but that several results of tools may follow a call."""
    if len(messages) < 2:
        return "too_few_messages" if messages else "no_messages"
    roles = ["system" if m["role"] == "developer" else m["role"] for m in messages]
    runs = ([role] if role == "tool" else list(run) for role, run in groupby(roles))
    return roles_fault(tuple(role for run in runs for role in run))


@lru_cache(maxsize=4096)
def roles_fault(roles: tuple[Any, ...]) -> str | None:
    """The reason code of roles that LLM-Foundry does not take in this order."""
    if not ROLES.issuperset(roles):
        return "unknown_role"
    if any(one == other for one, other in pairwise(roles)):
        return "repeated_role"
    if roles[-1] != "assistant":
        return "last_not_assistant"
    # Foundry renders what stands before each answer; transformers cannot render nothing.
    return "starts_with_assistant" if roles[0] == "assistant" else None


def list_of(record: Any, fields: Fields, key: str, nulls: str) -> list[Any]:
    """The list that holds the messages of a record."""
    name = fields[key]
    if name not in record:
        raise RecordRefused(missing(name))
    if not isinstance(record[name], list):
        raise RecordRefused("messages_not_a_list")
    messages: list[Any] = without_nulls(record[name], nulls)
    return messages


def without_nulls(value: Any, nulls: str) -> Any:
    """The value, under `nulls: drop` without the null entries of its objects; RecordRefused where it is nested too deep to be followed."""
    if _is_deep(value):
        raise RecordRefused("too_deep")
    return _not_null(value) if nulls == "drop" else value


def _not_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _not_null(inner) for key, inner in value.items() if inner is not None}
    return [_not_null(inner) for inner in value] if isinstance(value, list) else value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def holds_null(value: Any) -> bool:
    """Whether an object in the value has a null entry, at any depth; content that is null beside calls is none."""
    if isinstance(value, dict):
        entries = value.items()
        return any(key != "content" if v is None else holds_null(v) for key, v in entries)
    return isinstance(value, list) and any(map(holds_null, value))


def merged(
    messages: Sequence[Message], trained: Sequence[bool], apart: Sequence[str] = ("tool",)
) -> tuple[list[Message], list[bool]]:
    """Messages of one role in a row as one, where both are trained or neither is and they hold nothing but texts and calls.

    Args:
        apart: roles whose messages are not merged: two calls have two results.
    """
    joined, flags = list[Message](), list[bool]()
    for message, flag in zip(messages, trained, strict=True):
        is_next = joined and flags[-1] == flag and message["role"] not in apart
        if is_next and (both := _both(joined[-1], message)):
            joined[-1] = both
        else:
            joined.append(message)
            flags.append(flag)
    return joined, flags


def _both(one: Message, other: Message) -> Message | None:
    """Two messages as one; None where they differ in their roles or hold what cannot be joined."""
    is_known = {"role", "content", "tool_calls"}.issuperset((*one, *other))
    if one["role"] != other["role"] or not is_known or one.get("tool_calls"):
        return None
    texts = [m["content"] for m in (one, other) if m.get("content")]
    calls = {"tool_calls": other["tool_calls"]} if other.get("tool_calls") else {}
    return {"role": one["role"], "content": BETWEEN.join(texts), **calls}


def system_of(record: Any, fields: Fields) -> list[Marked]:
    """The message that the field `system` holds, if it holds one."""
    if value_of(record, fields, "system") in (None, ""):
        return []
    return [({"role": "system", "content": text_of(record, fields["system"])}, None)]


def exchange(question: str, answer: str) -> list[Message]:
    """One question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def trained_flag(message: Message) -> bool | None:
    """Whether the message says that it is trained, None where it does not say; RecordRefused (bad_weight)."""
    given = [message[key] for key in TRAIN_KEYS if message.get(key) is not None]
    is_partly = any(message.get(key) is not None for key in PARTLY_KEYS)
    if is_partly or any(value not in (0, 1) or value != given[0] for value in given):
        raise RecordRefused("bad_weight")
    return bool(given[0]) if given else None


def tools_for(
    record: Any, fields: Fields, nulls: str, messages: Iterable[Message]
) -> list[Message] | None:
    """The tools of a record, None where it has none; RecordRefused where its messages call some all the same.

    A tool, and a call too, that is bare is put into `{"type": "function", "function": ...}`, the form of chat templates. Arguments stay as
    they are, text or object: which of the two a template takes, the encoder finds out.
    """
    if "tools" not in fields:
        return None
    value = without_nulls(value_of(record, fields, "tools"), nulls)
    tools = from_json(value) if isinstance(value, str) and value else value or []
    if not isinstance(tools, list):
        raise RecordRefused("bad_tools")
    if not tools and any(message.get("tool_calls") for message in messages):
        raise RecordRefused("missing_tools")
    return [wrapped(tool, "bad_tools") for tool in tools] or None


def calls_of(value: Any) -> list[Message]:
    """The calls that `value` holds, in the form of a message's `tool_calls`.

    Args:
        value: a call or a list of them, as JSON text or decoded: `{"name": ..., "arguments": ...}`, or that inside `function`.

    Raises:
        RecordRefused: a call has no name (bad_tool_call), or its arguments are no JSON object (arguments_not_json).
    """
    value = from_json(value) if isinstance(value, str) else value
    calls = [wrapped(x, "bad_tool_call") for x in (value if isinstance(value, list) else [value])]
    if not calls:
        raise RecordRefused("bad_tool_call")
    for call in calls:
        arguments = call["function"].get("arguments")
        arguments = from_json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            raise RecordRefused("arguments_not_json")
    return calls


def wrapped(given: Any, reason: str) -> Message:
    """A tool or a call inside `function`; RecordRefused where it has no name."""
    if not isinstance(given, dict):
        raise RecordRefused(reason)
    function = given.get("function")
    named = given if function is None else function
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise RecordRefused(reason)
    if function is not None:
        return dict(given)
    inside = {key: value for key, value in given.items() if key not in ("type", "id", "function")}
    outside = {"id": given["id"]} if "id" in given else {}
    return {**outside, "type": "function", "function": inside}


def from_json(text: str) -> Any:
    """The JSON value of a text; None where it is none, RecordRefused where it is nested too deep to be followed.

    Python's reader keeps whole numbers of any size.
    """
    try:
        return without_nulls(json.loads(text, parse_constant=_refuse), "keep")
    except ValueError:
        return None
    except RecursionError:
        raise RecordRefused("too_deep") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")

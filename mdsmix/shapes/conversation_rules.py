"""What shapes of conversations share: the order of roles, messages merged, nulls dropped, flags of training, tools and calls of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn

from mdsmix.record import Conversation, Message, RecordRefused, RichConversation, is_encodable
from mdsmix.shapes.shape import Fields, text_of, value_of

TRAIN_KEYS = ("train", "weight", "loss", "loss_weight")
"Keys of a message that say whether it is trained, by true and false or 1 and 0."
PARTLY_KEYS = ("train_detail", "loss_scale")
"Keys that train a part of a message or weigh it, which no labels of LLM-Foundry's loader can say."
FLAGS = frozenset((*TRAIN_KEYS, *PARTLY_KEYS))
ROLES = ("user", "assistant", "system", "tool")
"Those that LLM-Foundry takes."
PLAIN_ROLES = ROLES[:3]
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


def conversation_of(
    record: Any,
    fields: Fields,
    said: Sequence[Message],
    consecutive_roles: str = "reject",
    nulls: str = "keep",
) -> Conversation:
    """The conversation of messages in the form of chat templates, with the record's tools; RecordRefused where something is wrong with
    them together."""
    trained = [FLAGS.isdisjoint(message) or _is_trained(message) for message in said]
    messages = [
        m if FLAGS.isdisjoint(m) else {key: m[key] for key in m if key not in FLAGS} for m in said
    ]
    tools = _tools_of(record, fields, messages, nulls)
    if consecutive_roles == "merge":
        messages, trained = merged(messages, trained)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not all(message.get("content") or message.get("tool_calls") for message in answers):
        raise RecordRefused("empty_answer")
    roles = ["system" if m["role"] == "developer" else m["role"] for m in messages]
    if fault := roles_fault(tuple(roles), "tool"):
        raise RecordRefused(fault)
    is_plain = tools is None and all(map(_is_plain, messages))
    kind = Conversation if is_plain else RichConversation
    conversation = kind(messages, None if all(trained) else trained, tools)
    if not is_encodable(conversation.said):
        raise RecordRefused("lone_surrogate")
    return conversation


def _is_plain(message: Message) -> bool:
    """Whether any template takes the message as it is: a text of one of the roles that all of them know."""
    return len(message) == 2 and "content" in message and message["role"] in PLAIN_ROLES


@lru_cache(maxsize=4096)
def roles_fault(roles: tuple[Any, ...], repeated: str = "") -> str | None:
    """The reason code of roles that LLM-Foundry does not take in this order. `repeated`: a role that may follow itself all the same."""
    if len(roles) < 2:
        return "too_few_messages" if roles else "no_messages"
    if not {*ROLES}.issuperset(roles):
        return "unknown_role"
    if any(one == other != repeated for one, other in pairwise(roles)):
        return "repeated_role"
    if roles[-1] != "assistant":
        return "last_not_assistant"
    # Foundry renders what stands before each answer; transformers cannot render nothing.
    return "starts_with_assistant" if roles[0] == "assistant" else None


def _is_trained(message: Message) -> bool:
    """Whether the message is trained, by its flags; RecordRefused (bad_weight, trained_prompt)."""
    given = [message[key] for key in TRAIN_KEYS if message.get(key) is not None]
    is_partly = any(message.get(key) is not None for key in PARTLY_KEYS)
    if is_partly or any(value not in (0, 1) or value != given[0] for value in given):
        raise RecordRefused("bad_weight")
    if any(given) and message["role"] != "assistant":
        raise RecordRefused("trained_prompt")
    return all(given)


def list_of(record: Any, fields: Fields, key: str, nulls: str = "keep") -> list[Any]:
    """The list that holds the messages of a record. `nulls`: "" where they hold texts alone, and nothing is to be dropped."""
    name = fields[key]
    if name not in record:
        raise RecordRefused("missing_field", missing=name)
    if not isinstance(messages := record[name], list):
        raise RecordRefused("messages_not_a_list")
    return [without_nulls(message, nulls) for message in messages] if nulls else messages


def without_nulls(value: Any, nulls: str, levels: int = MOST_LEVELS) -> Any:
    """The value, under `nulls: drop` without the null entries of its objects; RecordRefused where it is nested too deep to be followed."""
    if isinstance(value, (dict, list)) and not levels:
        raise RecordRefused("too_deep")
    if isinstance(value, list):
        return [without_nulls(inner, nulls, levels - 1) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: inner if type(inner) is str else without_nulls(inner, nulls, levels - 1)
        for key, inner in value.items()
        if inner is not None or nulls == "keep"
    }


def holds_null(value: Any) -> bool:
    """Whether an object in the value has a null entry, at any depth; content that is null beside calls is none."""
    if isinstance(value, dict):
        entries = value.items()
        return any(key != "content" if v is None else holds_null(v) for key, v in entries)
    return isinstance(value, list) and any(map(holds_null, value))


def merged(
    messages: Sequence[Message], trained: Sequence[bool], apart: str = "tool"
) -> tuple[list[Message], list[bool]]:
    """Messages of one role in a row as one, where both are trained or neither is and they hold nothing but texts and calls.

    Args:
        apart: the role whose messages are not merged: two calls have two results.
    """
    joined, flags = list[Message](), list[bool]()
    for message, flag in zip(messages, trained, strict=True):
        one = joined[-1] if joined and flags[-1] == flag else {}
        keys = {"role", "content", "tool_calls"}.issuperset((*one, *message))
        if one.get("role") == message["role"] != apart and keys and not one.get("tool_calls"):
            texts = [m["content"] for m in (one, message) if m.get("content")]
            joined[-1] = message | {"content": BETWEEN.join(texts)}
        else:
            joined.append(message)
            flags.append(flag)
    return joined, flags


def system_of(record: Any, fields: Fields) -> list[Message]:
    """The message that the field `system` holds, if it holds one."""
    if value_of(record, fields, "system") in (None, ""):
        return []
    return [{"role": "system", "content": text_of(record, fields["system"])}]


def exchange(question: str, answer: str) -> list[Message]:
    """One question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _tools_of(
    record: Any, fields: Fields, messages: Sequence[Message], nulls: str
) -> list[Message] | None:
    """The tools of a record, None where it has none; RecordRefused where its messages call some all the same.

    A tool, and a call too, that is bare is put into `{"type": "function", "function": ...}`, the form of chat templates. Arguments stay as
    they are, text or object: which of the two a template takes, the encoder finds out.
    """
    if "tools" not in fields:
        return None
    tools = _decoded(without_nulls(value_of(record, fields, "tools") or [], nulls))
    if not isinstance(tools, list):
        raise RecordRefused("bad_tools")
    if not tools and any(message.get("tool_calls") for message in messages):
        raise RecordRefused("missing_tools")
    return [_wrapped(tool, "bad_tools") for tool in tools] or None


def joined_parts(parts: Sequence[Any]) -> Message:
    """What a list of parts says, as keys of its message: texts, reasoning and calls."""
    said: dict[str, list[Any]] = {"text": [], "reasoning": [], "tool_call": []}
    for part in parts:
        if not isinstance(part, dict) or len(part) != 2 or part.get("type") not in tuple(said):
            raise RecordRefused("content_not_text")
        kind, value = part["type"], part.get("text", part.get("value"))
        if kind != "tool_call" and not isinstance(value, str):
            raise RecordRefused("content_not_text")
        said[kind] += calls_of(value) if kind == "tool_call" else [value]
    more = {"reasoning_content": "".join(said["reasoning"]), "tool_calls": said["tool_call"]}
    return {"content": "".join(said["text"]), **{key: v for key, v in more.items() if v}}


def calls_of(value: Any) -> list[Message]:
    """The calls that `value` holds, in the form of a message's `tool_calls`.

    Args:
        value: a call or a list of them, as JSON text or decoded: `{"name": ..., "arguments": ...}`, or that inside `function`.

    Raises:
        RecordRefused: a call has no name (bad_tool_call), or its arguments are no JSON object (arguments_not_json).
    """
    value = _decoded(value)
    calls = [_wrapped(x, "bad_tool_call") for x in (value if isinstance(value, list) else [value])]
    if not calls:
        raise RecordRefused("bad_tool_call")
    if not all(isinstance(_decoded(call["function"].get("arguments")), dict) for call in calls):
        raise RecordRefused("arguments_not_json")
    return calls


def _wrapped(given: Any, reason: str) -> Message:
    """A tool or a call inside `function`; RecordRefused where it has no name."""
    if isinstance(given, dict) and given.get("function") is None:
        inside = {key: given[key] for key in given if key not in ("type", "id", "function")}
        outside = {"id": given["id"]} if "id" in given else {}
        given = {**outside, "type": "function", "function": inside}
    match given:
        case {"function": {"name": str()}}:
            return {**given}
    raise RecordRefused(reason)


def _decoded(value: Any) -> Any:
    """The JSON value of a text, None where it is none; what is no text stays. RecordRefused where it is nested too deep to be followed.

    Python's reader keeps whole numbers of any size.
    """
    if not isinstance(value, str):
        return value
    try:
        return without_nulls(json.loads(value, parse_constant=_refuse), "keep")
    except ValueError:
        return None
    except RecursionError:
        raise RecordRefused("too_deep") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")

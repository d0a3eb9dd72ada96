"""Rules that all shapes of conversations share: the order of roles, merged messages, dropped nulls,
marks that decide which messages are trained, tools and calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from mdsmix.json_values import read_exactly
from mdsmix.record import Conversation, Message, RecordRefused, RichConversation, is_encodable
from mdsmix.shapes.shape import RawRecord

CONVERSATION_REASONS = {
    "messages_not_a_list": "The messages are not a list.",
    "no_messages": "The list of messages is empty.",
    "too_few_messages": "There is only one message.",
    "bad_message_keys": (
        "A message lacks a key of its shape or has another one, or a message that is not the "
        "assistant's has a call."
    ),
    "unknown_role": "A message has a role that its shape does not know.",
    "content_not_text": (
        "A message's content is neither text nor anything else that its shape reads."
    ),
    "repeated_role": "Two messages of one role are in a row.",
    "last_not_assistant": "The last message is not the assistant's.",
    "starts_with_assistant": (
        "The first message is the assistant's, and the shape does not take a greeting."
    ),
    "empty_answer": (
        "An answer is empty and calls nothing. The shapes messages and prompt_response do "
        "not check this."
    ),
    "trained_prompt": "A message that is not the assistant's is marked as trained.",
    "bad_weight": (
        "A message's mark (train, weight, loss, loss_weight, loss_mask, ...) is not true, "
        "false, 1 or 0, or two of its marks differ, or only a part of it is weighted."
    ),
    "bad_loss_mask": (
        "The record's loss_mask is not a list with one entry for each message or each "
        "answer; the detail counts them."
    ),
    "bad_tools": "The tools are not a list of objects with a name, nor the JSON text of one.",
    "missing_tools": "Messages call tools, and the field tools does not contain any.",
    "bad_tool_call": "A call has no name, or is not valid JSON.",
    "arguments_not_json": "The arguments of a call are not a JSON object, nor the text of one.",
}
"Reason codes that any shape of conversations may give -> their explanations."

TRAIN_KEYS = (
    *("train", "weight", "loss", "loss_weight"),  # axolotl, OpenAI, ms-swift, LLaMA-Factory
    *("loss_mask", "step_loss_mask", "training", "trainable"),
)
"Marks: keys of a message whose values, true and false or 1 and 0, decide whether it is trained."
MASK = "loss_mask"
"""The field of a record that may contain a list of such marks, one for each message or one for each
answer.
"""
MARK = "train_mark"
"The recipe's option that names one more mark: a key of messages, or a field with a list."
PARTLY_KEYS = ("train_detail", "loss_scale")
"""Keys that select a part of a message for training, or give it a weight. The labels of
LLM-Foundry's loader cannot express either.
"""
FLAGS = frozenset((*TRAIN_KEYS, *PARTLY_KEYS))
"All keys of messages that only concern training. They are removed before a template sees them."
GREETS = "starts_with_assistant"
"The reason code of a conversation that begins with a greeting of the assistant's."
ROLES = ("user", "assistant", "system", "tool")
"Roles that LLM-Foundry takes."
PLAIN_ROLES = ROLES[:3]
"Roles that any template takes."
SCHEMAS = ("input_schema", "inputSchema")
"The keys under which Anthropic and MCP write what chat templates read as a tool's `parameters`."
SEPARATOR = "\n\n"
"The text between the texts of merged messages."
MAX_LEVELS = 200
"""The most levels of nested lists and objects in messages and tools: templates and Python itself
follow some 900.
"""
TRIES: tuple[dict[str, Any], ...] = (
    {"consecutive_roles": "merge"},
    {"nulls": "drop"},
    {"consecutive_roles": "merge", "nulls": "drop"},
)
"The sets of options that `mdsmix init` tries on records that cannot be read without options."


def make_conversation(
    raw: RawRecord, messages: Sequence[Message], leading: int = 0
) -> Conversation:
    """Check messages by the rules of this file, and make a conversation of them, with the tools of
    their record.

    Args:
        raw: the record. Its tools, marks and options are read here.
        messages: all messages, with the keys that chat templates read: `{"role": "user",
            "content": "Hi"}`. Marks are still in them.
        leading: how many of the first messages come from a field of their own, such as `system`,
            not from the list of messages.

    Raises RecordRefused if the messages together break a rule, such as the order of roles.
    """
    # Read the marks, and put calls and tools into the form of chat templates.
    trained = read_trained(raw, messages, leading)
    cleaned = [
        _normalize_own_tools(message) if "tools" in message else message
        for message in remove_marks(raw, messages)
    ]
    tools = _read_tools(raw, cleaned)
    cleaned, trained = _join_parallel_calls(cleaned, trained)
    if raw.merges:
        cleaned, trained = merge_messages(cleaned, trained)
    # Check the answers and the order of roles.
    for message in cleaned:
        is_empty = not (message.get("content") or message.get("tool_calls"))
        if is_empty and message["role"] == "assistant":
            raise RecordRefused("empty_answer")
    roles = ["system" if message["role"] == "developer" else message["role"] for message in cleaned]
    fault = check_roles(tuple(roles), "tool")
    if fault and fault != GREETS:
        raise RecordRefused(fault)
    # Answers before the first question become part of its prompt. Without a question an answer to
    # the system message is trained; the first message of all has no prompt.
    opening = roles.index("user") if "user" in roles else int(fault == GREETS)
    for position in range(opening):
        if roles[position] == "assistant":
            trained[position] = False
    # Build the record.
    is_rich = bool(tools) or any(
        len(message) != 2 or "content" not in message or message["role"] not in PLAIN_ROLES
        for message in cleaned
    )
    record_type = RichConversation if is_rich else Conversation
    conversation = record_type(cleaned, None if all(trained) else trained, tools)
    if not is_encodable(conversation.all_text):
        raise RecordRefused("lone_surrogate")
    return conversation


@lru_cache(maxsize=4096)
def check_roles(roles: tuple[Any, ...], repeatable: str = "") -> str | None:
    """Return the reason code if LLM-Foundry does not take roles in this order; None if it does.

    Args:
        roles: the role of each message, in order.
        repeatable: a role that may follow itself, such as `tool`; empty: none may.
    """
    if len(roles) < 2:
        return "too_few_messages" if roles else "no_messages"
    if not {*ROLES}.issuperset(roles):
        return "unknown_role"
    if any(role == following != repeatable for role, following in pairwise(roles)):
        return "repeated_role"
    if roles[-1] != "assistant":
        return "last_not_assistant"
    # Foundry renders the messages before each answer, and transformers cannot render an empty list.
    return GREETS if roles[0] == "assistant" else None


def read_trained(raw: RawRecord, messages: Sequence[Message], leading: int = 0) -> list[bool]:
    """Return a flag for each message: False if a mark of the message or an entry of the record's
    list of marks excludes it from training.

    Args:
        leading: how many of the first messages come from a field of their own, such as `system`,
            not from the list of messages.

    Raises RecordRefused:
        bad_weight: a mark is neither true nor false, or two marks of a message differ.
        bad_loss_mask: the list does not have one entry for each message or answer.
        trained_prompt: a message that is not the assistant's is marked for training.
    """
    keys = (*TRAIN_KEYS, raw.options[MARK]) if MARK in raw.options else TRAIN_KEYS
    listed_marks = _read_listed_marks(raw, messages, leading)
    if listed_marks:
        return [
            _is_trained(message, keys, mark)
            for message, mark in zip(messages, listed_marks, strict=True)
        ]
    flags = _flag_keys(raw)
    return [flags.isdisjoint(message) or _is_trained(message, keys) for message in messages]


def remove_marks(raw: RawRecord, messages: Sequence[Message]) -> list[Message]:
    """Return the messages without their marks: the keys that decide about training."""
    flags = _flag_keys(raw)
    return [
        message
        if flags.isdisjoint(message)
        else {key: value for key, value in message.items() if key not in flags}
        for message in messages
    ]


def _flag_keys(raw: RawRecord) -> frozenset[str]:
    """Return the keys of messages that only concern training, including the key that the recipe
    names as `train_mark`.
    """
    return FLAGS | {raw.options[MARK]} if MARK in raw.options else FLAGS


def _read_listed_marks(raw: RawRecord, messages: Sequence[Message], leading: int) -> list[Any]:
    """Return the mark of each message in the record's list of marks; None for a message without a
    mark. The result is empty if the record has no such list.
    """
    named = raw.extra(raw.options[MARK]) if MARK in raw.options else None
    values = [raw.extra(MASK), named if isinstance(named, list) else None]
    lists = [decode_json(value) for value in values if value not in (None, "")]
    if not lists:
        return []
    if lists[-1] != lists[0]:
        raise RecordRefused("bad_weight")
    marks = lists[0]  # two lists that are equal count as one
    entries = len(marks) if isinstance(marks, list) else -1  # -1 fits none of the lengths below
    count = len(messages)
    answers = [
        position for position, message in enumerate(messages) if message["role"] == "assistant"
    ]
    # A list has one mark for each listed message, or each message, or each answer.
    for positions in (range(leading, count), range(count), answers):
        if len(positions) == entries:
            mark_at = dict(zip(positions, marks, strict=True))
            return [mark_at.get(position) for position in range(count)]
    raise RecordRefused(
        "bad_loss_mask", entries=max(0, entries), messages=count - leading, answers=len(answers)
    )


def _is_trained(message: Message, keys: Sequence[str], listed_mark: Any = None) -> bool:
    """Check whether a message may be used for training: all its marks are true or 1. A message
    without marks may.

    Raises RecordRefused (bad_weight, trained_prompt), as `read_trained` does.

    Args:
        keys: the keys of messages that are marks.
        listed_mark: the message's entry in the record's list of marks; None if it has none.
    """
    marks = [message[key] for key in keys if message.get(key) is not None]
    if listed_mark is not None:
        marks.append(listed_mark)
    is_partly = any(message.get(key) is not None for key in PARTLY_KEYS)
    if is_partly or any(mark not in (0, 1) or mark != marks[0] for mark in marks):
        raise RecordRefused("bad_weight")
    if any(marks) and message["role"] != "assistant":
        raise RecordRefused("trained_prompt")
    return all(marks)


def read_messages(raw: RawRecord, key: str) -> list[Any]:
    """Return a copy of the list of messages in the field that the recipe names under a key.

    Raises RecordRefused if the field is missing, is not a list, or is nested too deeply.
    """
    messages = raw.required_value(key)
    if not isinstance(messages, list):
        raise RecordRefused("messages_not_a_list")
    return [copy_nested(message, _drops_nulls(raw)) for message in messages]


def _drops_nulls(raw: RawRecord) -> bool:
    return raw.options.get("nulls") == "drop"


def copy_nested(value: Any, drops_nulls: bool, levels: int = MAX_LEVELS) -> Any:
    """Copy a decoded JSON value with all that is in it.

    Args:
        drops_nulls: whether null entries of objects are left out of the copy.
        levels: the most levels of nested lists and objects.

    Raises RecordRefused (too_deep) if the value has more levels.
    """
    if isinstance(value, (dict, list)) and not levels:
        raise RecordRefused("too_deep")
    if isinstance(value, list):
        return [copy_nested(inner, drops_nulls, levels - 1) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: inner if type(inner) is str else copy_nested(inner, drops_nulls, levels - 1)
        for key, inner in value.items()
        if inner is not None or not drops_nulls
    }


def contains_null(value: Any) -> bool:
    """Check whether an object in the value has a null entry, at any depth. Null under the key
    `content` does not count.
    """
    if isinstance(value, dict):
        return any(
            key != "content" if inner is None else contains_null(inner)
            for key, inner in value.items()
        )
    return isinstance(value, list) and any(map(contains_null, value))


def merge_messages(
    messages: Sequence[Message], trained: Sequence[bool], unmerged_role: str = "tool"
) -> tuple[list[Message], list[bool]]:
    """Merge messages of one role that follow each other. Return the messages and their flags.

    Messages are merged only if their flags are equal, and they have no keys besides role, text and
    calls.

    Args:
        trained: a flag for each message: whether it is used for training.
        unmerged_role: a role whose messages are never merged. Results of two calls are two
            messages of the role `tool`.
    """
    merged = list[Message]()
    flags = list[bool]()
    for message, flag in zip(messages, trained, strict=True):
        # The message before this one; {} has no role, so nothing is merged with it.
        previous = merged[-1] if merged and flags[-1] == flag else {}
        is_plain = {"role", "content", "tool_calls"}.issuperset((*previous, *message))
        is_same_role = previous.get("role") == message["role"]
        can_merge = is_same_role and message["role"] != unmerged_role
        if can_merge and is_plain and not previous.get("tool_calls"):
            texts = [m["content"] for m in (previous, message) if m.get("content")]
            merged[-1] = message | {"content": SEPARATOR.join(texts)}
        else:
            merged.append(message)
            flags.append(flag)
    return merged, flags


def _join_parallel_calls(
    messages: list[Message], trained: list[bool]
) -> tuple[list[Message], list[bool]]:
    """Join calls in messages that follow each other: [call A, call B, result, result] becomes one
    message with two calls, and two results. Return the messages and their flags.

    Messages are joined only if the later one has nothing but calls, and their flags are equal.

    Args:
        trained: a flag for each message: whether it is used for training.
    """
    if sum("tool_calls" in message for message in messages) < 2:
        return messages, trained
    joined = list[Message]()
    flags = list[bool]()
    for message, flag in zip(messages, trained, strict=True):
        calls = message.get("tool_calls")
        other_keys = message.keys() - {"role", "content", "tool_calls"}
        has_only_calls = bool(calls) and not other_keys and not message.get("content")
        previous_calls = joined[-1].get("tool_calls") if joined and flags[-1] == flag else None
        if calls and previous_calls and has_only_calls:
            joined[-1] = joined[-1] | {"tool_calls": [*previous_calls, *calls]}
        else:
            joined.append(message)
            flags.append(flag)
    return joined, flags


def system_messages(raw: RawRecord) -> list[Message]:
    """Return a list with the message in the field `system`; an empty list if that is empty."""
    if raw.value("system") in (None, ""):
        return []
    return [{"role": "system", "content": raw.text("system")}]


def exchange_messages(question: str, answer: str) -> list[Message]:
    """Return a question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _read_tools(raw: RawRecord, messages: Sequence[Message]) -> list[Message] | None:
    """Return the tools of a record; None if it has none, and [] if it has an empty list of them.

    Raises RecordRefused if messages call tools and the record does not have any.

    A bare tool is put into `{"type": "function", "function": ...}`, the form of chat templates.
    """
    if "tools" not in raw.fields:
        return None
    value = raw.value("tools")
    tools = _parse_tools(copy_nested(value or [], _drops_nulls(raw)))
    has_tools = tools or any(message.get("tools") for message in messages)
    if not has_tools and any(message.get("tool_calls") for message in messages):
        raise RecordRefused("missing_tools")
    return None if value in (None, "") else tools


def _parse_tools(value: Any) -> list[Message]:
    """Return the tools in a list or its JSON text, each in the form of chat templates. Raises
    RecordRefused (bad_tools) for another value.
    """
    tools = decode_json(value)
    if not isinstance(tools, list):
        raise RecordRefused("bad_tools")
    return [_normalize_tool(tool) for tool in tools]


def _normalize_own_tools(message: Message) -> Message:
    """Return the message with a system message's own tools, as in records of GLM-4, in the form of
    chat templates.
    """
    if message["role"] == "system" and message.get("tools"):
        return message | {"tools": _parse_tools(message["tools"])}
    return message


def _normalize_tool(value: Any) -> Message:
    """Return a tool in the form of chat templates. The schema of its arguments, which Anthropic and
    MCP write as `input_schema` or `inputSchema`, becomes `parameters`. `cache_control`, a setting
    of the service, is dropped.
    """
    tool = _wrap_function(value, "bad_tools")
    function = tool["function"]
    if function.keys().isdisjoint((*SCHEMAS, "cache_control")):
        return tool
    has_parameters = function.get("parameters") is not None
    renamed = {}
    for key, entry in function.items():
        if key == "cache_control":
            continue
        if key not in SCHEMAS:
            renamed[key] = entry
        elif entry is not None and not has_parameters:
            renamed["parameters"] = entry
    return tool | {"function": renamed}


def parse_calls(value: Any) -> list[Message]:
    """Return tool calls in the form of a message's `tool_calls`, each inside `function`. Arguments
    that are an empty string become an empty object. Other arguments stay JSON text or an object:
    the encoder finds out which of the two a template takes.

    Args:
        value: a call or a list of calls, as JSON text or decoded: `{"name": ..., "arguments":
            ...}`, or that inside `function`.

    Raises RecordRefused if a call has no name (bad_tool_call), or its arguments are not a JSON
    object (arguments_not_json).
    """
    value = decode_json(value)
    items = value if isinstance(value, list) else [value]
    calls = [_wrap_function(decode_json(item), "bad_tool_call") for item in items]
    if not calls:
        raise RecordRefused("bad_tool_call")
    calls = [_without_arguments(call) if _has_blank_arguments(call) else call for call in calls]
    for call in calls:
        if not isinstance(decode_json(call["function"].get("arguments")), dict):
            raise RecordRefused("arguments_not_json")
    return calls


def _has_blank_arguments(call: Message) -> bool:
    arguments = call["function"].get("arguments")
    return isinstance(arguments, str) and not arguments.strip()


def _without_arguments(call: Message) -> Message:
    """Return the call with an empty object as its arguments."""
    return {**call, "function": {**call["function"], "arguments": {}}}


def _wrap_function(value: Any, reason: str) -> Message:
    """Return a tool or a call in the form `{"type": "function", "function": {"name": ...}}`.

    Raises RecordRefused with the reason code `reason` if it has no name.
    """
    if isinstance(value, dict) and value.get("function") is None:
        function = {key: value[key] for key in value if key not in ("type", "id", "function")}
        id_entry = {"id": value["id"]} if "id" in value else {}
        value = {**id_entry, "type": "function", "function": function}
    match value:
        case {"function": {"name": str()}}:
            return {**value}
    raise RecordRefused(reason)


def decode_json(value: Any) -> Any:
    """Parse a string as JSON; return None if it is not valid JSON. A value of any other type is
    returned as it is. Whole numbers of any size are kept exactly.

    Raises RecordRefused (too_deep) if the JSON is nested too deeply.
    """
    if not isinstance(value, str):
        return value
    try:
        return copy_nested(read_exactly(value), False)
    except ValueError:
        return None
    except RecursionError:
        raise RecordRefused("too_deep") from None

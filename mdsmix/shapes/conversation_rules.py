"""Rules that all shapes of conversations share: the order of roles, merged messages, dropped nulls,
flags of training, tools and calls.
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
    "messages_not_a_list": "The messages are no list.",
    "no_messages": "The list of messages is empty.",
    "too_few_messages": "There is one message.",
    "bad_message_keys": (
        "A message has not the keys of its shape, or a call is beside another role than "
        "the assistant's."
    ),
    "unknown_role": "A message has a role that its shape does not know.",
    "content_not_text": (
        "A message's content is no text, nor what its shape takes in place of one."
    ),
    "repeated_role": "Two messages of one role are in a row.",
    "last_not_assistant": "The last message is not the assistant's.",
    "starts_with_assistant": (
        "The first message is the assistant's, and the shape takes no greeting."
    ),
    "empty_answer": (
        "An answer is empty and calls nothing. The shapes messages and prompt_response do "
        "not check this."
    ),
    "trained_prompt": "A message that is not the assistant's says that it is trained.",
    "bad_weight": (
        "A message's mark (train, weight, loss, loss_weight, loss_mask, ...) is not true, "
        "false, 1 or 0, or two marks of it differ, or a part of it is weighed."
    ),
    "bad_loss_mask": (
        "The record's loss_mask is no list with one entry for each message or each "
        "answer; the detail counts them."
    ),
    "bad_tools": ("The tools are no list of objects with a name, nor the JSON text of one."),
    "missing_tools": "Messages call tools, and the field tools holds none.",
    "bad_tool_call": "A call has no name, or is no JSON.",
    "arguments_not_json": "The arguments of a call are no JSON object, nor the text of one.",
}
"Reason codes that any shape of conversations may give -> their explanations."

TRAIN_KEYS = (
    *("train", "weight", "loss", "loss_weight"),  # axolotl, OpenAI, ms-swift, LLaMA-Factory
    *("loss_mask", "step_loss_mask", "training", "trainable"),
)
"Keys of a message that say whether it is trained, by true and false or 1 and 0: marks."
MASK = "loss_mask"
"""The field of a record that may hold a list of such marks, one for each message or one for each
answer.
"""
MARK = "train_mark"
"The option that names a further mark."
PARTLY_KEYS = ("train_detail", "loss_scale")
"""Keys that train a part of a message or give it a weight. Labels of LLM-Foundry's loader cannot
express that.
"""
FLAGS = frozenset((*TRAIN_KEYS, *PARTLY_KEYS))
GREETS = "starts_with_assistant"
"The reason code of a conversation that begins with a greeting of the assistant's."
ROLES = ("user", "assistant", "system", "tool")
"Roles that LLM-Foundry takes."
PLAIN_ROLES = ROLES[:3]
"Roles that any template takes."
SCHEMAS = ("input_schema", "inputSchema")
"The keys under which Anthropic and MCP write what chat templates read as a tool's `parameters`."
BETWEEN = "\n\n"
"The text between the texts of merged messages."
MOST_LEVELS = 200
"""The most levels of nested lists and objects in messages and tools: templates and Python itself
follow some 900.
"""
TRIES: tuple[dict[str, Any], ...] = (
    {"consecutive_roles": "merge"},
    {"nulls": "drop"},
    {"consecutive_roles": "merge", "nulls": "drop"},
)
"The sets of options that `mdsmix init` tries on records that cannot be read without."


def conversation_of(raw: RawRecord, said: Sequence[Message], before: int = 0) -> Conversation:
    """The conversation of these messages, which have the form of chat templates, with the record's
    tools.

    Args:
        before: how many of the first messages come from another field than the list of messages.

    Raises:
        RecordRefused: the messages break a rule together, such as the order of roles.
    """
    trained = are_trained(raw, said, before)
    messages = [_with_tools(m) if "tools" in m else m for m in without_marks(raw, said)]
    tools = _tools_of(raw, messages)
    messages, trained = _with_parallel_calls(messages, trained)
    if raw.merges:
        messages, trained = merged(messages, trained)
    for message in messages:
        is_empty = not (message.get("content") or message.get("tool_calls"))
        if is_empty and message["role"] == "assistant":
            raise RecordRefused("empty_answer")
    roles = ["system" if m["role"] == "developer" else m["role"] for m in messages]
    fault = roles_fault(tuple(roles), "tool")
    if fault and fault != GREETS:
        raise RecordRefused(fault)
    # What comes before the first question becomes part of its prompt. Without a question an answer
    # to the system message is trained; the first message of all has no prompt.
    opening = roles.index("user") if "user" in roles else int(fault == GREETS)
    for at in range(opening):
        if roles[at] == "assistant":
            trained[at] = False
    is_rich = bool(tools) or any(
        len(m) != 2 or "content" not in m or m["role"] not in PLAIN_ROLES for m in messages
    )
    kind = RichConversation if is_rich else Conversation
    conversation = kind(messages, None if all(trained) else trained, tools)
    if not is_encodable(conversation.all_text):
        raise RecordRefused("lone_surrogate")
    return conversation


@lru_cache(maxsize=4096)
def roles_fault(roles: tuple[Any, ...], repeated: str = "") -> str | None:
    """The reason code of roles that LLM-Foundry does not take in this order; None if it does.
    `repeated`: a role that may follow itself.
    """
    if len(roles) < 2:
        return "too_few_messages" if roles else "no_messages"
    if not {*ROLES}.issuperset(roles):
        return "unknown_role"
    if any(one == other != repeated for one, other in pairwise(roles)):
        return "repeated_role"
    if roles[-1] != "assistant":
        return "last_not_assistant"
    # Foundry renders the messages before each answer, and transformers cannot render an empty list.
    return GREETS if roles[0] == "assistant" else None


def are_trained(raw: RawRecord, messages: Sequence[Message], before: int = 0) -> list[bool]:
    """A flag for each message: whether it is trained, by its own marks and by the record's list.

    Args:
        before: how many of the first messages come from another field than the list of messages.

    Raises:
        RecordRefused: a mark is neither true nor false, or two marks of a message differ
        (bad_weight); the list has not one
            entry for each message or answer (bad_loss_mask); a message of another role is to be
            trained (trained_prompt).
    """
    keys = (*TRAIN_KEYS, raw.options[MARK]) if MARK in raw.options else TRAIN_KEYS
    if listed := _listed_marks(raw, messages, before):
        each = zip(messages, listed, strict=True)
        return [_is_trained(message, keys, mark) for message, mark in each]
    flags = _flags(raw)
    return [flags.isdisjoint(message) or _is_trained(message, keys) for message in messages]


def without_marks(raw: RawRecord, messages: Sequence[Message]) -> list[Message]:
    """The messages without the keys that say whether they are trained."""
    flags = _flags(raw)
    return [
        m if flags.isdisjoint(m) else {key: m[key] for key in m if key not in flags}
        for m in messages
    ]


def _flags(raw: RawRecord) -> frozenset[str]:
    """The keys of a message that are no part of it: those that are known, and the one that the
    recipe names.
    """
    return FLAGS | {raw.options[MARK]} if MARK in raw.options else FLAGS


def _listed_marks(raw: RawRecord, messages: Sequence[Message], before: int) -> list[Any]:
    """The mark of each message in the record's list, None for a message without one; empty if the
    record has no list.
    """
    named = raw.extra(raw.options[MARK]) if MARK in raw.options else None
    lists = [raw.extra(MASK), named if isinstance(named, list) else None]
    given = [decoded(each) for each in lists if each not in (None, "")]
    if not given:
        return []
    if given[-1] != given[0]:
        raise RecordRefused("bad_weight")
    held, last = given[0], len(messages)
    entries = len(held) if isinstance(held, list) else -1
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for places in (range(before, last), range(last), answers):
        if len(places) == entries:
            marks = dict(zip(places, held, strict=True))
            return [marks.get(at) for at in range(last)]
    counts = {"messages": last - before, "answers": len(answers)}
    raise RecordRefused("bad_loss_mask", entries=max(0, entries), **counts)


def _is_trained(message: Message, keys: Sequence[str], listed: Any = None) -> bool:
    """Whether the message is trained, by its marks and the record's list; RecordRefused
    (bad_weight, trained_prompt).
    """
    given = [message[key] for key in keys if message.get(key) is not None]
    given += [] if listed is None else [listed]
    is_partly = any(message.get(key) is not None for key in PARTLY_KEYS)
    if is_partly or any(value not in (0, 1) or value != given[0] for value in given):
        raise RecordRefused("bad_weight")
    if any(given) and message["role"] != "assistant":
        raise RecordRefused("trained_prompt")
    return all(given)


def list_of(raw: RawRecord, key: str) -> list[Any]:
    """The messages in a key's field; RecordRefused where the field is missing, holds no list, or
    nests too deep.
    """
    messages = raw.required_value(key)
    if not isinstance(messages, list):
        raise RecordRefused("messages_not_a_list")
    return [followed(message, _drops(raw)) for message in messages]


def _drops(raw: RawRecord) -> bool:
    """Whether null entries are taken out of messages and tools."""
    return raw.options.get("nulls") == "drop"


def followed(value: Any, drops_nulls: bool, levels: int = MOST_LEVELS) -> Any:
    """The value, with `drops_nulls` without the null entries of its objects; RecordRefused
    (too_deep) where it has more than `levels` levels.
    """
    if isinstance(value, (dict, list)) and not levels:
        raise RecordRefused("too_deep")
    if isinstance(value, list):
        return [followed(inner, drops_nulls, levels - 1) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: inner if type(inner) is str else followed(inner, drops_nulls, levels - 1)
        for key, inner in value.items()
        if inner is not None or not drops_nulls
    }


def holds_null(value: Any) -> bool:
    """Whether an object in the value has a null entry, at any depth. Null under the key `content`
    does not count.
    """
    if isinstance(value, dict):
        return any(key != "content" if v is None else holds_null(v) for key, v in value.items())
    return isinstance(value, list) and any(map(holds_null, value))


def merged(
    messages: Sequence[Message], trained: Sequence[bool], apart: str = "tool"
) -> tuple[list[Message], list[bool]]:
    """Messages in which neighbours of one role are merged, if both are trained or neither is, and
    both hold only texts and calls.

    Args:
        apart: a role whose messages are not merged: two calls have two results.
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


def _with_parallel_calls(
    messages: list[Message], trained: list[bool]
) -> tuple[list[Message], list[bool]]:
    """Join calls that are written one a message: [call A, call B, result, result] has one message
    with two calls. The later message must hold nothing but calls, and be trained as the first one
    is.
    """
    if sum("tool_calls" in message for message in messages) < 2:
        return messages, trained
    joined = list[Message]()
    flags = list[bool]()
    for message, flag in zip(messages, trained, strict=True):
        calls = message.get("tool_calls")
        holds_more = message.keys() - {"role", "content", "tool_calls"} or message.get("content")
        before = joined[-1].get("tool_calls") if joined and flags[-1] == flag else None
        if calls and before and not holds_more:
            joined[-1] = joined[-1] | {"tool_calls": [*before, *calls]}
        else:
            joined.append(message)
            flags.append(flag)
    return joined, flags


def system_of(raw: RawRecord) -> list[Message]:
    """The system message of the field `system`, as a list; empty where the field holds none."""
    if raw.value("system") in (None, ""):
        return []
    return [{"role": "system", "content": raw.text("system")}]


def exchange(question: str, answer: str) -> list[Message]:
    """One question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _tools_of(raw: RawRecord, messages: Sequence[Message]) -> list[Message] | None:
    """Return the tools of a record; None if it has none, and [] if it has an empty list of them.

    Raises RecordRefused if messages call tools that the field does not hold.

    A bare tool is put into `{"type": "function", "function": ...}`, the form of chat templates, and
    so is a bare call. Arguments stay text or object: the encoder finds out which of the two a
    template takes.
    """
    if "tools" not in raw.fields:
        return None
    given = raw.value("tools")
    tools = _tools_in(followed(given or [], _drops(raw)))
    held = tools or any(message.get("tools") for message in messages)
    if not held and any(message.get("tool_calls") for message in messages):
        raise RecordRefused("missing_tools")
    return None if given in (None, "") else tools


def _tools_in(value: Any) -> list[Message]:
    """The tools in a list or its JSON text, each in the form of chat templates; RecordRefused
    (bad_tools) for another value.
    """
    tools = decoded(value)
    if not isinstance(tools, list):
        raise RecordRefused("bad_tools")
    return [_tool(tool) for tool in tools]


def _with_tools(message: Message) -> Message:
    """The message; a system message's own tools, as in records of GLM-4, are put into the form of
    chat templates.
    """
    if message["role"] == "system" and message.get("tools"):
        return message | {"tools": _tools_in(message["tools"])}
    return message


def _tool(given: Any) -> Message:
    """Return a tool as a template takes it. Anthropic's and MCP's names of a tool's schema are
    renamed to `parameters`, and how a service caches it is left out.
    """
    tool = _wrapped(given, "bad_tools")
    function = tool["function"]
    if function.keys().isdisjoint((*SCHEMAS, "cache_control")):
        return tool
    found = {}
    for key, value in function.items():
        name = "parameters" if key in SCHEMAS else key
        if key in SCHEMAS and (value is None or function.get("parameters") is not None):
            continue
        if key != "cache_control":
            found[name] = value
    return tool | {"function": found}


def calls_of(value: Any) -> list[Message]:
    """The tool calls in `value`, in the form of a message's `tool_calls`.

    Args:
        value: a call or a list of them, as JSON text or decoded: `{"name": ..., "arguments": ...}`,
        or that inside `function`.

    Arguments that are an empty text mean none: an empty object.

    Raises:
        RecordRefused: a call has no name (bad_tool_call), or its arguments are no JSON object
        (arguments_not_json).
    """
    value = decoded(value)
    each = value if isinstance(value, list) else [value]
    calls = [_wrapped(decoded(call), "bad_tool_call") for call in each]
    if not calls:
        raise RecordRefused("bad_tool_call")
    calls = [_without_arguments(call) if _is_blank(call) else call for call in calls]
    if not all(isinstance(decoded(call["function"].get("arguments")), dict) for call in calls):
        raise RecordRefused("arguments_not_json")
    return calls


def _is_blank(call: Message) -> bool:
    arguments = call["function"].get("arguments")
    return isinstance(arguments, str) and not arguments.strip()


def _without_arguments(call: Message) -> Message:
    return {**call, "function": {**call["function"], "arguments": {}}}


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


def decoded(value: Any) -> Any:
    """The value of a JSON text, None for a text that is no JSON; any other value as it is.
    RecordRefused where a text nests too deep.

    Python's reader keeps whole numbers of any size.
    """
    if not isinstance(value, str):
        return value
    try:
        return followed(read_exactly(value), False)
    except ValueError:
        return None
    except RecursionError:
        raise RecordRefused("too_deep") from None

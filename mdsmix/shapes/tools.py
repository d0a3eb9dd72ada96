"""Reads the tools of a record and the calls of its messages, and writes both as chat templates read
them: in the form of OpenAI's API.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from mdsmix.record import Message, RecordRefused, Tools
from mdsmix.shapes.nested_values import copy_nested, decode_json
from mdsmix.shapes.shape import RawRecord

TOOLS_OF_TEXT = {
    "tools_of_text": (
        "The prompt is a string, and the record has tools, which only the chat template of a "
        "prompt of messages can print."
    )
}
"The reason code of shapes whose prompt may be a string -> its explanation."
_JSON_NULL = re.compile(rb"[:,\[]null")
"A null of an object or a list in compact JSON. A text may contain these characters too."
SCHEMAS = ("input_schema", "inputSchema")
"Anthropic's and MCP's names for the key of a tool that chat templates call `parameters`."
SHARED_TOOLS_BYTES = 8 << 20
"""Bytes of JSON of the tools that a process keeps, so that equal ones are parsed once. Parsed, they
take several times as much memory.
"""


def read_tools(raw: RawRecord, messages: Sequence[Message]) -> list[Message] | None:
    """Return the tools of a record as chat templates read them, each as `{"type": "function",
    "function": ...}`. Return None if the field `tools` is missing or null, and [] if it contains an
    empty list.

    Raises RecordRefused if the tools cannot be read (bad_tools), or if messages call tools and the
    record has no tools (missing_tools).

    Args:
        raw: the record.
        messages: its messages. A system message may have tools of its own.
    """
    if "tools" not in raw.fields:
        return None
    value = raw.value("tools")
    tools = _parse_repeated_tools(value or [], raw.drops_nulls)
    has_tools = tools or any(message.get("tools") for message in messages)
    if not has_tools and any(message.get("tool_calls") for message in messages):
        raise RecordRefused("missing_tools")
    return None if value in (None, "") else tools


def _parse_repeated_tools(value: Any, drops_nulls: bool) -> Tools:
    """Return the tools that `_parse_tools` returns for a copy of a value. Many records of a source
    have the same tools: they are parsed once, and share one object.

    Raises RecordRefused as `_parse_tools` does.

    Args:
        value: a list of tools, or its JSON text.
        drops_nulls: whether null entries of objects are left out.
    """
    try:
        content = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATETIME)
    except TypeError:  # a value that JSON does not have, such as a date of an Arrow file
        return Tools(_parse_tools(copy_nested(value, drops_nulls)))
    # orjson writes null for NaN too.
    if _JSON_NULL.search(content):
        return Tools(_parse_tools(copy_nested(value, drops_nulls)))
    return _SHARED_TOOLS.parse(content, drops_nulls)


class _ToolsCache:
    """Keeps tools by their JSON, up to `SHARED_TOOLS_BYTES` of it. Then all are deleted, since the
    tools of a source may be large and different in each record.
    """

    def __init__(self) -> None:
        self._tools = dict[tuple[bytes, bool], Tools]()
        self._bytes = 0
        "The bytes of JSON of all tools that are kept."

    def parse(self, content: bytes, drops_nulls: bool) -> Tools:
        """Return the tools in a JSON value (`_parse_repeated_tools`): the object that is kept if
        there is one.
        """
        key = (content, drops_nulls)
        tools = self._tools.get(key)
        if tools is None:
            tools = Tools(_parse_tools(copy_nested(orjson.loads(content), drops_nulls)))
            if self._bytes + len(content) > SHARED_TOOLS_BYTES:
                self._tools.clear()
                self._bytes = 0
            self._tools[key] = tools
            self._bytes += len(content)
        return tools


_SHARED_TOOLS = _ToolsCache()


def _parse_tools(value: Any) -> list[Message]:
    """Return a list of tools, each as `_normalize_tool` writes it for chat templates.

    Raises RecordRefused (bad_tools) if the value is neither a list of tools nor its JSON text.
    """
    tools = decode_json(value)
    if not isinstance(tools, list):
        raise RecordRefused("bad_tools")
    return [_normalize_tool(tool) for tool in tools]


def normalize_own_tools(message: Message) -> Message:
    """Return a message. If it is a system message with tools of its own, as in records of GLM-4,
    write these tools as chat templates read them.
    """
    if message["role"] == "system" and message.get("tools"):
        return message | {"tools": _parse_tools(message["tools"])}
    return message


def _normalize_tool(value: Any) -> Message:
    """Return a tool as chat templates read it: `{"type": "function", "function": {"name": ...,
    "parameters": ...}}`.

    The schema of its arguments, which Anthropic calls `input_schema` and MCP `inputSchema`, becomes
    `parameters`. The key `cache_control`, a setting of Anthropic's service, is dropped.
    """
    tool = _wrap_function(value, "bad_tools")
    function = tool["function"]
    if function.keys().isdisjoint((*SCHEMAS, "cache_control")):
        return tool
    # If a tool has `parameters` and a schema under another name too, `parameters` is kept.
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
    """Return tool calls as a message's `tool_calls` has them: `[{"type": "function", "function":
    {"name": ..., "arguments": ...}}]`.

    Arguments that are an empty string become an empty object. Other arguments stay JSON text or an
    object: the encoder finds out which of the two a template takes.

    Args:
        value: a call or a list of calls, decoded or as JSON text. A call is `{"name": ...,
            "arguments": ...}`, or has these keys inside `function`.

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
    """Check whether the arguments of a call are a string without text."""
    arguments = call["function"].get("arguments")
    return isinstance(arguments, str) and not arguments.strip()


def _without_arguments(call: Message) -> Message:
    """Return the call with an empty object as its arguments."""
    return {**call, "function": {**call["function"], "arguments": {}}}


def _wrap_function(value: Any, reason: str) -> Message:
    """Return a tool or a call as `{"type": "function", "function": {"name": ...}}`.

    Raises RecordRefused if the tool or the call has no name.

    Args:
        value: the tool or the call, with its keys inside `function` or directly in it.
        reason: the reason code for a value without a name.
    """
    if isinstance(value, dict) and value.get("function") is None:
        function = {key: value[key] for key in value if key not in ("type", "id", "function")}
        id_entry = {"id": value["id"]} if "id" in value else {}
        value = {**id_entry, "type": "function", "function": function}
    match value:
        case {"function": {"name": str()}}:
            return {**value}
    raise RecordRefused(reason)


def join_parallel_calls(
    messages: list[Message], trained: list[bool]
) -> tuple[list[Message], list[bool]]:
    """Join messages with calls that follow each other into one message. Return the messages and
    their flags.

    So the messages [call A, call B, result A, result B] become [calls A and B, result A, result B].
    Messages are joined only if the later message has nothing but calls, and their flags are equal.

    Args:
        messages: the messages, without marks.
        trained: a flag for each message: whether it is used for training.
    """
    with_calls = [message for message in messages if "tool_calls" in message]
    if len(with_calls) < 2:
        return messages, trained
    joined = list[Message]()
    flags = list[bool]()
    for message, flag in zip(messages, trained, strict=True):
        calls = message.get("tool_calls")
        other_keys = message.keys() - {"role", "content", "tool_calls"}
        has_only_calls = bool(calls) and not other_keys and not message.get("content")
        # The calls of the message before, if both messages are trained or both are not.
        previous_calls = joined[-1].get("tool_calls") if joined and flags[-1] == flag else None
        if calls and previous_calls and has_only_calls:
            joined[-1] = joined[-1] | {"tool_calls": [*previous_calls, *calls]}
        else:
            joined.append(message)
            flags.append(flag)
    return joined, flags

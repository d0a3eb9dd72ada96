"""Tools, and calls of them, as people write them: as JSON text or as objects, inside `function` or bare.

A bare one is put into `{"type": "function", "function": ...}`, the form in which transformers hands them to chat templates.
Arguments stay as they are, text or object: which of the two a chat template takes, the encoder finds out.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mdsmix.record import Message
from mdsmix.shapes.base import ABSENT, Fault, is_deep


def tools_of(value: Any) -> list[Message] | None:
    """The tools of a record, None where it has none; Fault (bad_tools)."""
    if isinstance(value, str) and value.strip():
        value = from_json(value)
        if not isinstance(value, list):
            raise Fault("bad_tools")
    if value is ABSENT or not value:
        return None
    if not isinstance(value, list):
        raise Fault("bad_tools")
    return [wrapped(tool, "bad_tools") for tool in value]


def calls_of(value: Any) -> list[Message]:
    """The calls that `value` holds, in the form of a message's `tool_calls`.

    Args:
        value: a call or a list of them, as JSON text or decoded: `{"name": ..., "arguments": ...}`, or that inside `function`.

    Raises:
        Fault: a call has no name (bad_tool_call), or its arguments are no JSON object (arguments_not_json).
    """
    value = from_json(value) if isinstance(value, str) else value
    calls = [wrapped(call, "bad_tool_call") for call in _listed(value)]
    if not calls:
        raise Fault("bad_tool_call")
    for call in calls:
        arguments = call["function"].get("arguments")
        arguments = from_json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            raise Fault("arguments_not_json")
    return calls


def wrapped(given: Any, reason: str) -> Message:
    """A tool or a call inside `function`; Fault where it has no name."""
    if not isinstance(given, dict):
        raise Fault(reason)
    function = given.get("function")
    named = given if function is None else function
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise Fault(reason)
    if function is not None:
        return dict(given)
    inside = {key: value for key, value in given.items() if key not in ("type", "id", "function")}
    outside = {"id": given["id"]} if "id" in given else {}
    return {**outside, "type": "function", "function": inside}


def from_json(text: str) -> Any:
    """The JSON value of a text; None where it is none, Fault where it is nested too deep to be followed.

    Python's reader keeps whole numbers of any size.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except ValueError:
        return None
    except RecursionError:
        raise Fault("too_deep") from None
    if is_deep(value):
        raise Fault("too_deep")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

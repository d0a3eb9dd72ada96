"""`{"messages": [{"role": "user", "content": "..."}, ...]}`, by LLM-Foundry's strict rules, or as
OpenAI's interfaces write it.

LLM-Foundry's rules, from `_validate_chat_formatted_example` of llmfoundry/data/finetuning/tasks.py:
two messages or more, each with exactly `role` and `content`, no role twice in a row, the last
message the assistant's.

OpenAI's records have `tools` beside the messages, and messages with calls, names and flags.
Messages go to the chat template as they are, with two exceptions: `weight` and its like, which say
whether a message is trained, are taken out, and the texts of content in parts are joined.

TRL writes `{"prompt": [...], "completion": [...]}`, both lists of such messages, and trains the
completion alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from mdsmix.record import Conversation, Message, RecordRefused, is_encodable
from mdsmix.shapes.content_parts import (
    from_anthropic,
    has_anthropic,
    joined_parts,
    result_text,
)
from mdsmix.shapes.conversation_rules import (
    CONVERSATION_REASONS,
    FLAGS,
    MARK,
    ROLES,
    TRIES,
    are_trained,
    calls_of,
    conversation_of,
    list_of,
    merged,
    roles_fault,
    without_marks,
)
from mdsmix.shapes.extras import EXTRAS, EXTRAS_REASONS, NAMES, with_extras
from mdsmix.shapes.shape import Fields, RawRecord, Shape, are_texts


def parse_messages(raw: RawRecord) -> Conversation:
    messages, mark = list_of(raw, "messages"), raw.options.get(MARK)
    for message in messages:
        if type(message) is not dict or message.keys() - {mark} != {"role", "content"}:
            raise RecordRefused("bad_message_keys")
        if message["role"] not in ROLES:
            raise RecordRefused("unknown_role")
        if type(message["content"]) is not str:
            raise RecordRefused("content_not_text")
    trained = are_trained(raw, messages)
    if mark:
        messages = without_marks(raw, messages)
    if raw.merges:
        messages, trained = merged(messages, trained, apart="")
    if fault := roles_fault(tuple([message["role"] for message in messages])):
        raise RecordRefused(fault)
    if not is_encodable("\n".join([message["content"] for message in messages])):
        raise RecordRefused("lone_surrogate")
    return Conversation(messages, None if all(trained) else trained)


def _plain(records: Sequence[Any], fields: Fields) -> list[Any] | None:
    """The records as conversations, where none breaks a rule of Foundry's; else None."""
    if not all(map(NAMES.isdisjoint, records)):
        return None
    lists = [record[fields["messages"]] for record in records]
    messages = [*chain.from_iterable(lists)]
    said = [message["content"] for message in messages]
    roles = iter([message["role"] for message in messages])
    faults = {*map(roles_fault, {tuple(islice(roles, len(each))) for each in lists})}
    is_plain = faults == {None} and {*map(len, messages)} == {2} and are_texts(said)
    return [*map(Conversation, lists)] if is_plain else None


def parse_openai(raw: RawRecord) -> Conversation:
    return _openai(raw, list_of(raw, "messages"))


def parse_prompt_completion(raw: RawRecord) -> Conversation:
    prompt, completion = list_of(raw, "prompt"), list_of(raw, "completion")
    for at, message in enumerate(prompt):
        is_answer = isinstance(message, dict) and message.get("role") == "assistant"
        if is_answer and all(message.get(key) is None for key in FLAGS):
            prompt[at] = message | {"train": 0}
    return _openai(raw, [*prompt, *completion])


def _openai(raw: RawRecord, given_messages: Sequence[Any]) -> Conversation:
    messages = list[Message]()
    for given in given_messages:
        messages += _messages(given)
    has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
    before = [] if has_system else _system_of(raw)
    messages = [*before, *messages]
    known = [None, *(call.get("id") for m in messages for call in m.get("tool_calls") or ())]
    if any(m["role"] == "tool" and m.get("tool_call_id") not in known for m in messages):
        raise RecordRefused("unknown_tool_call")
    return conversation_of(raw, messages, len(before))


def _system_of(raw: RawRecord) -> list[Message]:
    """Return the system message of the field `system`, text or parts, as a list; empty
    without one.
    """
    system = raw.value("system")
    if system in (None, "", []):
        return []
    if isinstance(system, list):
        return [{"role": "system", "content": joined_parts(system)}]
    return [{"role": "system", "content": raw.text("system")}]


def _messages(given: Any) -> list[Message]:
    """Return the message as a template takes it. One with Anthropic's results of tools is
    several.
    """
    if isinstance(given, dict) and "role" in given and has_anthropic(given.get("content")):
        return [_message(each) for each in from_anthropic(given)]
    return [_message(given)]


def _of_today(given: Message) -> Message:
    """Return a message of OpenAI's older interface in the words of today: `function_call` is one of
    `tool_calls`, and the role `function` is `tool`."""
    message = {key: value for key, value in given.items() if key != "function_call"}
    if message["role"] == "function":
        message["role"] = "tool"
    if call := given.get("function_call"):
        if message.get("tool_calls"):
            raise RecordRefused("bad_message_keys")
        message["tool_calls"] = [call]
    return message


def _without_roles_of_swift(given: Any) -> Any:
    """Return ms-swift's messages of the roles `tool_call` and `tool_response` as those of OpenAI;
    any other value as it is.
    """
    role = given.get("role") if isinstance(given, dict) else None
    if role == "tool_response":
        return given | {"role": "tool"}
    if role == "tool_call" and not given.get("tool_calls"):
        calls = calls_of(given.get("content"))
        return given | {"role": "assistant", "content": "", "tool_calls": calls}
    return given


def _message(given: Any) -> Message:
    """The message as a template takes it."""
    given = _without_roles_of_swift(given)
    if not isinstance(given, dict) or "role" not in given:
        raise RecordRefused("bad_message_keys")
    if "function_call" in given or given["role"] == "function":
        given = _of_today(given)
    if given["role"] not in (*ROLES, "developer"):
        raise RecordRefused("unknown_role")
    message, content, calls = {**given}, given.get("content"), given.get("tool_calls")
    if message["role"] == "tool" and content is not None:
        message["content"] = content = result_text(content)
    elif isinstance(content, list):
        message["content"] = content = joined_parts(content)
    if content is None and message["role"] == "system" and message.get("tools"):
        message["content"] = content = ""
    if not calls:
        message.pop("tool_calls", None)  # null, or an empty list: it calls nothing
    else:
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
    extras=EXTRAS,
    options=("consecutive_roles", "nulls", MARK),
    also_called={"messages": ("conversations", "conversation", "dialogue", "dialog")},
    guess=lambda *_: TRIES,
    plain=_plain,
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS,
    parse=with_extras(parse_messages),
)
OPENAI = replace(
    MESSAGES,
    name="openai",
    version=2,
    optional=("system", "tools"),
    structured=("messages", "tools"),
    reasons={
        **MESSAGES.reasons,
        "unknown_tool_call": "The tool_call_id of a result belongs to no call.",
    },
    parse=with_extras(parse_openai),
    plain=None,
)
PROMPT_COMPLETION = replace(
    OPENAI,
    name="prompt_completion",
    version=1,
    fields=("prompt", "completion"),
    structured=("prompt", "completion", "tools"),
    also_called={},
    parse=with_extras(parse_prompt_completion),
)

"""Reads records such as `{"messages": [{"role": "user", "content": "..."}, ...]}`: by LLM-Foundry's
strict rules, or as OpenAI's interfaces write them.

LLM-Foundry's rules, from `_validate_chat_formatted_example` of llmfoundry/data/finetuning/tasks.py:
two messages or more, each with exactly `role` and `content`, no role twice in a row, the last
message the assistant's.

OpenAI's records have `tools` next to the messages, and messages with calls, names and flags.
Messages go to the chat template unchanged, with two exceptions. Marks such as `weight`, which
decide whether a message is trained, are removed. If the content of a message is a list of parts,
their texts are joined.

TRL writes `{"prompt": [...], "completion": [...]}`, two lists of such messages, and trains only the
completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from mdsmix.record import (
    SYSTEM_ROLES,
    Conversation,
    Message,
    PlainConversations,
    RecordRefused,
    is_encodable,
)
from mdsmix.schema import shorten_value
from mdsmix.shapes.content_parts import (
    convert_anthropic,
    has_anthropic_parts,
    join_marked_parts,
    join_parts,
    result_to_text,
)
from mdsmix.shapes.conversation_rules import (
    CONVERSATION_REASONS,
    PLAIN_ROLES,
    ROLES,
    TRIES,
    check_roles,
    make_conversation,
    merge_messages,
    read_marked_conversations,
    read_messages,
    read_plain_conversations,
)
from mdsmix.shapes.extras import EXTRAS, EXTRAS_REASONS, with_extras
from mdsmix.shapes.shape import Fields, RawRecord, Shape
from mdsmix.shapes.spans import DETAIL, WEIGHTS
from mdsmix.shapes.tools import parse_calls
from mdsmix.shapes.training_marks import (
    FLAGS,
    MARK,
    MASK,
    add_marks,
    find_mark_keys,
    list_masks,
    read_marks,
    remove_marks,
)

_TEXT_KEYS = frozenset(("role", "content", *FLAGS))
"The keys of a message that is only a text, perhaps with marks."
_TEXT_ROLES = (*PLAIN_ROLES, "developer")
"The roles of a message that is only a text."


def parse_messages(raw: RawRecord) -> Conversation:
    """Read a record whose messages have only a role and a text, as LLM-Foundry takes them.

    Raises RecordRefused if the messages break a rule of LLM-Foundry's.
    """
    messages = read_messages(raw, "messages")
    mark = raw.options.get(MARK)
    # The key that the recipe names as `train_mark` may be in a message too.
    for message in messages:
        if type(message) is not dict or message.keys() - {mark} != {"role", "content"}:
            raise RecordRefused("bad_message_keys")
        if message["role"] not in ROLES:
            raise RecordRefused("unknown_role", role=shorten_value(message["role"]))
        if type(message["content"]) is not str:
            raise RecordRefused("content_not_text")
    marks = read_marks(raw, messages)
    trained = marks.trained
    if mark:
        messages = remove_marks(raw, messages)
    if raw.merges:
        count = len(messages)
        messages, trained = merge_messages(messages, trained, unmerged_role="")
        if marks.losses and len(messages) != count:
            raise RecordRefused("merged_spans")
    fault = check_roles(tuple([message["role"] for message in messages]))
    if fault:
        raise RecordRefused(fault)
    if not is_encodable("\n".join([message["content"] for message in messages])):
        raise RecordRefused("lone_surrogate")
    return Conversation(messages, None if all(trained) else trained, losses=marks.losses)


def _parse_all_messages(
    records: Sequence[Any], fields: Fields, loss_weights: bool = False
) -> PlainConversations | None:
    """Return all records as conversations. Return None if a record breaks a rule of LLM-Foundry, or
    has extras (fields such as `chat_template_kwargs` that no key of the recipe names) besides a
    `loss_mask`. The records are then read one by one.
    """
    if not MESSAGES.has_only_required(records, fields, allowed={MASK}):
        return None
    lists = [record[fields["messages"]] for record in records]
    plain = read_plain_conversations(lists)
    if plain is None:
        return None
    return add_marks(plain, lists, frozenset(), list_masks(records), with_weights=loss_weights)


def _parse_all_openai(
    records: Sequence[Any], fields: Fields, loss_weights: bool = False
) -> PlainConversations | None:
    """Return all records as conversations. Return None if a record has a system prompt, tools or
    extras besides a `loss_mask` in a field of its own, or a message with more than a role, a text
    and marks such as `weight`. The records are then read one by one.

    A conversion of 12 MB of plain messages takes 0.34 s of CPU time instead of 0.46.
    """
    if not OPENAI.has_only_required(records, fields, allowed={MASK}):
        return None
    lists = [record[fields["messages"]] for record in records]
    masks = list_masks(records)
    plain = read_plain_conversations(lists, only_foundry_rules=False)
    if plain is not None:
        return add_marks(plain, lists, frozenset(), masks, with_weights=loss_weights)
    keys = find_mark_keys(lists, {"role", "content"})
    if keys is None:
        return None
    # Keys stay in their order, since a template may print whole messages.
    without_marks = [
        [{key: message[key] for key in message if key not in keys} for message in messages]
        for messages in lists
    ]
    return read_marked_conversations(without_marks, lists, keys, masks, with_weights=loss_weights)


def parse_openai(raw: RawRecord) -> Conversation:
    """Read a record with a list of messages that may have calls, tools, parts and other keys."""
    return parse_openai_messages(raw, read_messages(raw, "messages"))


def parse_prompt_completion(raw: RawRecord) -> Conversation:
    """Read a record with two lists of messages, `prompt` and `completion`. Answers in the prompt
    are not used for training, unless they have a key of their own that says so, such as
    `"train": true`.
    """
    prompt = read_messages(raw, "prompt")
    completion = read_messages(raw, "completion")
    for position, message in enumerate(prompt):
        is_answer = isinstance(message, dict) and message.get("role") == "assistant"
        # Mark answers that have no mark themselves.
        if is_answer and all(message.get(key) is None for key in FLAGS):
            prompt[position] = message | {"train": 0}
    return parse_openai_messages(raw, [*prompt, *completion])


def _parse_all_prompt_completion(
    records: Sequence[Any], fields: Fields
) -> PlainConversations | None:
    """Return all records as conversations. Return None if a record has a system prompt, tools or
    extras in a field of its own, or a message with more than a role and a text. The records are
    then read one by one.

    A conversion of 26 MB with prompts of several turns takes 0.58 s of CPU time instead of 1.06.
    """
    if not PROMPT_COMPLETION.has_only_required(records, fields):
        return None
    prompts = [record[fields["prompt"]] for record in records]
    completions = [record[fields["completion"]] for record in records]
    lists = [[*chain.from_iterable(parts)] for parts in zip(prompts, completions, strict=True)]
    plain = read_plain_conversations(lists, only_foundry_rules=False)
    if plain is None:
        return None
    # Answers in a prompt are not trained.
    trained = list[list[bool] | None]()
    for roles, prompt in zip(plain.roles, prompts, strict=True):
        flags = None
        if "assistant" in roles[: len(prompt)]:
            flags = [role != "assistant" for role in roles]
            flags[len(prompt) :] = repeat(True, len(roles) - len(prompt))
        trained.append(flags)
    return replace(plain, trained=trained)


def parse_openai_messages(raw: RawRecord, items: Sequence[Any]) -> Conversation:
    """Return the conversation of a record.

    Raises RecordRefused if an item is not a message, or the messages break a rule.

    Args:
        raw: the record. The field `system` may have one more message.
        items: the items of the record's list of messages, as the record has them.
    """
    messages = list[Message]()
    for item in items:
        messages += _parse_item(item)
    has_system = bool(messages) and messages[0]["role"] in SYSTEM_ROLES
    leading = [] if has_system else _make_system_messages(raw)
    messages = [*leading, *messages]
    # Check that each result belongs to a call, or names no call (None).
    results = [message for message in messages if message["role"] == "tool"]
    if results:
        call_ids: list[Any] = [None]
        for message in messages:
            call_ids += [call.get("id") for call in message.get("tool_calls") or ()]
        for message in results:
            if message.get("tool_call_id") not in call_ids:
                raise RecordRefused("unknown_tool_call")
    return make_conversation(raw, messages, len(leading))


def _make_system_messages(raw: RawRecord) -> list[Message]:
    """Return a list with the system message in the field `system`, which contains a string or a
    list of parts. Return an empty list if the field is empty or missing.
    """
    system = raw.value("system")
    if system in (None, "", []):
        return []
    if isinstance(system, list):
        return [{"role": "system", "content": join_parts(system)}]
    return [{"role": "system", "content": raw.text("system")}]


def _parse_item(item: Any) -> list[Message]:
    """Return one item of a record's list as messages that chat templates read.

    An item becomes one message, except that Anthropic's item with results of tools becomes several.
    """
    # Most items are a text with its role, and perhaps marks: nothing in them is to be converted.
    if _is_marked_text(item):
        return [{**item}]
    if isinstance(item, dict) and "role" in item and has_anthropic_parts(item.get("content")):
        return [_parse_message(message) for message in convert_anthropic(item)]
    return [_parse_message(item)]


def _is_marked_text(item: Any) -> bool:
    """Check whether an item has only a text, a role that is not a tool's, and perhaps marks."""
    if type(item) is not dict or not _TEXT_KEYS.issuperset(item):
        return False
    return type(item.get("content")) is str and item.get("role") in _TEXT_ROLES


def _parse_message(item: Any) -> Message:
    """Return one message as chat templates read it: as OpenAI's interface of today writes messages,
    but with a string as the content.

    Raises RecordRefused if the item is not a message that this shape can read.
    """
    # Bring older and foreign forms into the form of OpenAI's interface of today.
    item = _convert_swift_roles(item)
    if not isinstance(item, dict) or "role" not in item:
        raise RecordRefused("bad_message_keys")
    if "function_call" in item or item["role"] == "function":
        item = _modernize(item)
    if item["role"] not in (*ROLES, "developer"):
        raise RecordRefused("unknown_role", role=shorten_value(item["role"]))
    message = _write_content_as_text({**item})
    # Parse the calls.
    calls = item.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)  # it is missing, null or an empty list
    else:
        if message["role"] != "assistant":
            raise RecordRefused("bad_message_keys")
        message["tool_calls"] = parse_calls(calls)
    content = message.get("content")
    has_only_calls = content is None and bool(calls)
    if not isinstance(content, str) and not has_only_calls:
        raise RecordRefused("content_not_text")
    return message


def _write_content_as_text(message: Message) -> Message:
    """Change a message so that its content is a string, if it is a result, a list of parts, or
    missing in a system message that has only tools. Marks of parts become `train_detail`.
    """
    content = message.get("content")
    if message["role"] == "tool" and content is not None:
        message["content"] = result_to_text(content)
    elif isinstance(content, list):
        message["content"], detail = join_marked_parts(content)
        if detail is not None:
            if message.get(DETAIL) is not None:
                why = "the message has train_detail, and parts of its content have marks: keep one"
                raise RecordRefused("bad_span", why=why)
            message[DETAIL] = detail
    elif content is None and message["role"] == "system" and message.get("tools"):
        message["content"] = ""
    return message


def _convert_swift_roles(item: Any) -> Any:
    """Return a message of ms-swift's role `tool_call` or `tool_response` as OpenAI's interface
    writes it. Return any other value unchanged.
    """
    role = item.get("role") if isinstance(item, dict) else None
    if role == "tool_response":
        return item | {"role": "tool"}
    if role == "tool_call" and not item.get("tool_calls"):
        calls = parse_calls(item.get("content"))
        return item | {"role": "assistant", "content": "", "tool_calls": calls}
    return item


def _modernize(item: Message) -> Message:
    """Return a message of OpenAI's older interface as the interface of today writes it:
    `function_call` becomes an entry of `tool_calls`, and the role `function` becomes `tool`.
    """
    message = {key: value for key, value in item.items() if key != "function_call"}
    if message["role"] == "function":
        message["role"] = "tool"
    call = item.get("function_call")
    if call:
        if message.get("tool_calls"):
            raise RecordRefused("bad_message_keys")
        message["tool_calls"] = [call]
    return message


MESSAGES = Shape(
    name="messages",
    gives=Conversation,
    fields=("messages",),
    structured=("messages",),
    extras=EXTRAS,
    options=("consecutive_roles", "nulls", MARK, WEIGHTS),
    also_called={"messages": ("conversations", "conversation", "dialogue", "dialog", "trajectory")},
    guess=lambda *_: TRIES,
    plain=_parse_all_messages,
    plain_options=(WEIGHTS,),
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
        "unknown_tool_call": "The tool_call_id of a result is not the id of any call.",
    },
    parse=with_extras(parse_openai),
    plain=_parse_all_openai,
)
PROMPT_COMPLETION = replace(
    OPENAI,
    name="prompt_completion",
    version=1,
    fields=("prompt", "completion"),
    structured=("prompt", "completion", "tools"),
    also_called={},
    parse=with_extras(parse_prompt_completion),
    plain=_parse_all_prompt_completion,
    plain_options=(),
)

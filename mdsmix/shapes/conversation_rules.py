"""Rules that all shapes of conversations share: the order of roles, merged messages, dropped nulls,
tools and calls, and marks. A mark is a key or a list of a record that decides which messages are
used for training, such as `"weight": 0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice, pairwise, repeat
from typing import Any, NamedTuple

import orjson

from mdsmix.json_values import read_exactly
from mdsmix.record import (
    AnswerLoss,
    Conversation,
    Message,
    PlainConversations,
    RecordRefused,
    RichConversation,
    Tools,
    is_encodable,
)
from mdsmix.shapes.shape import RawRecord, are_texts
from mdsmix.shapes.spans import DETAIL, SPAN_REASONS, WEIGHTS, read_spans, read_weight

CONVERSATION_REASONS = {
    **SPAN_REASONS,
    "messages_not_a_list": "The messages are not a list.",
    "no_messages": "The list of messages is empty.",
    "too_few_messages": "There is only one message.",
    "bad_message_keys": (
        "A message lacks a key that its shape needs, has a key that its shape does not know, or "
        "has a call although it is not the assistant's."
    ),
    "unknown_role": "A message has a role that its shape does not know.",
    "content_not_text": (
        "A message's content is not a string, and has no other form that its shape reads."
    ),
    "repeated_role": "Two messages in a row have the same role.",
    "last_not_assistant": "The last message is not the assistant's.",
    "starts_with_assistant": (
        "The first message is the assistant's, and the shape does not allow such a greeting."
    ),
    "empty_answer": (
        "An answer has neither text nor a call. The shapes messages and prompt_response do not "
        "check this."
    ),
    "trained_prompt": "A message that is not the assistant's is marked as trained.",
    "bad_mark": (
        "A mark of a message (train, weight, loss, loss_weight, loss_mask, ...) is not true, "
        "false, 1 or 0, or with loss_weights: true another number from 0 on; or two marks of the "
        "message differ."
    ),
    "bad_loss_mask": (
        "The record's loss_mask is not a list with one entry for each message or for each answer; "
        "the detail counts entries, messages and answers."
    ),
    "bad_tools": (
        "The tools are neither a list of objects with names nor the JSON text of such a list."
    ),
    "missing_tools": "Messages call tools, but the field tools contains no tool.",
    "bad_tool_call": "A call has no name, or is not valid JSON.",
    "arguments_not_json": (
        "The arguments of a call are neither a JSON object nor the JSON text of an object."
    ),
}
"Reason codes that any shape of conversations may give -> their explanations."

TRAIN_KEYS = (
    *("train", "weight", "loss", "loss_weight"),  # axolotl, OpenAI, ms-swift, LLaMA-Factory
    *("loss_mask", "step_loss_mask", "training", "trainable"),
    "loss_scale",  # ms-swift
)
"Marks: keys of a message whose values (true or 1, false or 0) decide whether it is trained."
_TRAIN_KEYS = frozenset(TRAIN_KEYS)
MASK = "loss_mask"
"""The field of a record that may contain a list of such marks, one for each message or one for each
answer.
"""
TOOLS_OF_TEXT = {
    "tools_of_text": (
        "The prompt is a string, and the record has tools, which only the chat template of a "
        "prompt of messages can print."
    )
}
"The reason code of shapes whose prompt may be a string -> its explanation."
MARK = "train_mark"
"The recipe's option that names one more mark: a key of messages, or a field with a list of marks."
FLAGS = frozenset((*TRAIN_KEYS, DETAIL))
"All keys of messages that only concern training. They are removed before a template sees them."
GREETS = "starts_with_assistant"
"The reason code of a conversation that begins with a greeting of the assistant's."
ROLES = ("user", "assistant", "system", "tool")
"Roles that LLM-Foundry takes."
PLAIN_ROLES = ROLES[:3]
"Roles that any template takes."
_JSON_NULL = re.compile(rb"[:,\[]null")
"A null of an object or a list in compact JSON. A text may contain these characters too."
SCHEMAS = ("input_schema", "inputSchema")
"The names that Anthropic and MCP have for a tool's `parameters`, as chat templates call them."
SEPARATOR = "\n\n"
"The text between the texts of merged messages."
_SCALARS = frozenset({str, int, float, bool})
SHARED_TOOLS_BYTES = 8 << 20
"""Bytes of JSON of the tools that a process keeps, so that equal ones are parsed once. Parsed, they
take several times as much memory.
"""
MAX_LEVELS = 200
"""How deeply lists and objects in messages and tools may be nested. Templates and Python itself
fail at some 900 levels.
"""
TRIES: tuple[dict[str, Any], ...] = (
    {"consecutive_roles": "merge"},
    {"nulls": "drop"},
    {"consecutive_roles": "merge", "nulls": "drop"},
    {WEIGHTS: True},
)
"The sets of options that `mdsmix init` tries on records that cannot be read without options."


def make_conversation(
    raw: RawRecord, messages: Sequence[Message], leading: int = 0
) -> Conversation:
    """Check messages by the rules of this file, and make a conversation of them, with the tools of
    their record.

    Args:
        raw: the record, with its tools, its options and its marks. Marks are keys or a list that
            say which messages are used for training, such as `"weight": 0`.
        messages: all messages, with the keys that chat templates read:
            `{"role": "user", "content": "Hi"}`. Marks are still in them.
        leading: how many of the first messages come from a field of their own, such as `system`,
            not from the list of messages.

    Raises RecordRefused if the messages together break a rule, such as the order of roles.
    """
    # Read the marks, and write calls and tools as chat templates read them.
    marks = read_marks(raw, messages, leading)
    trained = marks.trained
    cleaned = [
        _normalize_own_tools(message) if "tools" in message else message
        for message in remove_marks(raw, messages)
    ]
    tools = _read_tools(raw, cleaned)
    cleaned, trained = _join_parallel_calls(cleaned, trained)
    if raw.merges:
        cleaned, trained = merge_messages(cleaned, trained)
    if marks.losses and len(cleaned) != len(messages):
        raise RecordRefused("merged_spans")
    # Check the answers and the order of roles.
    for message in cleaned:
        is_empty = not (message.get("content") or message.get("tool_calls"))
        if is_empty and message["role"] == "assistant":
            raise RecordRefused("empty_answer")
    roles = ["system" if message["role"] == "developer" else message["role"] for message in cleaned]
    # An answer as the first message (GREETS) is accepted here: see below.
    fault = check_roles(tuple(roles), "tool")
    if fault and fault != GREETS:
        raise RecordRefused(fault)
    # Answers before the first question become a part of its prompt: they are not trained.
    for position in range(_count_opening_messages(roles)):
        if roles[position] == "assistant":
            trained[position] = False
    # Make the conversation. It is rich if it has tools, or a message with more than role and text.
    is_rich = bool(tools) or not all(map(_is_plain, cleaned))
    record_type = RichConversation if is_rich else Conversation
    trained_or_none = None if all(trained) else trained
    conversation = record_type(cleaned, trained_or_none, tools, losses=marks.losses)
    if not is_encodable(conversation.all_text):
        raise RecordRefused("lone_surrogate")
    return conversation


def _count_opening_messages(roles: Sequence[Any]) -> int:
    """Return how many messages come before the first question, from the roles of all messages.

    Without a question, only an answer as the first message counts, since it has no prompt. An
    answer to a system message has one.
    """
    if "user" in roles:
        return roles.index("user")
    return 1 if roles[0] == "assistant" else 0


def _is_plain(message: Message) -> bool:
    """Check whether a message has only a content and a role that any template takes."""
    return len(message) == 2 and "content" in message and message["role"] in PLAIN_ROLES


@lru_cache(maxsize=4096)
def check_roles(roles: tuple[Any, ...], repeatable: str = "") -> str | None:
    """Return the reason code if LLM-Foundry refuses roles in this order; None if it takes them.

    Args:
        roles: the role of each message, in order.
        repeatable: a role that two messages in a row may have, such as `tool`; empty: no role.
    """
    if len(roles) < 2:
        return "too_few_messages" if roles else "no_messages"
    if not {*ROLES}.issuperset(roles):
        return "unknown_role"
    for role, following in pairwise(roles):
        if role == following and role != repeatable:
            return "repeated_role"
    if roles[-1] != "assistant":
        return "last_not_assistant"
    # Foundry renders the messages before each answer, and transformers cannot render an empty list.
    return GREETS if roles[0] == "assistant" else None


def read_plain_conversations(
    lists: Sequence[list[Message]], only_foundry_rules: bool = True
) -> PlainConversations | None:
    """Return conversations whose messages have only a role and a text, read at once. Return None if
    one of them breaks a rule; they are then read one by one.

    Raises LookupError or TypeError if a message is not a dict with a role and a content.

    Args:
        lists: for each conversation its messages.
        only_foundry_rules: whether only LLM-Foundry's rules apply. False: those of
            `make_conversation` apply too.
    """
    conversations = PlainConversations.of(lists)
    # Many conversations have the same order of roles: check each order once.
    orders = {*conversations.roles}
    if {*map(check_roles, orders)} != {None}:
        return None
    have_two_keys = {*map(len, chain.from_iterable(lists))} == {2}  # role and content
    if not have_two_keys or not are_texts(conversations.all_contents):
        return None
    if only_foundry_rules:
        return conversations
    is_plain = all(conversations.all_contents) and all(map(_begins_plainly, orders))
    return conversations if is_plain else None


def _begins_plainly(roles: tuple[str, ...]) -> bool:
    """Check whether `make_conversation` trains all answers of a conversation with roles in this
    order, and finds it plain: no answer comes before the first question, and all roles are plain.
    """
    opening = roles[: _count_opening_messages(roles)]
    return "assistant" not in opening and {*PLAIN_ROLES}.issuperset(roles)


class Marks(NamedTuple):
    """What the marks of a record's messages say on training. A mark is a key or an entry of a list,
    such as `"weight": 0`.
    """

    trained: list[bool]
    "A flag for each message: whether it may be used for training."
    losses: list[AnswerLoss | None] | None
    """For each message the characters that are trained, and the loss weight; None for a message
    that is trained as a whole with the weight 1, or not at all. None in place of the list: there is
    no message with such marks.
    """


def read_marks(raw: RawRecord, messages: Sequence[Message], leading: int = 0) -> Marks:
    """Return which messages may be used for training, with their loss weights, and for some answers
    which of their characters. Marks decide this: keys of the message, such as `"weight": 0` or
    `train_detail`, and the record's list of marks, such as `loss_mask`. A message without marks may
    be used.

    Args:
        raw: the record.
        messages: its messages, with their marks.
        leading: how many of the first messages come from a field of their own, such as `system`,
            not from the list of messages.

    Raises RecordRefused:
        bad_mark: a mark is not a weight that the stream allows, or two marks of a message differ.
        bad_loss_mask: the list does not have one entry for each message or answer.
        trained_prompt: a message that is not the assistant's is marked for training.
        bad_span, span_with_calls: the list of ranges in `train_detail` is not valid (`read_spans`).
    """
    keys = _TRAIN_KEYS | {raw.options[MARK]} if MARK in raw.options else _TRAIN_KEYS
    listed_marks = _read_listed_marks(raw, messages, leading)
    # Most messages have no key that concerns training: these may be used.
    flags = _flag_keys(raw)
    if not listed_marks and all(map(flags.isdisjoint, messages)):
        return Marks([*repeat(True, len(messages))], None)
    trained = list[bool]()
    losses = list[AnswerLoss | None]()
    for position, message in enumerate(messages):
        if not listed_marks and flags.isdisjoint(message):
            trained.append(True)
            losses.append(None)
            continue
        marks = [message[key] for key in keys.intersection(message) if message[key] is not None]
        if listed_marks and listed_marks[position] is not None:
            marks.append(listed_marks[position])
        loss = _read_loss(message, marks, with_weights=WEIGHTS in raw.options)
        trained.append(loss.weight > 0)
        losses.append(loss if loss.weight > 0 and loss != AnswerLoss() else None)
    return Marks(trained, losses if any(losses) else None)


def find_mark_keys(
    items: Sequence[list[dict[str, Any]]], message_keys: Set[str]
) -> set[str] | None:
    """Return the keys of marks, such as `weight`, that messages have. Return None if a message has
    another key that is not one of `message_keys`.

    Args:
        items: for each conversation its messages, as the record has them.
        message_keys: the keys of a message's role and content.
    """
    keys = set[str]().union(*chain.from_iterable(items)) - message_keys
    return keys if keys.issubset(TRAIN_KEYS) else None


def list_masks(records: Sequence[Any]) -> list[Any] | None:
    """Return the list of marks of each record (`loss_mask`), None for a record that has none.
    Return None in place of the list if no record has one.
    """
    masks = [record.get(MASK) for record in records]
    return masks if {*map(type, masks)} != {type(None)} else None


def read_marked_conversations(
    lists: Sequence[list[Message]],
    items: Sequence[list[dict[str, Any]]],
    keys: Set[str],
    masks: Sequence[Any] | None,
) -> PlainConversations | None:
    """Return conversations whose messages have a role, a text and marks such as `weight`, read at
    once, by the rules of `make_conversation`. Return None if one of them breaks a rule; they are
    then read one by one.

    A conversion of 34 MB takes 0.76 s of CPU time instead of 1.3.

    Raises LookupError or TypeError if a message is not a dict with a role and a content.

    Args:
        lists: for each conversation its messages, with only a role and a content.
        items: for each conversation its messages, as the record has them.
        keys: the keys of the marks (`find_mark_keys`).
        masks: the list of marks of each record (`list_masks`).
    """
    plain = read_plain_conversations(lists, only_foundry_rules=False)
    return None if plain is None else add_marks(plain, items, sorted(keys), masks)


def add_marks(
    plain: PlainConversations,
    items: Sequence[list[dict[str, Any]]],
    keys: Sequence[str],
    masks: Sequence[Any] | None,
) -> PlainConversations | None:
    """Return plain conversations with the flags that their marks give. Return None if `read_marks`
    would refuse a record.

    Args:
        plain: the conversations.
        items: for each conversation its messages, as the record has them.
        keys: the keys of marks that messages have.
        masks: the list of marks of each record (`list_masks`).
    """
    if not keys and masks is None:
        return plain
    trained = _read_all_marks(items, plain.roles, keys, masks)
    return None if trained is None else replace(plain, trained=trained)


def _read_all_marks(
    lists: Sequence[list[dict[str, Any]]],
    roles: Sequence[Sequence[str]],
    keys: Sequence[str],
    masks: Sequence[Any] | None,
) -> list[list[bool] | None] | None:
    """Return for each conversation which of its messages may be used for training, as
    `Conversation.trained`. Return None if `read_marks` would refuse a message.

    Args:
        lists: for each conversation its messages, with their marks. They have no `train_detail`.
        roles: for each conversation the roles of its messages.
        keys: the keys of `TRAIN_KEYS` that messages have.
        masks: the list of marks of each record (`list_masks`).
    """
    messages = [*chain.from_iterable(lists)]
    columns = [[message.get(key) for message in messages] for key in keys]
    if masks is not None:
        listed_marks = _join_masks(masks, roles)
        if listed_marks is None:
            return None
        columns.append(listed_marks)
    # Messages have few combinations of a role and marks: read each combination once.
    marked_roles = [*zip(chain.from_iterable(roles), *columns, strict=True)]
    is_trained = dict[tuple[Any, ...], bool]()
    for marked_role in {*marked_roles}:
        role, *values = marked_role
        marks = [value for value in values if value is not None]
        try:
            loss = _read_loss({"role": role}, marks, with_weights=False)
        except RecordRefused:
            return None
        is_trained[marked_role] = loss.weight > 0
    # Split the flags at the ends of conversations.
    flags = iter([*map(is_trained.__getitem__, marked_roles)])
    flags_of_lists = [[*islice(flags, count)] for count in map(len, lists)]
    return [None if all(flags_of_list) else flags_of_list for flags_of_list in flags_of_lists]


def _join_masks(masks: Sequence[Any], roles: Sequence[Sequence[str]]) -> list[Any] | None:
    """Return for each message of all conversations its entry in the list of marks of its record, as
    `_read_listed_marks` finds it; None for a message without an entry. Return None in place of the
    list if a record has another value than a list with an entry for each message or each answer.

    Args:
        masks: the list of marks of each record (`list_masks`).
        roles: for each conversation the roles of its messages.
    """
    joined = list[Any]()
    for marks, roles_of_record in zip(masks, roles, strict=True):
        if marks is None:
            joined += [None] * len(roles_of_record)
        elif type(marks) is not list:
            return None
        elif len(marks) == len(roles_of_record):
            joined += marks
        elif len(marks) == roles_of_record.count("assistant"):
            marks_of_answers = iter(marks)
            joined += [
                next(marks_of_answers) if role == "assistant" else None for role in roles_of_record
            ]
        else:
            return None
    return joined


def remove_marks(raw: RawRecord, messages: Sequence[Message]) -> list[Message]:
    """Return the messages without the keys that only concern training, such as `weight`."""
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


def drop_listed_marks(raw: RawRecord) -> RawRecord:
    """Return the record without its list of marks (`loss_mask`), for a shape that builds other
    lists of messages than the list belongs to.
    """
    if raw.extra(MASK) is None:
        return raw
    return raw._replace(record={**raw.record, MASK: None})


def _read_listed_marks(raw: RawRecord, messages: Sequence[Message], leading: int) -> list[Any]:
    """Return for each message its entry in the record's list of marks, such as
    `"loss_mask": [0, 1]`. An entry says whether the message is used for training. A message without
    an entry gets None. Return [] if the record has no such list.

    The list is in the field `loss_mask`, or in the field that the recipe names as `train_mark`. It
    has one entry for each message or for each answer.

    Raises RecordRefused (bad_mark) if the record has both lists and they differ.
    Raises RecordRefused (bad_loss_mask) if the list has another number of entries.

    Args:
        leading: how many of the first messages come from a field of their own, such as `system`,
            not from the list of messages.
    """
    # Read the list in the field `loss_mask`, and the list in the field that the recipe names.
    values = [raw.extra(MASK)]
    if MARK in raw.options:
        named_value = raw.extra(raw.options[MARK])
        if isinstance(named_value, list):
            values.append(named_value)
    lists = [decode_json(value) for value in values if value not in (None, "")]
    if not lists:
        return []
    if lists[-1] != lists[0]:
        raise RecordRefused("bad_mark")
    marks = lists[0]  # all lists are equal
    entries = len(marks) if isinstance(marks, list) else -1  # -1 differs from all lengths below
    count = len(messages)
    answers = [
        position for position, message in enumerate(messages) if message["role"] == "assistant"
    ]
    # The marks may belong to the messages without the leading ones, to all messages, or to the
    # answers: find out by their number.
    for positions in (range(leading, count), range(count), answers):
        if len(positions) == entries:
            mark_at = dict(zip(positions, marks, strict=True))
            return [mark_at.get(position) for position in range(count)]
    raise RecordRefused(
        "bad_loss_mask", entries=max(0, entries), messages=count - leading, answers=len(answers)
    )


def _read_loss(message: Message, marks: Sequence[Any], with_weights: bool) -> AnswerLoss:
    """Return which characters of a message are trained, and its loss weight: 0 if it is not
    trained, because of its marks or because its `train_detail` trains no character.

    Raises RecordRefused (bad_mark) if a mark is not a weight, or two marks differ.
    Raises RecordRefused (trained_prompt) if a message that is not the assistant's is marked for
    training.

    Args:
        message: the message.
        marks: the values of its marks, such as the value of its key `weight`, and its entry in the
            record's list of marks.
        with_weights: whether there may be other weights than 0 and 1.
    """
    weight = read_weight(marks, with_weights)
    spans = read_spans(message, with_weights)
    if spans == ():
        # In axolotl an empty list trains nothing, but a mark of the whole message overrides it.
        is_overridden = message[DETAIL] == [] and bool(marks)
        spans = None
        weight = weight if is_overridden else 0.0
    is_marked = bool(marks) or message.get(DETAIL) is not None
    if is_marked and weight and message["role"] != "assistant":
        raise RecordRefused("trained_prompt")
    if spans is not None:
        spans = tuple(span._replace(weight=span.weight * weight) for span in spans)
    return AnswerLoss(spans, weight)


def read_messages(raw: RawRecord, key: str) -> list[Any]:
    """Return a copy of the list of messages in the field that the recipe names under a key, such as
    `messages`.

    Raises RecordRefused if the field is missing, is not a list, or is nested too deeply.
    """
    messages = raw.required_value(key)
    if not isinstance(messages, list):
        raise RecordRefused("messages_not_a_list")
    return [copy_nested(message, _drops_nulls(raw)) for message in messages]


def _drops_nulls(raw: RawRecord) -> bool:
    """Check whether the option `nulls` drops null entries of objects."""
    return raw.options.get("nulls") == "drop"


def copy_nested(value: Any, drops_nulls: bool, levels: int = MAX_LEVELS) -> Any:
    """Return a deep copy of a decoded JSON value.

    Args:
        value: the value.
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
    # Most objects have only strings and numbers.
    if _SCALARS.issuperset(map(type, value.values())):
        return {**value}
    return {
        key: inner if type(inner) is str else copy_nested(inner, drops_nulls, levels - 1)
        for key, inner in value.items()
        if inner is not None or not drops_nulls
    }


def contains_null(value: Any) -> bool:
    """Check whether an object has a null entry, in a value or anywhere inside it. A null under the
    key `content` does not count.

    Most values have no null, or only nulls under `content`: their JSON shows it in a tenth of the
    time of a search through all objects.
    """
    try:
        content = orjson.dumps(value)
    except TypeError:  # a value that JSON does not have, such as a date of an Arrow file
        return _finds_null(value)
    # A quotation mark inside a string is escaped, so these two are always keys.
    nulls_of_content = content.count(b',"content":null') + content.count(b'{"content":null')
    return content.count(b":null") != nulls_of_content and _finds_null(value)


def _finds_null(value: Any) -> bool:
    """Check the objects of a value as `contains_null` describes."""
    if isinstance(value, dict):
        return any(
            key != "content" if inner is None else _finds_null(inner)
            for key, inner in value.items()
        )
    return isinstance(value, list) and any(map(_finds_null, value))


def find_null_paths(value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the keys that lead to each null entry of an object, without the numbers of list
    entries: `("tool_calls", "function", "strict")`.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if inner is None:
                yield (key,)
            else:
                yield from ((key, *path) for path in find_null_paths(inner))
    elif isinstance(value, list):
        for item in value:
            yield from find_null_paths(item)


def merge_messages(
    messages: Sequence[Message], trained: Sequence[bool], unmerged_role: str = "tool"
) -> tuple[list[Message], list[bool]]:
    """Merge messages of one role that follow each other. Return the messages and their flags.

    Messages are merged only if their flags are equal, and they have no keys but `role`, `content`
    and `tool_calls`.

    Args:
        messages: the messages, without marks.
        trained: a flag for each message: whether it is used for training.
        unmerged_role: a role whose messages are never merged. Results of two calls are two
            messages of the role `tool`.
    """
    merged = list[Message]()
    flags = list[bool]()
    for message, flag in zip(messages, trained, strict=True):
        # The message before this one, if their flags are equal. Otherwise {}, whose role fits no
        # message.
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


def make_system_messages(raw: RawRecord) -> list[Message]:
    """Return a list with the system message in the field `system`; an empty list if the field is
    empty or missing.
    """
    if raw.value("system") in (None, ""):
        return []
    return [{"role": "system", "content": raw.text("system")}]


def make_exchange(question: str, answer: str) -> list[Message]:
    """Return a question and its answer as a message of the user and a message of the assistant."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _read_tools(raw: RawRecord, messages: Sequence[Message]) -> list[Message] | None:
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
    tools = _parse_repeated_tools(value or [], _drops_nulls(raw))
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
    """Keeps tools by their JSON, up to `SHARED_TOOLS_BYTES` of JSON, and then begins again: the
    tools of a source may be large, and other ones in each record.
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


def _normalize_own_tools(message: Message) -> Message:
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


def decode_json(value: Any) -> Any:
    """Parse a string as JSON, and return None if the string is not valid JSON. Return a value of
    any other type unchanged. Whole numbers of any size keep all digits.

    Raises RecordRefused (too_deep) if the JSON is nested too deeply.
    """
    if not isinstance(value, str):
        return value
    try:
        # The copy raises an error for a value that is nested too deeply.
        return copy_nested(read_exactly(value), drops_nulls=False)
    except ValueError:
        return None
    except RecursionError:
        raise RecordRefused("too_deep") from None

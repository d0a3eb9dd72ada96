"""Finds which parts of messages a chat template prints, by trying: keys, roles, and nulls.

A template prints only the keys that it knows. A key that it does not print is reported, and so is
one whose values look like marks, which say whether a message is trained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from mdsmix.encode.answer_parts import REASONING_DETAILS, REASONING_KEYS
from mdsmix.encode.chat import ChatTemplate
from mdsmix.encode.forms import find_forms, fit_role, make_call_probe
from mdsmix.encode.template_probes import ANSWER, QUESTION, Rendering, render_probe
from mdsmix.messages import format_field, plural
from mdsmix.record import OFFSET_KEYS, SYSTEM_ROLES, Message, RecordRefused, RichConversation

_STRUCTURE = frozenset({"role", "content", "tool_calls", "tool_call_id"})
"Keys of messages that every template reads, so they are never reported as unread."
AS_MARK = " as 0 or 1"
"""The end of the name of an unread key of messages, if the key may be a mark: a value in each
message that says whether the message is trained. Also of an unread field of records with a list of
such values. Manifests have it; `merge_unread_keys` gives the name for people.
"""
AS_RANGES = " as ranges of characters"
"The end of the name of an unread key of messages whose values are those of `train_detail`."
AS_ROLE = " as the role of answers"
"The end of the name of the unread field MASKED_ROLE, if it names the role of a record's answers."
MASKED_ROLE = "mask"
"""The field of NeMo's records that names the roles whose messages NeMo does not train: mostly
`User`. If it is the assistant's, NeMo trains the other messages and none of the answers.
"""
_POSSIBLE_MARKS = (AS_MARK, AS_RANGES, AS_ROLE)
NO_MARKS = frozenset(
    (
        *("toxic", "redacted", "prefix", "partial", "is_error", "end_turn"),
        *("turn", "turn_id", "turn_identifier", "turn_index", "index", "idx", "id", "step"),
    )
)
"""Keys of messages that say something else than whether the message is trained, although their
values may be 0 and 1: `toxic` and `redacted` of WildChat, `prefix` of DeepSeek and Mistral.
"""
MESSAGE_FIELDS = (
    *("messages", "conversations", "conversation", "texts"),
    *("prompt", "completion", "chosen", "rejected"),
)
"Keys of `source:` whose fields contain messages, or may contain them."


def name_in_records(name: str, fields: Mapping[str, str]) -> str:
    """Return the name of a key of messages with the fields of the record that contain messages:
    `messages.score` is `prompt/completion.score` if they are in these two. Return any other name
    as it is.

    Args:
        name: name from `find_unread_keys`, or of a field of records.
        fields: key of `source:` -> name of the record's field.
    """
    lists = [fields[key] for key in MESSAGE_FIELDS if key in fields]
    if not name.startswith("messages.") or not lists:
        return name
    return f"{'/'.join(lists)}{name.removeprefix('messages')}"


UNPRINTED = "messages.content of "
"How the names begin that `find_unprinted_contents` yields."


def find_unread_keys(template: ChatTemplate, conversation: RichConversation) -> Iterator[str]:
    """Yield the name of each part of the messages that the template does not print: `messages.KEY`
    for a key, and `messages.content beside tool_calls` for the content of messages with calls.

    A key that says whether a message is trained is called a mark. If an answer has the key, and all
    its values are 0 or 1 (or false or true), the key may be a mark, and `messages.KEY as 0 or 1` is
    yielded. If a value is a list of ranges, as `train_detail` has them, `messages.KEY as ranges of
    characters` is yielded.

    OpenRouter's `reasoning_details` is left out if its message has reasoning under another key,
    whose text it repeats.
    """
    # Key -> (role, value) of each message with this key.
    unread = dict[str, list[tuple[str, Any]]]()
    for message in conversation.messages:
        # Details then repeat a key that is printed, or is reported itself.
        is_repeated = any(message.get(key) for key in REASONING_KEYS)
        role = message["role"]
        read_keys = {*_STRUCTURE, "tools"} if role in SYSTEM_ROLES else _STRUCTURE
        for key, value in message.items():
            # "", [] and null are empty; 0 and false are not, since they may be marks.
            if key == REASONING_DETAILS and is_repeated:
                continue
            is_empty = not value and type(value) not in (bool, int, float)
            if not is_empty and key not in read_keys and not prints_key(template, role, key):
                unread.setdefault(key, []).append((role, value))
        has_both = message.get("tool_calls") and message.get("content")
        if has_both and not find_forms(template).prints_text_of_calls:
            yield "messages.content beside tool_calls"
    for key, values in unread.items():
        is_of_answers = any(role == "assistant" for role, _ in values)
        if is_of_answers and all(value in (0, 1) for _, value in values):
            yield f"messages.{key}{AS_MARK}"
        elif any(_are_ranges(value) for _, value in values):
            yield f"messages.{key}{AS_RANGES}"
        else:
            yield f"messages.{key}"


def _are_ranges(value: Any) -> bool:
    """Check whether a value is a list of ranges of characters, as in `train_detail`."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, dict) and entry.keys() >= OFFSET_KEYS for entry in value)
    )


def merge_unread_keys(unread: Mapping[str, int]) -> dict[str, int]:
    """Return the number of records by names that people find in their records: `messages.score` for
    the sum of `messages.score` and `messages.score as 0 or 1`. No record is in both.

    Args:
        unread: name from `find_unread_keys`, or of a field of records -> number of records.
    """
    merged = Counter[str]()
    for name, count in unread.items():
        for suffix in _POSSIBLE_MARKS:
            name = name.removesuffix(suffix)
        merged[name] += count
    return dict(merged)


def describe_possible_marks(unread: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning for each key of messages, or field of records, that is not read and may be a
    mark. A mark says which messages, or which of their characters, are trained.

    Args:
        unread: name from `find_unread_keys`, such as `messages.train as 0 or 1`, or of a field of
            records -> number of records.
    """
    for name, count in unread.items():
        records = plural(count, "record")
        if name.endswith(AS_RANGES):
            key = format_field(name.removesuffix(AS_RANGES).removeprefix("messages."))
            yield (
                f"the key {key} of messages has ranges of characters ({records}), and is not read: "
                f"if it says which characters are trained, as train_detail does, rename it to "
                "train_detail"
            )
            continue
        if name.endswith(AS_ROLE):
            key = format_field(name.removesuffix(AS_ROLE))
            yield (
                f"the field {key} names the role of the answers ({records}), and is not read: NeMo "
                "does not train these answers, but here they are trained; to leave the records "
                f"out, set source.where, such as where: {key} != 'Assistant'"
            )
            continue
        key = name.removesuffix(AS_MARK)
        field = key.removeprefix("messages.")
        # If `unread` also has the plain key, some records have values other than 0 and 1.
        if key == name or key in unread or field in NO_MARKS:
            continue
        fix = f"name it in the recipe by source.train_mark: {format_field(field)}"
        if key == field:
            yield (
                f"the field {format_field(field)} is a list of 0 and 1, or false and true, with an "
                f"entry for each message or each answer ({records}), and is not read: if it says "
                f"which answers are trained, {fix}"
            )
        else:
            yield (
                f"the key {format_field(field)} of messages is 0 or 1, or false or true, wherever "
                f"it occurs ({records}), and is not read: if it says which answers are trained, "
                f"{fix}"
            )


def find_unprinted_contents(template: ChatTemplate, messages: Sequence[Message]) -> Iterator[str]:
    """Yield a name for each content that is not blank and that the template leaves out, since it
    prints no messages of the role system or developer, or only the first message of a conversation:
    `messages.content of later system messages`.
    """
    for position, message in enumerate(messages):
        role = message["role"]
        content = message.get("content")
        if isinstance(content, str):
            content = content.strip()
        if role not in SYSTEM_ROLES or not content:
            continue
        is_later = position > 0
        if not prints_role(template, role, is_later):
            yield f"{UNPRINTED}{'later ' if is_later else ''}{role} messages"


def prints_system_roles(template: ChatTemplate) -> bool:
    """Return whether the template prints all messages of the roles system and developer."""
    places = product(SYSTEM_ROLES, (False, True))
    return all(prints_role(template, role, is_later) for role, is_later in places)


@lru_cache(maxsize=256)
def prints_role(template: ChatTemplate, role: str, is_later: bool) -> bool:
    """Return whether the template prints the content of a message of this role, as `fit_tools`
    hands it over. Return True also if the template refuses such a message, since these records are
    quarantined anyway.

    The message is rendered before a question, as in the prompt of an answer, and before a question
    with its answer. Mistral-Nemo's template prints a system message only before a last question.

    Args:
        template: the template.
        role: the role, such as `system`.
        is_later: whether the message comes after an answer; otherwise it is the first message.
    """
    message = {"role": fit_role(role, template), "content": "probe_text"}
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    before = earlier if is_later else []
    prompt = [*before, message, QUESTION]
    try:
        texts = (
            template.render(prompt, add_generation_prompt=True),
            template.render([*prompt, ANSWER], add_generation_prompt=False),
        )
    except RecordRefused:
        return True
    return any("probe_text" in text for text in texts)


@lru_cache(maxsize=256)
def prints_key(template: ChatTemplate, role: str, key: str) -> bool:
    """Return whether the template prints the text under a key of messages. The `name` in the result
    of a tool counts as printed.

    Args:
        template: the template.
        role: the role of the messages.
        key: the key.
    """
    if role == "tool":
        return key == "name"
    message: Message = {"role": role, "content": "probe_text", key: "probe_extra"}
    if role == "user":
        messages = [message, ANSWER]
    elif role == "assistant":
        messages = [QUESTION, message]
    else:
        messages = [message, QUESTION, ANSWER]
    return "probe_extra" in render_probe(template, *messages, tools=None).text


def prints_null(template: ChatTemplate, role: str, path: tuple[str, ...]) -> bool:
    """Return whether the template may print a null in messages of this role.

    Args:
        template: the template.
        role: the role.
        path: the keys that lead from the message to the null, without numbers of list entries:
            `("name",)` or `("tool_calls", "function", "strict")`.
    """
    key = path[0]
    if len(path) == 1:
        return _prints_null_of_message(template, role, key)
    if key == "tool_calls":
        return "arguments" in path or _prints_null_of_call(template, path[1:])
    if key in ("content", "tools"):
        return True
    # A template that does not name the key may still print whole messages.
    return key in template.source or prints_key(template, role, key)


@lru_cache(maxsize=256)
def _prints_null_of_call(template: ChatTemplate, path: tuple[str, ...]) -> bool:
    """Return whether the template prints a call of a tool with a null differently than without this
    entry. Return True if it prints no calls.

    Args:
        template: the template.
        path: the keys that lead from the call to the null.
    """
    texts = list[Rendering]()
    for has_null in (True, False):
        probe = make_call_probe(template)
        if probe is None:
            return True
        messages: list[Message] = json.loads(json.dumps(probe))  # a copy that can be changed
        entry = messages[1]["tool_calls"][0]
        for key in path[:-1]:
            entry = entry.setdefault(key, {})
            if not isinstance(entry, dict):
                return True
        entry.pop(path[-1], None)
        if has_null:
            entry[path[-1]] = None
        texts.append(render_probe(template, *messages, ANSWER))
    return texts[0] != texts[1]


@lru_cache(maxsize=256)
def _prints_null_of_message(template: ChatTemplate, role: str, key: str) -> bool:
    """Return whether the template prints messages with `key: null` differently than messages
    without the key. If the template fails on every probe without the key, return True.

    Args:
        template: the template.
        role: the role of the messages that have the key.
        key: the key.
    """
    role = fit_role(role, template)
    system = list[Message]()
    if role in SYSTEM_ROLES:
        system = [{"role": role, "content": "probe_text"}]
    call = make_call_probe(template) or [QUESTION]
    differ = list[bool]()
    for probe in (
        [*system, QUESTION, ANSWER],
        [*system, *call, ANSWER, QUESTION, ANSWER],
    ):
        if not any(message["role"] == role for message in probe):
            continue
        # Copies, since a template may compare messages by identity, as Mistral's does.
        with_null = [dict(message) for message in probe]
        without = [dict(message) for message in probe]
        for message in with_null:
            if message["role"] == role:
                message[key] = None
        for message in without:
            if message["role"] == role:
                message.pop(key, None)
        text, error = render_probe(template, *without)
        if not error:
            differ.append(render_probe(template, *with_null) != (text, ""))
    fails_on_all = not differ
    return fails_on_all or any(differ)

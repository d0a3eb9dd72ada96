"""The forms in which a chat template takes tools, calls of tools, and images. They are found by
trying.

Templates differ. Some take the arguments of a call only as an object, some only as text, some
escape a text a second time, and some print an object in a syntax of their own and a text as it is
(Gemma 4). Beside a call some want `content` null, some empty, some absent. Templates of vision
models take content as a list of parts: some of every message, some only of messages with an image;
a template without parts is given the image's token in the text. Each form is tried once per
template, on a probe conversation. A conversation keeps its own form where the template takes it, so
its text is the one that transformers renders; else it is put into a form that the template takes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from mdsmix.encode.chat import ChatTemplate
from mdsmix.messages import plural
from mdsmix.record import Conversation, Message, RecordRefused, RichConversation

ARGUMENTS: Mapping[str, Any] = {
    "object": {"probe_key": "probe_value", "another": "probe_more"},
    "text": '{"probe_key": "probe_value", "another": "probe_more"}',
}
CONTENTS: Mapping[str, Message] = {
    "empty": {"content": ""},
    "absent": {},
    "null": {"content": None},
    "text": {"content": "probe_text"},
}
"""Name of a form -> its probe, for a call's arguments and for the content beside a call. The first
that works replaces one that does not.
"""
FAULTS = ('\\"probe_value', "'probe_key': 'probe_value'")
"""Signs of a call printed wrongly: arguments escaped twice, or in Python's spelling. Forms that
print more `None` than others fail too.
"""

_ASKED: Message = {"role": "user", "content": "probe_question"}
_ANSWERED: Message = {"role": "assistant", "content": "probe_answer"}
_PROPERTIES = {"type": "object", "properties": {"probe_name": {"type": "string"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe_description",
        "parameters": _PROPERTIES,
    },
}
_ID = "probe0001"  # Mistral's templates want nine letters and digits
_RESULT: Message = {
    "role": "tool",
    "tool_call_id": _ID,
    "name": "probe_tool",
    "content": "probe_result",
}
_STRUCTURE = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_OF_SYSTEM = ("system", "developer")
AS_MARK = " as 0 or 1"
"Follows the name of an unread key of messages that may say whether a message is trained."


@dataclass(frozen=True)
class Forms:
    """The forms that a template takes."""

    calls: tuple[tuple[str, str], ...]
    """Forms of a message with a call that are printed without a fault: a key of ARGUMENTS, and a
    key of CONTENTS.
    """
    tools: bool
    "The template prints the tools."
    results: bool
    "The template prints the results of tools."
    text_beside_calls: bool
    "The template prints a text that stands beside a call."
    several: bool
    """The template prints all calls of a message, or fails on more than one; False: it prints one
    of several.
    """
    is_narrowed: bool
    """A form that is printed without a fault is not taken: it fails or prints `None` in an earlier
    message, or it is arguments as text, and the template prints an object otherwise."""
    why_not: str
    "Why no form of a call is taken; empty where one is."


@lru_cache(maxsize=16)
def find_forms(template: ChatTemplate) -> Forms:
    """Return the forms that the template prints without one of FAULTS, and with the fewest `None`.

    A call is tried as the last message, and with a result and an answer after it: QwQ's template
    takes null content only in the last message. Arguments as text are not taken if the template
    prints an object otherwise: of its two spellings of a call, that one is the model's.
    """
    tried = {f: _rendered(template, _ASKED, _calling(*f)) for f in product(ARGUMENTS, CONTENTS)}
    clean = {
        form: text
        for form, (text, _) in tried.items()
        if "probe_value" in text and not any(fault in text for fault in FAULTS)
    }
    least = min((text.count("None") for text in clean.values()), default=0)
    good = [form for form, text in clean.items() if text.count("None") == least]
    without_fault = good
    good = _printed_as_history(template, good)
    good = _as_the_model_writes(good, clean)
    # A template that prints no calls may print results.
    call = [_calling(*form) for form in good[:1]]
    twice, _ = _rendered(template, _ASKED, *[_calling(*form, calls=2) for form in good[:1]])
    why = next(why for _, why in tried.values()) or "it prints no calls of tools as they are"
    return Forms(
        calls=tuple(good),
        tools="probe_tool" in _rendered(template, _ASKED, _ANSWERED)[0],
        results="probe_result" in _rendered(template, _ASKED, *call, _RESULT, _ANSWERED)[0],
        text_beside_calls=any("probe_text" in clean[form] for form in good),
        is_narrowed=good != without_fault,
        several=twice.count("probe_value") != 1,
        why_not="" if good else why,
    )


def _printed_as_history(
    template: ChatTemplate, forms: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the forms that the template takes in an earlier message too, with the fewest `None`.

    If it takes none of them there, as a template that fails on results, all are returned.
    """
    printed = {}
    for form in forms:
        text, why = _rendered(template, _ASKED, _calling(*form), _RESULT, _ANSWERED)
        if not why:
            printed[form] = text.count("None")
    least = min(printed.values(), default=0)
    return [form for form, count in printed.items() if count == least] or [*forms]


def _as_the_model_writes(
    forms: list[tuple[str, str]], printed: Mapping[tuple[str, str], str]
) -> list[tuple[str, str]]:
    """Return the forms without those of arguments as text, if the template prints the same
    arguments otherwise as an object. `printed`: the text of each form.
    """
    for content in CONTENTS:
        as_object = ("object", content)
        as_text = ("text", content)
        both = as_object in forms and as_text in forms
        if both and printed[as_object] != printed[as_text]:
            return [form for form in forms if form[0] == "object"]
    return forms


def make_call_probe(template: ChatTemplate) -> list[Message] | None:
    """Return a question, a call whose last value is `probe_value`, and its result, in a form that
    the template takes; None if it takes none.
    """
    forms = find_forms(template)
    if not (forms.calls and forms.results):
        return None
    return [_ASKED, _calling(*forms.calls[0]), _RESULT]


def make_tool_probe() -> Message:
    """Return the tool that `make_call_probe` calls."""
    return _TOOL


def fit_tools(template: ChatTemplate, conversation: RichConversation) -> RichConversation:
    """The conversation in forms that the template takes; RecordRefused (tools_not_printed) where it
    takes none.
    """
    forms = find_forms(template)
    _refuse(conversation.tools and not forms.tools, "it prints no tools")
    return conversation._replace(messages=[_fit(m, template, forms) for m in conversation.messages])


def lift_system_tools(template: ChatTemplate, conversation: RichConversation) -> RichConversation:
    """The conversation with the tools of its system message, as in records of GLM-4, among its own
    tools; unchanged if the template prints them where they are.
    """
    messages = conversation.messages
    held = [m["tools"] for m in messages if m["role"] in _OF_SYSTEM and m.get("tools")]
    if not held or _prints_tools_of_system(template):
        return conversation
    tools = [tool for each in held for tool in each]
    is_other = conversation.tools and conversation.tools != tools
    _refuse(is_other, "the tools of the system message are not those of the record", "bad_tools")
    messages = [
        {key: m[key] for key in m if key != "tools"} if m["role"] in _OF_SYSTEM else m
        for m in messages
    ]
    return conversation._replace(messages=messages, tools=tools)


@lru_cache(maxsize=16)
def _prints_tools_of_system(template: ChatTemplate) -> bool:
    """Whether the template prints tools that are a key of the system message."""
    system: Message = {"role": "system", "content": "probe_text", "tools": [_TOOL]}
    return "probe_tool" in _rendered(template, system, _ASKED, _ANSWERED, tools=None)[0]


def find_unread_keys(template: ChatTemplate, conversation: RichConversation) -> Iterator[str]:
    """Parts of the messages that the template does not print: `messages.KEY`, and texts beside
    calls. A key that says of answers only 0 and 1, or false and true, may be a mark, and is
    `messages.KEY as 0 or 1`.
    """
    found = dict[str, list[tuple[str, Any]]]()
    for message in conversation.messages:
        role = message["role"]
        own = {*_STRUCTURE, "tools"} if role in _OF_SYSTEM else _STRUCTURE
        for key, value in message.items():
            is_empty = not value and type(value) not in (bool, int, float)
            if not is_empty and key not in own and not _prints(template, role, key):
                found.setdefault(key, []).append((role, value))
        has_both = message.get("tool_calls") and message.get("content")
        if has_both and not find_forms(template).text_beside_calls:
            yield "messages.content beside tool_calls"
    for key, values in found.items():
        is_of_answers = any(role == "assistant" for role, _ in values)
        is_mark = is_of_answers and all(value in (0, 1) for _, value in values)
        yield f"messages.{key}{AS_MARK}" if is_mark else f"messages.{key}"


def describe_possible_marks(unread: Mapping[str, int]) -> Iterator[str]:
    """Sentences on unread keys of messages that are 0 or 1 wherever they are, so that they may be
    marks. `unread`: name from `find_unread_keys` -> records.
    """
    for name, count in unread.items():
        key = name.removesuffix(AS_MARK)
        if key != name and key not in unread:
            plain = key.removeprefix("messages.")
            yield (
                f"{plain} of messages is 0 or 1, or false or true, in all {plural(count, 'record')} that have it, and is not read: if it says "
                f"which answers are trained, name it by source.train_mark: {plain}"
            )


@lru_cache(maxsize=256)
def _prints(template: ChatTemplate, role: str, key: str) -> bool:
    """Whether the template prints the text under a key of a role's messages. The `name` of a tool's
    result counts as printed.
    """
    if role == "tool":
        return key == "name"
    marked: Message = {"role": role, "content": "probe_text", key: "probe_extra"}
    said = {"user": [marked, _ANSWERED], "assistant": [_ASKED, marked]}
    text, _ = _rendered(template, *said.get(role, [marked, _ASKED, _ANSWERED]), tools=None)
    return "probe_extra" in text


@lru_cache(maxsize=256)
def prints_null(template: ChatTemplate, role: str, key: str) -> bool:
    """Return whether the template prints a role's messages otherwise if this key of them is null
    than without the key. True too if the template fails on each probe without the key.
    """
    if role == "developer" and role not in template.source:
        role = "system"
    system: list[Message] = [{"role": role, "content": "probe_text"}] if role in _OF_SYSTEM else []
    calling = make_call_probe(template) or [_ASKED]
    differ = []
    for probe in (
        [*system, _ASKED, _ANSWERED],
        [*system, *calling, _ANSWERED, _ASKED, _ANSWERED],
    ):
        if not any(message["role"] == role for message in probe):
            continue
        # Copies, since a template may compare messages by identity, as Mistral's does.
        marked = [m | ({key: None} if m["role"] == role else {}) for m in probe]
        without = [{k: m[k] for k in m if k != key or m["role"] != role} for m in probe]
        text, why = _rendered(template, *without)
        if not why:
            differ.append(_rendered(template, *marked) != (text, ""))
    return any(differ) or not differ


def _calling(arguments: str, content: str, calls: int = 1) -> Message:
    function = {"name": "probe_tool", "arguments": ARGUMENTS[arguments]}
    call = {"id": _ID, "type": "function", "function": function}
    return {"role": "assistant", **CONTENTS[content], "tool_calls": [call] * calls}


def _rendered(
    template: ChatTemplate, *messages: Message, tools: Sequence[Any] | None = (_TOOL,)
) -> tuple[str, str]:
    """The rendered text and ""; where the template fails, "" and its error."""
    try:
        return template.render([*messages], False, [*tools] if tools else None), ""
    except RecordRefused as refused:
        return "", str(refused.why.detail["template"] or "it fails on calls of tools")


def _refuse(is_wrong: Any, why: str, reason: str = "tools_not_printed") -> None:
    if is_wrong:
        raise RecordRefused(reason, template=why)


def _fit(message: Message, template: ChatTemplate, forms: Forms) -> Message:
    if message["role"] == "developer" and "developer" not in template.source:
        return message | {"role": "system"}
    if message["role"] == "tool":
        _refuse(not forms.results, forms.why_not or "it prints no results of tools")
    calls = message.get("tool_calls")
    if not calls:
        return message
    _refuse(not forms.calls, forms.why_not)
    _refuse(len(calls) > 1 and not forms.several, "it prints one of several calls")
    taken = {arguments for arguments, _ in forms.calls}
    fitted = message | {"tool_calls": [_fit_call(call, taken) for call in calls]}
    content = message.get("content")
    own = "text" if content else "empty" if content == "" else "null"
    own = own if "content" in message else "absent"
    contents = [content for _, content in forms.calls if (content == "text") == (own == "text")]
    _refuse(not contents, f"it takes no call with {own} content")
    if own in contents:
        return fitted
    fitted.pop("content", None)
    return fitted | CONTENTS[contents[0]]


def _fit_call(call: Message, taken: Collection[str]) -> Message:
    """The call with its arguments as an object or as text. `taken`: the keys of ARGUMENTS that the
    template takes.
    """
    arguments = call["function"]["arguments"]
    is_text = isinstance(arguments, str)
    if ("text" if is_text else "object") in taken:
        return call
    if is_text:
        other: Any = json.loads(arguments)
    else:  # as a template's tojson writes it; arguments from an Arrow file may hold a date
        other = json.dumps(arguments, ensure_ascii=False, default=str)
    return call | {"function": call["function"] | {"arguments": other}}


ImageForm = Literal["parts", "mixed", "text", ""]
"""parts: every content is a list of parts. mixed: only the content of messages with an image. text:
every content is a text, with the token in place of each image. "": the template prints no image in
any of these forms.
"""
IMAGE_FORMS: tuple[ImageForm, ...] = ("parts", "mixed", "text")


def fit_images(template: ChatTemplate, token: str, conversation: Conversation) -> Conversation:
    """The conversation with its images in a form that the template takes; RecordRefused
    (image_not_printed) where it takes none.
    """
    form = find_image_form(template, token)
    if not conversation.images and form != "parts":
        return conversation
    why = f"it does not print {token} for an image, in parts or in a text"
    _refuse(not form, why, "image_not_printed")
    messages = [_with_parts(message, form, token) for message in conversation.messages]
    return RichConversation(messages, *conversation[1:])


@lru_cache(maxsize=16)
def find_image_form(template: ChatTemplate, token: str) -> ImageForm:
    """The first form in which the template prints one token per image and each text once: tried
    with a system message, then without.
    """
    asked = [{"type": "image"}, {"type": "text", "text": "probe_question"}]
    system: Message = {"role": "system", "content": "probe_system"}
    for first, form in product(([system], []), IMAGE_FORMS):
        messages = [*first, {"role": "user", "content": asked}, _ANSWERED]
        fitted = [_with_parts(message, form, token) for message in messages]
        text, _ = _rendered(template, *fitted, tools=None)
        once = [*("probe_system" for _ in first), "probe_question", "probe_answer", token]
        is_clean = "'type'" not in text and '"type"' not in text
        if is_clean and all(text.count(said) == 1 for said in once):
            return form
    return ""


def _with_parts(message: Message, form: ImageForm, token: str) -> Message:
    content = message.get("content")
    if form == "text" and isinstance(content, list):
        return message | {"content": "".join(part.get("text", token) for part in content)}
    if form == "parts" and isinstance(content, str) and content:
        return message | {"content": [{"type": "text", "text": content}]}
    return message

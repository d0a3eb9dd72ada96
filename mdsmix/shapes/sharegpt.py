"""`{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...],
"system": "...", "tools": "[...]"}`, and similar records: LLaVA's, Qwen-VL's and ms-swift's.

A system message in the list is taken, as LLaMA-Factory takes it, and the field `system` is not
read; `consecutive_roles: merge` joins both. `tags` renames keys and roles, in the words of
LLaMA-Factory's dataset_info.json. A message from `function_call` holds one call or several as JSON:
`{"name": ..., "arguments": ...}`. A message from `observation`, or `tool`, holds the function's
result.

LLaVA and the finetuning scripts of Qwen2.5-VL and Qwen3-VL write `image` beside these messages, a
path or a list of paths, and `<image>` in a text for each image; a record without `image` is one of
text. In Qwen-VL's records the path stands in the text, `Picture 1: <img>a.jpg</img>`, and Qwen-VL
itself hands the path to the tokenizer (its issue 147). Here an image takes the place of the tags
and the path. ms-swift also reads rounds, `{"conversation": [{"human": "...", "assistant": "..."},
...]}`, and FineVision and the_cauldron write `{"images": [...], "texts": [{"user": "...",
"assistant": "...", "source": "..."}, ...]}`, where no text places the images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from mdsmix.record import Conversation, Message, RecordRefused
from mdsmix.shapes.content_parts import result_text
from mdsmix.shapes.conversation_rules import (
    CONVERSATION_REASONS,
    FLAGS,
    MARK,
    TRIES,
    calls_of,
    conversation_of,
    exchange,
    list_of,
    system_of,
)
from mdsmix.shapes.extras import EXTRAS, EXTRAS_REASONS, with_extras
from mdsmix.shapes.image_parts import MARK as PLACE
from mdsmix.shapes.image_parts import PLACEHOLDER_REASONS, Image, image_of, placed
from mdsmix.shapes.shape import Fields, RawRecord, Shape

TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
"""Tag of LLaMA-Factory's dataset_info.json -> its key or role in records, where `tags` does not
give another.
"""
KEY_TAGS = ("role_tag", "content_tag")
"Tags that name keys; all other tags name roles."
WORDS = {
    **dict.fromkeys(("human", "user", "User", "prompter", "question", "instruction"), "user_tag"),
    **dict.fromkeys(
        ("gpt", "assistant", "Assistant", "bot", "chatgpt", "model", "answer"), "assistant_tag"
    ),
    **dict.fromkeys(
        ("observation", "tool", "tool_response", "function_response"), "observation_tag"
    ),
    **dict.fromkeys(("function_call", "tool_call"), "function_tag"),
    **dict.fromkeys(("system", "System"), "system_tag"),
}
"Word for a role in common data sets -> its tag."
ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "system_tag": "system",
    "function_tag": "call",
}
QWEN_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "system": "system",
}
_TAGGED = re.compile(r"<img>(.*?)</img>", re.DOTALL)


def parse_sharegpt(raw: RawRecord) -> Conversation:
    items = list_of(raw, "conversations")
    messages = sharegpt_messages(raw, items)
    return conversation_of(raw, messages, len(messages) - len(items))


def sharegpt_messages(raw: RawRecord, items: Sequence[Any]) -> list[Message]:
    """Return a record's messages, the text of its field `system` first. `items`: as the record has
    them.

    Raises RecordRefused if an item is not a message.
    """
    words = {**TAGS, **raw.options.get("tags", {})}
    keys = [words[tag] for tag in KEY_TAGS]
    roles = {"tool": "tool"} | {words[tag]: role for tag, role in ROLES.items()}
    messages = [_message(item, roles, *keys) for item in items]
    has_system = bool(messages) and messages[0]["role"] == "system"
    return messages if has_system and not raw.merges else system_of(raw) + messages


def _message(
    item: Any, roles: Mapping[str, str], role_key: str = "from", text_key: str = "value"
) -> Message:
    """The message as a template takes it; a tool call becomes a message of the assistant."""
    if not isinstance(item, dict) or not item.keys() >= {role_key, text_key}:
        raise RecordRefused("bad_message_keys")
    name, text = item[role_key], item[text_key]
    role = roles.get(name) if isinstance(name, str) else None
    more = {k: v for k, v in item.items() if k not in (role_key, text_key) and v is not None}
    if role is None:
        raise RecordRefused("unknown_role")
    if role == "call":
        return {**more, "role": "assistant", "content": "", "tool_calls": calls_of(text)}
    if role == "tool":
        text = result_text(text)
    if not isinstance(text, str):
        raise RecordRefused("content_not_text")
    return {**more, "role": role, "content": text}


def guess(records: Sequence[Any], fields: Fields) -> Iterator[dict[str, Any]]:
    """Sets of options for `mdsmix init` to try: TRIES, and the `tags` that the messages show. Where
    messages have two keys with texts, and one holds only known words for roles, that key is the
    role_tag, the other key the content_tag, and the words name the roles.
    """
    yield from TRIES
    lists = [r.get(fields["conversations"]) for r in records if isinstance(r, dict)]
    texts = dict[str, set[str]]()
    for message in chain.from_iterable(said for said in lists if isinstance(said, list)):
        for key, text in message.items() if isinstance(message, dict) else ():
            if isinstance(text, str):
                texts.setdefault(key, set()).add(text)
    for key, said in texts.items():
        if len(texts) == 2 and said <= WORDS.keys():
            (other,) = texts.keys() - {key}
            words = {"role_tag": key, "content_tag": other}
            words |= {WORDS[word]: word for word in sorted(said)}
            tags = {"tags": {tag: word for tag, word in words.items() if TAGS[tag] != word}}
            yield from (tags | tried for tried in ({}, *TRIES))


def parse_qwen_vl(raw: RawRecord) -> Conversation:
    messages = system_of(raw)
    before, both = len(messages), {raw.fields.get("input"), raw.fields.get("output")}
    if raw.fields["conversations"] not in raw.record and raw.record.keys() >= both:
        messages += exchange(raw.text("input"), raw.text("output"))
    else:
        messages += [_message(item, QWEN_ROLES) for item in list_of(raw, "conversations")]
    conversation = conversation_of(raw, messages, before)
    images = list[Image]()

    def take(tagged: re.Match[str]) -> str:
        images.append(image_of(tagged[1].strip()))
        return PLACE

    messages = [m | {"content": _TAGGED.sub(take, m["content"])} for m in conversation.messages]
    if any("<img>" in m["content"] or "</img>" in m["content"] for m in messages):
        raise RecordRefused("bad_image", why="a tag <img> or </img> is without its other half")
    return placed(conversation._replace(messages=messages), images, PLACE)


def parse_rounds(raw: RawRecord) -> Conversation:
    marks = FLAGS | {raw.options.get(MARK)}
    rounds = list_of(raw, "conversation")
    for each in rounds:
        if not isinstance(each, dict) or each.keys() - marks != {"human", "assistant"}:
            raise RecordRefused("bad_message_keys")
    return _of_rounds(raw, rounds, "human")


def parse_finevision(raw: RawRecord) -> Conversation:
    rounds = list_of(raw, "texts")
    if not all(isinstance(each, dict) and each.keys() >= {"user", "assistant"} for each in rounds):
        raise RecordRefused("bad_message_keys")
    return _of_rounds(raw, rounds, "user")


def _of_rounds(raw: RawRecord, rounds: Sequence[Message], asker: str) -> Conversation:
    """The conversation of questions, under the key `asker`, and their answers. Other keys of a
    round are those of its answer.
    """
    messages = system_of(raw)
    before = len(messages)
    for each in rounds:
        question, answer = each[asker], each["assistant"]
        if not (isinstance(question, str) and isinstance(answer, str)):
            raise RecordRefused("content_not_text")
        more = {key: each[key] for key in each if key not in (asker, "assistant", "role")}
        asked, answered = exchange(question, answer)
        messages += [asked, more | answered]
    return conversation_of(raw, messages, before)


SHAREGPT = Shape(
    name="sharegpt",
    version=2,
    gives=Conversation,
    fields=("conversations",),
    optional=("system", "tools"),
    structured=("conversations", "tools"),
    extras=EXTRAS,
    options=("tags", "consecutive_roles", "nulls", MARK),
    also_called={
        "conversations": ("conversation", "messages", "chat", "turns", "dialogue", "dialog")
    },
    guess=guess,
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS,
    parse=with_extras(parse_sharegpt),
)
LLAVA = replace(
    SHAREGPT,
    name="llava",
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS | PLACEHOLDER_REASONS,
    optional=("system",),
    structured=("conversations",),
    has_images="outside",
    also_called={},
    guess=lambda *_: (),
)
QWEN_VL = replace(
    LLAVA,
    parse=with_extras(parse_qwen_vl),
    name="qwen_vl",
    optional=("input", "output", "system"),
    options=("consecutive_roles", "nulls", MARK),
    has_images="inside",
)
ROUNDS = Shape(
    name="rounds",
    version=2,
    gives=Conversation,
    fields=("conversation",),
    optional=("system",),
    structured=("conversation",),
    extras=EXTRAS,
    options=(MARK,),
    also_called={"conversation": ("conversations", "history", "dialogue")},
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS,
    parse=with_extras(parse_rounds),
)
FINEVISION = Shape(
    name="finevision",
    gives=Conversation,
    fields=("texts",),
    optional=("system",),
    structured=("texts",),
    extras=EXTRAS,
    options=(MARK,),
    also_called={"texts": ("conversation", "conversations")},
    images_first=True,
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS | PLACEHOLDER_REASONS,
    parse=with_extras(parse_finevision),
)

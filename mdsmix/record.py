"""A record in the form that every encoder takes: a document, a pair, or a conversation.

Shapes make records and encoders take them, so neither knows of the other: a further way to write a
conversation is one more shape, and no encoder changes. Records are named tuples, since one is made
for each raw record: 0.2 us each.

The reason codes of records that become no sample stand here too. A kind adds its own
(`Kind.reasons`), and `make tables` lists all of them on a page. A bad record (`BAD`) is quarantined
with its place and raw bytes, and its neighbours are not touched. A filtered record (`FILTERED`) is
good, and a rule leaves it out.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
import xxhash

Message = dict[str, Any]
"""`role` and `content` as a chat template takes them, and further keys that the template reads
(`tool_calls`, ...).
"""


class NoRecord(str):
    """The reason code of a raw value that is no record. Its `detail` explains it, and is kept
    beside the bad record.
    """

    detail: dict[str, str | int]

    def __new__(cls, reason: str, **detail: str | int) -> NoRecord:
        self = super().__new__(cls, reason)
        self.detail = detail
        return self


def detail_of(reason: str) -> dict[str, str | int]:
    """The detail of a reason code; empty where it has none."""
    return reason.detail if isinstance(reason, NoRecord) else {}


class RecordRefused(Exception):
    """A record cannot be read; `why` is the reason code with its detail."""

    def __init__(self, reason: str, **detail: str | int) -> None:
        super().__init__(reason)
        self.why = NoRecord(reason, **detail)


class Document(NamedTuple):
    """A text to be trained on as it is."""

    text: str


class Pair(NamedTuple):
    """A prompt and the response to it, rendered by no template."""

    prompt: str
    response: str


class Conversation(NamedTuple):
    """Messages for a chat template, with their tools and images."""

    messages: list[Message]
    trained: Sequence[bool] | None = None
    """One flag for each message. An untrained answer becomes part of the next prompt. None: the
    recipe's policies alone decide.
    """
    tools: list[Any] | None = None
    """The tools that the assistant may call, as the template takes them; [] if the record has an
    empty list.
    """
    images: Sequence[Any] = ()
    """One image for each part `{"type": "image"}` of the messages, in their order: a path or URL
    from the record, or bytes. Once it is read, each is a `mdsmix.images.reader.Image`.
    """
    variables: Mapping[str, Any] | None = None
    """The variables that the record gives to the chat template (`chat_template_kwargs`); None
    without any.
    """

    @property
    def texts(self) -> list[str]:
        """The contents of all messages, and the texts in the template's variables."""
        contents = [message["content"] for message in self.messages]
        return contents if self.variables is None else [*contents, *_texts(self.variables)]

    @property
    def said(self) -> str:
        """The conversation's texts, joined by line breaks."""
        return "\n".join(self.texts)


class RichConversation(Conversation):
    """A conversation with tools, with tool calls, or with content that is null or a list
    of parts.
    """

    __slots__ = ()

    @property
    def texts(self) -> list[str]:
        """All texts in messages, tools and variables, keys too: a template may print any
        of them.
        """
        return [*_texts([self.messages, self.tools, self.variables])]


Record = Document | Pair | Conversation


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from map(str, value)
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for inner in value:
            yield from _texts(inner)


def canonical(record: Record) -> bytes:
    """The record's content as bytes. Equal records give equal bytes, in whatever order their keys
    stand.
    """
    said: Any = list(record) if isinstance(record, tuple) else record
    if isinstance(record, Conversation):
        said[2] = record.tools or None
        if not record.variables:
            del said[4 if record.images else 3 :]
    try:
        return orjson.dumps(said, _digest, orjson.OPT_SORT_KEYS)
    except TypeError:
        # Tools may hold integers beyond 64 bits, or values of Arrow for which JSON has no type.
        return json.dumps(said, sort_keys=True, ensure_ascii=False, default=_said).encode()


def _digest(value: Any) -> str:
    """The hash that stands for an image's bytes; TypeError for any other value."""
    if isinstance(value, bytes):
        return xxhash.xxh3_128_hexdigest(value)
    raise TypeError


def _said(value: Any) -> str:
    return _digest(value) if isinstance(value, bytes) else str(value)


_keep_utf8 = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyUnicode_AsUTF8AndSize", ctypes.pythonapi)
)


def is_encodable(text: str) -> bool:
    """False for a text with a lone surrogate: it has no UTF-8 form, and no tokenizer takes it.

    Python keeps the UTF-8 form that its C API gives. The fingerprint and the tokenizer then need
    none of their own: with `encode` here, a text was encoded three times, a tenth of a conversion
    of many scripts.
    """
    try:
        return text.isascii() or bool(_keep_utf8(text, None))
    except UnicodeEncodeError:
        return False


BAD = {
    "not_json": "The line, or the text in a column of JSON, is no JSON value.",
    "json_array": "The record is a list of objects, or opens one: the file is one array.",
    "invalid_utf8": "The bytes are no valid UTF-8.",
    "lone_surrogate": "A text has half of a character, such as \\ud800, which has no UTF-8 form.",
    "too_deep": "JSON is nested deeper than 1,024 levels, or messages or tools deeper than 200, which templates do not follow.",
    "line_too_long": "The line has more than 256 MiB; its place and length are kept.",
    "record_too_long": "The element, row or document has more than 256 MiB, or a table's cell more than 16 million characters.",
    "damaged_rows": "Rows of a parquet's row group cannot be decompressed or decoded.",
    "unreadable_value": "A value has no form in Python, such as a date in the year 75,000, or the number 1e400.",
    "duplicate_key": "A map of parquet or Arrow has one key twice.",
    "too_few_fields": "The row has fewer cells than the table has fields.",
    "too_many_fields": "The row has more cells than the table has fields.",
    "not_csv": "A quote is in the wrong place; the next line is read as a row again.",
    "nul_byte": "The row of a table has a NUL byte.",
    "duplicate_member": "Two members of an archive are the same field of one record.",
    "no_suffix": "The name of an archive's member has no dot, so it names no field.",
    "unsafe_name": "The name of an archive's member leads out of the archive.",
    "crashed_worker": "Worker processes died of the record, and --quarantine-crashes was given.",
    "not_an_object": "The record is no JSON object.",
    "missing_field": "A field that the recipe names is not there.",
    "field_not_text": "A text field holds something else.",
    "function_refused": "The recipe's function returned a text, which the detail says.",
    "function_failed": "The recipe's function raised an exception, which the detail says.",
    "function_gave_other": "The recipe's function returned a value of another type than the stream takes.",
    "special_token_in_text": "The text holds a special token, and special_tokens_in_text is reject.",
    "bad_tools": "The tools are no list of objects with a name, nor the JSON text of one.",
    "missing_tools": "Messages call tools, and the field tools holds none.",
    "bad_tool_call": "A call has no name, or is no JSON.",
    "arguments_not_json": "The arguments of a call are no JSON object, nor the text of one.",
    "unknown_tool_call": "The tool_call_id of a result belongs to no call.",
    "tools_not_printed": "The chat template prints no tool, call or result of the conversation.",
    "bad_weight": "A message's mark (train, weight, loss, loss_weight, loss_mask, ...) is not true, false, 1 or 0, or two marks of it differ, or a part of it is weighed.",
    "bad_loss_mask": "The record's loss_mask is no list with one entry for each message or each answer; the detail counts them.",
    "bad_template_kwargs": "The record's chat_template_kwargs are no object, or name what mdsmix itself gives to the template, such as tools.",
    "objects_not_filled": "Texts hold <ref-object> or <bbox>, for which ms-swift fills in the record's objects by the rules of one model.",
    "trained_prompt": "A message that is not the assistant's says that it is trained.",
    "untrained_in_prompt": "An answer that is not trained is in a prompt, and target_prompts trains prompts.",
    "bad_history": "An Alpaca record's history is no list of [question, answer], both texts.",
    "empty_question": "An Alpaca record has neither instruction nor input.",
    "empty_answer": "An answer is empty and calls nothing. The shapes messages and prompt_response do not check this.",
    "messages_not_a_list": "The messages are no list.",
    "no_messages": "The list of messages is empty.",
    "too_few_messages": "There is one message.",
    "bad_message_keys": "A message has not the keys of its shape, or a call is beside another role than the assistant's.",
    "unknown_role": "A message has a role that its shape does not know.",
    "content_not_text": "A message's content is no text, nor what its shape takes in place of one.",
    "repeated_role": "Two messages of one role are in a row.",
    "last_not_assistant": "The last message is not the assistant's.",
    "starts_with_assistant": "The first message is the assistant's, and the shape takes no greeting.",
    "template_error": "The chat template fails on the conversation.",
    "split_token": "A prompt or an answer would end inside a control token of the tokenizer; the detail holds both sides.",
    "not_prefix_stable": "The chat template prints earlier messages otherwise once there are more; the detail holds both texts where they part.",
    "image_count": "The record has more or fewer images than places for them; the detail counts both.",
    "bad_image": "What stands for an image is neither a path nor an image: base64 that is none, a tag <img> without its end.",
    "image_not_printed": "The chat template prints no image token for an image.",
    "image_placeholders": "The tokens hold more or fewer image tokens than the record has images.",
    "image_not_found": "There is no such file, object or bucket, or a server answers that there is none.",
    "image_unreadable": "A disk or store refuses to read the image.",
    "image_empty": "The image's file has no bytes.",
    "not_an_image": "The bytes are of none of the formats; the detail says what they seem to be.",
    "image_truncated": "The end of the image is missing.",
    "image_damaged": "The image does not decode, or its EXIF cannot be read.",
    "image_animated": "The image has more than one frame.",
    "image_too_large": "The image has more pixels than max_pixels.",
    "image_depth": "The image has more than 8 bits a channel, and Pillow would turn it white.",
    "image_file_too_large": "The file has more than 256 MiB, or a server sends more than 64 MiB.",
    "bad_image_path": "The path names no place: a NUL, an unknown scheme, a way out of the bucket, or of the folder under outside: refuse.",
    "remote_image": "The image is at an http(s) URL, and the recipe does not say http: fetch.",
    "image_not_fetched": "A server sent no whole image in three tries or 60 s.",
    "image_refused": "The recipe's processor takes no image of this size, alone or in a batch with another image.",
    "too_many_images": "The record has more images than max_images.",
    "images_too_large": "The images of the record come to more than 1 GiB.",
}
FILTERED = {
    "where": "The source's condition `where` is false of the record.",
    "where_missing_field": "A field that `where` needs is not there.",
    "where_not_comparable": "The two values that `where` compares are of different types.",
    "not_sampled": "The record is not in the sample that the stream is made of.",
    "held_out": "The record is held out for evaluation.",
    "not_held_out": "The record is not held out for evaluation.",
    "duplicate": "An earlier record of the stream says the same, and duplicates is drop.",
    "nothing_trained": "No answer of the conversation is to be trained.",
    "images_too_long": "The row does not fit max_seq_len once the processor has expanded its images.",
    "empty": "The document has no tokens.",
    "min_tokens": "The document has fewer tokens than min_tokens.",
    "max_tokens": "The document has more tokens than max_tokens.",
    "one_token": "The document has one token, which has nothing to predict.",
    "empty_prompt": "A prompt has no tokens, in any turn.",
    "empty_response": "A response has no tokens, in any turn.",
    "too_long": "The record has more than max_seq_len tokens, and too_long is filter; or its first answer does not end within them.",
    "no_loss_tokens": "Nothing that is trained is left within max_seq_len.",
}

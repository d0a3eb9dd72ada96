"""What a raw record becomes before any encoder sees it: a document, a pair, or a conversation.

Shapes make these and encoders take them, so neither knows of the other: another way in which people write a conversation
is another shape, and no encoder changes. They are named tuples, since one is made for every record: 0.2 us each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson
import xxhash

Message = dict[str, Any]
"`role` and `content` as a chat template is given them, and what else the template reads (`tool_calls`, ...)."


class NoRecord(str):
    """The reason code of why a raw value is no record, and what explains it, which is kept beside the bad record."""

    detail: dict[str, str | int]

    def __new__(cls, reason: str, **detail: str | int) -> NoRecord:
        self = super().__new__(cls, reason)
        self.detail = detail
        return self


def detail_of(reason: str) -> dict[str, str | int]:
    """What explains a reason code; empty where nothing more is known."""
    return reason.detail if isinstance(reason, NoRecord) else {}


class RecordRefused(Exception):
    """A record that cannot be read; `why` is its reason code, with the detail that is kept beside it."""

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
    """What a chat template is given."""

    messages: list[Message]
    trained: Sequence[bool] | None = None
    "A flag a message: an answer that is not trained becomes part of the next prompt. None: the recipe's policies alone decide."
    tools: list[Any] | None = None
    "What the assistant may call, as the template takes it."
    images: Sequence[Any] = ()
    """Of a stream of images: for each part `{"type": "image"}` of the messages, in their order, a path or URL as the record
    says it, or the image itself (bytes); once they are read, `mdsmix.images.reader.Image`."""

    @property
    def texts(self) -> list[str]:
        """The contents of all messages."""
        return [message["content"] for message in self.messages]

    @property
    def said(self) -> str:
        """Its texts, a line or more each."""
        return "\n".join(self.texts)


class RichConversation(Conversation):
    """A conversation with more than a role and a text in each message: tools, calls of them, content that is null or a list of parts."""

    __slots__ = ()

    @property
    def texts(self) -> list[str]:
        """All texts in the messages and the tools, keys too: a template may print any of them."""
        return [*_texts([self.messages, self.tools])]


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
    """What the record says, as bytes: those of equal records are equal, whatever the order of the keys in them."""
    said: Any = list(record) if isinstance(record, tuple) else record
    if isinstance(record, Conversation) and not record.images:
        del said[3:]
    try:
        return orjson.dumps(said, _digest, orjson.OPT_SORT_KEYS)
    except (
        TypeError
    ):  # tools may hold numbers beyond 64 bits, and what Arrow has beside JSON's types
        return json.dumps(said, sort_keys=True, ensure_ascii=False, default=_said).encode()


def _digest(value: Any) -> str:
    """An image that stands in its record, by the hash of its bytes."""
    if isinstance(value, bytes):
        return xxhash.xxh3_128_hexdigest(value)
    raise TypeError


def _said(value: Any) -> str:
    return _digest(value) if isinstance(value, bytes) else str(value)


def is_encodable(text: str) -> bool:
    """False for a text with a lone surrogate: it has no UTF-8 form, and no tokenizer takes it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

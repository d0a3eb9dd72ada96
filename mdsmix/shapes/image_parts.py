"""Images in conversations: a conversation that a plain shape has read becomes one whose messages
have parts.

People write an image in four ways: as a placeholder in a text (`<image>`) with a list of paths
beside it, as a part of a message that brings the image, as a key of the message itself (`image`,
GLM-4's form), or as a path between tags inside of the text. All four become a message whose content
is a list of parts, as transformers' chat templates take it, and a list of images in the order of
the parts. So a template never gets a path. The numbers of placeholders and images must agree, or
nobody knows which image is meant.
"""

from __future__ import annotations

import base64
import re
import warnings
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import orjson

from mdsmix.record import Conversation, RecordRefused, RichConversation
from mdsmix.schema import shorten
from mdsmix.shapes.content_parts import TEXTS, joined_parts
from mdsmix.shapes.fields import parse_field
from mdsmix.shapes.shape import RawRecord, Shape

PLACEHOLDER_REASONS = {
    "image_count": (
        "The record has more or fewer images than places for them; the detail counts both."
    ),
    "bad_image": (
        "What stands for an image is neither a path nor an image: base64 that is none, a "
        "tag <img> without its end."
    ),
}
"Reason codes of a shape with images -> their explanations."

Image = str | bytes
PLACEHOLDER = "<image>"
"""Stands for the next image of the record in the texts of LLaVA, Qwen2.5-VL, ms-swift and
LLaMA-Factory.
"""
MARK = "\0image\0"
"Stands for an image, until texts are cut into parts, in records where `<image>` is plain text."
FIELDS = ("images", "image")
"""Fields of a record that may hold its images, where a recipe names no field: the first that is
there and not empty counts.
"""
NOTHING: tuple[Any, ...] = (None, [], "", {"bytes": None, "path": None})
"Values of a field without images. Some writers of parquet make the last one of a missing image."
KINDS = ("image", "image_url", "input_image")
"""Types of a part that is an image. A tuple and no set, since a part's type may be a list, which
has no hash.
"""
_ENCODED = ("bytes", "base64")
_SOURCES = (*_ENCODED, "data", "image", "image_url", "url", "path", "source", "value")
"""Keys of an object that bring an image. Bytes come first: the path beside them is where they once
lay.
"""
_DATA = re.compile(r"data:[^,]*?(;base64)?,", re.IGNORECASE)
_BARE = re.compile(
    r"\s*(/9j/|iVBORw0KGg|UklGR|R0lGOD|Qk|SUkqA|TU0AK|AAAA\wGZ0eXBhdm)[\w+/\s-]{256,}={0,2}",
    re.ASCII,
)
"""Base64 that begins as a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF does, and is longer than any path
without a dot.
"""
_OF_URLS = str.maketrans("-_", "+/")


def with_images(shape: Shape, fields: Sequence[str]) -> Shape:
    """The shape, reading images too: from these fields of a record (without any, `images`, else
    `image`), and from parts of messages.
    """
    names = tuple(fields) or FIELDS
    return replace(
        shape,
        parse=shape.parse if shape.has_images == "inside" else partial(_parse, shape, names),
        plain=None,
        image_fields=names,
        reasons={**shape.reasons, **PLACEHOLDER_REASONS},
    )


def _parse(shape: Shape, names: Sequence[str], raw: RawRecord) -> Conversation:
    images = [image for value in _held(raw.record, names) for image in images_of(value)]
    parts, mark = list[Any](), PLACEHOLDER
    said = {raw.fields[key]: raw.value(key) for key in shape.fields}
    lists = {name: value for name, value in said.items() if isinstance(value, list)}
    flat = {name: [_flat(message, parts) for message in lists[name]] for name in lists}
    if parts:
        mark, images = MARK, [*_images_of_parts(parts, images)]
    conversation = shape.parse(raw._replace(record={**raw.record, **flat}))
    if shape.images_first and not any(mark in text for text in conversation.texts):
        conversation = _begun(conversation, mark * len(images))
    return placed(conversation, images, mark)


def _begun(conversation: Conversation, marks: str) -> Conversation:
    """The conversation with these marks before the text of its first question."""
    messages = [*conversation.messages]
    first = next(at for at, message in enumerate(messages) if message["role"] == "user")
    messages[first] = messages[first] | {"content": marks + messages[first]["content"]}
    return conversation._replace(messages=messages)


def placed(conversation: Conversation, images: Sequence[Image], mark: str) -> Conversation:
    """The conversation with an image part in place of each mark; RecordRefused (image_count) where
    it has not as many marks as there are images.
    """
    texts = [message.get("content") or "" for message in conversation.messages]
    count = sum(text.count(mark) for text in texts)
    if count != len(images):
        raise RecordRefused("image_count", placeholders=count, images=len(images))
    if not images:
        return conversation
    messages = [
        message | {"content": _cut(text, mark)} if mark in text else message
        for message, text in zip(conversation.messages, texts, strict=True)
    ]
    return RichConversation(messages, *conversation[1:3], images, conversation.variables)


def _cut(text: str, mark: str) -> list[dict[str, str]]:
    """The text as parts, with an image part for each mark."""
    between = ({"type": "text", "text": piece} for piece in text.split(mark))
    parts = [part for piece in between for part in ({"type": "image"}, piece)][1:]
    return [part for part in parts if part.get("text") != ""]


def images_of(value: Any) -> Iterator[Image]:
    """The images in a field's value: one image or a list of them. RecordRefused (bad_image) for a
    value that is no image.
    """
    for number, each in enumerate(_each(value)):
        try:
            yield image_of(each)
        except RecordRefused as fault:
            fault.why.detail["image_number"] = number
            raise


def _each(value: Any) -> list[Any]:
    """The entries of a list, which may be a text, or the value alone."""
    value = _listed(value) if isinstance(value, str) and value[:1] == "[" else value
    return value if isinstance(value, list) else [value]


def _listed(text: str) -> Any:
    """The list in a csv's cell, as JSON or as Python writes it; the text itself where it is no
    list.
    """
    with warnings.catch_warnings():  # warnings on a backslash, as in paths of Windows
        warnings.simplefilter("ignore")
        for read in (orjson.loads, literal_eval):
            with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return read(text)
    return text


def image_of(value: Any) -> Image:
    """One image: a path or URL, a data: URI, base64 alone, bytes, or an object that holds one of
    these, such as a part or Hugging Face's `{"bytes": ..., "path": ...}`; RecordRefused
    (bad_image).
    """
    given, is_encoded = value, False
    for _ in range(2):  # a part, and the object in it
        if isinstance(value, Mapping):
            key = _source(value)
            is_encoded = key in _ENCODED or value.get("type") == "base64"
            value = value.get(key)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise RecordRefused(
            "bad_image", why=f"it is {shorten(given)}, no path, URL, bytes or base64"
        )
    if value[:5].lower() == "data:":
        return _from_data(value)
    return _decoded(value) if is_encoded or _BARE.fullmatch(value.rstrip()) else value


def _source(value: Mapping[str, Any]) -> str:
    return next((key for key in _SOURCES if value.get(key) not in (None, "")), "")


def _from_data(uri: str) -> bytes:
    head = _DATA.match(uri)
    if not head:
        raise RecordRefused("bad_image", why="it is a data: URI without a comma")
    content = uri[head.end() :]
    return _decoded(content) if head[1] else unquote_to_bytes(content)


def _decoded(text: str) -> bytes:
    """The bytes of base64 in any common form: in lines as of MIME, escaped as in a URL, in the
    alphabet of URLs, without its `=`.
    """
    said = "".join(unquote(text).split()).rstrip("=").translate(_OF_URLS)
    try:
        return base64.b64decode(said + "=" * (-len(said) % 4), validate=True)
    except ValueError:
        raise RecordRefused("bad_image", why="its base64 cannot be decoded") from None


def _held(record: Any, names: Sequence[str]) -> Iterator[Any]:
    """The values of a record's fields of images: the first of FIELDS that holds one, or all fields
    that a recipe names.
    """
    for name in names:
        with suppress(RecordRefused):
            if (value := parse_field(name).find(record)) not in NOTHING:
                yield value
                if names == FIELDS:
                    return


def _images_of_parts(
    parts: Sequence[Mapping[str, Any]], beside: Sequence[Image]
) -> Iterator[Image]:
    """The image of each part: the image that the part brings, else the image beside the messages
    that its `index` names, else the next of those. RecordRefused where images and parts do not
    match.
    """
    left, own = dict(enumerate(beside)), sum(map(bool, map(_source, parts)))
    counts = {"placeholders": len(parts), "images": own + len(beside)}
    for part in parts:
        if _source(part):
            yield image_of(part)
            continue
        number: Any = next(iter(left), None) if part.get("index") is None else part["index"]
        if number not in range(len(beside)):
            raise RecordRefused("image_count" if number is None else "bad_image", **counts)
        left.pop(number, None)
        yield beside[int(number)]  # a table with nulls in this column turns 0 into 0.0
    if left:
        raise RecordRefused("image_count", **counts)


def _flat(message: Any, images: list[Any]) -> Any:
    """The message with its parts joined into one text, with MARK for each image. The parts that are
    images are appended to `images`, and so are the images that are a key of the message.
    """
    if isinstance(message, dict) and not message.keys().isdisjoint(FIELDS):
        message = _with_own_images(message, images)
    for key in ("content", "value") if isinstance(message, dict) else ():
        if isinstance(message.get(key), list):
            parts = [_marked(part, images) for part in message[key]]
            is_text = all(isinstance(part, dict) and part.get("type") in TEXTS for part in parts)
            message = message | {key: joined_parts(parts) if is_text else parts}
    return message


def _with_own_images(message: Mapping[str, Any], images: list[Any]) -> dict[str, Any]:
    """The message with MARK in its text for each of the images that are keys of it: in place of
    `<image>`, else before the text.
    """
    held = [message.get(name) for name in FIELDS]
    own = [image for value in held if value not in NOTHING for image in _each(value)]
    plain = {key: value for key, value in message.items() if key not in FIELDS}
    images += [{"type": "image", "image": image} for image in own]
    for key in ("content", "value"):
        content = plain.get(key)
        if isinstance(content, list):
            return plain | {key: [*({"type": "text", "text": MARK} for _ in own), *content]}
        if isinstance(content, str):
            places = content.count(PLACEHOLDER)
            if places not in (0, len(own)):
                raise RecordRefused("image_count", placeholders=places, images=len(own))
            before = "" if places else MARK * len(own)
            return plain | {key: before + content.replace(PLACEHOLDER, MARK)}
    return plain


def _marked(part: Any, images: list[Any]) -> Any:
    """The part as a text part, if it is an image or a text; else the part without its nulls."""
    if not isinstance(part, Mapping):
        return part
    if part.get("type") in KINDS:
        images.append(part)
        return {"type": "text", "text": MARK}
    if part.get("type") in TEXTS:
        return {"type": "text", "text": part.get("text", part.get("value"))}
    return {key: value for key, value in part.items() if value is not None}

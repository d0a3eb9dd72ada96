"""Images in conversations: turns a conversation that a plain shape has read into one whose messages
have parts.

People write an image in four ways: as a placeholder in a text (`<image>`) with a list of paths next
to the messages, as a part of a message that brings the image, as a key of the message itself
(`image`, GLM-4's form), or as a path between tags inside the text. All four become a message whose
content is a list of parts, as transformers' chat templates take it, and a list of images in the
order of the parts. So a template never gets a path. The numbers of placeholders and images must
agree, otherwise it is unclear which image is meant.
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
from mdsmix.schema import shorten_value
from mdsmix.shapes.content_parts import TEXTS, join_parts
from mdsmix.shapes.fields import parse_field
from mdsmix.shapes.shape import RawRecord, Shape

PLACEHOLDER_REASONS = {
    "image_count": (
        "The record has more or fewer images than placeholders for them; the detail counts both."
    ),
    "bad_image": (
        "A value that should be an image is neither a path nor an image, such as base64 that "
        "cannot be decoded, or a tag <img> without its end."
    ),
}
"Reason codes of a shape with images -> their explanations."

Image = str | bytes
PLACEHOLDER = "<image>"
"""Means the next image of the record, in the texts of LLaVA, Qwen2.5-VL, ms-swift and
LLaMA-Factory.
"""
MARK = "\0image\0"
"The placeholder of an image in records whose `<image>` is plain text, until texts become parts."
FIELDS = ("images", "image")
"""Fields of a record that may contain its images, if the recipe does not name a field: the first
that is not empty counts.
"""
NOTHING: tuple[Any, ...] = (None, [], "", {"bytes": None, "path": None})
"Values of a field without images. Some writers of parquet write the last one for a missing image."
KINDS = ("image", "image_url", "input_image")
"""Types of a part that is an image. A tuple and not a set, since a part's type may be a list, which
has no hash.
"""
_ENCODED = ("bytes", "base64")
_SOURCES = (*_ENCODED, "data", "image", "image_url", "url", "path", "source", "value")
"""Keys of an object that bring an image. Bytes come first: a path next to them is where they once
were.
"""
_DATA = re.compile(r"data:[^,]*?(;base64)?,", re.IGNORECASE)
_BARE = re.compile(
    r"\s*(/9j/|iVBORw0KGg|UklGR|R0lGOD|Qk|SUkqA|TU0AK|AAAA\wGZ0eXBhdm)[\w+/\s-]{256,}={0,2}",
    re.ASCII,
)
"""Base64 that begins as a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF does, and is longer than any path
without a dot.
"""
_FROM_URL_ALPHABET = str.maketrans("-_", "+/")


def with_images(shape: Shape, fields: Sequence[str]) -> Shape:
    """Return the shape with a `parse` that also reads images.

    Args:
        fields: the record's fields of images; empty for `images`, or `image` if that is empty.
            Parts of messages are read too.
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
    images = list[Image]()
    for value in _find_field_values(raw.record, names):
        images += read_images(value)
    # Replace the image parts of all lists of messages with marks.
    parts = list[Any]()
    flattened = dict[str, list[Any]]()
    for key in shape.fields:
        messages = raw.value(key)
        field = raw.fields.get(key, "")
        if isinstance(messages, list) and field not in flattened:
            flattened[field] = [_flatten_message(message, parts) for message in messages]
    mark = PLACEHOLDER
    if parts:
        mark = MARK
        images = [*_read_part_images(parts, images)]
    # Read the text with the shape, then put the images in place of the marks.
    conversation = shape.parse(raw._replace(record={**raw.record, **flattened}))
    if shape.images_first and not any(mark in text for text in conversation.texts):
        conversation = _prepend_marks(conversation, mark * len(images))
    return place_images(conversation, images, mark)


def _prepend_marks(conversation: Conversation, marks: str) -> Conversation:
    """Return the conversation with these marks before the text of its first question."""
    messages = [*conversation.messages]
    roles = [message["role"] for message in messages]
    first = roles.index("user")
    messages[first] = messages[first] | {"content": marks + messages[first]["content"]}
    return conversation._replace(messages=messages)


def place_images(conversation: Conversation, images: Sequence[Image], mark: str) -> Conversation:
    """Return the conversation with an image part in place of each mark. Raises RecordRefused
    (image_count) if it does not have as many marks as there are images.
    """
    texts = [message.get("content") or "" for message in conversation.messages]
    count = sum(text.count(mark) for text in texts)
    if count != len(images):
        raise RecordRefused("image_count", placeholders=count, images=len(images))
    if not images:
        return conversation
    messages = [
        message | {"content": _split_at_marks(text, mark)} if mark in text else message
        for message, text in zip(conversation.messages, texts, strict=True)
    ]
    return RichConversation(
        messages,
        trained=conversation.trained,
        tools=conversation.tools,
        images=images,
        variables=conversation.variables,
    )


def _split_at_marks(text: str, mark: str) -> list[dict[str, str]]:
    """Return the text as parts, with an image part for each mark and without empty text parts."""
    parts = list[dict[str, str]]()
    for number, piece in enumerate(text.split(mark)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def read_images(value: Any) -> Iterator[Image]:
    """Yield the images in a field's value: one image or a list of them. Raises RecordRefused
    (bad_image), with the image's number in its detail, if one cannot be read.
    """
    for number, item in enumerate(_list_items(value)):
        try:
            yield read_image(item)
        except RecordRefused as refused:
            refused.why.detail["image_number"] = number
            raise


def _list_items(value: Any) -> list[Any]:
    """Return the items of a list, or of a list that is written as text; otherwise the value
    alone.
    """
    if isinstance(value, str) and value[:1] == "[":
        value = _parse_list(value)
    return value if isinstance(value, list) else [value]


def _parse_list(text: str) -> Any:
    """Return the list in a csv's cell, as JSON or as Python writes it; the text itself if it cannot
    be parsed.
    """
    with warnings.catch_warnings():  # warnings on a backslash, as in paths of Windows
        warnings.simplefilter("ignore")
        for parse in (orjson.loads, literal_eval):
            with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return parse(text)
    return text


def read_image(value: Any) -> Image:
    """Return one image: a path or URL, or the bytes of a data: URI, of base64, or of the value.

    The value may be an object that contains one of these, such as a part, or Hugging Face's
    `{"bytes": ..., "path": ...}`.

    Raises RecordRefused (bad_image) if the value is none of these.
    """
    source = value
    is_encoded = False
    for _ in range(2):  # a part, and the object in it
        if isinstance(source, Mapping):
            key = _source_key(source)
            is_encoded = key in _ENCODED or source.get("type") == "base64"
            source = source.get(key)
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str) or not source:
        why = f"it is {shorten_value(value)}, not a path, URL, bytes or base64"
        raise RecordRefused("bad_image", why=why)
    if source[:5].lower() == "data:":
        return _decode_data_uri(source)
    if is_encoded or _BARE.fullmatch(source.rstrip()):
        return _decode_base64(source)
    return source


def _source_key(value: Mapping[str, Any]) -> str:
    """Return the key that brings the image of an object; empty if it does not bring one."""
    return next((key for key in _SOURCES if value.get(key) not in (None, "")), "")


def _decode_data_uri(uri: str) -> bytes:
    head = _DATA.match(uri)
    if not head:
        raise RecordRefused("bad_image", why="it is a data: URI without a comma")
    content = uri[head.end() :]
    return _decode_base64(content) if head[1] else unquote_to_bytes(content)


def _decode_base64(text: str) -> bytes:
    """Decode base64 in any common form: in lines as in MIME, escaped as in a URL, in the alphabet
    of URLs, or without its `=`.
    """
    digits = "".join(unquote(text).split()).rstrip("=").translate(_FROM_URL_ALPHABET)
    try:
        return base64.b64decode(digits + "=" * (-len(digits) % 4), validate=True)
    except ValueError:
        raise RecordRefused("bad_image", why="its base64 cannot be decoded") from None


def _find_field_values(record: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the values of a record's fields of images that are not empty: of FIELDS the first one,
    of fields that a recipe names all.
    """
    for name in names:
        with suppress(RecordRefused):
            value = parse_field(name).find(record)
            if value not in NOTHING:
                yield value
                if names == FIELDS:
                    return


def _read_part_images(
    parts: Sequence[Mapping[str, Any]], field_images: Sequence[Image]
) -> Iterator[Image]:
    """Yield the image of each part: the image that the part brings, or the image of the record's
    fields that its `index` names, or the next unused one of those. Raises RecordRefused if images
    and parts do not match.
    """
    unused = [*range(len(field_images))]
    brought = sum(bool(_source_key(part)) for part in parts)
    counts = {"placeholders": len(parts), "images": brought + len(field_images)}
    for part in parts:
        if _source_key(part):
            yield read_image(part)
            continue
        number: Any = part.get("index")
        if number is None:
            if not unused:
                raise RecordRefused("image_count", **counts)
            number = unused[0]
        elif number not in range(len(field_images)):
            raise RecordRefused("bad_image", **counts)
        if number in unused:
            unused.remove(number)
        yield field_images[int(number)]  # a table with nulls in this column turns 0 into 0.0
    if unused:
        raise RecordRefused("image_count", **counts)


def _flatten_message(message: Any, images: list[Any]) -> Any:
    """Return the message with its parts joined into one text, with MARK for each image.

    Args:
        images: gets the parts that are images, and the images that are a key of the message.
    """
    if not isinstance(message, dict):
        return message
    if not message.keys().isdisjoint(FIELDS):
        message = _flatten_own_images(message, images)
    for key in ("content", "value"):
        if isinstance(message.get(key), list):
            parts = [_mark_part(part, images) for part in message[key]]
            is_text = all(isinstance(part, dict) and part.get("type") in TEXTS for part in parts)
            message = message | {key: join_parts(parts) if is_text else parts}
    return message


def _flatten_own_images(message: Mapping[str, Any], images: list[Any]) -> dict[str, Any]:
    """Return the message with MARK in its text for each image that is a key of the message: in
    place of `<image>`, or before the text if it does not contain that. The images are appended to
    `images`.
    """
    values = [message.get(name) for name in FIELDS]
    own_images = [image for value in values if value not in NOTHING for image in _list_items(value)]
    images += [{"type": "image", "image": image} for image in own_images]
    flattened = {key: value for key, value in message.items() if key not in FIELDS}
    for key in ("content", "value"):
        content = flattened.get(key)
        if isinstance(content, list):
            marks = [{"type": "text", "text": MARK} for _ in own_images]
            return flattened | {key: [*marks, *content]}
        if isinstance(content, str):
            count = content.count(PLACEHOLDER)
            if count not in (0, len(own_images)):
                raise RecordRefused("image_count", placeholders=count, images=len(own_images))
            leading_marks = "" if count else MARK * len(own_images)
            return flattened | {key: leading_marks + content.replace(PLACEHOLDER, MARK)}
    return flattened


def _mark_part(part: Any, images: list[Any]) -> Any:
    """Return an image or a text as a text part, any other part without its nulls. An image is
    appended to `images`.
    """
    if not isinstance(part, Mapping):
        return part
    if part.get("type") in KINDS:
        images.append(part)
        return {"type": "text", "text": MARK}
    if part.get("type") in TEXTS:
        return {"type": "text", "text": part.get("text", part.get("value"))}
    return {key: value for key, value in part.items() if value is not None}

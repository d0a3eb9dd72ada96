"""Images in conversations: what the shapes of plain conversations read becomes a conversation whose messages have parts.

People write an image as a placeholder in a text (`<image>`) and a list of paths beside it, as a part of a message that brings
the image with it, or as a path between tags inside of the text. All three become the same: a message whose content is a list
of parts, as transformers' chat templates take it, and a list of images in the order of the parts. So no path is ever given to
a template. How many placeholders and images there are must agree, or nobody knows which image is meant.
"""

from __future__ import annotations

import base64
import binascii
import re
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import unquote, unquote_to_bytes
from warnings import catch_warnings, simplefilter

import orjson

from mdsmix.record import Conversation, Message, PicturedConversation, RichConversation
from mdsmix.shapes.fields import FieldMissing, parse
from mdsmix.shapes.shape import Fields, RecordRefused, Shape, refusing
from mdsmix.typed import brief

Image = str | bytes
PLACEHOLDER = "<image>"
"Stands for the next image of the record in the texts of LLaVA, Qwen2.5-VL, ms-swift and LLaMA-Factory."
FIELDS = ("images", "image")
"Fields of a record that hold its images, where a recipe names none: the first that is there and not null."
NOTHING: tuple[Any, ...] = (None, [], "", {"bytes": None, "path": None})
"What a field without images holds: the last is what some writers of parquet make of one that is not there."
KINDS = ("image", "image_url", "input_image")
"Types of a part that is an image; no set, since what a part says there may be a list."
TEXTS = frozenset({"text", "input_text", "output_text"})
_SOURCES = ("image", "image_url", "path", "url", "base64", "source", "value", "data", "bytes")
_CONTENTS = ("content", "value")
_DATA = re.compile(r"data:[^,]*?(;base64)?,", re.IGNORECASE)
_BARE = re.compile(
    r"\s*(/9j/|iVBORw0KGg|UklGR|R0lGOD|Qk|SUkqA|TU0AK)[\w+/\s-]{256,}={0,2}", re.ASCII
)
"Base64, without blanks behind it, that begins as a JPEG, PNG, WebP, GIF, BMP or TIFF does, and is longer than a path without a dot."
_OF_URLS = str.maketrans("-_", "+/")
Read = Callable[..., Any]


def with_images(shape: Shape, fields: Sequence[str]) -> Shape:
    """The shape, reading images too: from these fields of a record, the usual ones where none is named, and from parts of messages."""
    if shape.has_images == "inside":
        return shape
    read = partial(_read, shape.read, tuple(fields) or FIELDS, shape.fields)
    return replace(shape, read=refusing(read))


def _read(
    read: Read,
    names: Sequence[str],
    keys: Sequence[str],
    record: Any,
    fields: Fields,
    **options: Any,
) -> Any:
    given = [image for value in _held(record, names) for image in images_of(value)]
    lists = [fields[key] for key in keys if isinstance(record.get(fields[key]), list)]
    mark, said = PLACEHOLDER, [message for name in lists for message in record[name]]
    if any(map(_has_list, said)):
        beside, placed_here = _Beside(given), list[Image]()
        has_images = any(map(_has_images, said))
        mark = _unused(said) if has_images else PLACEHOLDER
        flat = (_flat(message, mark, beside, placed_here) for message in said)
        record = record | {name: [*islice(flat, len(record[name]))] for name in lists}
        if has_images:
            beside.refuse_left(len(placed_here))
            given = placed_here
    conversation = read(record, fields, **options)
    return conversation if isinstance(conversation, str) else placed(conversation, given, mark)


def placed(conversation: Conversation, images: Sequence[Image], mark: str) -> Conversation:
    """The conversation with a part for each place where the mark stands in it; RecordRefused (image_count) where these are not as many
    as the images."""
    messages = [_parted(message, mark) for message in conversation.messages]
    count = sum(len(m["content"]) // 2 for m in messages if isinstance(m.get("content"), list))
    if count != len(images):
        raise RecordRefused("image_count", placeholders=count, images=len(images))
    if not images:
        return conversation
    kind = RichConversation if isinstance(conversation, RichConversation) else PicturedConversation
    clean = [_without_empty(message) for message in messages]
    return kind(clean, conversation.trained, conversation.tools, list(images))


def images_of(value: Any) -> Iterator[Image]:
    """The images that a field holds: one, or a list of them; RecordRefused where something in it is none."""
    if value is None:
        return
    value = _listed(value) if isinstance(value, str) and value[:1] == "[" else value
    for number, each in enumerate(value if isinstance(value, list) else [value]):
        try:
            yield image_of(each)
        except RecordRefused as fault:
            fault.why.detail["image_number"] = number
            raise


def _listed(text: str) -> Any:
    """The list that a cell of a csv says, as JSON or as Python writes it; the text where it says none."""
    for read in (orjson.loads, _literal):
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return text


def _literal(text: str) -> Any:
    with catch_warnings():  # of a backslash, as in paths of Windows
        simplefilter("ignore")
        return literal_eval(text)


def image_of(value: Any) -> Image:
    """One image: a path or URL, a data: URI, base64 alone, bytes, or Hugging Face's `{"bytes": ..., "path": ...}`; RecordRefused (bad_image)."""
    if isinstance(value, Mapping):
        return _from_struct(value)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise RecordRefused("bad_image", why=f"it is {brief(value)}, no path, URL, bytes or base64")
    if value[:5].lower() == "data:":
        return _from_data(value)
    return _decoded(value) if _BARE.fullmatch(value.rstrip()) else value


def _from_struct(value: Mapping[str, Any]) -> Image:
    """Bytes before a path: where a record has both, the path is where they once lay."""
    if (content := value.get("bytes")) is not None:
        return content if isinstance(content, bytes) else _decoded(content)
    if value.get("type") == "base64" or "base64" in value:  # as Anthropic's interface writes it
        return _decoded(value.get("data") or value.get("base64"))
    inner = next((value[key] for key in ("url", "path", "image") if value.get(key)), None)
    if inner is None:
        raise RecordRefused("bad_image", why="it is an object without a url, a path or bytes")
    if isinstance(inner, Mapping):
        raise RecordRefused("bad_image", why="it is an object in an object")
    return image_of(inner)


def _from_data(uri: str) -> bytes:
    found = _DATA.match(uri)
    if not found:
        raise RecordRefused("bad_image", why="it is a data: URI without a comma")
    content = uri[found.end() :]
    return _decoded(content) if found[1] else unquote_to_bytes(content)


def _decoded(text: Any) -> bytes:
    """Of base64, as it is found: broken into lines as in MIME, escaped as in a URL, in the alphabet of URLs, without its `=`."""
    try:
        said = "".join(unquote(text).split()).rstrip("=").translate(_OF_URLS)
        return base64.b64decode(said + "=" * (-len(said) % 4), validate=True)
    except (AttributeError, TypeError, binascii.Error, ValueError):
        raise RecordRefused("bad_image", why="its base64 cannot be decoded") from None


def _held(record: Any, names: Sequence[str]) -> Iterator[Any]:
    """What the fields of images hold: of the usual names the first that is there, of those that a recipe names all."""
    for name in names:
        try:
            value = parse(name).find(record)
        except FieldMissing:
            continue
        if value not in NOTHING:
            yield value
            if names == FIELDS:
                return


def _contents(message: Any) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(message, Mapping):
        for key in _CONTENTS:
            if isinstance(message.get(key), list):
                yield key, message[key]


def _has_list(message: Any) -> bool:
    """Whether to look closer: most messages are texts."""
    return type(message) is dict and any(type(value) is list for value in message.values())


def _has_images(message: Any) -> bool:
    return any(_is_image(part) for _, parts in _contents(message) for part in parts)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def _unused(messages: Sequence[Any]) -> str:
    """A mark that no text of the messages holds."""
    mark, said = "\0image\0", repr(messages)
    while repr(mark)[1:-1] in said:
        mark = f"\0{mark}"
    return mark


class _Beside:
    """The images of a record's field, for parts that bring none: the one that the part's `index` names, else the next one."""

    def __init__(self, images: Sequence[Image]) -> None:
        self._images, self._left = images, list(range(len(images)))

    def take(self, index: Any, found: Sequence[Image]) -> Image:
        number = next(iter(self._left), None) if index is None else index
        if number is None:
            raise RecordRefused("image_count", placeholders=len(found) + 1, images=len(found))
        if number not in range(len(self._images)):
            raise RecordRefused(
                "bad_image", why=f"its part says index {number!r}, of {len(self._images)} images"
            )
        number = int(number)  # a table that holds nulls too has made 0.0 of 0
        if number in self._left:
            self._left.remove(number)
        return self._images[number]

    def refuse_left(self, count: int) -> None:
        """RecordRefused where one of them stands nowhere."""
        if self._left:
            raise RecordRefused("image_count", placeholders=count, images=count + len(self._left))


def _flat(message: Any, mark: str, beside: _Beside, found: list[Image]) -> Any:
    """The message with the mark for each of its images, which are added to `found`: those that a part brings with it, and of
    `beside` for a part that brings none."""
    flat = dict(message) if isinstance(message, Mapping) else message
    for key, parts in _contents(message):
        texts = [_as_text(part, mark, beside, found) for part in parts]
        is_plain = all(part == {"type": "text", "text": str(part.get("text"))} for part in texts)
        flat[key] = "".join([part["text"] for part in texts]) if is_plain else texts
    return flat


def _as_text(part: Any, mark: str, beside: _Beside, found: list[Image]) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise RecordRefused("content_not_text")
    if not _is_image(part):
        text = part.get("text", part.get("value"))
        if part["type"] in TEXTS and isinstance(text, str):
            return {"type": "text", "text": text}
        return {key: value for key, value in part.items() if value is not None}
    given = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
    if given is None:
        given = beside.take(part.get("index"), found)
    elif "base64" in part and given is part["base64"]:
        given = _decoded(given)
    found.append(image_of(given))
    return {"type": "text", "text": mark}


def _parted(message: Message, mark: str) -> Message:
    """The message with its text cut at each mark: text, image, text ..., texts that are empty too; as it is where there is none."""
    content = message.get("content")
    if not isinstance(content, str) or mark not in content:
        return message
    first, *others = content.split(mark)
    parts: list[dict[str, str]] = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return message | {"content": parts}


def _without_empty(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [part for part in content if part.get("text") != ""]}

"""LLaMA-Factory's `dataset_info.json` -> streams. An entry that no recipe can express is named with the reason.

Its rules: without `columns` every column has its own name; with it those that it does not name are not read. An entry that
names only a prompt is text to be continued, for pretraining. A question is its prompt, its query or both. A record of plain text is a
line. `tags` rename the keys and roles of messages.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson

from mdsmix import typed
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.init.data_files import find_data, head_of
from mdsmix.init.drafts import Draft, Sorted, paths_of, plain_name
from mdsmix.init.recognise import read_by
from mdsmix.record import Conversation
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import FIELDS, with_images
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.sources import SourceFile
from mdsmix.storage import locate
from mdsmix.words import hint, printable

DEFAULTS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
"Its column -> field, by `formatting`, where an entry has no `columns`."
KEYS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system", "tools": "tools"},
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
    "openai": {"messages": "messages", "tools": "tools"},
}  # fmt: skip
"Its column -> our key of a source."
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "system_tag": "system",
}
HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url")
MEDIA = ("videos", "audios")


WANTED = "name LLaMA-Factory's dataset_info.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """What decides how the records of an entry are read."""

    KEYS: ClassVar = ("formatting", "columns", "tags")
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    columns: dict[str, Any] | None = None
    tags: dict[str, Any] | None = None


class NotSaid(Exception):
    """The reason why an entry becomes no stream."""


def read_dataset_info(path: str, names: Sequence[str], base: Path) -> Sorted:
    """The streams of the entries, or of those that are named; RecipeError where the file is none, or a name is not in it."""
    entries, found = _entries(path), Sorted()
    for name in names:
        if name not in entries:
            raise RecipeError(f"{path} has no entry {name}; {hint(name, list(entries), 'it has')}")
    for name in names or entries:
        try:
            found.drafts.append(_draft(name, entries[name], locate(path).parent.url, base))
        except (NotSaid, MdsmixError) as error:
            found.left_out.append(f"{name}: {error}")
    return found


def _entries(path: str) -> Mapping[str, Any]:
    content = locate(path).fetch()
    try:
        entries = orjson.loads(content[1]) if content else None
    except orjson.JSONDecodeError as error:
        raise RecipeError(f"{path} is no JSON ({error}): {WANTED}.") from None
    if not isinstance(entries, dict) or not entries:
        what = "there is no file" if content is None else "no entries by name are in"
        raise RecipeError(f"{what} {path}: {WANTED}.")
    return entries


def _draft(name: str, entry: Any, folder: str, base: Path) -> Draft:
    if not isinstance(entry, dict):
        raise NotSaid("it is no object.")
    try:
        found = typed.read(Entry, {key: entry[key] for key in Entry.KEYS if key in entry})
    except typed.Misfit as error:
        raise NotSaid(str(error)) from None
    columns = DEFAULTS[found.formatting] if found.columns is None else found.columns
    _refuse(entry, columns)
    data = find_data([_file(entry, folder)], base)
    if not data.files:
        raise NotSaid(f"{'; '.join(data.sentences)}.")
    given = {column: each for column, each in columns.items() if column != "images"}
    shape, fields, options = _shape(found.formatting, given, found.tags or {})
    files = [_by_line(file) for file in data.files]
    head = head_of(files[0])
    images = _images(columns.get("images"), shape)
    by_shape = SHAPES[shape] if images is None else with_images(SHAPES[shape], images)
    return Draft(
        name=plain_name(name),
        guess=replace(read_by(by_shape, fields, options, head), images=images),
        files=files,
        paths=paths_of(files, files),
        records=head.records,
        notes=list(_notes(name, entry)),
    )


def _by_line(file: SourceFile) -> SourceFile:
    """Plain text with a record a line."""
    is_text = bool(file.read_as.split_by)
    return replace(file, read_as=replace(file.read_as, split_by="line")) if is_text else file


def _images(name: Any, shape: str) -> tuple[str, ...] | None:
    """The field of images, or () if a shape reads it by its usual name; None: the entry has no images."""
    if not name:
        return None
    if SHAPES[shape].gives is not Conversation:
        raise NotSaid("images: it is text alone, and where its images stand is not said.")
    return () if name in FIELDS else (str(name),)


def _refuse(entry: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
    """NotSaid for an entry of another loss or medium, and for one whose files lie on a hub."""
    if entry.get("ranking") or {"chosen", "rejected"} & columns.keys():
        raise NotSaid(
            "ranking: it holds chosen and rejected answers, and these are trained by a loss of their own."
        )
    if columns.get("kto_tag"):
        raise NotSaid(
            "kto_tag: it holds judged answers, and these are trained by a loss of their own."
        )
    for medium in MEDIA:
        if columns.get(medium):
            raise NotSaid(f"{medium}: of media images alone are read.")
    if "file_name" not in entry and "cloud_file_name" not in entry:
        where = next((f"{key} {entry[key]}" for key in HUBS if key in entry), "no file_name")
        repo = entry.get("hf_hub_url")
        by_range = (
            f", or write a stream of hf://datasets/{printable(str(repo))}/..." if repo else ""
        )
        raise NotSaid(
            f"it lies elsewhere ({printable(where)}): fetch it, and name it as file_name{by_range}."
        )


def _file(entry: Mapping[str, Any], folder: str) -> str:
    name = str(entry.get("file_name") or entry.get("cloud_file_name"))
    if "://" in name:
        return name
    return f"{folder}/{name if folder.startswith('s3:') else glob.escape(name)}"


def _shape(
    formatting: str, columns: Mapping[str, Any], tags: Mapping[str, Any]
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The shape, its fields, and its options."""
    given = {column: name for column, name in columns.items() if name}
    if formatting == "alpaca" and "prompt" not in given and "query" in given:
        given["prompt"] = given.pop("query")
    if formatting == "alpaca" and given.keys() == {"prompt"}:
        return "text", {"text": given["prompt"]}, {}
    if formatting == "openai" and not OPENAI_TAGS.items() >= tags.items():
        formatting = "sharegpt"  # other words than OpenAI's
    keys = KEYS[formatting]
    if unknown := [column for column in given if column not in keys]:
        raise NotSaid(f"columns.{unknown[0]}: it is not read with formatting: {formatting}.")
    wanted = {key: column for column, key in keys.items()}
    missing = [wanted[key] for key in SHAPES[formatting].fields if wanted[key] not in given]
    if missing:
        raise NotSaid(f"columns names no {' and no '.join(missing)}.")
    renamed = {tag: word for tag, word in tags.items() if TAGS.get(tag) != word}
    options = {"tags": renamed} if renamed and formatting == "sharegpt" else {}
    return formatting, {keys[column]: str(name) for column, name in given.items()}, options


def _notes(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    yield f"{printable(name)} of dataset_info.json"
    if count := entry.get("num_samples"):
        yield f"its num_samples: {count!r} is left out: mix.{printable(name)}.choose: {count!r} draws as many an epoch"

"""LLaMA-Factory's `dataset_info.json` -> streams. An entry that no recipe can express is named with the reason.

LLaMA-Factory's rules: without `columns` every column has its usual name; with `columns`, columns that are not named are not read. An
entry that names only a prompt is text for pretraining. A question is the prompt, the query or both. A record of plain text is a
line. `tags` rename the keys and roles of messages.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson

from mdsmix import typed
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.init.data_files import Said, find_data, head_of
from mdsmix.init.drafts import Draft, draft_of, paths_of
from mdsmix.init.recognise import read_by
from mdsmix.record import Conversation
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import FIELDS, with_images
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.storage import locate
from mdsmix.words import hint, printable

KEYS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system", "tools": "tools"},
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
    "openai": {"messages": "messages", "tools": "tools"},
}  # fmt: skip
"By `formatting`: column -> key of a source in a recipe. An entry without `columns` has fields of the same names as these keys."
USUAL = ("prompt", "query", "response", "messages")
"The columns of an entry without `columns`."
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "system_tag": "system",
}
OTHER_LOSS = "answers that are judged or ranked are trained by a loss of their own"
NOT_READ = {
    "ranking": OTHER_LOSS,
    "chosen": OTHER_LOSS,
    "kto_tag": OTHER_LOSS,
    "videos": "of media images alone are read",
    "audios": "of media images alone are read",
}
"Key or column -> the reason why an entry with it becomes no stream."
WANTED = "name LLaMA-Factory's dataset_info.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """The keys of an entry that decide how its records are read."""

    KEYS: ClassVar = ("formatting", "columns", "tags")
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    columns: dict[str, Any] | None = None
    tags: dict[str, Any] | None = None


def read_dataset_info(path: str, names: Sequence[str], base: Path, said: Said) -> list[Draft]:
    """The streams of the entries in `names`, or of all. RecipeError where `path` is no dataset_info.json, or lacks a name."""
    entries, drafts = _entries(path), list[Draft]()
    for name in names:
        if name not in entries:
            raise RecipeError(f"{path} has no entry {name}; {hint(name, list(entries), 'it has')}")
    for name in names or entries:
        try:
            drafts.append(_draft(name, entries[name], locate(path).parent.url, base))
        except MdsmixError as error:
            said.append(f"{name}: {error}")
    return drafts


def _entries(path: str) -> Mapping[str, Any]:
    content = locate(path).fetch()
    if content is None:
        raise RecipeError(f"there is no file {path}: {WANTED}.")
    try:
        entries = orjson.loads(content[1])
    except orjson.JSONDecodeError as error:
        raise RecipeError(f"{path} is no JSON ({error}): {WANTED}.") from None
    if not isinstance(entries, dict) or not entries:
        raise RecipeError(f"no entries by name are in {path}: {WANTED}.")
    return entries


def _draft(name: str, entry: Any, folder: str, base: Path) -> Draft:
    """The stream of an entry; RecipeError, with the reason, where the entry becomes none."""
    if not isinstance(entry, dict):
        raise RecipeError("it is no object.")
    try:
        found = typed.read(Entry, {key: entry[key] for key in Entry.KEYS if key in entry})
    except typed.Misfit as error:
        raise RecipeError(str(error)) from None
    keys = KEYS[found.formatting]
    columns = found.columns or {column: keys[column] for column in USUAL if column in keys}
    for key, why in NOT_READ.items():
        if entry.get(key) or columns.get(key):
            raise RecipeError(f"{key}: {why}.")
    shape, fields, options = _shape(found.formatting, columns, found.tags or {})
    by, images = SHAPES[shape], None
    if field := columns.get("images"):
        if by.gives is not Conversation:
            raise RecipeError("images: it is text alone, and where its images stand is not said.")
        images = () if field in FIELDS else (str(field),)
        by = with_images(by, images)
    not_data: Said = []
    files = find_data([_file(entry, folder)], base, not_data)
    if not files:
        raise RecipeError(f"{'; '.join(map(str, not_data))}.")
    if files[0].read_as.split_by:
        files = [replace(f, read_as=replace(f.read_as, split_by="line")) for f in files]
    guess = replace(read_by(by, fields, options, head_of(files[0])), images=images)
    draft = draft_of(name, guess, files, paths_of(files, files))
    said = printable(name)
    draft.notes.append(f"{said} of dataset_info.json")
    if count := entry.get("num_samples"):
        draft.notes.append(
            f"its num_samples: {count!r} is left out: mix.{said}.choose: {count!r} draws as many an epoch"
        )
    return draft


def _shape(
    formatting: str, columns: Mapping[str, Any], tags: Mapping[str, Any]
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The name of an entry's shape, the shape's fields, and its options; RecipeError where columns do not fit the shape."""
    given = {column: str(name) for column, name in columns.items() if name and column != "images"}
    if formatting == "alpaca" and "prompt" not in given and "query" in given:
        given["prompt"] = given.pop("query")
    if formatting == "alpaca" and given.keys() == {"prompt"}:
        return "text", {"text": given["prompt"]}, {}
    if formatting == "openai" and not OPENAI_TAGS.items() >= tags.items():
        formatting = "sharegpt"  # roles or keys other than OpenAI's
    keys, wanted = KEYS[formatting], SHAPES[formatting].fields
    if unknown := [column for column in given if column not in keys]:
        raise RecipeError(f"columns.{unknown[0]}: it is not read with formatting: {formatting}.")
    if missing := [c for c, key in keys.items() if key in wanted and c not in given]:
        raise RecipeError(f"columns names no {' and no '.join(missing)}.")
    renamed = {tag: word for tag, word in tags.items() if TAGS.get(tag) != word}
    options = {"tags": renamed} if renamed and formatting == "sharegpt" else {}
    return formatting, {keys[column]: name for column, name in given.items()}, options


def _file(entry: Mapping[str, Any], folder: str) -> str:
    """The path or URL of an entry's data; RecipeError where the entry names no file."""
    named = entry.get("file_name") or entry.get("cloud_file_name")
    if not named:
        repo = printable(str(entry.get("hf_hub_url", "ORG/NAME")))
        raise RecipeError(
            f"it lies elsewhere: fetch it, and name it as file_name, or write a stream of hf://datasets/{repo}/..."
        )
    if "://" in named:
        return str(named)
    return f"{folder}/{named if folder.startswith('s3:') else glob.escape(named)}"

"""Files in which other tools name their data -> streams. What no recipe can express, or no file is
there for, is named with the reason.

LLaMA-Factory's `dataset_info.json`: without `columns` every column has its usual name; with
`columns`, columns that are not named are not read. An entry that names only a prompt is text for
pretraining. A question is the prompt, the query or both. A record of plain text is a line. `tags`
rename the keys and roles of messages.

FlagEmbedding's mixture file, published with its activation beacon: `mixture` holds percents of the
whole budget, and `num_tokens_avg` mean tokens of a record. A file belongs to the source of its own
name, or else of its nearest folder. Numbers, suffixes, upper case and words such as part or train
do not count: `commoncrawl.jsonl`, `CommonCrawl/chunk1/*.parquet` and
`commoncrawl-00001-of-00010.json` belong to `commoncrawl`.
"""

from __future__ import annotations

import glob
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson

from mdsmix import schema
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.init.data_files import Said, find_data, head_of
from mdsmix.init.drafts import Draft, draft_of, paths_of, plain_name, sort_out, telling
from mdsmix.init.recognise import read_by
from mdsmix.messages import join_names, make_printable, suggest_key
from mdsmix.record import Conversation
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import FIELDS, with_images
from mdsmix.shapes.preference import ANSWERS
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.sources import SourceFile, estimate_size
from mdsmix.storage import locate

KEYS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system", "tools": "tools"},
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
    "openai": {"messages": "messages", "tools": "tools"},
    "text": {"prompt": "text"},
    "preference_alpaca": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected", "history": "history", "system": "system"},
    "preference_sharegpt": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "system": "system", "tools": "tools"},
}  # fmt: skip
"""By shape: column -> key of a source in a recipe. An entry without `columns` has fields of the
same names as these keys.
"""
USUAL = ("prompt", "query", "response", "messages", "chosen", "rejected")
"The columns of an entry without `columns`."
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "system_tag": "system",
}
RANKED = {"alpaca": "preference_alpaca", "sharegpt": "preference_sharegpt", "openai": "preference_sharegpt"}  # fmt: skip
"Value of `formatting` -> the shape of an entry with `ranking: true`."
NOT_READ = {
    "kto_tag": "answers that are judged are trained by a loss of their own",
    "videos": "of media images alone are read",
    "audios": "of media images alone are read",
}
"Key or column -> the reason why an entry with it becomes no stream."
INFO = "LLaMA-Factory's dataset_info.json"
MIXTURE = 'a mixture, {"mixture": {"c4": 26.7, "wiki": 3.8}, "num_tokens_avg": {"c4": 378}}'
ROUNDING = 0.5
"The most by which the sum of percents may exceed 100, since percents are rounded."
MOST_SHOWN = 5


def _read_json(path: str, wanted: str) -> Any:
    """The content of a JSON file; RecipeError where there is none, which names the file that is
    wanted.
    """
    content = locate(path).fetch()
    if content is None:
        raise RecipeError(f"there is no file {path}: name {wanted}.")
    try:
        return orjson.loads(content[1])
    except orjson.JSONDecodeError as error:
        raise RecipeError(f"{path} is no JSON ({error}): name {wanted}.") from None


@dataclass(frozen=True)
class Entry:
    """The keys of an entry that decide how its records are read."""

    KEYS: ClassVar = ("formatting", "columns", "tags", "ranking")
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    columns: dict[str, Any] | None = None
    tags: dict[str, Any] | None = None
    ranking: bool | None = None

    @property
    def shape(self) -> str:
        """Return the name of the shape that the format and `ranking` name."""
        return RANKED[self.formatting] if self.ranking else self.formatting

    @property
    def given_tags(self) -> dict[str, Any]:
        """Return the tags of the entry, with those that its format implies."""
        is_openai = self.ranking and self.formatting == "openai"
        return (OPENAI_TAGS if is_openai else {}) | (self.tags or {})


def read_dataset_info(path: str, names: Sequence[str], base: Path, said: Said) -> list[Draft]:
    """The streams of the entries in `names`, or of all. RecipeError where `path` is no
    dataset_info.json, or lacks a name.
    """
    entries, drafts = _read_json(path, INFO), list[Draft]()
    if not isinstance(entries, dict) or not entries:
        raise RecipeError(f"no entries by name are in {path}: name {INFO}.")
    for name in names:
        if name not in entries:
            raise RecipeError(
                f"{path} has no entry {name}; {suggest_key(name, list(entries), 'it has')}"
            )
    for name in names or entries:
        try:
            drafts.append(_draft(name, entries[name], locate(path).parent.url, base))
        except MdsmixError as error:
            said.append(f"{name}: {error}")
    return drafts


def _draft(name: str, entry: Any, folder: str, base: Path) -> Draft:
    """The stream of an entry; RecipeError, with the reason, where the entry becomes none."""
    if not isinstance(entry, dict):
        raise RecipeError("it is no object.")
    try:
        found = schema.parse_mapping(Entry, {key: entry[key] for key in Entry.KEYS if key in entry})
    except schema.Misfit as error:
        raise RecipeError(str(error)) from None
    keys = KEYS[found.shape]
    columns = found.columns or {column: keys[column] for column in USUAL if column in keys}
    for key, why in NOT_READ.items():
        if entry.get(key) or columns.get(key):
            raise RecipeError(f"{key}: {why}.")
    shape, fields, options = _shape(found.shape, columns, found.given_tags)
    by = SHAPES[shape]
    if named := columns.get("images"):
        if by.gives is not Conversation:
            raise RecipeError("images: it is text alone, and where its images stand is not said.")
        by = with_images(by, [] if named in FIELDS else [str(named)])
    not_data: Said = []
    files = find_data([_file(entry, folder)], base, not_data)
    if not files:
        raise RecipeError(f"{'; '.join(map(str, not_data))}.")
    if files[0].read_as.split_by:
        files = [replace(f, read_as=replace(f.read_as, split_by="line")) for f in files]
    guess = read_by(by, fields, options, head_of(files[0]))
    draft = draft_of(name, guess, files, paths_of(files, files))
    said = make_printable(name)
    draft.notes.append(f"{said} of dataset_info.json")
    if count := entry.get("num_samples"):
        draft.notes.append(
            f"its num_samples: {count!r} is left out: mix.{said}.choose: {count!r} draws as many an epoch"
        )
    return draft


def _shape(
    shape: str, columns: Mapping[str, Any], tags: Mapping[str, Any]
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The name of an entry's shape, the shape's fields, and its options; RecipeError where columns
    do not fit the shape.
    """
    given = {column: str(name) for column, name in columns.items() if name and column != "images"}
    has_question = shape in ("alpaca", RANKED["alpaca"])
    if has_question and "prompt" not in given and "query" in given:
        given["prompt"] = given.pop("query")
    if shape == "alpaca" and given.keys() == {"prompt"}:
        shape = "text"
    if shape == "openai" and not OPENAI_TAGS.items() >= tags.items():
        shape = "sharegpt"  # roles or keys other than OpenAI's
    keys, wanted = KEYS[shape], SHAPES[shape].fields
    if unknown := [column for column in given if column not in keys]:
        other = "ranking: true" if shape in RANKED.values() else f"formatting: {shape}"
        added = " without ranking: true" if unknown[0] in ANSWERS else ""
        raise RecipeError(f"columns.{unknown[0]}: it is not read with {other}{added}.")
    if missing := [c for c, key in keys.items() if key in wanted and c not in given]:
        raise RecipeError(f"columns names no {' and no '.join(missing)}.")
    renamed = {tag: word for tag, word in tags.items() if TAGS.get(tag) != word}
    options = {"tags": renamed} if renamed and "tags" in SHAPES[shape].options else {}
    return shape, {keys[column]: name for column, name in given.items()}, options


def _file(entry: Mapping[str, Any], folder: str) -> str:
    """The path or URL of an entry's data; RecipeError where the entry names no file."""
    named = entry.get("file_name") or entry.get("cloud_file_name")
    if not named:
        repo = make_printable(str(entry.get("hf_hub_url", "ORG/NAME")))
        raise RecipeError(
            f"it lies elsewhere: fetch it, and name it as file_name, or write a stream of hf://datasets/{repo}/..."
        )
    if "://" in named:
        return str(named)
    return f"{folder}/{named if folder.startswith('s3:') else glob.escape(named)}"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The contents of a mixture file."""

    mixture: dict[str, int | float]
    "Percents of the whole budget, by source."
    num_tokens_avg: dict[str, int | float] = field(default_factory=dict)
    "Mean tokens of a record, by source."


def read_mixture(path: str) -> Mixture:
    """The mixture in a file; RecipeError, with the fault and an example, where the file is no
    mixture.
    """
    try:
        found = schema.parse_mapping(Mixture, _read_json(path, MIXTURE))
    except schema.Misfit as error:
        raise RecipeError(f"{path}: {error} Name {MIXTURE}.") from None
    total = sum(found.mixture.values())
    if min(found.mixture.values(), default=0) < 0 or not 0 < total <= 100 + ROUNDING:
        raise RecipeError(
            f"{path}: the percents of its mixture come to {total:g}; they are of one budget, so give 100 in all at most, each 0 or more."
        )
    return found


def match(
    path: str, names: Sequence[str], base: Path, is_budgeted: bool, said: Said
) -> list[Draft]:
    """The streams of a mixture file's sources that have files among `names` (files, folders,
    patterns).

    Args:
        is_budgeted: each stream is to be a sample as large as its share of the budget.
    """
    mixture, drafts = read_mixture(path), list[Draft]()
    files = _files_of(path, mixture.mixture, names, base, said)
    for name, percent in mixture.mixture.items():
        if not (percent and files[name]):
            why = "and no file or folder that was named is called so: it is" if percent else "so it is"  # fmt: skip
            said.append(f"{name}: {percent:g}% of the mixture, {why} left out")
            continue
        for split, draft in _by_split(name, files[name], said).items():
            drafts.append(draft)
            if split:
                continue
            # Without a budget they are ratios: sources that are left out divide nothing.
            draft.share = f"{percent:g}%" if is_budgeted else f"{percent:g}"
            if is_budgeted:
                draft.keys["sample"] = "budget"
            if mean := mixture.num_tokens_avg.get(name):
                draft.keys["expected_mean_tokens"] = mean
    return drafts


def _files_of(
    path: str, sources: Collection[str], names: Sequence[str], base: Path, said: Said
) -> dict[str, list[SourceFile]]:
    """Source -> its files. Files of no source are reported in `said`."""
    by_word = {_known(name): name for name in sources}
    found, others = defaultdict[str, list[SourceFile]](list), list[str]()
    for file in find_data(names, base, said):
        *folders, last = file.name.split("/")
        parts = (last.partition(".")[0], *reversed(folders))
        words = (_known(w) for part in parts for w in (part, "".join(telling(part))))
        if word := next(filter(by_word.__contains__, words), None):
            found[by_word[word]].append(file)
        elif file.location.url != locate(path).url:
            others.append(file.name)
    if others:
        said.append(f"of no source of the mixture, and left out: {join_names(others, MOST_SHOWN)}")
    return found


def _known(name: str) -> str:
    """The letters and digits of a name in lower case: spellings differ in all else."""
    return re.sub(r"[\W_]", "", name.lower())


def _by_split(name: str, files: list[SourceFile], said: Said) -> dict[str, Draft]:
    """A stream for each split of the source. If its files differ in shape, the shape with the most
    bytes wins; other files are reported.
    """
    found = dict[str, Draft]()
    for draft in sorted(sort_out(files, said, is_one=True), key=lambda d: -estimate_size(d.files)):
        if found.setdefault(draft.keys.get("split", ""), draft) is not draft:
            others = join_names([file.name for file in draft.files], MOST_SHOWN)
            said.append(f"{name}: {others} left out, since its fields are not those of most of it")
        draft.name = plain_name(name)
    if not found:
        said.append(f"{name}: none of its files can be read, so it is left out")
    return found

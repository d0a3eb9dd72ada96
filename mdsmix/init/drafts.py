"""Groups files into streams, and writes the text of a recipe for them. In the recipe, the reason
for a value is in a comment after it.

Files of one folder whose names differ only in numbers are one stream if their records are alike:
they have the same shape and fields. Only the first and the last of such files are read; if these
differ, all are read.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from mdsmix.errors import MdsmixError
from mdsmix.init.data_files import Notices, read_beginning, read_head
from mdsmix.init.field_doubts import find_condition
from mdsmix.init.recognise import COMMAS, Guess, describe_unknown, guess_shapes
from mdsmix.kinds import Piece
from mdsmix.messages import choose_verb, join_names, plural
from mdsmix.recipe import StreamSpec
from mdsmix.shapes import SHAPES, find_shape
from mdsmix.shards.counts import Records
from mdsmix.sources import ReadAs, SourceFile
from mdsmix.sources.sniff import begins_with_json_line, has_comma_after_object
from mdsmix.storage.location import path_matches

MAX_STREAMS = 8
"""If a folder has up to 8 files that are alike, each becomes a stream of its own. More files are
probably parts of one data set and become one stream.
"""
SPLITS = {
    "test": "test",
    "valid": "validation",
    "validation": "validation",
    "val": "validation",
    "dev": "dev",
    "eval": "eval",
}
"Word in a file's name -> the split of the file."
NUMBER = re.compile(r"\d+")
GENERIC = {"train", "index", "of", "part", "data", "shard", "chunk", "split", "jsonl", "json"}
"Words of file names that do not name a data set."
STREAM_KEYS = {key.name for key in dataclasses.fields(StreamSpec)}


@dataclass(slots=True, kw_only=True)
class Draft:
    """One stream of the recipe that `mdsmix init` is writing: its files, its keys, and the comments
    on them.
    """

    name: str
    guess: Guess
    files: Sequence[SourceFile]
    keys: dict[str, Any]
    "The stream's keys as the recipe writes them, without `source`."
    source: dict[str, Any]
    "The keys of its `source`."
    why: dict[str, str] = field(default_factory=dict)
    "Key -> the comment after it."
    notes: list[str] = field(default_factory=list)
    "Comments above the keys."
    share: str = ""
    "The stream's share of the mix, as the recipe writes it."
    tried: Records = field(default_factory=Records)
    "Counts of the first records: read, written, filtered, quarantined."
    is_printed: bool = False
    "Whether its texts have control tokens, as if a chat template had printed them."
    pieces: Sequence[Piece] | None = None
    "The first sample: runs of its tokens, each with whether the model is trained on it."
    eos: int | None = None
    "The id of the EOS that the loader appends to the first sample; None if it appends none."
    ends: list[str] = field(default_factory=list)
    "Messages for the user on the ends of its answers: whether a model stops there."
    refused: str = ""
    """The reason why `convert` would refuse the stream; empty if it would not. A refused stream is
    written as a comment.
    """

    def set(self, key: str, value: Any, why: str) -> None:
        """Set a key of the stream, with the comment after it."""
        self.keys[key] = value
        self.why[key] = why


def make_draft(name: str, guess: Guess, files: Sequence[SourceFile], paths: Sequence[str]) -> Draft:
    """Return the stream of these files.

    Args:
        name: a name for the stream; characters that a recipe does not take are replaced.
        guess: the shape of the files' records.
        files: the files.
        paths: names or patterns of these files, as the recipe writes them under `path`.
    """
    follows_from_fields = find_shape(None, guess.fields) == SHAPES[guess.shape.name]
    read_as = files[0].read_as  # all files of a stream are read in the same way
    source: dict[str, Any] = {
        "path": [*paths],
        "format": read_as.format,
        "split_by": read_as.split_by,
        "shape": None if follows_from_fields else guess.shape.name,
    }
    source = {key: value for key, value in source.items() if value}
    source |= guess.fields
    keys: dict[str, Any] = {"kind": guess.kind.word}
    for key, value in guess.options.items():
        if key in STREAM_KEYS:
            keys[key] = value
        else:
            source[key] = value
    condition = find_condition(guess)
    if condition:
        source["where"] = condition
    return Draft(name=clean_name(name), guess=guess, files=files, keys=keys, source=source)


class _Group(NamedTuple):
    """Files that are read as one stream, and the best guess at their shape."""

    files: Sequence[SourceFile]
    guess: Guess


class _Likeness(NamedTuple):
    """What files have in common that can be one stream."""

    split: str
    folder: str
    read_as: ReadAs
    identity: tuple[Any, ...]
    "The shape and fields of the records (`Guess.identity`)."


def group_files(files: Sequence[SourceFile], notices: Notices, is_one: bool = False) -> list[Draft]:
    """Return the streams of these files.

    Args:
        files: the files that contain data.
        notices: a list that messages on files in no stream are appended to.
        is_one: whether all files that are alike are one stream, whatever their folders and names.
    """
    # Group the files that can be one stream.
    runs = _group_numbered_runs(files)
    # If no file is for training, files of other splits are used for training.
    has_train = any(_split_of(run[0].name) == "train" for run in runs)
    if not has_train:
        notices += _warn_of_trained_splits(runs)
    alike = defaultdict[_Likeness, list[_Group]](list)
    for run in runs:
        split = _split_of(run[0].name) if has_train else "train"
        folder = "" if is_one else _folder(run[0].name)
        for group in _recognise_run(run, notices):
            likeness = _Likeness(split, folder, run[0].read_as, group.guess.identity())
            alike[likeness].append(group)
    # Make one stream of each file or run, or of all that are alike.
    drafts = list[Draft]()
    for likeness, groups in alike.items():
        if is_one or len(groups) > MAX_STREAMS:
            all_files = [file for group in groups for file in group.files]
            groups = [_Group(all_files, groups[0].guess)]
        for group in groups:
            paths = find_paths(group.files, files)
            draft = make_draft(_name_of(group.files), group.guess, group.files, paths)
            if likeness.split != "train":
                draft.set("split", likeness.split, "by the name: rendered as an eval_loader")
            drafts.append(draft)
    return drafts


def _warn_of_trained_splits(runs: Sequence[Sequence[SourceFile]]) -> Iterator[str]:
    """Yield a message for each split of evaluations whose files will be trained on, since no file
    is for training.

    Args:
        runs: groups of files whose names differ only in numbers. The name of each is that of a
            split other than train.
    """
    names = defaultdict[str, list[str]](list)
    for run in runs:
        names[_split_of(run[0].name)] += [file.name for file in run]
    for split, files in names.items():
        named_so = choose_verb(files, "its name is that", "their names are those")
        article = "an" if split == "eval" else "a"
        yield (
            f"WARNING: {join_names(files)} will be trained on, since no file is for training, "
            f"though {named_so} of {article} {split} split: if it is only to be evaluated on, "
            f"write split: {split} in its stream, and add the data to train on"
        )


def _group_numbered_runs(files: Iterable[SourceFile]) -> list[list[SourceFile]]:
    """Return groups of files whose names differ only in numbers, such as `part-01.jsonl` and
    `part-02.jsonl`. Files of a data set that itself lists its files in an order are one group,
    whatever their names.
    """
    runs = defaultdict[Any, list[SourceFile]](list)
    for file in sorted(files, key=lambda file: file.name):
        dataset = _folder(file.order)
        name_without_numbers = NUMBER.sub("#", _last_step(file.name))
        key = dataset if dataset else (_folder(file.name), name_without_numbers)
        runs[key, file.read_as].append(file)
    return list(runs.values())


def _recognise_run(run: list[SourceFile], notices: Notices) -> Iterator[_Group]:
    """Yield the files of a run as one group if its first and last file are alike. Otherwise read
    every file, and yield each as a group of its own. Files of unknown shape are in no group.

    Args:
        run: files whose names differ only in numbers, such as `part-01.jsonl` and `part-02.jsonl`,
            in the order of their names.
        notices: a list that messages on files in no group are appended to.
    """
    # The first and the last file; a run of one file has only one of them.
    ends = [_recognise_file(file, notices) for file in dict.fromkeys((run[0], run[-1]))]
    # None is a file of unknown shape, so a known and an unknown file differ too.
    identities = {guess.identity() if guess else None for guess in ends}
    if len(identities) > 1:
        for file in run:
            yield from _recognise_run([file], notices)
        return
    # Both are alike. The group's guess gets the first records of both files.
    guess = ends[0]
    if guess:
        # `sum` begins with the head of the first file, and adds the head of the last file.
        heads = [end.head for end in ends[1:] if end]
        yield _Group(run, replace(guess, head=sum(heads, guess.head)))
    elif len(run) > 2:  # `_recognise_file` has already reported the first and the last file
        notices.append(
            f"{plural(len(run) - 2, 'file')} between {run[0].name} and {run[-1].name} left out too"
        )


def _recognise_file(file: SourceFile, notices: Notices) -> Guess | None:
    """Return the best guess at a file's shape; None if the file cannot be read or has no known
    shape.
    """
    try:
        head = read_head(file)
    except MdsmixError as error:
        notices.append(error)
        return None
    if head.objects and head.bad["not_json"] and has_comma_after_object(read_beginning(file)):
        notices.append(f"WARNING: {file.name} has lines that are not JSON: {COMMAS}")
    guesses = guess_shapes(head)
    if guesses[0].is_right:
        if file.read_as.split_by and begins_with_json_line(str(head.objects[0]["text"])):
            notices.append(
                f"WARNING: {file.name} will be trained as plain text, but its first line is a JSON "
                "object: if it is JSON Lines, name it .jsonl and run init again"
            )
        return guesses[0]
    notices += describe_unknown(head, guesses)
    return None


def find_paths(files: Sequence[SourceFile], all_files: Sequence[SourceFile]) -> list[str]:
    """Return the paths that a recipe writes for these files.

    That is one pattern, if it matches these files and no other of `all_files`; otherwise the name
    of each file. Files of an MDS data set are named by its folder, since its index decides their
    order (`file.order`).
    """
    folders = [glob.escape(_folder(file.order)) for file in files if file.order]
    names = [file.name for file in files if not file.order]
    beginning, end = _find_common_ends(names)
    pattern = f"{glob.escape(beginning)}*{glob.escape(end)}"
    matched = {
        file.name for file in all_files if path_matches(file.name.split("/"), pattern.split("/"))
    }
    have_common_suffix = "." in end
    if len(names) > 1 and have_common_suffix and matched == set(names):
        paths = [pattern]
    else:
        paths = [glob.escape(name) for name in names]
    return [*dict.fromkeys(folders), *paths]


def _find_common_ends(names: Sequence[str]) -> tuple[str, str]:
    """Return the common beginning and end of the names, without digits where they differ:
    `a/part-` and `.jsonl` of `a/part-01.jsonl` and `a/part-02.jsonl`.
    """
    digits = "0123456789"
    beginning = os.path.commonprefix(names).rstrip(digits)  # noqa: RUF071 - of characters
    reversed_end = os.path.commonprefix([name[::-1] for name in names])  # noqa: RUF071
    return beginning, reversed_end.rstrip(digits)[::-1]


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _last_step(name: str) -> str:
    return name.rpartition("/")[2]


def _split_of(name: str) -> str:
    """Return the split of a file by the first or the last word of its name, or by its folder:
    `validation` for `a/chat-val.jsonl`. Return `train` if no word names a split.
    """
    words = re.findall("[a-z]+", _last_step(name).lower().partition(".")[0])
    candidates = (*words[:1], *words[-1:], _last_step(_folder(name)).lower())
    return next((SPLITS[word] for word in candidates if word in SPLITS), "train")


def _name_of(files: Sequence[SourceFile]) -> str:
    """Return a name for the stream of these files, without words such as train.

    It is made from the name of the files if their names differ only in numbers, otherwise from the
    nearest folder whose name has other words. Numbers in it are dropped if there are several files.
    """
    path = files[0].name.rpartition("://")[2]
    *folders, file_name = path.split("/")
    differ_in_numbers = len({NUMBER.sub("#", file.name) for file in files}) == 1
    steps = folders
    if differ_in_numbers:
        steps = [*folders, file_name.partition(".")[0]]
    for step in reversed(steps):
        if len(files) > 1:  # a number in the name of one file does not name all files
            step = NUMBER.sub("", step)
        name = "_".join(naming_words(step))
        if name:
            return name[:60]
    return "data"


def naming_words(step: str) -> list[str]:
    """Return the words of a step of a path, without numbers and words such as train, which do not
    name a data set.
    """
    generic = {"", *GENERIC, *SPLITS}
    words = re.split(r"[\W_]+", step)
    return [word for word in words if word.lower().rstrip("0123456789") not in generic]


def clean_name(name: str) -> str:
    """Return the name with only characters that a recipe takes in the name of a stream."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip("._-") or "data"


def make_names_unique(drafts: Iterable[Draft]) -> None:
    """Append splits to the names of streams, and numbers if names are equal: `chat`, `chat-test`,
    `chat-2`.
    """
    used = set[str]()
    for draft in drafts:
        base = draft.name
        numbers = count(2)
        if "split" in draft.keys:
            draft.name = f"{base}-{draft.keys['split']}"
        while draft.name in used:
            draft.name = f"{base}-{next(numbers)}"
        used.add(draft.name)


HEAD = (
    "# By mdsmix init, from the first records. Every key is explained in docs/recipe.md of mdsmix."
)
REPEAT_KEY = (
    "# mix: {{{first}: {{repeat: 2}}}}    # how often an epoch draws a stream; once by default"
)
RESPONSES_KEY = (
    "# target_responses: all    # trains every answer of a conversation; by default only the last, "
    "as LLM-Foundry does"
)
PROCESSOR_KEY = (
    "# processor: ./model    # the model's folder or hub name: decides how many tokens images "
    "become, so that rows that do not fit are left out\n"
)
WHY = {
    "local": "published there; `remote: s3://bucket/prefix` publishes to a bucket",
    "remote": "published there, streamed from there",
    "budget": "the tokens of an epoch; `sample: budget` converts each stream's share of it",
    "absolute": "percentages are of the whole budget, and may sum to less than 100 if a source is "
    "missing",
    "target_responses": "answers of which only some characters are trained need it; every answer "
    "of a conversation is then trained",
    "format": "by its first bytes",
    "split_by": "what is a document: file, line or paragraph",
    "nulls": "nulls inside objects are removed: Arrow and datasets write them for keys that "
    "an object lacks",
    "where": "answers that this field marks as bad are left out",
}
"Key -> the comment after the key, for any value."


def format_recipe(
    keys: Mapping[str, Any], drafts: Sequence[Draft], why: Mapping[str, str] = WHY
) -> str:
    """Return the text of the recipe. A refused stream is commented out, below the reason.

    Args:
        keys: the keys at the top.
        drafts: the streams, at least one.
        why: key at the top -> the comment after it.
    """
    accepted = [draft for draft in drafts if not draft.refused]
    lines = [HEAD, *_format_keys(keys, why)]
    # The keys of the mix and of the loader.
    # A kind with a loader of its own, such as preferences, is never in a recipe with other kinds.
    # So all streams have the loader of the first.
    loader = drafts[0].guess.kind.loader
    if loader:
        records = drafts[0].guess.kind.name.replace("_", " ")
        comment = f"the loader of {loader.whose}, which reads only {records}"
        section: dict[str, Any] = {"name": loader.name}
        if loader.needs:
            section["dataset"] = {
                key: find_value(keys["max_seq_len"]) for key, find_value in loader.needs.items()
            }
        lines.append(f"train_loader: {format_value(section)}    # {comment}")
    shares = [_share_line(draft) for draft in drafts if draft.share]
    if shares:
        lines += ["mix:", *shares]
    # The streams.
    lines.append("streams:")
    for draft in drafts:
        prefix = "  "
        if draft.refused:
            prefix = "  # "
            lines.append(f"  # left out: {draft.refused}")
        lines += [prefix + line for line in _format_stream(draft)]
    # Keys that a user may want to add.
    trained = [draft for draft in accepted if "split" not in draft.keys]
    if accepted and not shares and not drafts[0].guess.kind.needs_own_run():
        if trained:
            lines.append(REPEAT_KEY.format(first=trained[0].name))
        if "target_responses" not in keys:
            lines.append(RESPONSES_KEY)
    if any(draft.guess.shape.image_fields for draft in accepted):
        lines.append(PROCESSOR_KEY)
    return "\n".join(lines).rstrip() + "\n"


def _share_line(draft: Draft) -> str:
    """Return the stream's line in `mix`: `  web: 30%`, or for a ratio `  web: {share: 3}`."""
    prefix = "  # " if draft.refused else "  "
    share = draft.share if "%" in draft.share else f"{{share: {draft.share}}}"
    return f"{prefix}{format_value(draft.name)}: {share}"


def _format_stream(draft: Draft) -> Iterator[str]:
    """Yield the stream's lines in `streams`: its name, its notes as comments, and its keys."""
    yield f"{format_value(draft.name)}:"
    yield from (f"  # {note}" for note in draft.notes)
    yield from (f"  {line}" for line in _format_keys(draft.keys, draft.why))
    yield "  source:"
    yield from (f"    {line}" for line in _format_keys(draft.source, WHY | draft.why))


def _format_keys(keys: Mapping[str, Any], why: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each key, with its comment if it has one. If `path` has several values, each
    gets a line.

    Args:
        keys: the keys and values.
        why: key -> the comment after it.
    """
    for key, value in keys.items():
        comment = f"    # {why[key]}" if key in why else ""
        if key == "path" and len(value) > 1:
            yield "path:"
            yield from (f"  - {format_value(path)}" for path in value)
        elif key == "path":
            yield f"path: {format_value(value[0])}{comment}"
        else:
            yield f"{key}: {format_value(value)}{comment}"


def format_value(value: Any) -> str:
    """Return a value on one line of YAML. `${` is escaped, since OmegaConf would replace it."""
    import yaml

    has_lines = isinstance(value, str) and "\n" in value
    text = yaml.safe_dump(
        value,
        default_flow_style=True,
        default_style='"' if has_lines else None,
        width=1 << 30,
        allow_unicode=True,
        sort_keys=False,
    )
    # PyYAML ends a plain scalar with a line `...`.
    return text.removesuffix("...\n").strip().replace("${", "\\${")

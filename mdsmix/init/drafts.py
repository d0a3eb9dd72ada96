"""Files -> streams -> the text of a recipe, in which a comment beside a key gives the reason for
its value.

Files of one folder whose names differ only in numbers are one stream if their records are alike. Of
such files the first and the last are read; where these differ, all are read.
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
from typing import Any

from mdsmix.errors import MdsmixError
from mdsmix.init.data_files import Said, head_of
from mdsmix.init.recognise import Guess, described, guesses, mark_of
from mdsmix.kinds import Piece
from mdsmix.messages import plural
from mdsmix.recipe import StreamSpec
from mdsmix.shapes import SHAPES, find_shape
from mdsmix.shards.counts import Records
from mdsmix.sources import SourceFile
from mdsmix.storage.location import path_matches

MOST_STREAMS = 8
"""Up to 8 alike files of a folder become one stream each. More files are probably parts of one
stream.
"""
SPLITS = {"test": "test", "valid": "validation", "validation": "validation", "val": "validation", "dev": "dev", "eval": "eval"}  # fmt: skip
"Word in a file's name -> the split of the file."
NUMBER = re.compile(r"\d+")
PLAIN = {"train", "index", "of", "part", "data", "shard", "chunk", "split", "jsonl", "json"}
"Words of file names that do not name a data set."
STREAM_KEYS = {each.name for each in dataclasses.fields(StreamSpec)}


@dataclass(slots=True, kw_only=True)
class Draft:
    """A stream of the recipe that is being written."""

    name: str
    guess: Guess
    files: Sequence[SourceFile]
    keys: dict[str, Any]
    "The stream's keys as the recipe writes them, without `source`."
    source: dict[str, Any]
    why: dict[str, str] = field(default_factory=dict)
    "Key -> the comment beside it."
    notes: list[str] = field(default_factory=list)
    "Comments above the keys."
    share: str = ""
    "The stream's share of the mix, as the recipe writes it."
    tried: Records = field(default_factory=Records)
    "Counts of the first records: read, written, filtered, quarantined."
    pieces: Sequence[Piece] | None = None
    "The first sample: runs of its tokens, each with whether it is trained."
    eos: int | None = None
    "The EOS that the loader appends to it."
    ends: list[str] = field(default_factory=list)
    "Sentences on the ends of its answers: whether a model stops there."
    refused: str = ""
    """Why conversion would refuse the stream, which is then written as a comment; empty where it
    would not.
    """

    def set(self, key: str, value: Any, why: str) -> None:
        self.keys[key], self.why[key] = value, why


def draft_of(name: str, guess: Guess, files: Sequence[SourceFile], paths: Sequence[str]) -> Draft:
    """The stream of these files. `paths`: names or patterns of the files, for the recipe."""
    read_as = files[0].read_as
    keys = {key: value for key, value in guess.options.items() if key in STREAM_KEYS}
    options = {key: value for key, value in guess.options.items() if key not in STREAM_KEYS}
    is_told = find_shape(None, guess.fields) == SHAPES[guess.shape.name]
    shape = None if is_told else guess.shape.name
    first = {"path": [*paths], "format": read_as.format, "split_by": read_as.split_by}
    source = {key: value for key, value in (first | {"shape": shape}).items() if value}
    if mark := mark_of(guess):
        options["where"] = mark
    return Draft(
        name=plain_name(name),
        guess=guess,
        files=files,
        keys={"kind": guess.kind.word, **keys},
        source={**source, **guess.fields, **options},
    )


def sort_out(files: Sequence[SourceFile], said: Said, is_one: bool = False) -> list[Draft]:
    """The streams of these files; `said` takes lines on files that are in no stream.

    Args:
        is_one: alike files are one stream, whatever their folders and names.
    """
    runs = list(_runs(files).values())
    has_train = any(_split(run[0].name) == "train" for run in runs)
    alike = defaultdict[Any, list[tuple[list[SourceFile], Guess]]](list)
    for run in runs:
        split = _split(run[0].name) if has_train else "train"
        place = "" if is_one else _folder(run[0].name)
        for members, guess in _looked_at(run, said):
            alike[split, place, run[0].read_as, guess.same()].append((members, guess))
    drafts = list[Draft]()
    for (split, *_), some in alike.items():
        if is_one or len(some) > MOST_STREAMS:
            some = [([file for members, _ in some for file in members], some[0][1])]
        for members, guess in some:
            drafts.append(draft_of(_name(members), guess, members, paths_of(members, files)))
            if split != "train":
                drafts[-1].set("split", split, "by the name: rendered as an eval_loader")
    return drafts


def _runs(files: Iterable[SourceFile]) -> dict[Any, list[SourceFile]]:
    """Groups of files whose names differ only in numbers."""
    runs = defaultdict[Any, list[SourceFile]](list)
    for file in sorted(files, key=lambda file: file.name):
        key = _folder(file.order) or (_folder(file.name), NUMBER.sub("#", _last(file.name)))
        runs[key, file.read_as].append(file)
    return runs


def _looked_at(run: list[SourceFile], said: Said) -> Iterator[tuple[list[SourceFile], Guess]]:
    """Groups of files, each with its best guess: all files together if the first and the last are
    alike, else each file alone.
    """
    ends = [_look(file, said) for file in dict.fromkeys((run[0], run[-1]))]
    if len({end and end.same() for end in ends}) > 1:
        for file in run:
            yield from _looked_at([file], said)
    elif guess := ends[0]:
        yield run, replace(guess, head=sum([end.head for end in ends[1:] if end], guess.head))
    elif run[2:]:
        said.append(f"{plural(len(run) - 2, 'file')} between these two left out with them")


def _look(file: SourceFile, said: Said) -> Guess | None:
    """The best guess at a file's shape; None if the file cannot be read or has no known shape."""
    try:
        head = head_of(file)
    except MdsmixError as error:
        said.append(error)
        return None
    best = guesses(head)
    if best[0].is_right:
        return best[0]
    said += described(head, best)
    return None


def paths_of(files: Sequence[SourceFile], known: Sequence[SourceFile]) -> list[str]:
    """One pattern that finds these files and no other file in `known`; without such a pattern, the
    names of the files.
    """
    saved = [glob.escape(_folder(file.order)) for file in files if file.order]
    names = [file.name for file in files if not file.order]
    begin, end = (
        os.path.commonprefix([name[::step] for name in names]).rstrip("0123456789")[::step]  # noqa: RUF071
        for step in (1, -1)
    )
    pattern = f"{glob.escape(begin)}*{glob.escape(end)}"
    found = {f.name for f in known if path_matches(f.name.split("/"), pattern.split("/"))}
    is_found = names[1:] and "." in end and found == set(names)
    return [*dict.fromkeys(saved), *([pattern] if is_found else map(glob.escape, names))]


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _split(name: str) -> str:
    """The split of a file by the first or the last word of its name, or by its folder; else
    `train`.
    """
    words = re.findall("[a-z]+", _last(name).lower().partition(".")[0])
    said = (*words[:1], *words[-1:], _last(_folder(name)).lower())
    return next((SPLITS[word] for word in said if word in SPLITS), "train")


def _name(files: Sequence[SourceFile]) -> str:
    """The common name of the files, or else of their folder, without numbers and words such as
    train.
    """
    *folders, last = files[0].name.rpartition("://")[2].split("/")
    is_alike = len({NUMBER.sub("#", file.name) for file in files}) == 1
    stems = [*folders, *([last.partition(".")[0]] if is_alike else [])]
    if len(files) > 1:
        stems = [NUMBER.sub("", stem) for stem in stems]
    return next(filter(None, map("_".join, map(telling, reversed(stems)))), "data")[:60]


def telling(part: str) -> list[str]:
    """The words of a part of a path, without numbers and words such as train, which do not name a
    data set.
    """
    others = {"", *PLAIN, *SPLITS}
    words = re.split(r"[\W_]+", part)
    return [word for word in words if word.lower().rstrip("0123456789") not in others]


def plain_name(name: str) -> str:
    """The name with only characters that a recipe takes in the name of a stream."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip("._-") or "data"


def name_apart(drafts: Iterable[Draft]) -> None:
    """Adds splits to the names of streams, and numbers where names are equal: `chat`, `chat-test`,
    `chat-2`.
    """
    taken = set[str]()
    for draft in drafts:
        base, numbers = draft.name, count(2)
        draft.name = "-".join(filter(None, [base, draft.keys.get("split")]))
        while draft.name in taken:
            draft.name = f"{base}-{next(numbers)}"
        taken.add(draft.name)


HEAD = "# By mdsmix init, from what it saw. Every key is explained in docs/recipe.md of mdsmix."
LATER = """# mix: {{{first}: {{repeat: 2}}}}    # how often a stream is drawn an epoch; once where nothing is said
# target_responses: all    # trains every answer of a conversation; without it the last one alone, as LLM-Foundry does
"""
SEEING = """# processor: ./model    # the model's folder or hub name: how many tokens images become, so that what does not fit is left out
"""
WHY = {
    "local": "published there; `remote: s3://bucket/prefix` publishes to a bucket",
    "remote": "published there, streamed from there",
    "budget": "what an epoch holds, and of which `sample: budget` takes each stream's share",
    "absolute": "the percents are of the whole budget, and need not sum to 100 where a source is not there",
    "format": "by its first bytes",
    "split_by": "what is a document: file, line or paragraph",
    "where": "answers that this field marks as false are not trained",
}
"Key -> the comment beside the key, for any value."


def text_of(keys: Mapping[str, Any], drafts: Sequence[Draft], why: Mapping[str, str] = WHY) -> str:
    """The text of the recipe, with `keys` at its top. A refused stream is commented out, below the
    reason.
    """
    live = [draft for draft in drafts if not draft.refused]
    shares = [
        f"  {'# ' if draft.refused else ''}{scalar(draft.name)}: {{share: {draft.share}}}"
        for draft in drafts
        if draft.share
    ]
    lines = [HEAD, *_lines(keys, why)]
    kind = drafts[0].guess.kind
    if kind.loader:
        only = f"the loader of {kind.loader.whose}, which reads {kind.word}s alone"
        lines.append(f"train_loader: {{name: {kind.loader.name}}}    # {only}")
    lines += [*(["mix:"] if shares else []), *shares, "streams:"]
    for draft in drafts:
        mark = "  # " if draft.refused else "  "
        lines += [f"  # left out: {draft.refused}"] if draft.refused else []
        lines += [mark + line for line in _stream(draft)]
    if live and not shares and not kind.loader:
        lines.append(LATER.format(first=live[0].name))
    if any(draft.guess.shape.image_fields for draft in live):
        lines.append(SEEING)
    return "\n".join(lines).rstrip() + "\n"


def _stream(draft: Draft) -> Iterator[str]:
    yield f"{scalar(draft.name)}:"
    yield from (f"  # {note}" for note in draft.notes)
    yield from (f"  {line}" for line in _lines(draft.keys, draft.why))
    yield "  source:"
    yield from (f"    {line}" for line in _lines(draft.source, WHY))


def _lines(keys: Mapping[str, Any], why: Mapping[str, str]) -> Iterator[str]:
    """A line for each key, with its comment if any. Several paths take a line each."""
    for key, value in keys.items():
        comment = f"    # {why[key]}" if key in why else ""
        if key == "path" and len(value) > 1:
            yield from ("path:", *(f"  - {scalar(path)}" for path in value))
        else:
            yield f"{key}: {scalar(value[0] if key == 'path' else value)}{comment}"


def scalar(value: Any) -> str:
    """A value on one line of YAML. `${` is escaped, since OmegaConf would replace it."""
    import yaml

    is_long = isinstance(value, str) and "\n" in value
    text = yaml.safe_dump(
        value,
        default_flow_style=True,
        default_style='"' if is_long else None,
        width=1 << 30,
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip().replace("${", "\\${")

"""Files -> streams: files of one folder whose names differ only in numbers are one stream, where their records are alike.

Of many files two are looked at, the first and the last; where these differ, all are.
"""

from __future__ import annotations

import glob
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import count
from typing import Any

from mdsmix.errors import MdsmixError
from mdsmix.init.data_files import FirstRecords, head_of
from mdsmix.init.recognise import Guess, described, guesses
from mdsmix.kinds import KINDS, Piece
from mdsmix.shapes import SHAPES, find_shape
from mdsmix.sources import SourceFile
from mdsmix.training.loader_keys import OtherLoader

MOST_STREAMS = 8
"Up to 8 alike files of a folder become a stream each. More files are most likely parts of one stream."
SPLITS = {"test": "test", "valid": "validation", "validation": "validation", "val": "validation", "dev": "dev", "eval": "eval"}  # fmt: skip
"Words in a file's name -> the split that it is of."
_NUMBER = re.compile(r"\d+")
PLAIN = {"train", "index", "of", "part", "data", "shard", "chunk", "split", "jsonl", "json"}
"Words that name no data set."
JUDGING = ("label", "kto_tag")
"Fields that judge answers in data of KTO."
_VERDICTS = (("True", "False", ""), ("'True'", "'False'", " == 'True'"), ("'true'", "'false'", " == 'true'"))  # fmt: skip
"A good answer and a bad one, as Python prints the field, and the condition on the field that keeps the good ones."


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How many of the first records are written, filtered and quarantined."""

    read: int = 0
    filtered: Mapping[str, int] = field(default_factory=dict)
    quarantined: Mapping[str, int] = field(default_factory=dict)
    template_says: Mapping[str, str] = field(default_factory=dict)
    "By reason, what the chat template says of the first such record."
    unread: Mapping[str, int] = field(default_factory=dict)
    "Field that nothing reads -> records in which it is not empty."
    pieces: Sequence[Piece] | None = None
    "The first that is written: its tokens, and whether they are trained."

    @property
    def bad(self) -> int:
        return sum(self.quarantined.values())

    @property
    def written(self) -> int:
        return self.read - self.bad - sum(self.filtered.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A stream of the recipe that is being written."""

    name: str
    guess: Guess
    files: Sequence[SourceFile]
    paths: Sequence[str]
    "From the folder of the recipe, or URLs."
    options: Mapping[str, Any] = field(default_factory=dict)
    "Beside those of the guess."
    split: str = "train"
    records: Sequence[Any] = ()
    "The first ones."
    notes: Sequence[str] = ()
    "Comments above the stream."
    share: str = ""
    "Of the mix, as the recipe writes it."
    settings: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    "Other keys of the stream -> value, and why."
    trial: Trial = Trial()
    refused: str = ""
    "Why the stream is written as a comment, e.g. since conversion would refuse it."

    @property
    def loader(self) -> OtherLoader | None:
        """What reads the stream, where its kind brings a loader of its own."""
        return next((kind.loader for kind in KINDS if kind.word == self.guess.kind), None)

    @property
    def shape(self) -> str | None:
        """Set only if the fields do not tell the shape."""
        told = find_shape(None, self.guess.fields)
        return None if told == SHAPES[self.guess.shape.name] else self.guess.shape.name


@dataclass(slots=True)
class Sorted:
    """Files that were looked at."""

    drafts: list[Draft] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    "Sentences on what is in no stream."
    unknown: list[str] = field(default_factory=list)
    "Lines on files of no known shape: what they hold, and what the nearest shapes lack."
    failed: list[MdsmixError] = field(default_factory=list)
    "Files that could not be read."


def sort_out(files: Sequence[SourceFile]) -> Sorted:
    """The streams that these files make."""
    found = Sorted()
    alike = defaultdict[Any, list[tuple[list[SourceFile], FirstRecords, Guess]]](list)
    for run in _runs(files).values():
        for members, head in _looked_at(run, found):
            best = guesses(head)
            if best and best[0].is_right:
                key = (_folder(run[0].name), _split(run[0].name), run[0].read_as, *best[0].same())
                alike[key].append((members, head, best[0]))
            else:
                found.unknown += described(head, best)
    for same in alike.values():
        if len(same) > MOST_STREAMS:
            same = [([file for members, _, _ in same for file in members], *same[0][1:])]
        found.drafts += [_draft(*each, files) for each in same]
    if all(draft.split != "train" for draft in found.drafts):  # there is nothing else to train on
        found.drafts = [replace(draft, split="train") for draft in found.drafts]
    return found


def _runs(files: Iterable[SourceFile]) -> dict[Any, list[SourceFile]]:
    """Files whose names differ only in their numbers."""
    runs = defaultdict[Any, list[SourceFile]](list)
    for file in sorted(files, key=lambda file: file.name):
        folder, _, name = file.name.rpartition("/")
        key = _folder(file.order) if file.order else (folder, _NUMBER.sub("#", name))
        runs[key, file.read_as].append(file)
    return runs


def _looked_at(
    run: list[SourceFile], found: Sorted
) -> Iterator[tuple[list[SourceFile], FirstRecords]]:
    """The files of a run with first records: all files together if the first and the last are alike, else each file."""
    read = {file: _read(file, found) for file in (run[0], run[-1])}
    heads = [head for head in read.values() if head]
    if len(heads) == 2 and len(set(map(_best, heads))) == 1:
        yield run, replace(heads[0], records=[*heads[0].records, *heads[1].records])
        return
    for file in run:
        if head := read[file] if file in read else _read(file, found):
            yield [file], head


def _read(file: SourceFile, found: Sorted) -> FirstRecords | None:
    try:
        return head_of(file)
    except MdsmixError as error:
        found.failed.append(error)
        return None


def _best(head: FirstRecords) -> Any:
    found = guesses(head)
    return found[0].same() if found and found[0].is_right else None


def _draft(
    files: list[SourceFile], head: FirstRecords, guess: Guess, known: Sequence[SourceFile]
) -> Draft:
    return Draft(
        name=_name(files),
        guess=guess,
        files=files,
        paths=paths_of(files, known),
        options=_judged(guess, head),
        split=_split(files[0].name),
        records=head.records,
    )


def _judged(guess: Guess, head: FirstRecords) -> dict[str, str]:
    """`where: label` if a field label of the records is true or false, or empty; of a csv the words. It keeps the good answers."""
    records = [record for record in head.records if isinstance(record, dict)]
    for name in guess.left if guess.kind == "finetuning" else ():
        said = {repr(record.get(name)) for record in records} - {"None", "''"}
        for good, bad, where in _VERDICTS if name in JUDGING and said else ():
            if said <= {good, bad}:
                return {"where": f"{name}{where}"}
    return {}


def paths_of(files: Sequence[SourceFile], known: Sequence[SourceFile]) -> list[str]:
    """One pattern that finds these files and no other known file; without such a pattern all names."""
    if files[0].order:
        return [glob.escape(_folder(files[0].order))]  # one source, in an order of its own
    names = [file.name for file in files]
    if len(names) > 1:
        others = {file.name for file in known}.difference(names)
        for pattern in _patterns(names):
            if not any(_is_found(name, pattern) for name in others):
                return [pattern]
    return [glob.escape(name) for name in names]


def _patterns(names: Sequence[str]) -> Iterator[str]:
    """Patterns that find all these files of one folder, the narrowest first."""
    folder, _, name = names[0].rpartition("/")
    before = f"{glob.escape(folder)}/" if folder else ""
    masked = before + re.sub(r"\*+", "*", "*".join(map(glob.escape, _NUMBER.split(name))))
    by_suffix = before + "*." + glob.escape(name.partition(".")[2])
    yield from (p for p in (masked, by_suffix) if all(_is_found(each, p) for each in names))


def _is_found(name: str, pattern: str) -> bool:
    """Whether the pattern, of one folder, finds the file."""
    return _folder(name) == _folder(pattern) and fnmatchcase(name, pattern)


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _split(name: str) -> str:
    *_, folder, last = f"/{name.lower()}".split("/")
    words = [word for word in re.split(r"[^a-z]+", last.partition(".")[0]) if word]
    return next((SPLITS[w] for w in (*words[:1], *words[-1:], folder) if w in SPLITS), "train")


def _name(files: Sequence[SourceFile]) -> str:
    """The name of the files without numbers and words such as train; the name of their folder if nothing is left."""
    parts = files[0].name.removeprefix("s3://").split("/")
    stems = [parts[-1].partition(".")[0], *reversed(parts[:-1])]
    if len(files) > 1 and len({_NUMBER.sub("#", file.name) for file in files}) > 1:
        stems = stems[1:]
    for stem in stems:
        stem = _NUMBER.sub("", stem) if len(files) > 1 else stem
        words = [word for word in re.split(r"[^A-Za-z0-9]+", stem) if word]
        words = [word for word in words if word.lower() not in PLAIN | SPLITS.keys()]
        if words and not all(word.isdigit() for word in words):
            return "_".join(words)[:60]
    return "data"


def plain_name(name: str) -> str:
    """A name that a recipe takes for a stream."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip("._-") or "data"


def named_apart(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """The streams, numbered where two have one name."""
    taken = set[str]()
    for draft in drafts:
        name = draft.name if draft.split == "train" else f"{draft.name}-{draft.split}"
        numbers = count(2)
        while name in taken:
            name = f"{draft.name}-{next(numbers)}"
        taken.add(name)
        yield replace(draft, name=name)

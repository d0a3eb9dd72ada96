"""Records -> their shape: by the names of their fields, and by trying. A shape is taken where it reads the records.

Nothing here knows a shape: their keys say which fields they want, the recipe's other words for a key (`also called`) which
names such fields bear, and `options` of what a shape guesses itself is tried too. So a shape that is added is recognised.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from mdsmix.init.data_files import FirstRecords, fields_of_images, first_bytes
from mdsmix.kinds import KINDS
from mdsmix.recipe import SourceSpec
from mdsmix.record import Conversation
from mdsmix.shapes import SHAPES, Shape
from mdsmix.shapes.fields import derived, parse
from mdsmix.shapes.image_parts import FIELDS, PLACEHOLDER, with_images
from mdsmix.sources.arrow import begins_as
from mdsmix.sources.formats import format_of
from mdsmix.words import listed, printable

LIST_INSIDE = re.compile(rb'\s*\{.*?"(\w+)"\s*:\s*\[\s*\{', re.DOTALL)
PACKINGS = ("gzip", "Zstandard")
MOST_SHOWN = 12
"Fields that a line names."
ENOUGH = 0.5
"The share of the first records that a shape must read to be taken."

SERVES = 0.9
"Guesses that read this share or more rank alike: a recipe allows a tenth of bad records, and no option is set for a few records."


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A shape, and how it reads some records."""

    shape: Shape
    fields: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    read: int = 0
    "Records that it reads."
    of: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    "Why it does not read the others."
    missing: tuple[str, ...] = ()
    "Its keys for which the records have no field."
    left: tuple[str, ...] = ()
    "Fields of the records that it does not read."
    images: tuple[str, ...] | None = None
    "The fields that hold images, none where they are the usual ones; None: it reads none."
    pictures: tuple[str | bytes, ...] = ()
    "The images of the records that it reads."

    @property
    def is_right(self) -> bool:
        return not self.missing and self.read > 0 and self.read >= ENOUGH * self.of

    @property
    def kind(self) -> str:
        """The `kind:` of its streams."""
        return next(kind.word for kind in KINDS if kind.reads is self.shape.gives)

    def same(self) -> tuple[Any, ...]:
        """Equal for files of one stream."""
        return self.shape.name, repr(sorted(self.fields.items())), repr(self.options), self.images


def guesses(head: FirstRecords) -> list[Guess]:
    """The guesses for the records, the best first: it reads the most records, and of these the most fields."""
    found = [guess for shape in SHAPES.values() for guess in _guesses(shape, head)]
    found += _seeing(head)
    return sorted(found, key=_rank, reverse=True)


def _seeing(head: FirstRecords) -> Iterator[Guess]:
    """The guesses for records with images: conversations with a place for each image, or questions with one image each."""
    names = fields_of_images(head)
    for plain in SHAPES.values():
        if plain.gives is not Conversation:
            continue
        shape = with_images(plain, names)
        for guess in (*_guesses(shape, head), *_as_pairs(shape, head), *_by_own_names(shape, head)):
            if guess.pictures:
                left = tuple(n for n in guess.left if n not in (names or FIELDS))
                yield replace(guess, images=names, left=left)


def _as_pairs(shape: Shape, head: FirstRecords) -> Iterator[Guess]:
    """Questions and answers as instruction and output, with a place for the image before a question that names none."""
    pair = _fields(SHAPES["prompt_response"], head)
    if "instruction" not in shape.fields or not pair.keys() >= {"prompt", "response"}:
        return
    for asked in (pair["prompt"], f"{PLACEHOLDER}\n{{{pair['prompt']}}}"):
        fields = {"instruction": asked, "output": pair["response"]}
        yield read_by(shape, fields, {}, head)


def _by_own_names(shape: Shape, head: FirstRecords) -> Iterator[Guess]:
    """A shape whose keys are all its fields' names: Qwen-VL's `input` and `output`."""
    if shape.has_images == "inside":
        fields = {key: key for key in (*shape.fields, *shape.optional)}
        guess = _tried(shape, fields, {}, head.records, head)
        yield replace(guess, fields={})


def nearest(tried: Sequence[Guess]) -> list[Guess]:
    """The best guess of each of the three shapes that lack the fewest keys."""
    best = {guess.shape.name: guess for guess in reversed(tried)}
    found = [best[name] for name in SHAPES if name in best]
    return sorted(found, key=lambda guess: (len(guess.missing), -guess.read))[:3]


def names_of(shape: Shape, key: str) -> tuple[str, ...]:
    """The names that the field of a key has in public data."""
    known = {f.name: f.metadata.get("also called", ()) for f in dataclasses.fields(SourceSpec)}
    return (key, *shape.also_called.get(key, ()), *known.get(key, ()))


def _rank(guess: Guess) -> tuple[Any, ...]:
    sees = guess.is_right and guess.images is not None
    return (
        sees,
        min(guess.read / max(1, guess.of), SERVES),
        -len(guess.missing),
        -len(guess.left),
        bool(guess.shape.structured),
        -len(guess.options),
        sum(name == key for key, name in guess.fields.items()),
        sees and bool(guess.shape.has_images),
    )


def _guesses(shape: Shape, head: FirstRecords) -> Iterator[Guess]:
    fields = _fields(shape, head)
    if missing := tuple(key for key in shape.fields if key not in fields):
        yield Guess(
            shape=shape, fields=fields, missing=missing, of=len(head.records) + head.bad.total()
        )
        return
    records = list(_prepared(shape, fields, head))
    for options in ({}, *shape.guess(records, fields)):
        yield _tried(shape, fields, options, records, head)


def read_by(
    shape: Shape, fields: Mapping[str, str], options: Mapping[str, Any], head: FirstRecords
) -> Guess:
    """Reads the records by a given shape."""
    return _tried(shape, fields, options, list(_prepared(shape, fields, head)), head)


def _tried(
    shape: Shape,
    fields: Mapping[str, str],
    options: Mapping[str, Any],
    records: list[Any],
    head: FirstRecords,
) -> Guess:
    answers = [shape.read(record, fields, **options) for record in records]
    reasons = Counter(answer for answer in answers if isinstance(answer, str)) + head.bad
    read = {root for name in fields.values() for root in parse(name).roots}
    return Guess(
        shape=shape,
        fields=fields,
        options=options,
        pictures=tuple(i for answer in answers for i in getattr(answer, "images", ())),
        read=sum(not isinstance(answer, str) for answer in answers),
        of=len(records) + head.bad.total(),
        reasons=dict(reasons.most_common()),
        left=tuple(name for name in head.fields if name not in read),
    )


def _fields(shape: Shape, head: FirstRecords) -> dict[str, str]:
    """The fields that the records have for the keys of a shape, at their top, else one level down."""

    def best(keys: Iterable[str], names: Mapping[str, int]) -> dict[str, str]:
        return {key: name for key in keys if (name := _best(names_of(shape, key), names))}

    present = Counter(_places(head))
    for depth in (0, 1):
        names = {name: n for name, n in present.items() if name.count(".") == depth}
        found = best(shape.fields, names)
        if len(found) == len(shape.fields):
            others = best(shape.optional, names)
            return found | {k: name for k, name in others.items() if name not in found.values()}
    return best(shape.fields, present)


def _places(head: FirstRecords) -> Iterator[str]:
    """The fields that each record has, and those of objects in them, which may be JSON in a cell of text."""
    are_texts = format_of(head.file).cells_are_texts
    for record in head.records:
        if isinstance(record, dict):
            for name, value in record.items():
                yield name
                if are_texts and isinstance(value, str) and value.lstrip().startswith("{"):
                    value = parsed(value)
                if isinstance(value, dict) and "." not in name:
                    yield from (f"{name}.{inner}" for inner in value if "." not in inner)


def _best(names: Sequence[str], present: Mapping[str, int]) -> str | None:
    """The field for a key: the one that most records have, of several the one whose name says it most plainly."""
    lasts = ((name, name.rpartition(".")[2].lower()) for name in present)
    ranks = {name: (present[name], -names.index(last)) for name, last in lasts if last in names}
    return max(ranks, key=ranks.__getitem__, default=None)


def _prepared(shape: Shape, fields: Mapping[str, str], head: FirstRecords) -> Iterator[Any]:
    """The records as the shape will be given them: with the values of paths, and lists and objects where cells can only be texts."""
    derive, entered, structured = derived(fields.values()), set[str](), list[str]()
    if format_of(head.file).cells_are_texts:
        entered.update(*(parse(name).entered for name in fields.values()))
        structured += (fields[key] for key in shape.structured if key in fields)
    for record in head.records:
        record = with_cells_parsed(record, entered)
        if derive and isinstance(record, dict):
            record = derive(record)
        yield with_cells_parsed(record, structured)


def with_cells_parsed(record: Any, names: Iterable[str]) -> Any:
    """The record with lists and objects in place of the JSON text in these of its fields."""
    if not isinstance(record, dict):
        return record
    return record | {name: parsed(record[name]) for name in names if name in record}


def parsed(cell: Any) -> Any:
    """The list or object in a cell of JSON text; another cell is returned as it is."""
    try:
        return orjson.loads(cell)
    except (orjson.JSONDecodeError, TypeError):
        return cell


def named(names: Iterable[str]) -> str:
    """The names, without escape codes."""
    return listed(list(map(printable, names)), MOST_SHOWN)


def described(head: FirstRecords, best: Sequence[Guess]) -> Iterator[str]:
    """Lines on a file of no known shape: what it holds, and what the nearest shapes lack."""
    if not head.records and not head.bad:
        yield f"{head.file.name} holds no record"
        return
    if inner := _list_inside(head):
        yield (
            f"{head.file.name} is one object, and its records are in the list {inner}: `jq -c '.{inner}[]'` writes them one on a line, "
            "as JSON Lines have them"
        )
        return
    if not head.fields:
        reasons = ", ".join(f"{n} {reason}" for reason, n in head.bad.most_common())
        yield f"{head.file.name} holds no record that is an object ({reasons or 'other values'}){_hint(head)}"
        return
    yield f"{head.file.name} is of no known shape; its records have the fields {named(head.fields)}"
    for guess in nearest(best):
        if guess.missing:
            wants = " and ".join(_spelled(guess.shape, key) for key in guess.missing)
            yield f"  {guess.shape.name}: there is no field {wants}"
        else:
            why = ", ".join(f"{n} {reason}" for reason, n in guess.reasons.items())
            yield f"  {guess.shape.name}: of {guess.of} records {guess.read} can be read ({why})"


def _spelled(shape: Shape, key: str) -> str:
    _, *others = names_of(shape, key)
    return f"{key} (or {', '.join(others)})" if others else key


def _list_inside(head: FirstRecords) -> str:
    """The field whose list holds the records, of a file that is one object; empty where there is none."""
    found = LIST_INSIDE.match(first_bytes(head.file)) if len(head.records) < 2 else None
    name = found[1].decode() if found else ""
    lists = (names_of(shape, key) for shape in SHAPES.values() for key in shape.structured)
    return "" if any(name in names for names in lists) else name


def _hint(head: FirstRecords) -> str:
    """What a file without records most likely is, and what to do."""
    looks = begins_as(head.file)
    if looks == "JSON Lines":
        return "; in JSON Lines a record stands on one line, as `jq -c .` writes it"
    if looks and looks not in PACKINGS:
        return f"; it begins as {looks} does: name it by what it is, or say so by source.format"
    if "invalid_utf8" in head.bad:
        return "; text is read as UTF-8, as `iconv -f LATIN1 -t UTF-8` writes it"
    return ""

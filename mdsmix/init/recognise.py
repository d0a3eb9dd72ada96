"""Records -> their shape, by the names of their fields and by trying. A shape is taken if it reads
the records.

No shape is named here. A shape's keys say which fields it wants, and the recipe's other words for a
key (`also called`) give the names of such fields. Options that a shape itself guesses are tried
too. So a new shape is recognised without a change here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mdsmix.init.data_files import FirstRecords
from mdsmix.init.foreign_forms import foreign_form
from mdsmix.kinds import KINDS, Kind
from mdsmix.messages import join_counts, join_names, make_printable
from mdsmix.recipe import SourceSpec
from mdsmix.record import Conversation
from mdsmix.shapes import SHAPES, Shape
from mdsmix.shapes.fields import make_deriver, parse_field
from mdsmix.shapes.image_parts import FIELDS, PLACEHOLDER, with_images
from mdsmix.sources.sniff import sniff_format

MOST_SHOWN = 12
"The most fields that a line names."
ENOUGH = 0.5
"The share of the first records that a shape must read to be taken."
SERVES = 0.9
"""Guesses that read this share or more rank alike: a recipe allows a tenth of bad records, and a
few records justify no option.
"""
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A shape, and the result of reading the first records of a file by it."""

    head: FirstRecords
    shape: Shape
    fields: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    read: int = 0
    "Records that the shape reads."
    reasons: Counter[str] = field(default_factory=Counter)
    "Reason code -> number of records that the shape does not read."
    missing: tuple[str, ...] = ()
    "Keys of the shape for which the records have no field."
    pictures: tuple[str | bytes, ...] = ()
    "The images of the records that the shape reads."
    marked: int = 0
    "Records that say of an answer that it is not trained."

    @property
    def is_right(self) -> bool:
        return self.read > 0 and self.read >= ENOUGH * len(self.head)

    @property
    def left(self) -> set[str]:
        """Fields of the records that the shape does not read."""
        read = {root for name in self.fields.values() for root in parse_field(name).roots}
        return {*self.head.fields} - read - {*self.shape.extras, *(self.shape.image_fields or ())}

    @property
    def kind(self) -> type[Kind]:
        """The kind of streams whose records have this shape."""
        return next(kind for kind in KINDS if kind.reads is self.shape.gives)

    def same(self) -> tuple[Any, ...]:
        """A key that is equal for files of one stream."""
        return (
            self.shape.name,
            repr(sorted(self.fields.items())),
            repr(self.options),
            self.shape.image_fields,
        )


def guesses(head: FirstRecords) -> list[Guess]:
    """All guesses at the records' shape, the best first: the one that reads the most records, then
    the most fields.
    """
    found, names = [g for shape in SHAPES.values() for g in _guesses(shape, head)], _pictured(head)
    found += _with_context(head)
    for shape in SHAPES.values():
        if shape.gives is Conversation:
            found += [guess for guess in _seeing(with_images(shape, names), head) if guess.pictures]
    return sorted(found, key=_rank, reverse=True)


def _rank(guess: Guess) -> tuple[Any, ...]:
    return (
        guess.is_right and guess.shape.image_fields is not None,
        min(guess.read / max(1, len(guess.head)), SERVES),
        -len(guess.missing),
        -len(guess.left),
        bool(guess.shape.structured),
        -len(guess.options),
        sum(name == key for key, name in guess.fields.items()),
    )


def _guesses(shape: Shape, head: FirstRecords) -> Iterator[Guess]:
    fields = _fields(shape, head)
    if missing := tuple(key for key in shape.fields if key not in fields):
        yield Guess(head=head, shape=shape, fields=fields, missing=missing)
        return
    for options in ({}, *shape.guess(_prepared(shape, fields, head), fields)):
        yield read_by(shape, fields, options, head)


CONTEXTS = ("context", "passage", "document", "background")
"Names of the field with the text that a question is about, as in Dolly and SQuAD."


def _with_context(head: FirstRecords) -> Iterator[Guess]:
    """Yield a guess at questions, answers and the text that they are about, as alpaca's input."""
    pair = _fields(SHAPES["prompt_response"], head)
    names = [name for name in head.fields if name.lower() in CONTEXTS]
    others = [name for name in names if name not in pair.values()]
    if others and pair.keys() >= {"prompt", "response"}:
        fields = {"instruction": pair["prompt"], "input": others[0], "output": pair["response"]}
        yield read_by(SHAPES["alpaca"], fields, {}, head)


def mark_of(guess: Guess) -> str | None:
    """Return the field that marks bad answers in a file of questions and answers; None if absent.

    Unpaired preferences (KTO) have a boolean for each answer. To train those that are false is
    to train what people did not want.
    """
    if guess.kind.word != "finetuning":
        return None
    for name in sorted(guess.left & {"label", "labels", "chosen", "is_good", "desirable"}):
        values = [record.get(name) for record in guess.head.objects]
        if False in values and all(type(value) is bool for value in values):
            return name
    return None


def _seeing(shape: Shape, head: FirstRecords) -> Iterator[Guess]:
    """The guesses of a shape with images: conversations with a place for each image, or questions
    with one image each.
    """
    yield from _guesses(shape, head)
    pair = _fields(SHAPES["prompt_response"], head)
    if "instruction" in shape.fields and pair.keys() >= {"prompt", "response"}:
        for asked in (pair["prompt"], f"{PLACEHOLDER}\n{{{pair['prompt']}}}"):
            yield read_by(shape, {"instruction": asked, "output": pair["response"]}, {}, head)
    if shape.has_images == "inside":  # Qwen-VL's fields have the names of their keys
        yield replace(read_by(shape, shape.own_fields, {}, head), fields={})


def read_by(
    shape: Shape, fields: Mapping[str, str], options: Mapping[str, Any], head: FirstRecords
) -> Guess:
    """The guess of a given shape, by reading the records."""
    answers = [shape.read(r, fields, **options) for r in _prepared(shape, fields, head)]
    reasons = head.bad + Counter(answer for answer in answers if isinstance(answer, str))
    return Guess(
        head=head,
        shape=shape,
        fields=fields,
        options=options,
        read=len(head) - reasons.total(),
        reasons=reasons,
        pictures=tuple(i for answer in answers for i in getattr(answer, "images", ())),
        marked=sum(getattr(answer, "trained", None) is not None for answer in answers),
    )


def _prepared(shape: Shape, fields: Mapping[str, str], head: FirstRecords) -> Sequence[Any]:
    """The records as the shape gets them: with the values of paths such as `meta.text`, and with
    JSON in texts parsed.
    """
    structured = [fields[key] for key in shape.structured if key in fields]
    entered = [root for name in fields.values() for root in parse_field(name).entered]
    named = [*structured, *entered, *shape.extras]
    records, derive = head.parsed(named), make_deriver(fields.values())
    return [*map(derive, records)] if derive else records


def _fields(shape: Shape, head: FirstRecords) -> dict[str, str]:
    """Key of a shape -> the records' field for it: at the top of records, or one level down if more
    keys have fields there.
    """
    present = Counter(_places(head))
    at_top = {name: n for name, n in present.items() if "." not in name}
    found = [_named_as(shape, names) for names in (at_top, present - Counter(at_top))]
    return max(found, key=lambda fields: len(fields.keys() & set(shape.fields)))


def _named_as(shape: Shape, present: Mapping[str, int]) -> dict[str, str]:
    """Key of a shape -> its field. Of several fields the one that most records have wins, then the
    one with the plainest name.
    """
    found = dict[str, str]()
    for key in shape.own_fields:
        names = names_of(shape, key)
        fits = [p for name in names for p in present if p.rpartition(".")[2].lower() == name]
        best = max(fits, key=present.__getitem__, default="")
        if best and best not in found.values():
            found[key] = best
    return found


def _places(head: FirstRecords) -> Iterator[str]:
    """The paths of all fields of all records, and of fields one level down: `meta`, `meta.text`."""
    for record in head.parsed(head.fields):
        for name, value in record.items() if isinstance(record, dict) else ():
            yield name
            if isinstance(value, dict) and "." not in name:
                yield from (f"{name}.{inner}" for inner in value if "." not in inner)


def names_of(shape: Shape, key: str) -> tuple[str, ...]:
    """The names that fields for this key have in public data."""
    known = {f.name: f.metadata.get("also called", ()) for f in dataclasses.fields(SourceSpec)}
    return (key, *shape.also_called.get(key, ()), *known.get(key, ()))


def _pictured(head: FirstRecords) -> list[str]:
    """The fields at the top of records that hold images; none if they have the usual names, or if
    no field holds images.
    """
    held = [n for n in head.fields if any(_is_image(record.get(n)) for record in head.objects)]
    return [] if set(held) & set(FIELDS) else held


def _is_image(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_image, value))
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"} and any(value.values())
    if isinstance(value, bytes):
        return value.startswith(MAGIC) or value[4:11] == b"ftypavi"
    is_text = isinstance(value, str)
    return is_text and (value[:11].lower() == "data:image/" or value.lower().endswith(SUFFIXES))


def named(names: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> str:
    """The names as a list in a sentence, without escape codes."""
    return join_names(list(map(make_printable, names)), MOST_SHOWN)


def described(head: FirstRecords, tried: Sequence[Guess]) -> Iterator[str]:
    """Lines on a file of no known shape: its fields, and the reasons why the nearest shapes do not
    fit.
    """
    if not head.fields:
        held = join_counts(head.bad) or ("other values" if head.records else "nothing")
        looks = sniff_format(head.file)
        hint = f"; it begins as {looks} does" if looks else ""
        if looks == "jsonl":
            hint += ", where a record stands on one line, as `jq -c .` writes it"
        yield f"{head.file.name} holds no record that is an object ({held}){hint}"
        return
    if form := foreign_form(head):
        yield f"{head.file.name} has the form of {form.name}, which no shape reads; {form.way}"
        return
    yield f"{head.file.name} is of no known shape; its records have the fields {named(head.fields)}"
    for guess in nearest(tried):
        lacks = " and no ".join("/".join(names_of(guess.shape, key)) for key in guess.missing)
        reads = f"reads {guess.read} of {len(head)} records ({join_counts(guess.reasons)})"
        yield f"  {guess.shape.name}: {f'there is no field {lacks}' if lacks else reads}"


def nearest(tried: Sequence[Guess]) -> list[Guess]:
    """The best guesses of the three shapes that lack the fewest keys, one of each shape."""
    best = {guess.shape.name: guess for guess in reversed(tried)}
    found = [best[name] for name in SHAPES if name in best]
    return sorted(found, key=lambda guess: (len(guess.missing), -guess.read))[:3]

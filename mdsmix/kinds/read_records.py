"""Raw records -> samples: the shape reads each, and the kind makes samples of those that could be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Detail, Encoded, Rejected, encoded
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.kinds.encodings import fields_read, fields_rivalling, kind_of, shape_of
from mdsmix.kinds.membership import Fingerprints, Holdout, RecordSample
from mdsmix.ragged import Ragged
from mdsmix.reasons import FILTERED
from mdsmix.record import NoRecord, RichConversation
from mdsmix.shapes import Fields, Shape
from mdsmix.shapes.condition import Condition, parse_where
from mdsmix.shapes.conversation_rules import holds_null
from mdsmix.shapes.fields import derived, value_at
from mdsmix.shapes.image_parts import NOTHING
from mdsmix.shards.manifest import Encoding
from mdsmix.storage import Location

if TYPE_CHECKING:
    from mdsmix.images.reader import ImageReader

MOST_FIELDS = 64
"Fields that are counted by name in a work unit; a record may have any names, and the rest are counted as `...`."
OTHERS = "..."


class Oddities:
    """What the records' writer most likely meant otherwise, counted over the records of a work unit in their order."""

    def __init__(self, read: Iterable[str] = (), one_of: Sequence[str] = ()) -> None:
        """`one_of`: of these fields the first is read that is not empty."""
        self._read, self._one_of = frozenset(read), one_of
        self.unread: dict[str, int] = {}
        'Field -> records in which it is there, not read, and not empty (null, "", [] or {}).'
        self.unseen: dict[str, int] = {}
        "Field of a columnar file -> records that have it, where nothing tells whether it is empty."
        self.placeholders: dict[str, int] = {}
        "Placeholder -> records whose texts hold it, which train it as text."
        self.nulls: dict[str, int] = {}
        "Key of the source -> records with null entries inside that field."

    @property
    def counts(self) -> dict[str, Any]:
        """By the names that a manifest's `Records` have for them."""
        names = ("unread", "unseen", "placeholders", "nulls")
        return {name: getattr(self, name) for name in names}

    def look_at_fields(self, records: Sequence[Any]) -> None:
        """Raw records, bad ones too."""
        read, unread = self._read, self.unread
        for record in records:
            if type(record) is not dict:
                continue
            if not read.issuperset(record):
                for name, value in record.items():
                    # 0 and False are not empty: they may be a label.
                    if name not in read and (value or isinstance(value, (int, float))):
                        _count(unread, name)
            if self._one_of:
                for name in [n for n in self._one_of if record.get(n) not in NOTHING][1:]:
                    _count(unread, name)

    def look_at_columns(self, filled: Mapping[str, int], unseen: Mapping[str, int]) -> None:
        """What a format says of fields that it passed over; of those `unseen` nothing tells whether they are empty."""
        for into, said in ((self.unread, filled), (self.unseen, unseen)):
            for name, count in said.items():
                _count(into, name, count)

    def look_at_samples(self, made: Encoded) -> None:
        """What the kind says of the records that it was given; a document may well be about placeholders."""
        self.look_at_columns(made.unread, {})
        for placeholder, count in made.placeholders.items():
            _count(self.placeholders, placeholder, count)


def _count(into: dict[str, int], name: str, count: int = 1) -> None:
    if count:
        known = name if name in into or len(into) < MOST_FIELDS else OTHERS
        into[known] = into.get(known, 0) + count


@dataclass(slots=True)
class NoSamples:
    """In place of a kind, for those who read records, and their images, only to know them again."""

    pictures: ImageReader | None = None

    def encode(self, records: list[Any], folders: Sequence[Location] = ()) -> Encoded:
        if self.pictures:
            self.pictures.read(records, folders)
        return encoded({}, [Ragged.of([], np.uint8)], (), 0)


@dataclass(frozen=True, slots=True)
class Reading:
    """A kind behind a shape."""

    shape: Shape
    fields: Fields
    kind: Any
    "An opened Kind, or NoSamples."
    options: Mapping[str, Any] = field(default_factory=dict)
    "Of the shape, those that are not at their defaults."
    oddities: Oddities = field(default_factory=Oddities)
    sample: RecordSample | None = None
    holdout: Holdout | None = None
    where: Condition | None = None
    "Records that do not match are left out before the shape sees them."
    id: str | None = None
    "The field by which a bad record is named."
    fingerprints: Fingerprints | None = None
    "Told of all records that it reads, and knows which are to be dropped."

    def encode(
        self, records: Sequence[Any], first: int = 0, folders: Sequence[Location] = ()
    ) -> Encoded:
        """The samples of the records; `rejected` names positions among them. `first`: how many records of the window stand
        before them; `folders`: of the file of each, for those whose images lie beside it."""
        self.oddities.look_at_fields(records)
        found = self._read(records)
        if self.sample:
            found = self.sample.of(records, found)
        types = set(map(type, found))
        if RichConversation in types and "nulls" not in self.options:
            self._look_at_nulls(records, found)
        unread = {} if types.isdisjoint((str, NoRecord)) else self._unread(found)
        if self.holdout:
            unread |= self.holdout.refused(found)
        dropped = self.fingerprints.dropped(first, len(found)) if self.fingerprints else []
        rejected = [*unread.values(), *dropped]
        made = self._encode(found, {each.position for each in rejected}, folders)
        if self.fingerprints:  # a text that was tokenized is hashed in a third of the time
            self.fingerprints.add(first, found, unread)
        return self._named(replace(made, rejected=rejected + made.rejected), records)

    @property
    def pictures(self) -> ImageReader | None:
        """What reads the images of its records; None where they have none."""
        found: ImageReader | None = self.kind.pictures
        return found

    def _read(self, records: Sequence[Any]) -> list[Any]:
        """What the shape makes of each; the fields of a recipe that are plain names and no more cost nothing here."""
        read, fields = partial(self.shape.read, **self.options), self.fields
        where, derive = self.where, derived(fields.values())
        if where is None and derive is None:
            return [read(record, fields) for record in records]
        found = []
        for record in records:
            why = where and where.refused(record)
            if not why and derive and type(record) is dict:
                record = derive(record)
                why = record if isinstance(record, str) else None
            found.append(why or read(record, fields))
        return found

    def _unread(self, found: Sequence[Any]) -> dict[int, Rejected]:
        """By their positions, the records that the shape does not read, or that are not in the sample."""
        reasons = {i: why for i, why in enumerate(found) if isinstance(why, str)}
        details = {i: why.detail for i, why in reasons.items() if isinstance(why, NoRecord)}
        return {
            i: Rejected(i, str(why), why in FILTERED, details.get(i)) for i, why in reasons.items()
        }

    def _look_at_nulls(self, records: Sequence[Any], found: Sequence[Any]) -> None:
        keys = [key for key in self.shape.structured if key in self.fields]
        for record, read in zip(records, found, strict=True):
            for key in keys if type(read) is RichConversation else ():
                if holds_null(value_at(self.fields[key], record)):
                    _count(self.oddities.nulls, key)

    def _encode(self, found: list[Any], out: set[int], folders: Sequence[Location]) -> Encoded:
        """The samples of the records that are not `out`; positions are those among all."""
        good = [i for i in range(len(found)) if i not in out]
        records = [found[i] for i in good] if out else found
        beside = ([folders[i] for i in good],) if folders else ()
        made: Encoded = self.kind.encode(records, *beside)
        self.oddities.look_at_samples(made)
        if not out:  # nearly every batch
            return made
        rejected = [replace(each, position=good[each.position]) for each in made.rejected]
        positions = np.array(good, np.int64)[made.positions]
        return replace(made, rejected=rejected, positions=positions)

    def _named(self, made: Encoded, records: Sequence[Any]) -> Encoded:
        """With the names of rows, and of bad records."""
        rejected = [
            each if each.filtered else replace(each, detail=self._detail(each, records))
            for each in made.rejected
        ]
        ids = [self._name(records[at]) for at in made.positions.tolist()] if self.id else ()
        return replace(made, rejected=rejected, ids=ids)

    def _name(self, record: Any) -> str | int | None:
        name = value_at(self.id, record) if self.id else None
        return name if type(name) in (str, int) else None

    def _detail(self, bad: Rejected, records: Sequence[Any]) -> Detail | None:
        name = self._name(records[bad.position])
        return {**({} if name is None else {"id": name}), **(bad.detail or {})} or None


def open_reading(
    encoding: Encoding,
    tokenizer: Tokenizer,
    backend: Backend,
    fingerprints: Fingerprints | None = None,
    root: Location | None = None,
) -> Reading:
    """What turns the raw records of a stream into its samples. `root`: where the paths of images begin."""
    kind = kind_of(encoding).open(tokenizer, backend)
    if kind.pictures:
        kind.pictures.root = root
    return _open(encoding, kind, fingerprints)


def open_looking(
    encoding: Encoding, fingerprints: Fingerprints, root: Location | None = None
) -> Reading:
    """What reads the records of a stream, and their images, to know them again, and encodes nothing."""
    from mdsmix.images.reader import ImageReader

    pictures = replace(ImageReader.of(encoding.images, root), judges=False)
    return _open(encoding, NoSamples(pictures), fingerprints)


def open_hashing(encoding: Encoding, fingerprints: Fingerprints) -> Reading:
    """What reads the records of a stream for their fingerprints alone."""
    return _open(encoding, NoSamples(), fingerprints)


def _open(encoding: Encoding, kind: Any, fingerprints: Fingerprints | None) -> Reading:
    share, sample = encoding.holdout, encoding.sample
    return Reading(
        shape=shape_of(encoding),
        fields=encoding.fields,
        kind=kind,
        options=encoding.shape_options,
        oddities=Oddities(fields_read(encoding), fields_rivalling(encoding)),
        sample=RecordSample(Fraction(sample)) if sample else None,
        holdout=Holdout(Fraction(share), encoding.held_out) if share else None,
        where=parse_where(encoding.where) if encoding.where else None,
        id=encoding.id,
        fingerprints=fingerprints,
    )

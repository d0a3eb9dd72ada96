"""Raw records -> samples: the shape reads each, and the kind makes samples of those that could be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Encoded, Rejected, encoded
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.kinds.encodings import fields_read, fields_rivalling, kind_of, shape_of
from mdsmix.kinds.membership import Fingerprints, Holdout, RecordSample
from mdsmix.ragged import Ragged
from mdsmix.reasons import FILTERED
from mdsmix.record import RichConversation
from mdsmix.shapes import Fields, Shape
from mdsmix.shapes.condition import Condition, parse_where
from mdsmix.shapes.conversation_rules import holds_null
from mdsmix.shapes.fields import derived, value_at
from mdsmix.shapes.image_parts import NOTHING
from mdsmix.shapes.shape import read_plain
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
        self.counts: dict[str, Any] = {}
        "By the names that a manifest's `Records` have for them."

    def add(self, oddity: str, found: Mapping[str, int]) -> None:
        """Field, placeholder or key -> records. `oddity`: a name of `counts`."""
        into = self.counts.setdefault(oddity, {})
        for name, count in found.items():
            if count:
                known = name if name in into or len(into) < MOST_FIELDS else OTHERS
                into[known] = into.get(known, 0) + count

    def look_at_fields(self, records: Sequence[Any]) -> None:
        """Raw records, bad ones too: fields that are there, not read, and not empty (null, "", [] or {}); 0 and False may be a label."""
        read, objects = self._read, [record for record in records if type(record) is dict]
        unread = (
            name
            for record in objects
            if not read.issuperset(record)
            for name, value in record.items()
            if name not in read and (value or isinstance(value, (int, float)))
        )
        self.add("unread", Counter(unread))
        for record in objects if self._one_of else ():
            filled = [name for name in self._one_of if record.get(name) not in NOTHING]
            self.add("unread", dict.fromkeys(filled[1:], 1))


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
        if self.shape.fields:  # else it is given all of a record, and nobody knows what it reads
            self.oddities.look_at_fields(records)
        found = self._read(records)
        if self.sample:
            found = self.sample.of(records, found)
        self._look_at_nulls(records, found)
        unread = {
            i: Rejected(i, str(why), why in FILTERED, getattr(why, "detail", None) or None)
            for i, why in enumerate(found)
            if isinstance(why, str)
        }
        if self.holdout:
            unread |= self.holdout.refused(found)
        dropped = self.fingerprints.dropped(first, len(found)) if self.fingerprints else []
        rejected = [*unread.values(), *dropped]
        made = self._encode(found, {each.position for each in rejected}, folders)
        if self.fingerprints:  # a text that was tokenized is hashed in a third of the time
            self.fingerprints.add(first, found, unread)
        made = replace(made, rejected=rejected + made.rejected)
        return self._named(made, records) if self.id else made

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
            found = None if self.options else read_plain(self.shape, records, fields)
            return found or [read(record, fields) for record in records]
        found = []
        for record in records:
            why = where and where.refused(record)
            if not why and derive and type(record) is dict:
                record = derive(record)
                why = record if isinstance(record, str) else None
            found.append(why or read(record, fields))
        return found

    def _look_at_nulls(self, records: Sequence[Any], found: Sequence[Any]) -> None:
        """Null entries inside messages and tools, which are rendered unless an option says otherwise."""
        keys = [key for key in self.shape.structured if key in self.fields]
        if keys and "nulls" not in self.options:
            each = zip(records, found, strict=True)
            rich = [record for record, read in each if type(read) is RichConversation]
            for key in keys:
                count = sum(holds_null(value_at(self.fields[key], record)) for record in rich)
                self.oddities.add("nulls", {key: count})

    def _encode(self, found: list[Any], out: set[int], folders: Sequence[Location]) -> Encoded:
        """The samples of the records that are not `out`; positions are those among all."""
        good = [i for i in range(len(found)) if i not in out]
        records = [found[i] for i in good] if out else found
        beside = ([folders[i] for i in good],) if folders else ()
        made: Encoded = self.kind.encode(records, *beside)
        self.oddities.add("unread", made.unread)
        self.oddities.add("placeholders", made.placeholders)
        if not out:  # nearly every batch
            return made
        rejected = [replace(each, position=good[each.position]) for each in made.rejected]
        positions = np.array(good, np.int64)[made.positions]
        return replace(made, rejected=rejected, positions=positions)

    def _named(self, made: Encoded, records: Sequence[Any]) -> Encoded:
        """With the names of rows, and of bad records."""

        def name(at: int) -> str | int | None:
            found = value_at(self.id, records[at]) if self.id else None
            return found if type(found) in (str, int) else None

        rejected = [
            each
            if each.filtered or (known := name(each.position)) is None
            else replace(each, detail={"id": known, **(each.detail or {})})
            for each in made.rejected
        ]
        return replace(made, rejected=rejected, ids=[*map(name, made.positions.tolist())])


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
    encoding: Encoding,
    fingerprints: Fingerprints,
    root: Location | None = None,
    with_images: bool = False,
) -> Reading:
    """What reads the records of a stream, and their images, to know them again, and encodes nothing."""
    pictures = None
    if with_images:
        from mdsmix.images.reader import ImageReader

        pictures = ImageReader(encoding.images, root, judges=False)
    return _open(encoding, NoSamples(pictures), fingerprints)


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

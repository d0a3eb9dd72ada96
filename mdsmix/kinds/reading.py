"""Raw records -> samples: the shape reads each, and the kind's encoder makes samples of those that could be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Detail, Encoded, Encoder, Rejected
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.fingerprints import Fingerprints, NoSamples
from mdsmix.kinds.membership import Holdout, RecordSample
from mdsmix.kinds.oddities import Oddities
from mdsmix.kinds.registry import fields_read, fields_rivalling, kind_of, shape_of
from mdsmix.record import Document, NoRecord, RichConversation
from mdsmix.shapes import Fields, Shape
from mdsmix.shapes.fields import derived, value_at
from mdsmix.shapes.where import LEFT_OUT, Where, parse_where
from mdsmix.shards.counts import NOT_SAMPLED
from mdsmix.shards.manifest import Encoding
from mdsmix.storage import Location

if TYPE_CHECKING:
    from mdsmix.images.reader import ImageReader

FILTERED = frozenset((*LEFT_OUT, NOT_SAMPLED))
"Reasons in place of a record that is good, or was not looked at."


@dataclass(frozen=True, slots=True)
class Reading:
    """An encoder behind a shape."""

    shape: Shape
    fields: Fields
    encoder: Encoder
    options: Mapping[str, Any] = field(default_factory=dict)
    "Of the shape, those that are not at their defaults."
    oddities: Oddities = field(default_factory=Oddities)
    sample: RecordSample | None = None
    holdout: Holdout | None = None
    where: Where | None = None
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
        rejected = list[Rejected]()
        if self.holdout or not types.isdisjoint((str, NoRecord)):
            rejected = [
                Rejected(
                    i, str(why), why in FILTERED, why.detail if isinstance(why, NoRecord) else None
                )
                for i, why in enumerate(found)
                if isinstance(why, str)
            ]
            rejected += self._left_out(found)
        if self.fingerprints:
            rejected += [*self.fingerprints.look(first, found, rejected)]
        if not rejected:  # nearly every batch
            return self._explained(self._encode(found, folders), records)
        out = {each.position for each in rejected}
        good = [i for i in range(len(found)) if i not in out]
        beside = [folders[i] for i in good] if folders else folders
        encoded = self._encode([found[i] for i in good], beside)
        rejected += [replace(each, position=good[each.position]) for each in encoded.rejected]
        return self._explained(replace(encoded, rejected=rejected), records)

    @property
    def pictures(self) -> ImageReader | None:
        """What reads the images of its records; None where they have none."""
        return getattr(self.encoder, "pictures", None)

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

    def _explained(self, encoded: Encoded, records: Sequence[Any]) -> Encoded:
        """With the names of bad records."""
        rejected = [
            each if each.filtered else replace(each, detail=self._detail(each, records))
            for each in encoded.rejected
        ]
        if self.id:
            encoded = replace(encoded, ids=self._ids(encoded, records))
        return replace(encoded, rejected=rejected) if rejected else encoded

    def _ids(self, encoded: Encoded, records: Sequence[Any]) -> list[str | int | None]:
        """The name of each row's record."""
        out = {each.position for each in encoded.rejected}
        names = [self._name(record) for i, record in enumerate(records) if i not in out]
        if encoded.rows_of is None:
            return names
        return [name for name, n in zip(names, encoded.rows_of, strict=True) for _ in range(n)]

    def _name(self, record: Any) -> str | int | None:
        name = value_at(self.id, record) if self.id else None
        return name if type(name) in (str, int) else None

    def _detail(self, bad: Rejected, records: Sequence[Any]) -> Detail | None:
        name = self._name(records[bad.position])
        return {**({} if name is None else {"id": name}), **(bad.detail or {})} or None

    def _left_out(self, found: list[Any]) -> Iterator[Rejected]:
        """The records that are on the other side of the holdout."""
        if self.holdout:
            for i, record in enumerate(found):
                if not isinstance(record, str) and (why := self.holdout.refused(record)):
                    yield Rejected(i, why, True)

    def _look_at_nulls(self, records: Sequence[Any], found: Sequence[Any]) -> None:
        for record, read in zip(records, found, strict=True):
            for key in self.shape.structured if type(read) is RichConversation else ():
                if key in self.fields:
                    self.oddities.look_at_nulls(key, value_at(self.fields[key], record))

    def _encode(self, found: list[Any], folders: Sequence[Location]) -> Encoded:
        if self.shape.gives is not Document:
            self.oddities.look_at_texts(found)
        encoder: Any = self.encoder
        encoded: Encoded = encoder.encode(found, folders) if folders else encoder.encode(found)
        self.oddities.look_at_columns(encoded.unread, {})
        return encoded


def open_reading(
    encoding: Encoding,
    tokenizer: Tokenizer,
    backend: Backend,
    fingerprints: Fingerprints | None = None,
    root: Location | None = None,
) -> Reading:
    """What turns the raw records of a stream into its samples. `root`: where the paths of images begin."""
    encoder = kind_of(encoding).open_encoder(tokenizer, backend)
    reading = _open(encoding, encoder, fingerprints)
    if reading.pictures:
        reading.pictures.root = root
    return reading


def open_looking(
    encoding: Encoding, fingerprints: Fingerprints, root: Location | None = None
) -> Reading:
    """What reads the images of a stream's records to know them again, and encodes nothing."""
    from mdsmix.images.encoder import ImageHasher
    from mdsmix.images.reader import ImageReader

    return _open(
        encoding,
        ImageHasher(pictures=replace(ImageReader.of(encoding.images, root), judges=False)),
        fingerprints,
    )


def open_hashing(encoding: Encoding, fingerprints: Fingerprints) -> Reading:
    """What reads the records of a stream for their fingerprints alone."""
    return _open(encoding, NoSamples(), fingerprints)


def _open(encoding: Encoding, encoder: Encoder, fingerprints: Fingerprints | None) -> Reading:
    share, sample = encoding.holdout, encoding.sample
    return Reading(
        shape=shape_of(encoding),
        fields=encoding.fields,
        encoder=encoder,
        options=encoding.shape_options,
        oddities=Oddities(fields_read(encoding), fields_rivalling(encoding)),
        sample=RecordSample(Fraction(sample)) if sample else None,
        holdout=Holdout(Fraction(share), encoding.held_out) if share else None,
        where=parse_where(encoding.where) if encoding.where else None,
        id=encoding.id,
        fingerprints=fingerprints,
    )

"""Turns raw records into samples: the shape reads each record, and the kind encodes those that
could be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, filterfalse
from typing import TYPE_CHECKING, Any

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Encoded
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.membership import Membership, split_rejected
from mdsmix.kinds.resolved_stream import ResolvedStream
from mdsmix.record import NoRecord, RichConversation, detail_of
from mdsmix.shapes import Fields, Shape
from mdsmix.shapes.condition import Condition, parse_where
from mdsmix.shapes.conversation_rules import contains_null
from mdsmix.shapes.fields import find_value, make_deriver
from mdsmix.shapes.image_parts import NOTHING
from mdsmix.shards.manifest import Encoding
from mdsmix.storage import Location
from mdsmix.tokenizer.card import Tokenizer

if TYPE_CHECKING:
    from mdsmix.images.reader import ImageReader

MAX_NAMES = 64
"""How many fields are counted by name in a work unit. Further ones are counted together as `...`,
since records may have any number of names.
"""
FURTHER_NAMES = "..."


class Diagnostics:
    """Counts of likely mistakes in the records of a work unit (the part of a source that one task
    converts): fields that are not read, placeholders of media, null entries.
    """

    def __init__(self, fields_read: Iterable[str] = (), rival_fields: Sequence[str] = ()) -> None:
        """Start without counts.

        Args:
            fields_read: names of the fields that are read.
            rival_fields: fields for the same value, such as `images` and `image`. Of each record,
                only the first that is not empty is read.
        """
        self._fields_read = frozenset(fields_read)
        self._rival_fields = rival_fields
        self.counts: dict[str, Any] = {}
        """Diagnosis, the name of a field of the manifest's `Records`, such as `unread` -> field,
        placeholder or key -> number of records that have it.
        """

    def add(self, diagnosis: str, record_counts: Mapping[str, int]) -> None:
        """Add counts.

        Args:
            diagnosis: a key of `counts`.
            record_counts: field, placeholder or key -> records that have it.
        """
        totals = self.counts.setdefault(diagnosis, {})
        for name, count in record_counts.items():
            if count:
                is_counted_by_name = name in totals or len(totals) < MAX_NAMES
                key = name if is_counted_by_name else FURTHER_NAMES
                totals[key] = totals.get(key, 0) + count

    def count_unread_fields(self, records: Sequence[Any]) -> None:
        """Count the unread fields of raw records, bad records included."""
        objects: Iterable[Any] = (record for record in records if type(record) is dict)
        if not self._rival_fields:
            objects = filterfalse(self._fields_read.issuperset, objects)
        self.add("unread", Counter(chain.from_iterable(map(self._unread_fields, objects))))

    def _unread_fields(self, record: Mapping[str, Any]) -> list[str]:
        """Return the unread fields of a record that are not empty. Null, "", [] and {} count as
        empty; 0 and False do not, since they may be labels.
        """
        # The first of the rival fields that is not empty is read; the others are not.
        rivals = [name for name in self._rival_fields if record.get(name) not in NOTHING]
        unread = [
            name
            for name, value in record.items()
            if name not in self._fields_read and (value or isinstance(value, (int, float)))
        ]
        return [*rivals[1:], *unread]


@dataclass(frozen=True)
class RecordReader:
    """Turns the raw records of one work unit into samples: a shape, then a kind."""

    shape: Shape
    fields: Fields
    kind: Kind | None = None
    "The kind, opened with a tokenizer; None if records are only read, not encoded."
    options: Mapping[str, Any] = field(default_factory=dict)
    "Options of the shape that are not at their defaults."
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    membership: Membership = field(default_factory=Membership)
    where: Condition | None = None
    "Records that do not match are left out before the shape reads them."
    id: str | None = None
    "The field that contains a record's name, `source.id` in the recipe; None if not set."
    images: ImageReader | None = None
    "Reads the images of the records; None if they have none."

    def encode(
        self, records: Sequence[Any], first: int = 0, folders: Sequence[Location] = ()
    ) -> Encoded:
        """Return the samples of the records. `Encoded.rejected` and `Encoded.positions` count from
        the first of `records`.

        Args:
            records: decoded records of one window (a slice of a source file).
            first: how many records of the window come before these.
            folders: the folder of each record's file, where relative paths of images begin.
        """
        assert self.kind is not None, "it was opened to encode"
        positions, readable, rejected = split_rejected(self.read(records, first, folders))
        encoded = self.kind.encode(readable)
        self.diagnostics.add("unread", encoded.unread)
        self.diagnostics.add("placeholders", encoded.placeholders)
        for position, reason in encoded.rejected.items():
            rejected[int(positions[position])] = reason
        encoded = replace(encoded, rejected=rejected, positions=positions[encoded.positions])
        return self._add_ids(encoded, records) if self.id else encoded

    def read(
        self, records: Sequence[Any], first: int = 0, folders: Sequence[Location] = ()
    ) -> list[Any]:
        """Return a result for each record: an object of type `Shape.gives`, with its images. A str
        is a reason code: the record is bad or left out.

        Args:
            records: decoded records of one window (a slice of a source file).
            first: how many records of the window come before these.
            folders: the folder of each record's file, where relative paths of images begin.
        """
        if self.shape.fields:  # otherwise it is unknown which fields the shape reads
            self.diagnostics.count_unread_fields(records)
        results = self.membership.select(records, self._apply_shape(records), first)
        self._count_nulls(records, results)
        return self.images.read(results, folders) if self.images else results

    def _apply_shape(self, records: Sequence[Any]) -> list[Any]:
        """Return the shape's result for each record. A str is a reason code: the record is bad or
        left out. If the stream has no `where`, options, paths and templates, `read_plain` reads all
        records at once, which is faster.
        """
        where = self.where
        derive = make_deriver(self.fields.values())
        if not (where or derive or self.options):
            results = self.shape.read_plain(records, self.fields)
            if results is not None:
                return results

        def read_one(record: Any) -> Any:
            """Read one record: check `where`, add the values of paths, then read it by the shape.
            A str is a reason code.
            """
            if where:
                reason = where.refusal(record)
                if reason:
                    return reason
            if derive:
                record = derive(record)
                if isinstance(record, NoRecord):
                    return record
            return self.shape.read(record, self.fields, **self.options)

        return [read_one(record) for record in records]

    def _count_nulls(self, records: Sequence[Any], results: Sequence[Any]) -> None:
        """Count the records with null entries inside messages or tools, which templates print. A
        key of a message itself that is null counts only if the template prints it. Nothing is
        counted if the option `nulls` drops null entries.
        """
        if "nulls" in self.options:
            return
        for key in self.shape.structured:
            if key not in self.fields:
                continue
            count = 0
            for record, conversation in zip(records, results, strict=True):
                if type(conversation) is not RichConversation or conversation.images:
                    continue
                value = find_value(self.fields[key], record)
                if not contains_null(value):
                    continue
                if key == "tools" or self._may_print_null(value, conversation):
                    count += 1
            self.diagnostics.add("nulls", {key: count})

    def _may_print_null(self, value: Any, conversation: RichConversation) -> bool:
        """Check whether the template may print a null entry of these raw messages.

        Args:
            value: the raw messages, as the record has them.
            conversation: the conversation that the shape made of the record.
        """
        if self.kind is None or not isinstance(value, list):
            return True
        # A null deeper inside a message may always be printed. Collect the keys of messages that
        # are null themselves.
        null_keys = set[str]()
        for item in value:
            if not isinstance(item, dict):
                if contains_null(item):
                    return True
            elif any(map(contains_null, item.values())):
                return True
            else:
                null_keys.update(key for key, inner in item.items() if inner is None)
        null_keys.discard("content")
        # Check whether the shape keeps such a key, and the template prints it.
        for message in conversation.messages:
            for key, inner in message.items():
                is_null = inner is None and key in null_keys
                if is_null and self.kind.prints_null(conversation, message["role"], key):
                    return True
        return False

    def _add_ids(self, encoded: Encoded, records: Sequence[Any]) -> Encoded:
        """Return the samples with the name of each sample's record in `Encoded.ids`, and with the
        name of each rejected record as `id` in its detail.
        """
        names = [_as_name(find_value(self.id or "", record)) for record in records]
        rejected = dict[int, str]()
        for position, reason in encoded.rejected.items():
            name = names[position]
            if name is not None:
                reason = NoRecord(reason, id=name, **detail_of(reason))
            rejected[position] = reason
        ids = [names[position] for position in encoded.positions.tolist()]
        return replace(encoded, rejected=rejected, ids=ids)


def _as_name(value: Any) -> str | int | None:
    """Return a record's name if it is a string or a whole number, otherwise None. A whole number
    beyond 64 bits becomes a string, since the JSON writer cannot store it.
    """
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return str(value)
    return value if type(value) in (str, int) else None


def open_record_encoder(
    stream: ResolvedStream,
    tokenizer: Tokenizer,
    backend: Backend,
    root: Location | None = None,
    dropped: bytes = b"",
) -> RecordReader:
    """Return a reader that encodes the records of a stream.

    Args:
        stream: the stream.
        tokenizer: its tokenizer.
        backend: encodes texts by that tokenizer.
        root: the folder where paths of images begin; None: the folder of the record's file.
        dropped: a bit for each record of the window, 1 if it is dropped as a duplicate; eight a
            byte, the lowest bit first.
    """
    images = open_image_reader(stream.encoding, root)
    reader = open_record_reader(stream, dropped, images)
    return replace(reader, kind=stream.kind.open(tokenizer, backend))


def open_record_reader(
    stream: ResolvedStream, dropped: bytes, images: ImageReader | None
) -> RecordReader:
    """Return a reader without a kind: it reads the records of a stream, for their fingerprints and
    images, but cannot encode them.

    Args:
        stream: the stream.
        dropped: a bit for each record of the window, 1 if it is dropped as a duplicate; eight a
            byte, the lowest bit first.
        images: reads the images of the records; None if they have none.
    """
    encoding = stream.encoding
    return RecordReader(
        shape=stream.shape,
        fields=encoding.fields,
        options=encoding.shape_options,
        diagnostics=Diagnostics(stream.fields_read, stream.rival_fields),
        membership=Membership.of(encoding, dropped),
        where=parse_where(encoding.where) if encoding.where else None,
        id=encoding.id,
        images=images,
    )


def open_image_reader(
    encoding: Encoding, root: Location | None, judges: bool = True
) -> ImageReader | None:
    """Return the reader of a stream's images; None if its records have none. Raises RecipeError if
    Pillow is not installed.

    Args:
        encoding: the settings of the stream.
        root: the folder where paths of images begin; None: the folder of the record's file.
        judges: whether images are checked; False if they are only hashed.
    """
    if not encoding.images:
        return None
    from mdsmix.images.judge import require_pillow
    from mdsmix.images.reader import ImageReader

    require_pillow()
    return ImageReader(encoding.images, root, judges)

"""Raw records -> samples: the shape reads each record, and the kind makes samples of the readable
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, filterfalse
from typing import TYPE_CHECKING, Any

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Encoded
from mdsmix.kinds.encodings import fields_read, fields_rivalling, kind_of, shape_of
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.membership import Membership, told_apart
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

MOST_FIELDS = 64
"""How many fields are counted by name in a work unit. Records may have any number of names; further
ones are counted together as `...`.
"""
OTHERS = "..."


class Oddities:
    """Counts of likely mistakes in the records of a work unit: fields that are not read,
    placeholders of media, null entries.
    """

    def __init__(self, read: Iterable[str] = (), one_of: Sequence[str] = ()) -> None:
        """`read`: names of the fields that are read; `one_of`: rival fields, of which only the
        first that is not empty is read.
        """
        self._read, self._one_of = frozenset(read), one_of
        self.counts: dict[str, Any] = {}
        """Name of a field of the manifest's `Records`, such as `unread` -> field, placeholder or
        key -> records.
        """

    def add(self, oddity: str, found: Mapping[str, int]) -> None:
        """Adds counts. `oddity`: a key of `counts`; `found`: field, placeholder or key -> records
        that have it.
        """
        into = self.counts.setdefault(oddity, {})
        for name, count in found.items():
            if count:
                known = name if name in into or len(into) < MOST_FIELDS else OTHERS
                into[known] = into.get(known, 0) + count

    def look_at_fields(self, records: Sequence[Any]) -> None:
        """Counts the unread fields of raw records, bad records included."""
        objects = (record for record in records if type(record) is dict)
        odd = objects if self._one_of else filterfalse(self._read.issuperset, objects)
        self.add("unread", Counter(chain.from_iterable(map(self._unread, odd))))

    def _unread(self, record: Mapping[str, Any]) -> list[str]:
        """The unread fields of a record, without empty ones: null, "", [] and {} are empty; 0 and
        False may be labels, and are not.
        """
        rivals = [name for name in self._one_of if record.get(name) not in NOTHING]
        said = (name for name, of in record.items() if of or isinstance(of, (int, float)))
        return [*rivals[1:], *(name for name in said if name not in self._read)]


@dataclass(frozen=True)
class Reading:
    """Turns the raw records of one work unit into samples: a shape, then a kind."""

    shape: Shape
    fields: Fields
    kind: Kind | None = None
    "The opened kind; None where records are read only for their fingerprints and images."
    options: Mapping[str, Any] = field(default_factory=dict)
    "Options of the shape that are not at their defaults."
    oddities: Oddities = field(default_factory=Oddities)
    members: Membership = field(default_factory=Membership)
    where: Condition | None = None
    "Records that do not match are left out before the shape sees them."
    id: str | None = None
    "The field whose value names a record."
    pictures: ImageReader | None = None
    "Reads the images of the records; None where they have none."

    def encode(
        self, records: Sequence[Any], first: int = 0, folders: Sequence[Location] = ()
    ) -> Encoded:
        """The samples of the records; `Encoded.rejected` and `positions` count within `records`.

        Args:
            first: how many records of the window come before these.
            folders: the folder of each record's file, where relative paths of images begin.
        """
        assert self.kind is not None, "it was opened to encode"
        good, read, rejected = told_apart(self.read(records, first, folders))
        made = self.kind.encode(read)
        self.oddities.add("unread", made.unread)
        self.oddities.add("placeholders", made.placeholders)
        rejected |= {int(good[i]): why for i, why in made.rejected.items()}
        made = replace(made, rejected=rejected, positions=good[made.positions])
        return self._named(made, records) if self.id else made

    def read(
        self, records: Sequence[Any], first: int = 0, folders: Sequence[Location] = ()
    ) -> list[Any]:
        """An object of type `Shape.gives` for each record, with its images; the reason code of a
        record that is bad or left out.
        """
        if self.shape.fields:  # without them nobody knows what the shape reads
            self.oddities.look_at_fields(records)
        found = self.members.judge(records, self._shaped(records), first)
        self._look_at_nulls(records, found)
        return self.pictures.read(found, folders) if self.pictures else found

    def _shaped(self, records: Sequence[Any]) -> list[Any]:
        """The shape's result for each record, or a reason code. Without `where`, options and
        templates `read_plain` takes all at once.
        """
        where, derive = self.where, make_deriver(self.fields.values())
        if not (where or derive or self.options):
            found = self.shape.read_plain(records, self.fields)
            if found is not None:
                return found

        def read(record: Any) -> Any:
            if where and (why := where.refusal(record)):
                return why
            if derive and isinstance(found := derive(record), NoRecord):
                return found
            return self.shape.read(found if derive else record, self.fields, **self.options)

        return [read(record) for record in records]

    def _look_at_nulls(self, records: Sequence[Any], found: Sequence[Any]) -> None:
        """Count records with null entries inside messages and tools. Templates print these, unless
        the option `nulls` says otherwise. Null under a key of a message counts only if it is
        printed.
        """
        for key in self.shape.structured:
            if key in self.fields and "nulls" not in self.options:
                each = zip(records, found, strict=True)
                rich = (
                    (find_value(self.fields[key], record), conversation)
                    for record, conversation in each
                    if type(conversation) is RichConversation and not conversation.images
                )
                count = sum(
                    contains_null(value)
                    and (key == "tools" or self._prints_null(value, conversation))
                    for value, conversation in rich
                )
                self.oddities.add("nulls", {key: count})

    def _prints_null(self, value: Any, conversation: RichConversation) -> bool:
        """Return whether the template may print a null of these raw messages: one inside a value,
        or one under a key of a message that the shape keeps and the template prints.
        """
        if self.kind is None or not isinstance(value, list):
            return True
        nulls = set[str]()
        for item in value:
            if not isinstance(item, dict):
                if contains_null(item):
                    return True
            elif any(map(contains_null, item.values())):
                return True
            else:
                nulls.update(key for key, inner in item.items() if inner is None)
        nulls.discard("content")
        return any(
            key in nulls and self.kind.prints_null(conversation, message["role"], key)
            for message in conversation.messages
            for key, inner in message.items()
            if inner is None
        )

    def _named(self, made: Encoded, records: Sequence[Any]) -> Encoded:
        """The samples with the names of their records in `ids`, and with `id` in the detail of
        rejected records.
        """
        found = [find_value(self.id or "", record) for record in records]
        names: list[Any] = [*map(_name, found)]
        rejected = {
            at: why if names[at] is None else NoRecord(why, id=names[at], **detail_of(why))
            for at, why in made.rejected.items()
        }
        return replace(made, rejected=rejected, ids=[names[at] for at in made.positions.tolist()])


def _name(value: Any) -> str | int | None:
    """Return a record's name as JSON can keep it: a whole number beyond 64 bits is a text. None for
    what is no name.
    """
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return str(value)
    return value if type(value) in (str, int) else None


def open_reading(
    encoding: Encoding,
    tokenizer: Tokenizer,
    backend: Backend,
    root: Location | None = None,
    dropped: bytes = b"",
) -> Reading:
    """A Reading that encodes the records of a stream. `root`: the folder where paths of images
    begin; None: that of the record's file; `dropped`: the flags of duplicates in a window, eight a
    byte.
    """
    reading = open_looking(encoding, dropped, open_pictures(encoding, root))
    return replace(reading, kind=kind_of(encoding).open(tokenizer, backend))


def open_looking(encoding: Encoding, dropped: bytes, pictures: ImageReader | None) -> Reading:
    """A Reading without a kind: it reads the records of a stream for their fingerprints and images,
    and encodes nothing.
    """
    return Reading(
        shape=shape_of(encoding),
        fields=encoding.fields,
        options=encoding.shape_options,
        oddities=Oddities(fields_read(encoding), fields_rivalling(encoding)),
        members=Membership.of(encoding, dropped),
        where=parse_where(encoding.where) if encoding.where else None,
        id=encoding.id,
        pictures=pictures,
    )


def open_pictures(
    encoding: Encoding, root: Location | None, judges: bool = True
) -> ImageReader | None:
    """The reader of a stream's images; None where its records have none. RecipeError where Pillow
    is not installed. `judges`: False where images are only hashed.
    """
    if not encoding.images:
        return None
    from mdsmix.images.judge import require_pillow
    from mdsmix.images.reader import ImageReader

    require_pillow()
    return ImageReader(encoding.images, root, judges)

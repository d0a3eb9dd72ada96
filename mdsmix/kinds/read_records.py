"""Turns raw records into samples: the shape reads each record, and the kind encodes those that
could be read.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain, filterfalse
from typing import TYPE_CHECKING, Any, NamedTuple

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.printed_parts import AS_MARK, AS_ROLE, MASKED_ROLE
from mdsmix.frozen import frozen
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.membership import Membership, split_rejected
from mdsmix.kinds.resolved_stream import ResolvedStream
from mdsmix.record import (
    SYSTEM_ROLES,
    Conversation,
    NoRecord,
    PlainConversations,
    RichConversation,
    detail_of,
)
from mdsmix.shapes import Fields, Shape
from mdsmix.shapes.condition import Condition, parse_where
from mdsmix.shapes.fields import find_inner_fields, find_value, make_deriver, parse_field
from mdsmix.shapes.image_parts import NOTHING
from mdsmix.shapes.nested_values import contains_null, find_null_paths
from mdsmix.shapes.preference import Preference
from mdsmix.shapes.prompt import Prompt
from mdsmix.shapes.training_marks import may_be_marks
from mdsmix.shapes.unpaired_preference import UnpairedPreference
from mdsmix.shards.manifest import Encoding
from mdsmix.storage import Location
from mdsmix.tokenizer.card import Tokenizer

if TYPE_CHECKING:
    from mdsmix.images.reader import ImageReader

MAX_NAMES = 64
"""How many names (of fields, placeholders or keys) are counted one by one in a work unit. All
further names are counted together as `...`, since records may have any number of names.
"""
FURTHER_NAMES = "..."
"The name under which all further names are counted."


class Diagnostics:
    """Counts likely mistakes in the records of a work unit (the part of a source that one task
    converts): fields that are not read or not there, placeholders of media, null entries.
    """

    def __init__(
        self,
        fields_read: Iterable[str] = (),
        rival_fields: Sequence[str] = (),
        message_fields: Sequence[str] = (),
        most_names: int = MAX_NAMES,
    ) -> None:
        """Start without counts.

        Args:
            fields_read: names of the fields that are read.
            rival_fields: fields for the same value, such as `images` and `image`. In each record
                only the first of these fields that is not empty is read.
            message_fields: fields with the lists of messages that are trained. A field that is not
                read may be a list of marks for these messages.
            most_names: how many names are counted one by one in each diagnosis: of unread fields,
                for example. All further names are counted together as FURTHER_NAMES.
        """
        self._fields_read = frozenset(fields_read)
        self._rival_fields = rival_fields
        self._message_fields = message_fields
        self._inner_fields = find_inner_fields(self._fields_read)
        self._most_names = most_names
        self.counts: dict[str, Any] = {}
        """The counts so far, such as `{"unread": {"score": 12}}`: diagnosis -> name -> number of
        records.

        The diagnosis is a field of the manifest's `Records`. The records have a field, a
        placeholder or a key of this name.
        """

    def add(self, diagnosis: str, record_counts: Mapping[str, int]) -> None:
        """Add counts, such as `add("unread", {"score": 12})`.

        Args:
            diagnosis: a key of `counts`.
            record_counts: name -> number of records with a field, placeholder or key of this name.
        """
        totals = self.counts.setdefault(diagnosis, {})
        for name, count in record_counts.items():
            if count:
                is_counted_by_name = name in totals or len(totals) < self._most_names
                key = name if is_counted_by_name else FURTHER_NAMES
                totals[key] = totals.get(key, 0) + count

    def for_part(self) -> Diagnostics:
        """Return an object without counts for some of the records. It counts all names one by one:
        if its counts are added to this object, they are limited as if this object had counted.
        """
        return Diagnostics(
            self._fields_read, self._rival_fields, self._message_fields, most_names=sys.maxsize
        )

    def count_unread_fields(self, records: Sequence[Any]) -> None:
        """Count the fields of raw records that are not read. Bad records count too."""
        objects = records
        if {*map(type, records)} != {dict}:
            objects = [record for record in records if type(record) is dict]
        # Quickly skip the records all of whose fields are read. This is not possible with rival
        # fields: `_fields_read` has all of these, but only one of them is read. Nor is it possible
        # if only a part of a field's value is read.
        if not self._rival_fields and not self._inner_fields:
            # Usually no record has other fields. Looking at all names together takes 20 ns a
            # record, a quarter of the time of looking at each record.
            if set[str]().union(*objects) <= self._fields_read:
                return
            objects = [*filterfalse(self._fields_read.issuperset, objects)]
        self.add("unread", Counter(chain.from_iterable(map(self._unread_fields, objects))))

    def _unread_fields(self, record: Mapping[str, Any]) -> list[str]:
        """Return the names of the fields of a record that are neither read nor empty. Null, "", []
        and {} count as empty. 0 and False count as values, since they may be labels. A name ends in
        AS_MARK if the field may be a list of marks, and in AS_ROLE if it is NeMo's field of the
        role that is not trained, and names the role of the answers.
        """
        # Of the rival fields with a value only the first is read.
        rivals = [name for name in self._rival_fields if record.get(name) not in NOTHING]
        unread = [
            name
            for name, value in record.items()
            if name not in self._fields_read and (value or isinstance(value, (int, float)))
        ]
        if self._message_fields:
            unread = [f"{name}{self._find_mark(name, record)}" for name in unread]
        # Of `meta.body` only a part of the object under `meta` is read.
        for outer, read in self._inner_fields.items():
            inner_record = record.get(outer)
            if type(inner_record) is dict:
                for name, value in inner_record.items():
                    if name not in read and (value or isinstance(value, (int, float))):
                        unread.append(f"{outer}.{name}")
        return [*rivals[1:], *unread]

    def _find_mark(self, name: str, record: Mapping[str, Any]) -> str:
        """Return AS_MARK or AS_ROLE if a field of the record may be a mark of this form, otherwise
        an empty string.
        """
        value = record[name]
        if self._may_be_marks(value, record):
            return AS_MARK
        if name == MASKED_ROLE and isinstance(value, str):
            last = self._list_messages(record)[-1:]  # an answer
            if any(isinstance(message, dict) and value in message.values() for message in last):
                return AS_ROLE
        return ""

    def _list_messages(self, record: Mapping[str, Any]) -> list[Any]:
        """Return the messages of a record, from all its fields of messages."""
        lists = [find_value(name, record) for name in self._message_fields]
        return [*chain.from_iterable(items for items in lists if isinstance(items, list))]

    def _may_be_marks(self, value: Any, record: Mapping[str, Any]) -> bool:
        """Check whether the value of a field may be a list of marks for the record's messages."""
        # Most values are no such list, as their beginning shows. An empty list is never asked for.
        if isinstance(value, list):
            if value[0] not in (0, 1):
                return False
        elif not isinstance(value, str) or not value.startswith("["):
            return False
        return may_be_marks(value, self._list_messages(record))


class EncodedPart(NamedTuple):
    """Some records of a window (a slice of a source file), encoded apart from the others."""

    encoded: Encoded
    diagnoses: Mapping[str, Mapping[str, int]]
    "The likely mistakes in these records (`Diagnostics.counts`): diagnosis -> name -> records."
    fingerprints: bytes
    "16 bytes for each record, as in `Membership.fingerprints`."


@frozen
class RecordReader:
    """Turns the raw records of one work unit (the part of a source that one task converts) into
    samples, in two steps. The shape reads each raw record, for example as a Pair. The kind
    tokenizes what the shape returns.
    """

    shape: Shape
    fields: Fields
    kind: Kind | None = None
    "The kind, opened with a tokenizer; None if records are only read, not encoded."
    options: Mapping[str, Any] = field(default_factory=dict)
    "Options of the shape that are not at their defaults: key -> value."
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    "Counts likely mistakes in the records."
    membership: Membership = field(default_factory=Membership)
    "Decides which records are in the stream."
    where: Condition | None = None
    """The recipe's `where`. A record that does not meet this condition is left out before the shape
    reads it.
    """
    id: str | None = None
    "The field that contains a record's name, `source.id` in the recipe; None if it is not set."
    images: ImageReader | None = None
    "Reads the images of the records; None if the stream has no images."

    def encode_part(
        self, records: Sequence[Any], membership: Membership, folders: Sequence[Location] = ()
    ) -> EncodedPart:
        """Return the samples of some records of a window (a slice of a source file), and all that
        `add_part` needs. This object does not change, so another process can do this.

        Args:
            records: successive decoded records.
            membership: decides which of these records are in the stream (`Membership.for_part`).
            folders: the folder of each record's file, where relative paths of images begin.
        """
        reader = replace(self, diagnostics=self.diagnostics.for_part(), membership=membership)
        encoded = reader.encode(records, folders)
        return EncodedPart(
            encoded=encoded,
            diagnoses=reader.diagnostics.counts,
            fingerprints=membership.fingerprints(len(records)),
        )

    def add_part(self, encoded_part: EncodedPart, first: int) -> None:
        """Add the counts and fingerprints of some records of a window (a slice of a source file).
        Parts are added in the order of their records.

        Args:
            encoded_part: the result of `encode_part`.
            first: how many records of the window come before these.
        """
        for diagnosis, record_counts in encoded_part.diagnoses.items():
            self.diagnostics.add(diagnosis, record_counts)
        self.membership.add_fingerprints(first, encoded_part.fingerprints)

    def encode(self, records: Sequence[Any], folders: Sequence[Location] = ()) -> Encoded:
        """Return the samples of the records. In `Encoded.rejected` and `Encoded.positions` the
        first of `records` has the position 0.

        Args:
            records: some successive decoded records of one window (a slice of a source file), from
                the first that `membership` decides about.
            folders: the folder of each record's file, where relative paths of images begin.
        """
        assert self.kind is not None, "only a reader with a kind can encode"
        positions, readable, rejected = split_rejected(self.read(records, folders=folders))
        encoded = self.kind.encode(readable)
        self.diagnostics.add("unread", encoded.unread)
        self.diagnostics.add("placeholders", encoded.placeholders)
        # The kind counts only the readable records: turn its positions into positions in `records`.
        for position, reason in encoded.rejected.items():
            rejected[int(positions[position])] = reason
        encoded = replace(encoded, rejected=rejected, positions=positions[encoded.positions])
        return self._add_ids(encoded, records) if self.id else encoded

    def read(
        self, records: Sequence[Any], first: int = 0, folders: Sequence[Location] = ()
    ) -> Sequence[Any]:
        """Return a result for each record: an object of type `Shape.gives`, such as a Pair. A str
        is a reason code instead: the record is bad or left out.

        Args:
            records: some successive decoded records of one window (a slice of a source file).
            first: how many records of the window come before the first of `records`.
            folders: the folder of each record's file, where relative paths of images begin.
        """
        is_known_which_are_read = bool(self.shape.fields)  # not for a function of the user
        if is_known_which_are_read:
            self.diagnostics.count_unread_fields(records)
            self._count_false_texts(records)
        self._count_absent_fields(records)
        results = self.membership.select(records, self._apply_shape(records), first)
        self._count_nulls(records, results)
        self._count_other_systems(records, results)
        return self.images.read(results, folders) if self.images else results

    def _count_false_texts(self, records: Sequence[Any]) -> None:
        """Count the records with 0 or false in a field for text that the shape then leaves out
        (`Shape.skipped_if_false`): for them the field is not read.
        """
        for key in self.shape.skipped_if_false:
            if key not in self.fields:
                continue
            name = self.fields[key]
            values = _read_column(name, records)
            count = sum(isinstance(value, (int, float)) and not value for value in values)
            self.diagnostics.add("unread", {name: count})

    def _count_absent_fields(self, records: Sequence[Any]) -> None:
        """Count the records that lack a field: that of `id`, and each optional field that the
        recipe names (`system: sys`).
        """
        names = list[str]()
        # If the recipe names no field, the shape's own names are read.
        if self.fields != self.shape.own_fields:
            names = [name for key, name in self.fields.items() if key in self.shape.optional]
        if self.id:
            names.append(self.id)
        for name in names:
            field = parse_field(name)
            if field.is_template:
                continue  # a record without one of its fields is bad
            count = sum(not field.is_in(record) for record in records)
            self.diagnostics.add("absent", {name: count})

    def _apply_shape(self, records: Sequence[Any]) -> Sequence[Any]:
        """Read each raw record, and return a result for each: an object such as a Pair, or a str,
        which is the reason code of a record that is bad or that `where` leaves out.
        """
        where = self.where
        derive = make_deriver(self.fields.values())
        # The fast way, for a stream without a condition, paths and templates: read all records at
        # once.
        if not (where or derive):
            results = self.shape.read_plain(records, self.fields, **self.options)
            if results is not None:
                return results

        def read_one(record: Any) -> Any:
            """Return the result for one record: check `where`, add the values of paths and
            templates to the record, then read the record by the shape.
            """
            if where:
                reason = where.find_refusal(record)
                if reason:
                    return reason
            if derive:
                record = derive(record)
            return self.shape.read(record, self.fields, **self.options)

        return [read_one(record) for record in records]

    def _count_nulls(self, records: Sequence[Any], results: Sequence[Any]) -> None:
        """Count the records with null entries inside messages or tools, since templates may print
        such a null as `None`.

        A null in a message counts only if the template may print it. Nothing is counted if the
        option `nulls` drops null entries, or if all conversations are plain: these have no nulls.
        """
        if "nulls" in self.options or isinstance(results, PlainConversations):
            return
        for key in self.shape.structured:
            if key not in self.fields:
                continue
            count = 0
            for record, result in zip(records, results, strict=True):
                conversation = _find_conversation(result, key)
                # A plain conversation has no nulls. Conversations with images are not checked.
                if type(conversation) is not RichConversation or conversation.images:
                    continue
                value = find_value(self.fields[key], record)
                if not contains_null(value):
                    continue
                if key == "tools" or self._may_print_null(value, conversation):
                    count += 1
            self.diagnostics.add("nulls", {key: count})

    def _count_other_systems(self, records: Sequence[Any], results: Sequence[Any]) -> None:
        """Count the records whose field `system` is not read, since their messages begin with
        another system message, as in LLaMA-Factory.
        """
        if "system" not in self.fields:
            return
        name = self.fields["system"]
        values = _read_column(name, records)
        if not any(values):
            return
        count = 0
        for value, result in zip(values, results, strict=True):
            conversation = _find_conversation(result, "messages")
            if not value or type(value) is not str or not isinstance(conversation, Conversation):
                continue
            first = conversation.messages[0]
            content = first.get("content")
            # White space around the two does not count, so a blank field is no other message.
            is_other = type(content) is str and not content.strip().startswith(value.strip())
            if is_other and first["role"] in SYSTEM_ROLES:
                count += 1
        self.diagnostics.add("unread", {name: count})

    def _may_print_null(self, value: Any, conversation: RichConversation) -> bool:
        """Check whether the template may print a null entry of the raw messages of a record.

        Args:
            value: the raw messages, as the record has them; of a preference also one message.
            conversation: the conversation that the shape made of the record.
        """
        if isinstance(value, dict):
            value = [value]
        if self.kind is None or not isinstance(value, list):
            return True
        # A shape adds keys of its own with null: collect the keys that have null in the record.
        null_keys = set[str]()
        for item in value:
            if isinstance(item, dict):
                null_keys.update(key for key, inner in item.items() if inner is None)
            elif contains_null(item):
                return True
        null_keys.discard("content")  # a null content does not count (`contains_null`)
        # Check whether the shape has kept a null, and the template may print it.
        for message in conversation.messages:
            for path in set(find_null_paths(message)):
                is_own = len(path) > 1 or path[0] in null_keys
                if is_own and self.kind.prints_null(conversation, message["role"], path):
                    return True
        return False

    def _add_ids(self, encoded: Encoded, records: Sequence[Any]) -> Encoded:
        """Return the samples with the names of their records, which the field `id` contains.

        `Encoded.ids` gets the name of each sample's record. The detail of each rejected record's
        reason code gets the record's name as `id`.
        """
        names = [*map(_as_name, _read_column(self.id or "", records))]
        rejected = dict[int, str]()
        for position, reason in encoded.rejected.items():
            name = names[position]
            if name is not None:
                reason = NoRecord(reason, id=name, **detail_of(reason))
            rejected[position] = reason
        ids = [names[position] for position in encoded.positions.tolist()]
        return replace(encoded, rejected=rejected, ids=ids)


def _read_column(name: str, records: Sequence[Any]) -> list[Any]:
    """Return the value of a field in each record, None if a record lacks it. A plain name is read
    in 0.05 us a record, a path or a template in 0.4.
    """
    field = parse_field(name)
    if field.entered or field.is_template:
        return [find_value(name, record) for record in records]
    return [record.get(name) if type(record) is dict else None for record in records]


def _find_conversation(result: Any, key: str) -> Any:
    """Return the conversation whose messages are in a field of the record. This is what the shape
    made of the record, except that a preference has two conversations, one for each answer, and a
    prompt or an unpaired preference contains one.

    Args:
        result: what the shape made of the record.
        key: the key of `source:` that names the field.
    """
    if isinstance(result, Prompt):
        return result.prompt
    if isinstance(result, UnpairedPreference):
        return result.answer
    if not isinstance(result, Preference):
        return result
    return result.rejected if key == "rejected" else result.chosen


def _as_name(value: Any) -> str | int | None:
    """Return the value of the field `id` as a record's name: a string or a whole number, otherwise
    None.
    """
    fits_64_bits = type(value) is not int or -(1 << 63) <= value < 1 << 64
    if not fits_64_bits:
        return str(value)  # the JSON writer cannot store such a number
    return value if type(value) in (str, int) else None


def open_record_encoder(
    stream: ResolvedStream,
    tokenizer: Tokenizer,
    backend: Backend,
    root: Location | None = None,
    dropped: bytes = b"",
) -> RecordReader:
    """Return a reader that reads and encodes the records of a stream.

    Args:
        stream: the stream.
        tokenizer: its tokenizer.
        backend: encodes texts by that tokenizer.
        root: the folder where paths of images begin; None: the folder of the record's file.
        dropped: a bit for each record of the window (a slice of a source file): 1 if the record is
            dropped as a duplicate. Each byte has eight of these bits, the lowest bit first.
    """
    images = open_image_reader(stream.encoding, root)
    reader = open_record_reader(stream, dropped, images)
    return replace(reader, kind=stream.kind.open(tokenizer, backend))


def open_record_reader(
    stream: ResolvedStream, dropped: bytes, images: ImageReader | None
) -> RecordReader:
    """Return a reader that reads the records of a stream, for example for their fingerprints, but
    cannot encode them.

    Args:
        stream: the stream.
        dropped: a bit for each record of the window (a slice of a source file): 1 if the record is
            dropped as a duplicate. Each byte has eight of these bits, the lowest bit first.
        images: reads the images of the records; None if the stream has no images.
    """
    encoding = stream.encoding
    return RecordReader(
        shape=stream.shape,
        fields=encoding.fields,
        options=encoding.shape_options,
        diagnostics=Diagnostics(stream.fields_read, stream.rival_fields, stream.message_fields),
        membership=Membership.of(encoding, dropped),
        where=parse_where(encoding.where) if encoding.where else None,
        id=encoding.id,
        images=images,
    )


def open_image_reader(
    encoding: Encoding, root: Location | None, judges: bool = True
) -> ImageReader | None:
    """Return the reader of a stream's images; None if the stream has no images.

    Raises RecipeError if the stream has images and Pillow is not installed.

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

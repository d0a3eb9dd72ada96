"""The interface of a file format: how a file is divided into splits, how its records are read in
blocks, and how the place of each record is named.

Work units, windows (slices of a unit's bytes), digests, counting and quarantine are the same for
all formats. Everything that differs is a method of `Format`. A format that reads records one by one
(rows, archive members, array elements) yields `Item`s, and `item_blocks` groups them into blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.json_values import read_json
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span

LONGEST = 256 << 20
"""Bytes of the longest record. A longer one is skipped while it is read; only its place and length
are kept.
"""
MOST_ITEMS = 4096
"The most items of a block, however short they are."
TOO_LONG = "record_too_long"
BLANK = "blank"
"The reason of an item without content, such as an empty line. It is not a fault."
ROWS = "rows"
"The format of blocks whose bytes are lines of JSON, as for rows of parquet and Arrow."
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"Bytes at the start of some UTF-8 files; they do not belong to the text."


Splits = Iterable[tuple[int, int | None]]
"""Ranges [start, end) that a file is divided into, in the numbers (`Item.ordinal`) that its format
counts by. An end of None is the end of the file.
"""


class Item(NamedTuple):
    """A piece of a file: a record, or bytes that are not a record, with the reason code."""

    ordinal: int
    """The piece's number as its format counts: a byte offset or a row. It ascends through the file,
    and does not depend on the work unit that reads the piece.
    """
    place: Mapping[str, Any]
    "The place as it is written into the quarantine file: {`line`: 12, `offset`: 345}."
    length: int
    "Length in bytes; includes the newline for text rows."
    raw: bytes
    "The bytes themselves; empty if they are longer than `LONGEST`."
    record: Any = None
    reason: str = ""
    "The reason code of an item that is not a record."
    fields: tuple[str, ...] = ()
    "All fields of the record if its bytes do not name them."
    file: str = ""
    "The file's name, set by `Block.origin`."

    @property
    def where(self) -> str:
        """The place for a person: `row 3, batch 0`, or `byte 345` if the place has an offset.

        The byte is shown instead of the line, because lines are counted from the start of the
        split, not of the file.
        """
        if "offset" in self.place:
            return f"byte {self.ordinal}"
        return ", ".join(f"{key} {value}" for key, value in self.place.items())


Decoded = tuple[list[Any], dict[int, str]]
"""The records of consecutive pieces of bytes; and index of a piece -> reason code, for each piece
that is not a record. The reason BLANK (an empty line) is not a fault.
"""
Decoder = Callable[[list[bytes]], Decoded]
"A function that decodes consecutive pieces of bytes, such as the lines of a block."


@dataclass(slots=True)
class BoundedBytes:
    """Collects the bytes of one record piece by piece. Drops them once the record is longer than
    `LONGEST`.
    """

    offset: int = 0
    "The byte of the file at which the record begins."
    length: int = 0
    parts: list[bytes] = field(default_factory=list)

    def add(self, part: bytes) -> None:
        """Add the next bytes of the record."""
        self.length += len(part)
        if self.is_too_long:
            self.parts.clear()
        else:
            self.parts.append(part)

    @property
    def is_too_long(self) -> bool:
        return self.length > LONGEST

    def item(self, decode: Decoder, **place: int) -> Item:
        """Decode the collected bytes, and return the item.

        Args:
            decode: decodes a list of byte strings, here of one.
            place: the item's place without its offset, such as `line=12`.
        """
        place["offset"] = self.offset
        raw = b""
        record = None
        reason = TOO_LONG
        if not self.is_too_long:
            raw = b"".join(self.parts)
            records, faults = decode([raw])
            record = records[0] if records else None
            reason = faults.get(0, "")
        return Item(self.offset, place, self.length, raw, record, reason)


@dataclass(slots=True, kw_only=True)
class Block:
    """Consecutive pieces of one file, about 4 MB, all in one window (a slice of a work unit):
    either lines that are not decoded yet, or items.
    """

    format: str
    """Everything besides the bytes that affects decoding, such as the header of a csv. Two blocks
    of equal format and content have equal records.
    """
    file: str
    "The name of the pieces' file."
    window: int
    start: tuple[int, ...]
    """The place of the first piece, which distinguishes blocks of equal content. For lines: the
    line number, counted from 1 at the split's start, and the byte offset. For items: the ordinal.
    """
    raws: list[bytes]
    """The bytes of each piece, limited to the fields that are read. They are empty for a piece that
    is too long to be kept. A line includes its newline.
    """
    whole: memoryview | None = None
    "All lines in one buffer, as in the file, so that hashing need not join `raws`. None for items."
    decoder: Decoder | None = None
    "The decoder of lines; None for items."
    items: Sequence[Item] = ()
    unseen: tuple[str, ...] = ()
    "Fields that are not read, although a record may have a value in them."
    _offsets: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of pieces, records or not."""
        return len(self.raws)

    @property
    def size(self) -> int:
        """Number of uncompressed bytes, limited to the fields that are read."""
        if self.items:
            return sum(item.length for item in self.items)
        return len(self.whole) if self.whole else sum(map(len, self.raws))

    def content(self) -> bytes | memoryview:
        """Return the bytes that are hashed.

        The concatenation over consecutive blocks does not depend on where one block ends and the
        next begins.
        """
        if self.whole is not None:
            return self.whole
        if not self.items:
            return b"".join(self.raws)
        if self.format == ROWS:
            return b"\n".join(self.raws) + b"\n"
        parts = list[bytes]()
        for item in self.items:
            parts += (b"%d\n" % item.length, item.raw)
        return b"".join(parts)

    def first(self, count: int) -> Block:
        """Return the block of the first `count` pieces."""
        return replace(self, raws=self.raws[:count], items=self.items[:count], whole=None)

    def decode(self) -> Decoded:
        """Return the block's records; and index -> reason code for the other pieces."""
        if self.decoder and not self.items:
            return self.decoder(self.raws)
        faults = {index: item.reason for index, item in enumerate(self.items) if item.reason}
        return [item.record for item in self.items if not item.reason], faults

    def origin(self, index: int) -> Item:
        """Return the piece with this index, with the name of its file."""
        if self.items:
            item = self.items[index]
            length = len(item.raw) if self.format == ROWS else item.length
            return item._replace(length=length, file=self.file)
        first_line, first_offset = self.start
        if not self._offsets:
            self._offsets.extend(accumulate(map(len, self.raws), initial=first_offset))
        raw = self.raws[index][:-1]
        offset = self._offsets[index]
        place = {"line": first_line + index, "offset": offset}
        return Item(ordinal=offset, place=place, length=len(raw), raw=raw, file=self.file)


def item_blocks(
    file: SourceFile, span: Span, format: str, items: Iterable[Item], unseen: Sequence[str] = ()
) -> Iterator[Block]:
    """Yield the items grouped into blocks.

    A block ends at the end of its window (a slice of a work unit), at 4 MB or at 4,096 items. An
    item belongs to the window that contains its first byte.

    Args:
        file: the file of the items.
        span: the range of the file that is read, with its windows.
        format: everything besides the bytes that affects decoding, as in `Block`.
        unseen: fields that are not read, although a record may have a value in them.
    """

    def make_block() -> Block:
        return Block(
            format=format,
            file=file.name,
            window=span.window_of(begin),
            start=(pending[0].ordinal,),
            raws=[item.raw for item in pending],
            items=pending,
            unseen=tuple(unseen),
        )

    pending = list[Item]()
    # Uncompressed bytes from the split's start to the beginning of the block, to the next item, and
    # to the end of the block's window.
    begin = position = edge = 0
    for item in items:
        if pending and (
            len(pending) >= MOST_ITEMS
            or position >= edge
            or position + item.length > begin + BLOCK_BYTES
        ):
            yield make_block()
            pending = []
        if not pending:
            begin = position
            edge = span.next_edge(position)
        pending.append(item)
        position += item.length
    if pending:
        yield make_block()


class Stretch(NamedTuple):
    """Consecutive records of a file that are stored together: a row group, a shard."""

    records: int
    size: int
    "Uncompressed bytes."


def cut_splits(stretches: Iterable[Stretch], window_bytes: int) -> Splits:
    """Yield splits as ranges [start, end) of record numbers, counted through the file. A split
    never divides a stretch, and has at most `window_bytes` bytes, unless it is one larger stretch.
    """
    start = end = size = 0
    for stretch in stretches:
        if size and size + stretch.size > window_bytes:
            yield start, end
            start = end
            size = 0
        end += stretch.records
        size += stretch.size
    yield start, end


def parse_json_fields(record: dict[str, Any], names: Iterable[str]) -> None:
    """Replace the JSON strings in the named fields of a record by their values.

    An empty string becomes null. A string that is not valid JSON stays; the shape then refuses it.
    """
    for name in names:
        cell = record.get(name)
        if not isinstance(cell, str):
            continue
        if not cell.strip():
            record[name] = None
            continue
        try:
            record[name] = read_json(cell)
        except (ValueError, RecursionError):
            continue


class Format(ABC):
    """A kind of file. A split of it is a range [start, end) of ordinals; an end of None is the end
    of the file.
    """

    name: ClassVar[str] = ""
    "The format's name in the names of rules (`format.csv`); empty: the lower-case class name."
    version: int = 1
    """Increased when this format begins to return other records for the same file (see
    `version_for`). A subclass inherits it. After an increase, files of the format are read again
    once.
    """
    size_factor: int = 1
    "Assumed uncompressed size divided by stored size; 1: a file is stored as it is read."
    reads_fields: ClassVar[bool] = False
    "Only the fields that the shape needs are read, so a file's digest depends on them."
    cells_are_texts: ClassVar[bool] = False
    "Every cell is a string, so lists and objects are written as JSON."
    heeds: ClassVar[tuple[str, ...]] = ()
    "The settings of `ReadAs` that the format uses, besides `format`: `header`, `split_by`."
    ordinals: ClassVar[str] = "byte"
    "The thing that the format's ordinals count: `byte`, `row`, `sample`."
    counted: ClassVar[str] = ""
    """The key of a place, such as `line`, that is counted from the split's start. Its number in the
    file is known only once the earlier splits were read.
    """
    reasons: ClassVar[Mapping[str, str]] = {}
    "Reason codes of bad records that only this format uses -> their explanations."

    def __init__(self, packing: str = "") -> None:
        """`packing`: the suffix, such as `.gz`, of the files' compression; "" if there is none."""
        self.packing = packing
        if packing:
            self.size_factor = 4  # text compresses three- to fivefold

    @property
    def rule(self) -> str:
        """The name that stands for this format's way of reading records: `format.csv`."""
        return f"format.{self.name or type(self).__name__.lower()}"

    def version_for(self, file: SourceFile, fields: tuple[str, ...]) -> int:
        """Return the version that is hashed into the digests of a file's windows.

        Override it if a change of the format concerns only some files, and return the older version
        for all others. Their digests then stay the same, so they are not converted again.

        Args:
            fields: the fields that are read of each record; empty: all.
        """
        return self.version

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        """Return splits of about `window_bytes` each; one split for the whole file if the places to
        split at are known only after reading its records.

        Args:
            fields: the fields that are read of each record; empty: all.
        """
        return [(0, None)]

    def check(self, file: SourceFile) -> None:
        """Raise RecipeError if the recipe sets a key that this format does not use, or lacks one
        that it needs.
        """
        for key in {"header", "split_by"} - set(self.heeds):
            if getattr(file.read_as, key):
                raise RecipeError(
                    f"source.{key} does not apply to {file.name}, which is read as "
                    f"{self.rule.removeprefix('format.')}: remove it"
                )

    def weight(self, file: SourceFile) -> int:
        """Return the number of uncompressed bytes that the file is assumed to have."""
        return file.stat.size * self.size_factor

    def records(self, file: SourceFile) -> int | None:
        """Return the number of records in the file; None if that needs reading the whole file."""
        return None

    def prepare(self) -> None:  # noqa: B027 - most import nothing
        """Import the libraries that read such files: once in a run, before workers are forked."""

    @abstractmethod
    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        """Yield the records that start in the span, in order.

        Raises Unreachable if the file is damaged.
        """

    def guess(self, file: SourceFile) -> Mapping[str, Any]:
        """Return the settings, of those in `heeds`, that `mdsmix init` writes for the file.

        Example: `{"split_by": "line"}`.
        """
        return {}

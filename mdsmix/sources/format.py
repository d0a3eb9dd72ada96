"""What a file format says: how a file is cut into splits, its records in blocks, and where each record stands.

Units, windows, digests, counting and quarantine are the same for all formats and ask a `Format` for what they need to know.
A format that cuts records out of a file one by one (rows, members, elements) yields `Item`s, of which `item_blocks` makes blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import orjson

from mdsmix.errors import RecipeError
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span

LONGEST = 256 << 20
"Bytes of the longest record; what is longer is skipped as it streams by, and kept by its place and length only."
MOST_ITEMS = 4096
"Items of a block, however short."
TOO_LONG = "record_too_long"
BLANK = "blank"
"Stands for a reason where an item is nothing at all."
ROWS = "rows"
"The format of items that are known by lines of JSON, which their ends part."
MARK = b"\xef\xbb\xbf"
"The byte order mark, which is no part of a text."


Splits = Iterable[tuple[int, int | None]]
"Ranges [start, end) of ordinals that a file is cut into."


class Origin(NamedTuple):
    """Where a record comes from, and what stands there."""

    file: str
    "The file's name."
    ordinal: int
    "What its format counts records by (a byte offset, a row): ascending in the file, and the same in whatever unit it is read."
    place: Mapping[str, Any]
    "The place as the quarantine says it: {`line`: 12, `offset`: 345}."
    length: int
    "Bytes."
    raw: bytes
    "The bytes themselves; empty where they were too long to be kept."
    fields: tuple[str, ...] = ()
    "All fields that the record has, where they do not stand in its bytes."

    @property
    def shown(self) -> str:
        """The place for a person: a byte, where lines are counted from the split's start only."""
        if "offset" in self.place:
            return f"byte {self.ordinal}"
        return ", ".join(f"{key} {value}" for key, value in self.place.items())


class Item(NamedTuple):
    """What a format cut out of a file, and what may be a record."""

    ordinal: int
    place: Mapping[str, Any]
    size: int
    "Bytes; of rows with the line's end."
    raw: bytes
    "The bytes; none of them where they are too many."
    record: Any
    reason: str = ""
    "Why it is no record."
    fields: tuple[str, ...] = ()
    "As `Origin` has it."


Decoded = tuple[list[Any], dict[int, str]]
"The records of consecutive pieces of bytes, and why the others, by their index, are none; BLANK is no fault."
Decoder = Callable[[list[bytes]], Decoded]


@dataclass(slots=True)
class BoundedBytes:
    """The bytes of one record that come in parts, as long as it is not too long to be kept."""

    offset: int = 0
    "Where in the file they begin."
    length: int = 0
    parts: list[bytes] = field(default_factory=list)

    def add(self, part: bytes) -> None:
        self.length += len(part)
        if self.is_too_long:
            self.parts.clear()
        else:
            self.parts.append(part)

    @property
    def is_too_long(self) -> bool:
        return self.length > LONGEST

    def item(self, decode: Decoder, **place: int) -> Item:
        """What was gathered, decoded."""
        place["offset"] = self.offset
        if self.is_too_long:
            return Item(self.offset, place, self.length, b"", None, TOO_LONG)
        raw = b"".join(self.parts)
        records, faults = decode([raw])
        return Item(self.offset, place, self.length, raw, *records or [None], *faults.values())


@dataclass(slots=True, kw_only=True)
class Block:
    """Consecutive pieces of one file in one window, about 8 MB: lines that are not decoded yet, or items."""

    format: str
    "What shapes records beside the bytes: pieces of equal format and content give equal records, packed or not."
    file: str
    "The name of the file that its pieces stand in."
    window: int
    start: tuple[int, ...]
    "Where its first piece stands: it tells apart blocks of equal content. Of lines: the line, counted from 1 at the split's start, and the byte."
    raws: list[bytes]
    "The bytes of each piece, of the fields that are read; none of one that is too long to be kept. Lines are without their ends."
    whole: memoryview | None = None
    "Lines with their ends as the file has them, so that they are not joined again to be hashed."
    decoder: Decoder | None = None
    "Of lines."
    items: Sequence[Item] = ()
    unseen: tuple[str, ...] = ()
    "Fields that are passed over, and may hold something in any record."
    _offsets: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Pieces, whether they hold a record or not."""
        return len(self.raws)

    @property
    def size(self) -> int:
        """Uncompressed bytes, of the fields that are read."""
        if self.items:
            return sum(item.size for item in self.items)
        return len(self.whole) if self.whole else sum(map(len, self.raws)) + self.count

    def content(self) -> bytes | memoryview:
        """By which the pieces are known again. Of consecutive blocks joined, it is the same however they were cut."""
        if self.whole is not None:
            return self.whole
        if not self.items or self.format == ROWS:
            return b"\n".join(self.raws) + b"\n"
        return b"".join([part for item in self.items for part in (b"%d\n" % item.size, item.raw)])

    def first(self, count: int) -> Block:
        """The block of the first so many pieces."""
        return replace(self, raws=self.raws[:count], items=self.items[:count], whole=None)

    def decode(self) -> Decoded:
        """Its records, and why the pieces of the other indexes are none."""
        if self.decoder and not self.items:
            return self.decoder(self.raws)
        faults = {index: item.reason for index, item in enumerate(self.items) if item.reason}
        return [item.record for item in self.items if not item.reason], faults

    def origin(self, index: int) -> Origin:
        """Where the piece of this index is."""
        raw = self.raws[index]
        if self.items:
            item = self.items[index]
            size = len(raw) if self.format == ROWS else item.size
            return Origin(self.file, item.ordinal, item.place, size, raw, item.fields)
        line, offset = self.start
        if not self._offsets:
            self._offsets.extend(accumulate((len(raw) + 1 for raw in self.raws), initial=offset))
        offset = self._offsets[index]
        return Origin(self.file, offset, {"line": line + index, "offset": offset}, len(raw), raw)


def item_blocks(
    file: SourceFile, span: Span, format: str, items: Iterable[Item], unseen: Sequence[str] = ()
) -> Iterator[Block]:
    """The items, cut at the edges of windows, at 8 MB and at 4,096. An item is in the window of its first byte."""

    def block() -> Block:
        return Block(
            format=format,
            file=file.name,
            window=span.window_of(begin),
            start=(held[0].ordinal,),
            raws=[item.raw for item in held],
            items=held,
            unseen=tuple(unseen),
        )

    held, begin, position, edge = list[Item](), 0, 0, 0
    for item in items:
        if held and (position >= edge or position + item.size > begin + BLOCK_BYTES):
            yield block()
            held = []
        if not held:
            begin, edge = position, span.next_edge(position)
        held.append(item)
        position += item.size
        if len(held) >= MOST_ITEMS:
            yield block()
            held = []
    if held:
        yield block()


def cut(parts: Iterable[tuple[int, int]], window_bytes: int) -> Splits:
    """Runs of consecutive parts (records, bytes) of at most a window, or one part; in records."""
    start = end = size = 0
    for records, more in parts:
        if size and size + more > window_bytes:
            yield start, end
            start, size = end, 0
        end, size = end + records, size + more
    yield start, end


def parsed(record: dict[str, Any], names: Iterable[str]) -> None:
    """In a record of texts, makes those that are JSON what they say; an empty one is null, and one that is no JSON stays a
    text, which the shape then refuses."""
    for name in names:
        cell = record.get(name)
        if isinstance(cell, str):
            try:
                record[name] = orjson.loads(cell) if cell.strip() else None
            except orjson.JSONDecodeError:
                continue


class Format(ABC):
    """One kind of file. A split of it is a range [start, end) of ordinals; an end of None is the end of the file."""

    size_factor: int = 1
    "How many times its stored size a file counts when it is planned; 1: it is stored as it is read."
    reads_fields: ClassVar[bool] = False
    "Only the fields that are asked for are read, so what a file is known by depends on them."
    cells_are_texts: ClassVar[bool] = False
    "A field holds a text whatever it means, so that lists and objects are written as JSON in it."
    heeds: ClassVar[tuple[str, ...]] = ()
    "What it heeds of a `ReadAs`, beside the name of the format."
    ordinals: ClassVar[str] = "byte"
    "What its ordinals count."
    counted: ClassVar[str] = ""
    "The key of a place that counts from the split's start, where only what stands before tells the true number."

    def __init__(self, packing: str = "") -> None:
        """`packing`: the suffix by which such files are decompressed as they are read."""
        self.packing = packing
        if packing:
            self.size_factor = 4  # text compresses three- to fivefold

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        """A large file as splits of about a window, where they are known without reading its records; else all of it as one."""
        return [(0, None)]

    def check(self, file: SourceFile) -> None:
        """RecipeError where the recipe says of the file what means nothing to this format, or not what it takes."""
        for key in {"header", "split_by"} - set(self.heeds):
            if getattr(file.read_as, key):
                raise RecipeError(
                    f"source.{key} means nothing for {file.name}: take it out, it would change nothing"
                )

    def weight(self, file: SourceFile) -> int:
        """The uncompressed bytes that a file is planned as."""
        return file.stat.size * self.size_factor

    def records(self, file: SourceFile) -> int | None:
        """How many records the file holds, where it says so without being read."""
        return None

    def prepare(self) -> None:  # noqa: B027 - most take nothing
        """Imports what reading takes: once in the run, before its workers are forked."""

    @abstractmethod
    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        """The records that start in the span, in order. A damaged file is `Unreachable`."""

    def guess(self, file: SourceFile, head: Callable[[], bytes]) -> Mapping[str, Any]:
        """What a recipe must say of how such a file is read (`heeds`), for `mdsmix init`; `head` fetches how it begins."""
        return {}

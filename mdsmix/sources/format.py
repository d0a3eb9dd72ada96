"""What a file format says: how a file is cut into splits, its records in blocks, and where each record stands.

Units, windows, digests, counting and quarantine are the same for all formats and ask a `Format` for what they need to know.
A format that cuts records out of a file one by one (rows, members, elements) yields `Item`s, of which `item_blocks` makes blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
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
        """The place for a person; lines, and rows of record batches, are counted from the split's start only, so they do not count."""
        if "offset" in self.place:
            return f"byte {self.ordinal}"
        if "batch" in self.place:
            return f"row {self.ordinal & 0xFFFFFFFF} of record batch {self.place['batch']}"
        return ", ".join(f"{key} {value}" for key, value in self.place.items())


class Item(NamedTuple):
    """What a format cut out of a file, and what may be a record."""

    ordinal: int
    place: Mapping[str, Any]
    "Of rows one for many: `row` is what is added to the ordinal."
    size: int
    "Bytes; of rows with the line's end."
    raw: bytes
    "The bytes; none of them where they are too many."
    record: Any
    reason: str = ""
    "Why it is no record."
    fields: tuple[str, ...] = ()
    "As `Origin` has it."


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

    def item(
        self, place: Mapping[str, Any], decode: Callable[[bytes], tuple[Any, str]], end: bytes = b""
    ) -> Item:
        """What was gathered, without this end; `decode` gives its record, and the reason why it is none."""
        raw, record, reason = b"", None, TOO_LONG
        if not self.is_too_long:
            raw = b"".join(self.parts).removesuffix(end)
            record, reason = decode(raw)
        place = {**place, "offset": self.offset}
        return Item(self.offset, place, self.length, raw, record, reason)


@dataclass(slots=True, kw_only=True)
class Decoded:
    """The records of a block, and which of its items are none."""

    records: list[Any] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    "Index among the block's items, and the reason code."
    blank: list[int] = field(default_factory=list)
    "Indexes of items that are nothing at all, such as empty lines."


@dataclass(slots=True, kw_only=True)
class Block(ABC):
    """Consecutive items (lines, rows, members) of one file in one window, about 8 MB, not decoded yet."""

    format: str
    "What shapes records beside the bytes: items of equal format and content give equal records, packed or not."
    file: str
    "The name of the file that its items stand in."
    window: int
    start: tuple[int, ...]
    "Where its first item stands: it tells apart blocks of equal content."
    raws: list[bytes]
    "The bytes of each item, of the fields that are read; none of one that is too long to be kept."
    sizes: list[int] | None = None
    "Uncompressed bytes of each item; None: of lines, which their ends part."
    whole: memoryview | None = None
    "Lines with their ends as the file has them, so that they are not joined again to be hashed."
    unread: Mapping[str, int | None] = field(default_factory=dict)
    """Fields that were passed over, and in how many records of this block and those behind it there is something in them; None
    where nothing tells."""

    @property
    def count(self) -> int:
        """Items, whether they hold a record or not."""
        return len(self.raws)

    @property
    def size(self) -> int:
        """Uncompressed bytes, of the fields that are read."""
        if self.whole is not None:
            return len(self.whole)
        return sum(self.sizes or map(len, self.raws)) + (0 if self.sizes else self.count)

    def content(self) -> bytes | memoryview:
        """By which the items are known again. Of consecutive blocks joined, it is the same however they were cut."""
        if self.whole is not None:
            return self.whole
        if self.sizes is None:
            return b"\n".join(self.raws) + b"\n"
        sized = zip(self.sizes, self.raws, strict=True)
        return b"".join([part for size, raw in sized for part in (b"%d\n" % size, raw)])

    def first(self, count: int) -> Block:
        """The block of the first so many items."""
        sizes = self.sizes and self.sizes[:count]
        return replace(self, raws=self.raws[:count], sizes=sizes, whole=None)

    @abstractmethod
    def decode(self) -> Decoded: ...

    @abstractmethod
    def origin(self, index: int) -> Origin:
        """Where the item of this index is."""


@dataclass(slots=True, kw_only=True)
class ItemBlock(Block):
    """Items that were cut out one by one."""

    items: list[Item]

    def decode(self) -> Decoded:
        items = self.items[: self.count]
        wrong = [(index, item.reason) for index, item in enumerate(items) if item.reason]
        return Decoded(
            records=[item.record for item in items if not item.reason],
            bad=[each for each in wrong if each[1] != BLANK],
            blank=[index for index, reason in wrong if reason == BLANK],
        )

    def origin(self, index: int) -> Origin:
        item = self.items[index]
        place, size = item.place, item.size
        if self.format == ROWS:
            place, size = {**place, "row": place["row"] + item.ordinal}, len(item.raw)
        return Origin(self.file, item.ordinal, place, size, item.raw, item.fields)


def item_blocks(
    file: SourceFile,
    span: Span,
    format: str,
    items: Iterable[Item],
    unread: Mapping[str, int | None] | None = None,
) -> Iterator[ItemBlock]:
    """The items, cut at the edges of windows, at 8 MB and at 4,096. An item is in the window of its first byte. `unread`: of the
    whole span, told by the first block; fields of which nothing tells are told again by each."""

    def block() -> ItemBlock:
        sizes = None if format == ROWS else [item.size for item in held]
        return ItemBlock(
            format=format,
            file=file.name,
            window=span.window_of(begin),
            start=(held[0].ordinal,),
            raws=[item.raw for item in held],
            sizes=sizes,
            unread=left,
            items=held,
        )

    held, begin, position, left = list[Item](), 0, 0, unread or {}
    unknown = {name: filled for name, filled in left.items() if filled is None}
    edge = end = 0
    for item in items:
        after = position + item.size
        if held and (position >= edge or after > end):
            yield block()
            held, begin, left = [], position, unknown
        if not held:
            edge, end = span.next_edge(position), position + BLOCK_BYTES
        held.append(item)
        position = after
        if len(held) >= MOST_ITEMS:
            yield block()
            held, begin, left = [], position, unknown
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

    def shown(self, ordinal: int) -> str:
        """An ordinal for a person: `byte 345`."""
        return f"{self.ordinals} {ordinal}"

    def fits(self, head: bytes) -> bool:
        """Whether a file that begins so (64 KiB, or all of it) is most likely of this format; asked by `mdsmix init` where the
        file's name does not tell."""
        return False

    def guess(self, file: SourceFile, head: Callable[[], bytes]) -> Mapping[str, Any]:
        """What a recipe must say of how such a file is read (`heeds`), for `mdsmix init`; `head` fetches how it begins."""
        return {}

    def most_records(self, file: SourceFile, start: int, end: int | None) -> float:
        """How many records a split can hold at most, known without reading."""
        return inf

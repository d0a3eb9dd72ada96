"""The interface of a file format: how a file is cut into splits, its records in blocks, and where
each record stands.

Units, windows, digests, counting and quarantine are the same for all formats, and ask a `Format`
for all that differs. A format that cuts records out of a file one by one (rows, members, elements)
yields `Item`s, of which `item_blocks` makes blocks.
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
"""Bytes of the longest record. A longer one is skipped as it streams by, and only its place and
length are kept.
"""
MOST_ITEMS = 4096
"The most items of a block, however short they are."
TOO_LONG = "record_too_long"
BLANK = "blank"
"The reason of an item that is nothing at all, such as an empty line; no fault."
ROWS = "rows"
"The format of items whose bytes are lines of JSON, as rows of parquet and arrow are."
MARK = b"\xef\xbb\xbf"
"The byte order mark, which is no part of a text."


Splits = Iterable[tuple[int, int | None]]
"Ranges [start, end) of ordinals that a file is cut into."


class Item(NamedTuple):
    """A piece of a file: a record, or something that is none for a reason."""

    ordinal: int
    """The piece's number as its format counts (a byte offset, a row): ascending in the file, and
    the same in whatever unit it is read.
    """
    place: Mapping[str, Any]
    "The place as the quarantine says it: {`line`: 12, `offset`: 345}."
    length: int
    "Bytes; of a row that a format cuts out, with the line's end."
    raw: bytes
    "The bytes themselves; empty where they are too long to be kept."
    record: Any = None
    reason: str = ""
    "The reason code of an item that is no record."
    fields: tuple[str, ...] = ()
    "All fields of the record, where its bytes do not name them."
    file: str = ""
    "The file's name, of an item that `Block.origin` gives."

    @property
    def where(self) -> str:
        """The place for a person: a byte, where lines are counted from the split's start only."""
        if "offset" in self.place:
            return f"byte {self.ordinal}"
        return ", ".join(f"{key} {value}" for key, value in self.place.items())


Decoded = tuple[list[Any], dict[int, str]]
"""The records of consecutive pieces of bytes, and for each other piece: index -> reason why it is
no record. BLANK is no fault.
"""
Decoder = Callable[[list[bytes]], Decoded]


@dataclass(slots=True)
class BoundedBytes:
    """The bytes of one record, gathered in parts, and given up where the record is too long to be
    kept.
    """

    offset: int = 0
    "The byte of the file at which the record begins."
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
        """The gathered bytes as an item, decoded."""
        place["offset"] = self.offset
        if self.is_too_long:
            return Item(self.offset, place, self.length, b"", None, TOO_LONG)
        raw = b"".join(self.parts)
        records, faults = decode([raw])
        return Item(self.offset, place, self.length, raw, *records or [None], *faults.values())


@dataclass(slots=True, kw_only=True)
class Block:
    """Consecutive pieces of one file in one window, about 4 MB: lines that are not decoded yet, or
    items.
    """

    format: str
    """All beside the bytes that decides on records, such as the header of a csv: pieces of equal
    format and content give equal records.
    """
    file: str
    "The name of the file of the pieces."
    window: int
    start: tuple[int, ...]
    """The place of the first piece: it tells blocks of equal content apart. For lines: the line,
    from 1 at the split's start, and the byte.
    """
    raws: list[bytes]
    """The bytes of each piece, of the fields that are read; empty for one that is too long to be
    kept. Each line is with its end.
    """
    whole: memoryview | None = None
    "The lines with their ends, as in the file, so that hashing does not join them again."
    decoder: Decoder | None = None
    "The decoder of lines; None for items."
    items: Sequence[Item] = ()
    unseen: tuple[str, ...] = ()
    "Fields that are not read, although a record may hold something in them."
    _offsets: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of pieces, whether they hold a record or not."""
        return len(self.raws)

    @property
    def size(self) -> int:
        """Uncompressed bytes, of the fields that are read."""
        if self.items:
            return sum(item.length for item in self.items)
        return len(self.whole) if self.whole else sum(map(len, self.raws))

    def content(self) -> bytes | memoryview:
        """The bytes that are hashed to know the pieces again. Joined over consecutive blocks, they
        are the same however blocks were cut.
        """
        if self.whole is not None:
            return self.whole
        if not self.items:
            return b"".join(self.raws)
        if self.format == ROWS:
            return b"\n".join(self.raws) + b"\n"
        return b"".join([part for item in self.items for part in (b"%d\n" % item.length, item.raw)])

    def first(self, count: int) -> Block:
        """The block of the first `count` pieces."""
        return replace(self, raws=self.raws[:count], items=self.items[:count], whole=None)

    def decode(self) -> Decoded:
        """The block's records, and the reasons of pieces that are no record, by index."""
        if self.decoder and not self.items:
            return self.decoder(self.raws)
        faults = {index: item.reason for index, item in enumerate(self.items) if item.reason}
        return [item.record for item in self.items if not item.reason], faults

    def origin(self, index: int) -> Item:
        """The piece with this index, by its place in its file."""
        if self.items:
            item = self.items[index]
            length = len(item.raw) if self.format == ROWS else item.length
            return item._replace(length=length, file=self.file)
        line, offset = self.start
        if not self._offsets:
            self._offsets.extend(accumulate(map(len, self.raws), initial=offset))
        raw, offset = self.raws[index][:-1], self._offsets[index]
        place = {"line": line + index, "offset": offset}
        return Item(offset, place, len(raw), raw, file=self.file)


def item_blocks(
    file: SourceFile, span: Span, format: str, items: Iterable[Item], unseen: Sequence[str] = ()
) -> Iterator[Block]:
    """Blocks of the items, cut at the edges of windows, at 4 MB and at 4,096 items. An item is in
    the window of its first byte.
    """

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
        if held and (
            len(held) >= MOST_ITEMS
            or position >= edge
            or position + item.length > begin + BLOCK_BYTES
        ):
            yield block()
            held = []
        if not held:
            begin, edge = position, span.next_edge(position)
        held.append(item)
        position += item.length
    if held:
        yield block()


def cut_splits(parts: Iterable[tuple[int, int]], window_bytes: int) -> Splits:
    """Splits of consecutive parts (records, bytes), each of at most a window or of one part;
    counted in records.
    """
    start = end = size = 0
    for records, more in parts:
        if size and size + more > window_bytes:
            yield start, end
            start, size = end, 0
        end, size = end + records, size + more
    yield start, end


def parse_json_fields(record: dict[str, Any], names: Iterable[str]) -> None:
    """Replaces texts of JSON in the named fields of a record by their values. An empty text becomes
    null; a text that is no JSON stays, and the shape then refuses it.
    """
    for name in names:
        cell = record.get(name)
        if isinstance(cell, str):
            try:
                record[name] = read_json(cell) if cell.strip() else None
            except (ValueError, RecursionError):
                continue


class Format(ABC):
    """One kind of file. A split of it is a range [start, end) of ordinals; an end of None is the
    end of the file.
    """

    name: ClassVar[str] = ""
    "The word for the format in the names of rules; empty: the class's name."
    version: int = 1
    """Raised when a file gives other records than before (`version_for`). A subclass inherits it.
    Files of a raised format are read again, once.
    """
    size_factor: int = 1
    "The factor from a file's stored size to its planned size; 1: the file is stored as it is read."
    reads_fields: ClassVar[bool] = False
    "Only the wanted fields are read, so a file's digest depends on them."
    cells_are_texts: ClassVar[bool] = False
    "Every cell is a text, so lists and objects are written as JSON."
    heeds: ClassVar[tuple[str, ...]] = ()
    "The keys of a `ReadAs` that the format heeds, beside the format's name."
    ordinals: ClassVar[str] = "byte"
    "The thing that the format's ordinals count: `byte`, `row`, `sample`."
    counted: ClassVar[str] = ""
    """The key of a place, such as `line`, that counts from the split's start: the true number
    depends on earlier splits.
    """
    reasons: ClassVar[Mapping[str, str]] = {}
    "Reason codes that only this format gives -> their explanations."

    def __init__(self, packing: str = "") -> None:
        """`packing`: the suffix, such as `.gz`, that tells how files are decompressed as they are
        read.
        """
        self.packing = packing
        if packing:
            self.size_factor = 4  # text compresses three- to fivefold

    @property
    def rule(self) -> str:
        """The name of the rule by which records are cut out of its files, for example
        `format.csv`.
        """
        return f"format.{self.name or type(self).__name__.lower()}"

    def version_for(self, file: SourceFile, fields: tuple[str, ...]) -> int:
        """Return the version that goes into the digests of a file's windows.

        A format whose change concerns some files only overrides this and returns the older
        version for all others: their digests stay, so their rows are not made again.

        Args:
            file: the file, whose digest is being worked out.
            fields: the fields that are read of each record; empty: all.
        """
        return self.version

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        """Splits of about a window each, where they are known without reading the file's records;
        else one split of the whole file.
        """
        return [(0, None)]

    def check(self, file: SourceFile) -> None:
        """RecipeError where the recipe gives the file a key that this format does not use, or lacks
        one that it needs.
        """
        for key in {"header", "split_by"} - set(self.heeds):
            if getattr(file.read_as, key):
                raise RecipeError(
                    f"source.{key} means nothing for {file.name}: take it out, it would change nothing"
                )

    def weight(self, file: SourceFile) -> int:
        """The uncompressed bytes that a file is planned as."""
        return file.stat.size * self.size_factor

    def records(self, file: SourceFile) -> int | None:
        """The number of records in the file; None where only reading the file would tell."""
        return None

    def prepare(self) -> None:  # noqa: B027 - most take nothing
        """Imports the libraries for reading: once in a run, before its workers are forked."""

    @abstractmethod
    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        """The records that start in the span, in order. A damaged file is `Unreachable`."""

    def guess(self, file: SourceFile) -> Mapping[str, Any]:
        """The keys of `heeds`, with values, that a recipe must give for such a file; for `mdsmix
        init`.
        """
        return {}

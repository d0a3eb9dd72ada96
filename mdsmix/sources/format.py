"""What a file format says: how a file is cut into splits, its records in blocks, and where each record stands.

Units, windows, digests, counting and quarantine are the same for all formats and ask a `Format` for what they need to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.sources.units import SourceFile, Span


class Origin(NamedTuple):
    """Where a record comes from, and what stands there."""

    file: str
    "The file's name."
    ordinal: int
    "What its format counts records by (a byte offset, a row): ascending in the file, and the same in whatever unit it is read."
    shown: str
    "The same for a person: `byte 345`, `row 12`."
    place: Mapping[str, Any]
    "The same as the quarantine says it: {`line`: 12, `offset`: 345}."
    length: int
    "Bytes."
    raw: bytes
    "The bytes themselves; empty where they were too long to be kept."
    fields: tuple[str, ...] = ()
    "All fields that the record has, where they do not stand in its bytes."


@dataclass(slots=True, kw_only=True)
class Decoded:
    """The records of a block, and which of its items are none."""

    records: list[Any]
    bad: list[tuple[int, str]]
    "Index among the block's items, and the reason code."
    blank: list[int]
    "Indexes of items that are nothing at all, such as empty lines."
    unread: Mapping[str, int | None] = field(default_factory=dict)
    """Fields that were passed over, and in how many records of this block and those behind it there is something in them; None
    where nothing tells."""


@dataclass(slots=True, kw_only=True)
class Block(ABC):
    """Consecutive items (lines, rows, members) of one file in one window, about 8 MB, not decoded yet."""

    format: str
    "What shapes records beside the bytes: items of equal format and content give equal records, packed or not."
    file: str
    "The name of the file that its items stand in."
    window: int
    raws: list[bytes]
    "The bytes of each item, of the fields that are read; none of one that is too long to be kept."
    sizes: list[int] | None = None
    "Uncompressed bytes of each item; None: of lines, which their ends part."
    whole: memoryview | None = None
    "Lines with their ends as the file has them, so that they are not joined again to be hashed."

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

    @property
    @abstractmethod
    def start(self) -> tuple[Any, ...]:
        """Where its first item stands: it tells apart blocks of equal content."""

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


class Format(ABC):
    """One kind of file. A split of it is a range [start, end) of ordinals; an end of None is the end of the file."""

    looks_for_weight: bool = False
    "Whether `weight` opens the file."
    size_factor: int = 1
    "How many times its stored size a file counts when it is planned; 1: it is stored as it is read."
    reads_fields: ClassVar[bool] = False
    "Only the fields that are asked for are read, so what a file is known by depends on them."
    cells_are_texts: ClassVar[bool] = False
    "A field holds a text whatever it means, so that lists and objects are written as JSON in it."
    heeds: ClassVar[tuple[str, ...]] = ()
    "What it heeds of a `ReadAs`, beside the name of the format."
    counted: ClassVar[str] = ""
    "The key of a place that counts from the split's start, where only what stands before tells the true number."

    def splits(
        self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]
    ) -> Iterable[tuple[int, int | None]]:
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

    @abstractmethod
    def shown(self, ordinal: int) -> str:
        """An ordinal for a person: `byte 345`."""

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

"""What every format yields, whatever it reads: blocks of records that know where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mdsmix.sources.units import SourceFile, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a record comes from, and what stands there."""

    file: str
    "The file's name."
    line: int
    "From 1, counted from the unit's first line: absolute unless the unit starts inside its file."
    offset: int
    "In uncompressed bytes from the file's start, always."
    length: int
    raw: bytes
    "The bytes themselves, without the line's end; empty where they were too long to be kept."


@dataclass(slots=True, kw_only=True)
class Decoded:
    """The records of a block, and which of its lines are none."""

    records: list[Any]
    bad: list[tuple[int, str]]
    "Index among the block's lines, and the reason code."
    blank: list[int]


class Block(Protocol):
    """About 8 MB of one file, cut at line ends and at window edges, not decoded yet."""

    @property
    def window(self) -> int: ...

    @property
    def size(self) -> int:
        """Uncompressed bytes."""

    @property
    def lines(self) -> int:
        """Lines or rows, whether they hold a record or not."""

    @property
    def place(self) -> tuple[int, int]:
        """Number and offset of its first line, as an Origin says them."""

    def content(self) -> bytes:
        """By which it is known again: the lines as one, however they were cut into blocks."""

    def first(self, lines: int) -> Block:
        """The block of the first so many lines."""

    def decode(self) -> Decoded: ...

    def origin(self, index: int) -> Origin:
        """Where the line of this index is."""


class Format(Protocol):
    """One kind of file."""

    @property
    def name(self) -> str:
        """What shapes records beside the bytes: files of one name are read alike, packed or not."""

    @property
    def growth(self) -> int:
        """How many times its stored size a file counts when small ones are grouped; 1: exact."""

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        """The lines that start in the span, in order. A damaged file is `Unreachable`."""

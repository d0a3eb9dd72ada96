"""The files of a source and the work units that they are cut into.

A unit is small enough to be done again after a crash and large enough to fill a shard. It says what to read and
nothing else, so that whichever worker reads it gets the same records.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from mdsmix.storage import Location, Stat

if TYPE_CHECKING:
    from mdsmix.recipe import SourceSpec

WINDOW_BYTES = 96 << 20
"""Uncompressed bytes per window of text: a shard of 47 MB for English in uint16. With 128 MiB a run is as fast and 35 MB larger;
with 64 MiB it is 30 MB smaller, and 5 % slower since each unit has a fresh worker."""

BLOCK_BYTES = 8 << 20
"""Bytes that are read, decoded and handed on at once, unless one record alone is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAs:
    """What a recipe says of how files are read, where their names and contents do not."""

    format: str = ""
    "A format's name; none: by the file's suffix."
    header: tuple[str, ...] = ()
    "The fields of a table without a line that names them."
    split_by: str = ""
    "Of plain text: what is a record."

    @classmethod
    def of(cls, source: SourceSpec) -> ReadAs:
        """What a recipe says of how the files are read."""
        return cls(
            format=source.format or "",
            header=tuple(source.header or ()),
            split_by=source.split_by or "",
        )


BY_NAME = ReadAs()
"A recipe that says nothing of it."


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file as it was found. `name` is its path from the recipe's folder, or its URL in a bucket."""

    location: Location
    stat: Stat
    name: str
    read_as: ReadAs = BY_NAME
    order: str = ""
    "By which files are ordered, where their names do not tell."
    held: bytes | None = None
    "All of it, where it was fetched before it is read."

    def open(self, start: int = 0, until: int | None = None) -> BinaryIO:
        """A sequential reader of the version that was found, from byte `start`; `until`: where reading will most likely end."""
        if self.held is not None:
            return io.BytesIO(self.held)
        if start == 0 and until is not None and until >= self.stat.size:
            until = None  # of an object that is asked for as a whole its store knows a checksum
        return self.location.open(start, until, self.stat.stamp)

    def open_random(self, ahead: int = 1 << 20) -> BinaryIO:
        """A seekable reader of the version that was found; from a store, so many bytes at least are asked for at a time."""
        if self.held is not None:
            return io.BytesIO(self.held)
        return self.location.open_random(self.stat, ahead)


def place(file: SourceFile) -> str:
    """By which files are ordered."""
    return file.order or file.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Whole files, or the split [start, end) of one file, in the ordinals of its format.

    The records of a unit fall into windows by the uncompressed byte at which they start, counted through all its files.
    A split of plain text is one window; how many windows a compressed file has is known only when it is read.
    """

    files: tuple[SourceFile, ...]
    start: int = 0
    end: int | None = None
    "None: to the end of each file."
    window_bytes: int = WINDOW_BYTES
    fields: tuple[str, ...] = ()
    "What is read of each record, where a format of its files reads by fields; none named: all of it."
    parsed: tuple[str, ...] = ()
    "Fields that hold lists or objects: where a format's cells are texts, theirs are JSON."
    blobs: tuple[str, ...] = ()
    "Fields that hold bytes: where a format's cells are texts, theirs are none."

    @property
    def name(self) -> str:
        """The path of the first file."""
        return self.files[0].name

    @property
    def place(self) -> tuple[str, int]:
        """By which units are ordered."""
        return place(self.files[0]), self.start

    def span(self, before: int = 0, memory: int = 4 << 30) -> Span:
        """What it reads of one of its files."""
        return Span(self, self.start, self.end, before, memory)


@dataclass(frozen=True, slots=True)
class Span:
    """What a unit reads of one of its files: a split of it, and where the windows lie in that."""

    unit: Unit
    start: int
    end: int | None
    before: int
    "Uncompressed bytes of the unit's files before this one."
    memory: int
    "Bytes that whoever reads may hold: half of them for what a compressed file says it needs."

    def window_of(self, position: int) -> int:
        """The window of a record that starts so many uncompressed bytes behind the split's start."""
        return (self.before + position) // self.unit.window_bytes

    def holds(self, ordinal: int) -> bool:
        return self.start <= ordinal and (self.end is None or ordinal < self.end)

    def next_edge(self, position: int) -> int:
        """The first position behind this one that belongs to the next window."""
        return (self.window_of(position) + 1) * self.unit.window_bytes - self.before

"""The files of a source and the work units that they are cut into.

A unit is small enough to be done again after a crash and large enough to fill a shard. It says what
to read and nothing else, so that whichever worker reads it gets the same records.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from mdsmix.storage import Location, Stat

if TYPE_CHECKING:
    from mdsmix.recipe import SourceSpec

WINDOW_BYTES = 96 << 20
"""Uncompressed bytes per window of text: a shard of 47 MB for English in uint16. With 128 MiB a run
is as fast and 35 MB larger; with 64 MiB it is as fast and 40 MB smaller, and has half as many
shards again.
"""

BLOCK_BYTES = 4 << 20
"""Bytes that are read, decoded and handed on at once, unless one record alone is longer. With 8 MB
wide text took 10 % more CPU time and 60 MB more of two workers' memory, as parquet 13 % and 220 MB;
with 2 MB no less than with 4.
"""


@dataclass(frozen=True, kw_only=True)
class ReadAs:
    """The recipe's settings for reading files, where names and contents of the files do
    not tell.
    """

    format: str = ""
    "The name of a format; empty: the file's suffix tells it."
    header: tuple[str, ...] = ()
    "The fields of a table that has no header line."
    split_by: str = ""
    "The record of plain text: `file`, `line` or `paragraph`."

    @classmethod
    def of(cls, source: SourceSpec) -> ReadAs:
        """The settings of a recipe's source."""
        return cls(
            format=source.format or "",
            header=tuple(source.header or ()),
            split_by=source.split_by or "",
        )


BY_NAME = ReadAs()
"The settings of a recipe that says nothing: names and contents of the files tell."


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file as it was found. `name` is its path from the recipe's folder, or its URL in a
    bucket.
    """

    location: Location
    stat: Stat
    name: str
    read_as: ReadAs = BY_NAME
    order: str = ""
    "The sort key of the file; empty: its name is the key."
    held: bytes | None = None
    "All bytes of the file, where they were fetched ahead."

    def open(self, start: int = 0, until: int | None = None) -> BinaryIO:
        """A sequential reader of the version that was found, from byte `start` on; `until`: the
        likely end of reading.
        """
        if self.held is not None:
            return io.BytesIO(self.held)
        if start == 0 and until is not None and until >= self.stat.size:
            until = None  # a store sends a checksum only with a whole object
        return self.location.open(start, until, self.stat.stamp)

    def open_random(self, ahead: int = 1 << 20) -> BinaryIO:
        """A seekable reader of the version that was found. `ahead`: the least bytes that a request
        to a store asks for.
        """
        if self.held is not None:
            return io.BytesIO(self.held)
        return self.location.open_random(self.stat, ahead)


def sort_key(file: SourceFile) -> str:
    """The sort key of a file."""
    return file.order or file.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Whole files, or the split [start, end) of one file, in the ordinals of its format.

    The records of a unit fall into windows by the uncompressed byte at which they start, counted
    through all its files. A split of plain text is one window; how many windows a compressed file
    has is known only when it is read.
    """

    files: tuple[SourceFile, ...]
    start: int = 0
    end: int | None = None
    "None: to the end of each file."
    window_bytes: int = WINDOW_BYTES
    fields: tuple[str, ...] = ()
    "The fields that are read of each record, where a format reads by fields; empty: all fields."
    parsed: tuple[str, ...] = ()
    "Fields that hold lists or objects: as JSON, in a format whose cells are texts."
    blobs: tuple[str, ...] = ()
    "Fields that hold bytes, also in a format whose other cells are texts."

    @property
    def name(self) -> str:
        """The path of the first file."""
        return self.files[0].name

    @property
    def sort_key(self) -> tuple[str, int]:
        """The sort key of a unit."""
        return sort_key(self.files[0]), self.start

    def span(self, before: int = 0, memory: int = 4 << 30) -> Span:
        """The unit's span of one of its files; `before` and `memory` as `Span` has them."""
        return Span(self, self.start, self.end, before, memory)


@dataclass(frozen=True, slots=True)
class Span:
    """The part that a unit reads of one of its files: a split, and the windows in the split."""

    unit: Unit
    start: int
    end: int | None
    before: int
    "Uncompressed bytes of the unit's files before this one."
    memory: int
    "Bytes that the reading process may hold. A compressed file's window may take half of them."

    def window_of(self, position: int) -> int:
        """The window of a record that starts `position` uncompressed bytes behind the split's
        start.
        """
        return (self.before + position) // self.unit.window_bytes

    def holds(self, ordinal: int) -> bool:
        return self.start <= ordinal and (self.end is None or ordinal < self.end)

    def next_edge(self, position: int) -> int:
        """The first position behind this one that belongs to the next window."""
        return (self.window_of(position) + 1) * self.unit.window_bytes - self.before

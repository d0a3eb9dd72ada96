"""The files of a source, and the work units that they are cut into.

A unit is small enough to be done again after a crash, and large enough to fill a shard. It says
which bytes or rows to read and nothing else, so whichever worker reads it gets the same records.
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
"""Bytes that are read, decoded and passed on at once, unless one record alone is longer. With 8 MB
wide text took 10 % more CPU time and 60 MB more of two workers' memory, as parquet 13 % and 220 MB.
With 2 MB it took no less of either than with 4.
"""


@dataclass(frozen=True, kw_only=True)
class ReadAs:
    """The recipe's settings for reading files whose names and contents do not suffice."""

    format: str = ""
    "The name of a format; empty: the file's suffix decides."
    header: tuple[str, ...] = ()
    "The fields of a table that has no header line."
    split_by: str = ""
    "The record of plain text: `file`, `line` or `paragraph`."

    @classmethod
    def of(cls, source: SourceSpec) -> ReadAs:
        """Return the settings of a recipe's source."""
        return cls(
            format=source.format or "",
            header=tuple(source.header or ()),
            split_by=source.split_by or "",
        )


BY_NAME = ReadAs()
"The settings of a recipe that sets none: names and contents of the files decide."


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file in the version that was found when the source was join_names."""

    location: Location
    stat: Stat
    name: str
    "The path from the recipe's folder, or the URL in a bucket."
    read_as: ReadAs = BY_NAME
    order: str = ""
    "The file's sort key; empty: its name."
    content: bytes | None = None
    "All bytes of the file if they were fetched ahead."

    def open(self, start: int = 0, until: int | None = None) -> BinaryIO:
        """Return a sequential reader from byte `start` on. `until`: where reading probably ends."""
        if self.content is not None:
            return io.BytesIO(self.content)
        if start == 0 and until is not None and until >= self.stat.size:
            until = None  # a store sends a checksum only with a whole object
        return self.location.open(start, until, self.stat.stamp)

    def open_random(self, ahead: int = 1 << 20) -> BinaryIO:
        """Return a seekable reader. `ahead`: the fewest bytes of a request to a store."""
        if self.content is not None:
            return io.BytesIO(self.content)
        return self.location.open_random(self.stat, ahead)


def sort_key(file: SourceFile) -> str:
    return file.order or file.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Whole files, or the split [start, end) of one file, in the ordinals of its format.

    A unit's records are divided into windows by the uncompressed byte at which each starts, counted
    through all files of the unit. A split of plain text is one window. How many windows a
    compressed file has is known only after reading it.
    """

    files: tuple[SourceFile, ...]
    start: int = 0
    end: int | None = None
    "None: to the end of each file."
    window_bytes: int = WINDOW_BYTES
    fields: tuple[str, ...] = ()
    "The fields that are read of each record, for a format that reads by fields; empty: all."
    parsed: tuple[str, ...] = ()
    "Fields with lists or objects, which a format whose cells are strings stores as JSON."
    blobs: tuple[str, ...] = ()
    "Fields with bytes, also in a format whose other cells are strings."

    @property
    def name(self) -> str:
        """The name of the first file."""
        return self.files[0].name

    @property
    def sort_key(self) -> tuple[str, int]:
        return sort_key(self.files[0]), self.start

    def span(self, before: int = 0, memory: int = 4 << 30) -> Span:
        """Return the span that this unit reads of one of its files; arguments as in `Span`."""
        return Span(self, self.start, self.end, before, memory)


@dataclass(frozen=True, slots=True)
class Span:
    """The range of one file that a unit reads: a split, divided into windows."""

    unit: Unit
    start: int
    end: int | None
    before: int
    "Uncompressed bytes of the unit's files before this one."
    memory: int
    "Bytes that the reading process may use; decompressing may take half of them."

    def window_of(self, position: int) -> int:
        """Return the window of a record.

        Args:
            position: uncompressed bytes from the split's start to the record.
        """
        return (self.before + position) // self.unit.window_bytes

    def holds(self, ordinal: int) -> bool:
        return self.start <= ordinal and (self.end is None or ordinal < self.end)

    def next_edge(self, position: int) -> int:
        """Return the first position after this one that belongs to the next window."""
        return (self.window_of(position) + 1) * self.unit.window_bytes - self.before

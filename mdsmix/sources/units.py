"""The files of a source, and the work units that they are divided into.

A work unit is a group of small files, or a split of a large one, which one worker converts. It is
small enough to be repeated after a crash, and large enough to fill a shard. It names only the bytes
or rows to read, so every worker that reads it gets the same records.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from mdsmix.storage import Location, Stat

if TYPE_CHECKING:
    from mdsmix.recipe import SourceSpec

WINDOW_BYTES = 96 << 20
"""Uncompressed bytes of a window (a slice of a work unit), which becomes a shard of 47 MB for
English text in uint16. Runs with 64 MiB and 128 MiB are as fast. 128 MiB takes 35 MB more memory;
64 MiB takes 40 MB less, but makes one and a half times as many shards.
"""

BLOCK_BYTES = 4 << 20
"""Bytes that are read, decoded and passed on at once, unless one record alone is longer. Compared
with 4 MB, blocks of 8 MB took 10 % more CPU time and 60 MB more memory (two workers, wide text);
for parquet 13 % and 220 MB. Blocks of 2 MB saved neither time nor memory.
"""


@dataclass(frozen=True, kw_only=True)
class ReadAs:
    """The recipe's settings for reading files, where a file's name and content do not decide."""

    format: str = ""
    "The name of a format; empty: the file's suffix decides."
    header: tuple[str, ...] = ()
    "The fields of a table that has no header line."
    split_by: str = ""
    "The part of a plain text file that is one record: `file`, `line` or `paragraph`."

    @classmethod
    def of(cls, source: SourceSpec) -> ReadAs:
        """Return the settings of a recipe's source."""
        return cls(
            format=source.format or "",
            header=tuple(source.header or ()),
            split_by=source.split_by or "",
        )


BY_NAME = ReadAs()
"The settings of a recipe that sets nothing: names and contents of the files decide."


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of a source, in the version that existed when the source's files were listed."""

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
        """Return a sequential reader from byte `start` on.

        Args:
            until: the byte at which reading probably ends; a store is asked for no more at first.
        """
        if self.content is not None:
            return io.BytesIO(self.content)
        if start == 0 and until is not None and until >= self.stat.size:
            until = None  # request the whole object: only then does a store send a checksum
        return self.location.open(start, until, self.stat.stamp)

    def open_random(self, ahead: int = 1 << 20) -> BinaryIO:
        """Return a seekable reader. `ahead`: the fewest bytes of a request to a store."""
        if self.content is not None:
            return io.BytesIO(self.content)
        return self.location.open_random(self.stat, ahead)


def sort_key(file: SourceFile) -> str:
    """Return the string by which the files of a source are sorted."""
    return file.order or file.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A work unit: whole files, or the split [start, end) of one file, in numbers as its format
    counts (`Format.ordinals`).

    A unit is divided into windows of `window_bytes` uncompressed bytes, counted through all of its
    files. A record belongs to the window that contains its first byte. A split of plain text is one
    window. The number of windows in a compressed file is known only after reading it.
    """

    files: tuple[SourceFile, ...]
    start: int = 0
    end: int | None = None
    "None: to the end of each file."
    window_bytes: int = WINDOW_BYTES
    fields: tuple[str, ...] = ()
    "The fields that are read of each record, for a format that reads by fields; empty: all."
    parsed: tuple[str, ...] = ()
    """Fields whose values are lists or objects. A format whose cells are strings, such as csv,
    contains them as JSON.
    """
    blobs: tuple[str, ...] = ()
    "Fields whose values are bytes, even in a format whose other cells are strings, such as tar."

    @property
    def name(self) -> str:
        """The name of the first file."""
        return self.files[0].name

    @property
    def sort_key(self) -> tuple[str, int]:
        return sort_key(self.files[0]), self.start

    def span(self, before: int = 0, memory: int = 4 << 30) -> Span:
        """Return the span that this unit reads of one of its files.

        Args:
            before: uncompressed bytes of the unit's earlier files.
            memory: bytes that the reading process may use.
        """
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
        """Return whether a record with this ordinal (`Format.ordinals`) starts in the split."""
        return self.start <= ordinal and (self.end is None or ordinal < self.end)

    def next_edge(self, position: int) -> int:
        """Return the position at which the window after that of `position` begins.

        Positions are uncompressed bytes from the split's start.
        """
        return (self.window_of(position) + 1) * self.unit.window_bytes - self.before

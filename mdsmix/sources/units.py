"""The files of a source, and the work units that they are divided into.

A work unit is a group of small files, or a split (a range) of a large file, which one worker
converts. It is small enough to be repeated after a crash, and large enough to fill a shard. A unit
names only the bytes or rows to read, so every worker that reads the unit gets the same records.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

from mdsmix.frozen import frozen
from mdsmix.storage import Location, Stat

if TYPE_CHECKING:
    from mdsmix.recipe import SourceSpec

WINDOW_BYTES = 96 << 20
"""Uncompressed bytes of a window (a slice of a work unit), which becomes a shard of 47 MB for
English text in uint16. Runs with 64 MiB and 128 MiB are as fast. 128 MiB takes 35 MB more memory;
64 MiB takes 40 MB less, but makes one and a half times as many shards.
"""

BLOCK_BYTES = 4 << 20
"""Bytes that are read, decoded and passed on at once, unless one record alone is longer.

Compared with blocks of 4 MB, blocks of 8 MB took 10 % more CPU time and 60 MB more memory (two
workers, wide text); for parquet 13 % and 220 MB. Blocks of 2 MB saved neither time nor memory.
"""


@frozen(kw_only=True)
class ReadAs:
    """The recipe's settings for reading files, for what a file's name and content do not show."""

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


@frozen(kw_only=True, slots=True)
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
    "All bytes of the file if they were fetched ahead; otherwise None."

    def open(self, start: int = 0, until: int | None = None) -> BinaryIO:
        """Return a reader of the file's stored bytes from byte `start` on, which is read from start
        to end.

        Args:
            until: the byte at which reading probably ends; a store is first asked only for the
                bytes up to there. None: the end of the file.
        """
        if self.content is not None:
            return io.BytesIO(self.content)
        if start == 0 and until is not None and until >= self.stat.size:
            until = None  # request the whole object: only then does a store send a checksum
        return self.location.open(start, until, self.stat.stamp)

    def open_random(self, ahead: int = 1 << 20) -> BinaryIO:
        """Return a reader of the file's stored bytes that can seek.

        Args:
            ahead: the least bytes of a request to a store.
        """
        if self.content is not None:
            return io.BytesIO(self.content)
        return self.location.open_random(self.stat, ahead)


def sort_key(file: SourceFile) -> str:
    """Return the sort key of a source's file: its name, or `SourceFile.order` for a data set whose
    own list orders its files.
    """
    return file.order or file.name


@frozen(kw_only=True, slots=True)
class Unit:
    """A work unit: the files, or the part of one file, that one worker converts at a time.

    A part of a file (a split) begins at ordinal `start` and ends before ordinal `end`. The format
    of the file decides what ordinals count: bytes, rows or samples (`Format.ordinals`).

    A unit is divided into windows of `window_bytes` uncompressed bytes, counted through all files
    of the unit. A record belongs to the window that contains its first byte. A split of plain text
    is one window. The number of windows in a compressed file is known only after reading the file.
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
    contains these values as JSON.
    """
    text_or_messages: tuple[str, ...] = ()
    """Fields whose values are strings or messages. In a format whose cells are strings, only cells
    with a JSON list or object are decoded.
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
        """Return the range that this unit reads of one of its files: from `start` to `end`. A unit
        of several files reads each of them whole.

        Args:
            before: uncompressed bytes of the unit's files before this file. Windows (slices of the
                unit) are counted from the first of these files.
            memory: bytes of memory that the reading process may use.
        """
        return Span(self, self.start, self.end, before, memory)


@frozen(slots=True)
class Span:
    """The range of one file that a unit reads: a split or the whole file, divided into windows of
    `Unit.window_bytes`.
    """

    unit: Unit
    start: int
    end: int | None
    before: int
    "Uncompressed bytes of the unit's files before this file."
    memory: int
    "Bytes that the reading process may use; decompressing may take half of them."

    def window_of(self, position: int) -> int:
        """Return the number of the window (a slice of the work unit, of `window_bytes` each) in
        which a record starts.

        Args:
            position: uncompressed bytes from the beginning of this range to the record.
        """
        return (self.before + position) // self.unit.window_bytes

    def holds(self, ordinal: int) -> bool:
        """Return whether a record with this ordinal (`Item.ordinal`) starts in the range."""
        return self.start <= ordinal and (self.end is None or ordinal < self.end)

    def next_edge(self, position: int) -> int:
        """Return where the window ends that contains `position`. A window is a slice of the work
        unit of `window_bytes` bytes.

        Both numbers count uncompressed bytes from the beginning of this range of the file. Example:
        with windows of 100 bytes, and 30 bytes in earlier files of the unit, `next_edge(10)` is 70.
        """
        return (self.window_of(position) + 1) * self.unit.window_bytes - self.before

"""Joining: at a publication the files of single units (ledger.py) are joined into segments.

The next run then reads a few files where it read one for each unit, and lists them on a few pages. It is done once enough units have
files of their own: segments are written first, and when the stream is published the files of the units are deleted, under the lease. A
run that is killed in between leaves units twice, which the next one mends, and no published byte depends on any of it. A job of an
array (`--part`) that has listed a file which is joined meanwhile does its unit again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from mdsmix.convert.job import hashes_name
from mdsmix.convert.ledger import FOLDER, Extent, parse, read_extents, write_segment
from mdsmix.convert.stored import DoneWindow, StoredUnits
from mdsmix.errors import Unreachable
from mdsmix.shards.lease import Lease
from mdsmix.storage import Location

FEWEST = 100
"Units with files of their own that are worth a segment: they are read in a second, 16 at a time and 20 ms each."
MOST_UNITS = 1000
"Of a segment: 4 MB as lines, 0.5 MB as stored."
MOST_BYTES = 32 << 20
"Of the blobs in a segment, which are held until it is written; one unit may have more."
AT_ONCE = 1000
"Files that are deleted before the lease is asked for again: a store takes so many in one request."


@dataclass(slots=True)
class Joining:
    """What the publication of these windows joins. Where the store fails nothing is lost but the next run's time."""

    folder: Location
    _left: dict[str, None] = field(default_factory=dict)
    "Files of windows of the stream that were not joined yet, in the order of the plan."
    _records: dict[str, bytes] = field(default_factory=dict)
    _blobs: dict[str, bytes] = field(default_factory=dict)
    _size: int = 0
    _joined: list[str] = field(default_factory=list)
    "Files that a segment holds by now."

    @staticmethod
    def of(
        folder: Location, stored: StoredUnits, windows: Iterable[DoneWindow], drops: bool
    ) -> Joining:
        own = {file: done.base for done in windows if (file := stored.file_of(done))}
        files = dict[str, None]()
        for file, base in own.items() if len(own) >= FEWEST else ():
            if drops or hashes_name(base) in stored.names:
                files[hashes_name(base)] = None
            files[file] = None  # last: a unit that lies twice is joined again
        return Joining(folder, files)

    def note(self, file: str, content: bytes) -> None:
        """A file, as it is read for the publication."""
        if file in self._left:
            del self._left[file]
            self._add(file, content)

    def finish(self, held: Lease) -> None:
        """Joins what was not noted, and deletes the files of the units."""
        with suppress(Unreachable):
            left = list(self._left)
            for file, content in zip(
                left, read_extents(self.folder, map(Extent, left)), strict=True
            ):
                self._add(file, content)
            self._flush()
            for begin in range(0, len(self._joined), AT_ONCE):
                if not held.is_held_still():
                    return
                (self.folder / FOLDER).delete_all(self._joined[begin : begin + AT_ONCE])

    def _add(self, file: str, content: bytes | None) -> None:
        found = parse(file, content) if content else None
        if not content or not found:  # the next run does it again
            return
        self._records |= found.records
        self._blobs |= {name: content[at.start : at.end] for name, at in found.blobs.items()}
        self._size += len(content)
        self._joined.append(file)
        if len(self._records) >= MOST_UNITS or self._size >= MOST_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._records or self._blobs:
            write_segment(self.folder, self._records.values(), self._blobs)
        self._records, self._blobs, self._size = {}, {}, 0

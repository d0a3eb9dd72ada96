"""Joining: at each publication the records and fingerprints of finished units go from files of their own into segments.

The next run then reads a few files where it read two for each unit, and lists them on a few pages. It is done once enough units have
files of their own: segments are written first, and when the stream is published the files of the units are deleted, under the lease. A
run that is killed in between leaves units twice, which the next one mends, and no published byte depends on any of it. A job of an
array (`--part`) that has listed a file which is joined meanwhile does its unit again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from mdsmix.convert.hashes import hashes_name, stored_hashes
from mdsmix.convert.ledger import FOLDER, UnitRecord
from mdsmix.convert.segments import shrink, write_segment
from mdsmix.convert.stored import StoredUnits
from mdsmix.errors import Unreachable
from mdsmix.shards.lease import Lease
from mdsmix.storage import Location

FEWEST = 100
"Units with files of their own that are worth a segment: they are read in a second, 16 at a time and 20 ms each."
MOST_UNITS = 1000
"Of a segment: 4 MB as lines, 0.5 MB as stored."
MOST_BYTES = 32 << 20
"Of the fingerprints in a segment, which are held until it is written."
OWN_BYTES = 2 << 20
"From this size on the fingerprints of a unit keep a file of their own."
AT_ONCE = 1000
"Files that are deleted before the lease is asked for again: a store takes so many in one request."


@dataclass(slots=True)
class Joining:
    """What the publication of these units joins. Where the store fails nothing is lost but the next run's time."""

    folder: Location
    stored: StoredUnits
    units: Sequence[UnitRecord]
    "Those of the stream, in the order of the plan."
    _left: dict[str, UnitRecord] = field(default_factory=dict)
    "Key of its fingerprints -> a unit that has files of its own and was not joined yet."
    _lines: list[bytes] = field(default_factory=list)
    _fingerprints: list[tuple[str, bytes]] = field(default_factory=list)
    _size: int = 0
    _written: list[str] = field(default_factory=list)
    _needless: list[str] = field(default_factory=list)
    "Files of units that were joined."

    def __post_init__(self) -> None:
        own = [unit for unit in self.units if unit.key not in self.stored.joined.records]
        if len(own) >= FEWEST:
            self._left = {unit.base or unit.key: unit for unit in own}

    def note(self, base: str, content: bytes) -> None:
        """The fingerprints of a unit, as they are read for the publication."""
        if unit := self._left.pop(base, None):
            self._add(unit, base, content)

    def finish(self, held: Lease) -> None:
        """Joins what was not noted, since nobody reads fingerprints where duplicates were dropped, and deletes the files of the units."""
        with suppress(Unreachable):
            if left := list(self._left):
                for base, content in zip(left, stored_hashes(self.folder, left, {}), strict=True):
                    self._add(self._left[base], base, content)
            self._flush()
            if self._written:
                self._shrink_older(held)
            for begin in range(0, len(self._needless), AT_ONCE):
                if not held.is_held_still():
                    return
                (self.folder / FOLDER).delete_all(self._needless[begin : begin + AT_ONCE])

    def _add(self, unit: UnitRecord, base: str, content: bytes | None) -> None:
        self._lines.append(orjson.dumps(unit))
        if content and len(content) < OWN_BYTES:
            self._fingerprints.append((base, content))
            self._size += len(content)
            self._needless.append(hashes_name(base))
        self._needless.append(unit.key)  # last: a unit that lies twice is joined again
        if len(self._lines) >= MOST_UNITS or self._size >= MOST_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._written.append(write_segment(self.folder, self._lines, self._fingerprints))
        self._lines, self._fingerprints, self._size = [], [], 0

    def _shrink_older(self, held: Lease) -> None:
        """Takes from segments the units that were done again since."""
        again = set(self._needless)
        for name, segment in self.stored.segments.items():
            left = segment.only(segment.records.keys() - again, segment.fingerprints)
            if len(left.records) < len(segment.records) and name not in self._written:
                shrink(self.folder, name, left, held.delete)

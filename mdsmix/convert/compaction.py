"""Compaction: at each publication the records and fingerprints of finished units go from files of their own into packs.

The next run then reads a few files where it read two for each unit, and lists them on a few pages. It is done once enough units have
files of their own, after the stream is published: packs are written first, then the files of the units are deleted, both under
the lease. A run that is killed in between leaves units twice, which the next compaction mends, and no published byte depends on
any of it. A job of an array (`--part`) that has listed a file which is packed meanwhile looks for it in the packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import orjson

from mdsmix.convert.hashes import hashes_name, stored_hashes
from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER, UnitRecord
from mdsmix.convert.packs import Pack, Sizes, rewrite, write_fingerprints, write_pack
from mdsmix.convert.stored import Stored
from mdsmix.errors import Unreachable
from mdsmix.shards.lease import Lease
from mdsmix.storage import Location, together

FEWEST = 100
"Units with files of their own that are worth a pack: they are read in a second, 16 at a time and 20 ms each."
A_PACK = 1000
"Units: 4 MB as lines, 0.5 MB as stored."
PIECE_BYTES = 2 << 20
"Of fingerprints in a file, and the size from which a unit keeps its own: 16 are read at a time."
AT_ONCE = 1000
"Files that are deleted before the lease is asked for again: a store takes so many in one request."


@dataclass(slots=True)
class Joining:
    """What files of units hold and a few files are to: noted as it is read for the publication, and written by the way."""

    folder: Location
    missing: dict[str, None]
    "Keys of which nothing was noted yet."
    files: dict[str, Sizes] = field(default_factory=dict)
    _held: list[tuple[str, bytes]] = field(default_factory=list)
    _size: int = 0

    def note(self, key: str, content: bytes) -> None:
        """What the file of a unit holds."""
        if key in self.missing:
            del self.missing[key]
            if len(content) < PIECE_BYTES:
                self._held.append((key, content))
                self._size += len(content)
            if self._size >= PIECE_BYTES:
                self._flush()

    def finish(self, rest: Iterator[bytes | None]) -> None:
        """Notes what else there is, of the keys that are missing and in their order, and writes it."""
        for key, content in zip(list(self.missing), rest, strict=True):
            if content:
                self.note(key, content)
        self._flush()

    def _flush(self) -> None:
        if self._held:
            name, sizes = write_fingerprints(self.folder, self._held)
            self.files[name] = sizes
        self._held, self._size = [], 0

    @property
    def keys(self) -> Iterator[str]:
        """Of all that was written."""
        return (key for sizes in self.files.values() for key, _ in sizes)


class Compaction:
    """What the publication of these units is to pack."""

    def __init__(self, job: Job, stored: Stored, units: Sequence[UnitRecord]) -> None:
        self._folder, packed = job.folder, stored.packed
        self.packed = packed
        self._units = {unit.key: unit for unit in units if unit.key not in packed.records}
        self.is_worth_it = len(self._units) >= FEWEST
        new = self._units.values() if self.is_worth_it else ()
        bases = dict.fromkeys(unit.base or unit.key for unit in new)
        missing = {base: None for base in bases if base not in packed.fingerprints}
        self.fingerprints = Joining(job.folder, missing)

    def finish(self, held: Lease) -> None:
        """Writes the packs and deletes what they hold. Where the store fails nothing is lost but the next run's time: the stream is published."""
        if self.is_worth_it:
            with suppress(Unreachable):
                self._finish(held)

    def _finish(self, held: Lease) -> None:
        # Where duplicates were dropped nobody has read the fingerprints.
        missing = list(self.fingerprints.missing)
        self.fingerprints.finish(stored_hashes(self._folder, missing, {}))
        new = together(lambda pack: write_pack(self._folder, pack), self._packs())
        for name, pack in self.packed.packs.items():
            left = {k: line for k, line in pack.records.items() if k not in self._units}
            if len(left) < len(pack.records) and name not in new:
                rewrite(self._folder, name, replace(pack, records=left), held.delete)
        self._delete(held)

    def _packs(self) -> Iterator[Pack]:
        lines, files = iter(self._units.items()), self.fingerprints.files
        while some := {key: orjson.dumps(unit) for key, unit in islice(lines, A_PACK)}:
            yield Pack(some, files)
            files = {}

    def _delete(self, held: Lease) -> None:
        names = [*self._units, *map(hashes_name, self.fingerprints.keys)]
        for begin in range(0, len(names), AT_ONCE):
            if not held.is_held_still():
                return
            (self._folder / FOLDER).delete_all(names[begin : begin + AT_ONCE])

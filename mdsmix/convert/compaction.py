"""Compaction: at each publication the records and fingerprints of finished units go from files of their own into packs.

The next run then reads a few files where it read two for each unit, and lists them on one page. It is done once enough units have
files of their own, after the stream is published: packs are written first, then the files of the units are deleted, both under
the lease. A run that is killed in between leaves units twice, which the next compaction mends, and no published byte depends on
any of it. A job of an array (`--part`) that has listed a file which is packed meanwhile looks for it in the packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

import orjson

from mdsmix.convert.hashes import hashes_name, stored_hashes
from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER, UnitRecord
from mdsmix.convert.packs import (
    Pack,
    Sizes,
    rewrite,
    write_fingerprints,
    write_pack,
)
from mdsmix.convert.stored import Stored
from mdsmix.errors import Unreachable
from mdsmix.shards.lease import Lease
from mdsmix.storage import together

FEWEST = 100
"Units with files of their own that are worth a pack: they are read in a second, 16 at a time and 20 ms each."
A_PACK = 1000
"Units: 4 MB as lines, 0.5 MB as stored."
PIECE_BYTES = 2 << 20
"Of fingerprints in a file, and the size from which a unit keeps its own: 16 are read at a time."
AT_ONCE = 1000
"Files that are deleted before the lease is asked for again: a store takes so many in one request."


class Compaction:
    """What the publication of these units is to pack. Fingerprints are noted as they are read for it, and written by the way."""

    def __init__(self, job: Job, stored: Stored, units: Sequence[UnitRecord]) -> None:
        self._folder, self._stored = job.folder, stored
        packed = stored.packed
        self._units = {unit.key: unit for unit in units if unit.key not in packed.records}
        self.is_worth_it = len(self._units) >= FEWEST and not job.limit
        bases = dict.fromkeys(unit.base or unit.key for unit in self._units.values())
        self._bases = [base for base in bases if base not in packed.fingerprints]
        self._missing = set(self._bases if self.is_worth_it else ())
        self._files, self._held, self._size = dict[str, Sizes](), list[tuple[str, bytes]](), 0

    def note(self, key: str, content: bytes) -> None:
        """The fingerprints of a unit, as they are stored."""
        if key in self._missing:
            self._missing.discard(key)
            if len(content) < PIECE_BYTES:
                self._held.append((key, content))
                self._size += len(content)
            if self._size >= PIECE_BYTES:
                self._write_fingerprints()

    def _write_fingerprints(self) -> None:
        if self._held:
            name, sizes = write_fingerprints(self._folder, self._held)
            self._files[name] = sizes
        self._held, self._size = [], 0

    def finish(self, held: Lease) -> None:
        """Writes the packs and deletes what they hold. Where the store fails nothing is lost but the next run's time: the stream is published."""
        if self.is_worth_it:
            with suppress(Unreachable):
                self._finish(held)

    def _finish(self, held: Lease) -> None:
        rest = [base for base in self._bases if base in self._missing]  # duplicates were dropped
        for key, content in zip(rest, stored_hashes(self._folder, rest, {}), strict=True):
            if content:
                self.note(key, content)
        self._write_fingerprints()
        new = together(lambda pack: write_pack(self._folder, pack), self._packs())
        for name, pack in self._stored.packed.packs.items():
            left = {k: line for k, line in pack.records.items() if k not in self._units}
            if len(left) < len(pack.records) and name not in new:
                rewrite(self._folder, name, Pack(left, pack.fingerprints), held.delete)
        self._delete(held)

    def _packs(self) -> Iterator[Pack]:
        lines, files = iter(self._units.items()), self._files
        while some := {key: orjson.dumps(unit) for key, unit in islice(lines, A_PACK)}:
            yield Pack(some, files)
            files = {}

    def _delete(self, held: Lease) -> None:
        packed = (key for sizes in self._files.values() for key, _ in sizes)
        names = [*self._units, *map(hashes_name, packed)]
        for begin in range(0, len(names), AT_ONCE):
            if not held.is_held_still():
                return
            (self._folder / FOLDER).delete_all(names[begin : begin + AT_ONCE])

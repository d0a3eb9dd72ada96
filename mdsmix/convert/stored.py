"""What lies at a target when the work on it begins: two listings and the segments of units, instead of a request for every shard and every
unit; and how a finished unit, its fingerprints and its bad records are found in it.

A window's record says which shards and other files it has. The window counts as done only while all of them are there. A listed
file stays, because `gc` and `repair` delete only under the lease, which this run holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.convert.job import Job, bad_name, hashes_name, unit_name, window_key
from mdsmix.convert.ledger import (
    FOLDER,
    UNIT,
    WHOLE,
    Extent,
    FinishedUnits,
    UnitRecord,
    blob_in,
    decompressed,
    joined,
    read_extents,
    read_segments,
    read_units,
)
from mdsmix.errors import Unreachable
from mdsmix.shards.counts import Records
from mdsmix.shards.index import StoredFile
from mdsmix.sources import Content, Window
from mdsmix.storage import Location, together

Fingerprints = NDArray[np.uint64]
"[n, 2]: the two halves of each; both are 0 where a record has none."
Note = Callable[[str, bytes], None]
"Is told of each file of a unit that is read, with its content."


class DoneWindow(NamedTuple):
    """A window that is done."""

    record: UnitRecord
    window: Window
    is_new: bool
    "This run has done it."

    @property
    def base(self) -> str:
        """What its fingerprints are named by."""
        return self.record.base or self.record.key


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """A unit that is done, by this run or by one before."""

    content: Content
    records: list[UnitRecord]
    "One per window."
    reused: frozenset[int] = frozenset()
    "Numbers of windows whose records were there already."

    @property
    def total(self) -> Records:
        """What became of its records."""
        return sum((record.records for record in self.records), Records())

    @property
    def read(self) -> int:
        return self.total.read

    @property
    def windows(self) -> Iterator[DoneWindow]:
        for record, window in zip(self.records, self.content.windows, strict=True):
            yield DoneWindow(record, window, window.number not in self.reused)


@dataclass(frozen=True, slots=True)
class StoredUnits:
    """What lies at a target. A shard of another size is not the shard."""

    names: frozenset[str] = frozenset()
    "Of the files in the ledger."
    joined: FinishedUnits = field(default_factory=FinishedUnits)
    "What all segments hold, less the records that have files of their own."
    own: Mapping[str, str] = field(default_factory=dict)
    "Key of a unit -> its own file."
    shards: frozenset[tuple[str, int]] = frozenset()
    "Names and sizes of files in the target and in its versions."

    @property
    def keys(self) -> Iterable[str]:
        return (*self.joined.records, *self.own)

    def find(self, job: Job, window: Window, dropped: bytes = b"") -> UnitRecord | None:
        """The record of a finished window, None where the window is to be done (again): it never was, or its shards are gone."""
        key = window_key(job, window, dropped)
        file = self._file(key, window)
        units = read_units(job.folder, file) if file else self.joined
        found = units.record(key) if units else None
        if found is None or not job.trusts(found.backend):
            return None
        name = bad_name(key, window)
        if found.records.bad and not (f"{name}.unit" == file or name in self.joined.blobs):
            return None
        files: list[StoredFile] = [shard.stored for shard in found.shards]
        files += [side.stored for side in found.side_files]
        return found if all(_has(self.shards, each) for each in files) else None

    def _file(self, key: str, window: Window) -> str:
        """The file of its own that a window of this key has; blank where it has none."""
        own = unit_name(key, window)
        return own if own in self.names else self.own.get(key, "")

    def file_of(self, done: DoneWindow) -> str:
        """The file that holds this window alone; blank where a segment holds it."""
        key = done.record.key
        return unit_name(key, done.window) if done.is_new else self._file(key, done.window)

    def keeps_hashes(self, base: str) -> bool:
        return base in self.joined.blobs or base in self.own or hashes_name(base) in self.names

    def hashes_of(self, base: str, file: str = "") -> Extent:
        """Where fingerprints lie. `file`: that of their window."""
        if found := self.joined.blobs.get(base):
            return found
        name = hashes_name(base)
        return Extent(name if name in self.names else file or self.own.get(base, name))

    def bad_of(self, done: DoneWindow) -> Extent:
        """Where the bad records of a window lie."""
        name = bad_name(done.record.key, done.window)
        in_segment = None if done.is_new or f"{name}.unit" in self.names else self.joined.blobs
        return (in_segment or {}).get(name) or Extent(f"{name}.unit")


def _has(shards: Collection[tuple[str, int]], file: StoredFile) -> bool:
    return (file.basename, file.bytes) in shards


def list_stored(job: Job) -> StoredUnits:
    target, *versions = job.shard_folders
    kept, *shards = together(lambda at: dict(at.list()), [target / FOLDER, target, *versions])
    names = sorted(kept, key=lambda name: kept[name].modified)
    own = {found[1]: found[0] for found in filter(None, map(UNIT.fullmatch, names))}
    return StoredUnits(
        names=frozenset(names),
        joined=joined(read_segments(target, names).values(), own),
        own=own,
        shards=frozenset((name, stat.size) for of in shards for name, stat in of.items()),
    )


def read_blobs(
    folder: Location, wanted: Sequence[tuple[str, Extent]], note: Note | None = None
) -> Iterator[bytes]:
    """The blobs of these names, as they are stored, in their order; Unreachable where one is gone or cut off."""
    extents = [at for _, at in wanted]
    for (name, at), found in zip(wanted, read_extents(folder, extents), strict=True):
        blob = blob_in(found, name) if at.bytes == WHOLE else found
        if blob is None or (at.bytes not in (WHOLE, len(blob))):
            raise lost(folder, at)
        if note and found and at.bytes == WHOLE:
            note(at.file, found)
        yield blob


def read_hashes(
    folder: Location, wanted: Sequence[tuple[str, Extent]], note: Note | None = None
) -> Iterator[Fingerprints]:
    """The fingerprints of these keys; uint64 [n, 2] each. Unreachable where some are damaged."""
    for (_, at), blob in zip(wanted, read_blobs(folder, wanted, note), strict=True):
        content = decompressed(blob)
        if content is None or len(content) % 16:
            raise lost(folder, at)
        yield np.frombuffer(content, "<u8").reshape(-1, 2)


def lost(folder: Location, at: Extent) -> Unreachable:
    return Unreachable(
        f"{folder / FOLDER / at.file} is damaged or gone, and it says what work units hold: run the same command with --verify-target, "
        "which does these units again"
    )

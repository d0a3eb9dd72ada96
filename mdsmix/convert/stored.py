"""What lies at a target when the work on it begins: two listings and the segments of units, instead of a request for every shard and every
unit; and how a finished unit, its fingerprints and its bad records are found in it.

A window's record says which shards and other files it has. The window counts as done only while all of them are there. A listed
file stays, because `gc` and `repair` delete only under the lease, which this run holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.convert.job import Dropped, Job, bad_name, hashes_name, unit_name, window_key
from mdsmix.convert.ledger import (
    FINGERPRINTS,
    FOLDER,
    SEGMENT,
    UNIT,
    FinishedUnits,
    UnitRecord,
    bytes_of,
    decompressed,
    few_at_once,
    joined,
    lost,
    parse,
    read_blobs,
    read_segments,
    read_units,
    write_segment,
)
from mdsmix.errors import Unreachable
from mdsmix.shards.counts import Records
from mdsmix.shards.lease import Lease
from mdsmix.shards.shard_files import SHARD
from mdsmix.shards.side_files import NAMES
from mdsmix.sources import Content, Window
from mdsmix.storage import Location, together
from mdsmix.words import plural

Fingerprints = NDArray[np.uint64]
"[n, 2]: the two halves of each; both are 0 where a record has none."


class DoneWindow(NamedTuple):
    """A window that is done."""

    record: UnitRecord
    window: Window
    is_new: bool
    "This run has done it."

    @property
    def bad_name(self) -> str:
        """Of its bad records."""
        return bad_name(self.record.key, self.window)

    @property
    def file(self) -> str:
        """What its worker has written."""
        return unit_name(self.record.key, self.window)

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
    own: dict[str, str] = field(default_factory=dict)
    "Key of a unit -> its own file."
    shards: frozenset[tuple[str, int]] = frozenset()
    "Names and sizes of files in the target and in its versions."

    def find(self, job: Job, window: Window, dropped: bytes = b"") -> UnitRecord | None:
        """The record of a finished window, None where the window is to be done (again): it never was, or its shards are gone."""
        key = window_key(job, window, dropped)
        file = self.file_of(key, window)
        units = read_units(job.folder, file) if file else self.joined
        found = units.record(key) if units else None
        if found is None or not job.trusts(found.backend):
            return None
        name = bad_name(key, window)
        if found.records.bad and not (f"{name}.unit" == file or name in self.joined.blobs):
            return None
        files = [*(s.stored for s in found.shards), *(s.stored for s in found.side_files)]
        return found if self.shards.issuperset((of.basename, of.bytes) for of in files) else None

    def find_all(
        self, job: Job, windows: Iterable[Window], dropped: Dropped
    ) -> dict[int, UnitRecord]:
        """By their numbers, the records of those windows of a unit that are finished."""
        found = {w.number: self.find(job, w, dropped.get(w.number, b"")) for w in windows}
        return {number: record for number, record in found.items() if record}

    def file_of(self, key: str, window: Window) -> str:
        """The file of its own that a window of this key has; blank where a segment holds it, or none."""
        own = unit_name(key, window)
        return own if own in self.names else self.own.get(key, "")

    def hashes_of(self, base: str, key: str = "") -> str:
        """The file in which fingerprints lie; `key`: of the unit that they are of, where that is another."""
        if at := self.joined.blobs.get(base):
            return at.file
        name = hashes_name(base)
        return name if name in self.names else self.own.get(base) or self.own.get(key, name)

    def bad_of(self, done: DoneWindow) -> str:
        """The file in which the bad records of a window lie."""
        at = None if done.file in self.names else self.joined.blobs.get(done.bad_name)
        return at.file if at else done.file


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


def read_hashes(folder: Location, wanted: Sequence[tuple[str, str]]) -> Iterator[Fingerprints]:
    """The fingerprints of these keys in these files; uint64 [n, 2] each. Unreachable where some are damaged."""
    for (_, file), blob in zip(wanted, read_blobs(folder, wanted), strict=True):
        content = decompressed(blob)
        if content is None or len(content) % 16:
            raise lost(folder, file)
        yield np.frombuffer(content, "<u8").reshape(-1, 2)


FEWEST = 100
"Units with files of their own that are worth a segment: they are read in a second, 16 at a time and 20 ms each."
MOST_UNITS = 1000
"Of a segment: 4 MB as lines, 0.5 MB as stored."
MOST_BYTES = 4 << 20
"Of the blobs in a segment, which is read whole; one unit may have more."


def join(
    folder: Location, stored: StoredUnits, windows: Sequence[DoneWindow], drops: bool
) -> tuple[StoredUnits, list[str]]:
    """What lies at the target now that these windows of a stream are done, and the files that segments hold by now, which go when the
    stream is published.

    The next run then reads a few files where it read one for each unit. A run that is killed before the files are deleted leaves units
    twice, which the next one mends, and no published byte depends on any of it. A job of an array (`--part`) that has listed a file
    which is joined meanwhile does its unit again.
    """
    new = {done.file: done.record.key for done in windows if done.is_new}
    names = stored.names | new.keys()
    stored = replace(stored, names=names, own=stored.own | {new[file]: file for file in new})
    own = {f: done.base for done in windows if (f := stored.file_of(done.record.key, done.window))}
    if len(own) < FEWEST:
        return stored, []
    # The unit last: one that lies twice is joined again.
    files = [f for file, base in own.items() for f in (hashes_name(base), file)]
    gone, segments = list[str](), list[FinishedUnits]()
    for some, records, blobs in _gathered(folder, [f for f in files if drops or f in names]):
        segments.append(write_segment(folder, records.values(), blobs))
        gone += some
    left = {key: file for key, file in stored.own.items() if file not in gone}
    every = joined([stored.joined, *segments])
    return replace(stored, names=names - set(gone), joined=every, own=left), gone


def _gathered(
    folder: Location, files: Sequence[str]
) -> Iterator[tuple[list[str], dict[str, bytes], dict[str, bytes]]]:
    """The names, records and blobs of these files, as many as a segment holds; a damaged file is passed over, and the next run does its
    unit again."""
    names, records, blobs = list[str](), dict[str, bytes](), dict[str, bytes]()
    for file, content in zip(files, few_at_once(partial(bytes_of, folder), files), strict=True):
        if units := parse(file, content):
            names.append(file)
            records |= units.records
            blobs |= {name: content[at.start : at.end] for name, at in units.blobs.items()}
        is_full = len(records) >= MOST_UNITS or sum(map(len, blobs.values())) >= MOST_BYTES
        if names and (is_full or file == files[-1]):
            yield names, records, blobs
            names, records, blobs = [], {}, {}


def delete_joined(folder: Location, files: Sequence[str], held: Lease) -> None:
    """Deletes files that segments hold. Where the store fails nothing is lost but the next run's time."""
    with suppress(Unreachable):
        if held.is_held_still():
            (folder / FOLDER).delete_all(files)


BLOCK = 1 << 20


def delete_damaged(job: Job, held: Lease, say: Callable[[str], None]) -> str:
    """Deletes the files at the target that are not what their names say, and calls `say` for each. Returns a sentence on what was checked
    and found. Unreachable where one cannot be read.

    A run trusts a shard that lies there in its full size. Here every shard that it might reuse, those of older versions too, is read and
    hashed, which needs no index; a unit whose record names a missing shard is then converted again. A shard that only an older index or
    version names is not made again: its reader then misses a shard, where it would have trained on damage.
    """
    places = [*job.shard_folders, job.folder / FOLDER]
    lying = [place / name for place in places for name, _ in place.list()]
    looked_at = [at for at in lying if _HASHED.fullmatch(at.name) or _UNITS.fullmatch(at.name)]
    whole = together(is_whole, looked_at)
    damaged = [at for at, is_sound in zip(looked_at, whole, strict=True) if not is_sound]
    for at in damaged:
        say(f"{job.name}: {at} is damaged: it is deleted, and made anew if the stream needs it")
        held.delete(at)
    result = f"{len(damaged):,} damaged, made anew" if damaged else "all whole"
    shards = [at for at in looked_at if SHARD.fullmatch(at.name)]
    return f"{plural(len(shards), 'shard')} at the target read and hashed: {result}"


_HASHED = re.compile("|".join([SHARD.pattern, SEGMENT.pattern, *NAMES.values()]))
"Files whose names begin with the hash of their bytes."
_UNITS = re.compile(f"{UNIT.pattern}|{FINGERPRINTS.pattern}")


def is_whole(at: Location) -> bool:
    """Whether a file holds what its name says, or of a unit, all blobs."""
    if _HASHED.fullmatch(at.name):
        return at.name.startswith(stored_hash(at))
    stored = at.read()
    found = parse(at.name, stored)
    blobs = [stored[blob.start : blob.end] for blob in found.blobs.values()] if found else [b""]
    return None not in map(decompressed, blobs)


def stored_hash(at: Location) -> str:
    """The xxh128 that the name of a shard, of a file beside the manifest or of a segment begins with where it is whole."""
    digest = xxhash.xxh128()
    with at.open() as stored:
        while block := stored.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()

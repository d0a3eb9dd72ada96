"""Finds finished units, their fingerprints and their bad records at a target, when the work on it
begins. It takes two listings and the segments of units, instead of a request for every shard and
every unit.

A window's record says which shards and other files it has. The window counts as done only while all
of them are there. A listed file stays, because `gc` and `repair` delete only under the lease, which
this run holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.conversion.job import Dropped, Job, bad_name, hashes_name, unit_name, window_key
from mdsmix.conversion.unit_files import (
    FINGERPRINTS,
    FOLDER,
    SEGMENT,
    UNIT,
    UnitFile,
    UnitRecord,
    bytes_of,
    gathered,
    lost,
    names_in,
    parse,
    read_blobs,
    read_units,
    record_of,
    write_segment,
)
from mdsmix.errors import Unreachable
from mdsmix.messages import Say, plural
from mdsmix.shards.counts import Records
from mdsmix.shards.lease import Lease
from mdsmix.shards.shard_files import SHARD_NAME, decompress_frame
from mdsmix.shards.side_files import NAME_PATTERNS
from mdsmix.sources import Content, Window
from mdsmix.storage import Location, map_in_batches, map_threads

Fingerprints = NDArray[np.uint64]
"uint64 [n, 2]: the two halves of each fingerprint; both are 0 where a record has none."


class DoneWindow(NamedTuple):
    """A window that is done."""

    record: UnitRecord
    window: Window
    is_new: bool
    "This run has done it."

    @property
    def bad_name(self) -> str:
        """The name of its bad records."""
        return bad_name(self.record.key, self.window)

    @property
    def file(self) -> str:
        """The name of the file that its worker wrote."""
        return unit_name(self.record.key, self.window)

    @property
    def base(self) -> str:
        """The key that names its fingerprints."""
        return self.record.base or self.record.key


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """A unit that is done, by this run or by one before."""

    content: Content
    records: list[UnitRecord]
    "One per window."
    reused: frozenset[int]
    "Numbers of windows whose records were there already."

    @property
    def total(self) -> Records:
        """What became of its records."""
        return sum((record.records for record in self.records), Records())

    @property
    def windows(self) -> Iterator[DoneWindow]:
        for record, window in zip(self.records, self.content.windows, strict=True):
            yield DoneWindow(record, window, window.number not in self.reused)


@dataclass(frozen=True)
class StoredUnits:
    """The finished units and the shards at a target. A shard counts only in its full size."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Key of a unit, name of its bad records, file name of its fingerprints -> the file or segment
    that holds this, the newest one.
    """
    segments: Mapping[str, UnitFile] = field(default_factory=dict)
    shards: frozenset[tuple[str, int]] = frozenset()
    "Names and sizes of files in the target and in its versions."

    def find(self, job: Job, window: Window, dropped: bytes) -> UnitRecord | None:
        """The record of a finished window, None where the window is to be done (again): it never
        was, or its shards are gone.
        """
        key = window_key(job, window, dropped)
        file = self.file_of(key, window)
        units = self.segments.get(file) or read_units(job.folder, file)
        found = record_of(units.records.get(key, b""))
        if found is None or not job.trusts(found.backend):
            return None
        if found.records.bad and bad_name(key, window) not in self.files:
            return None
        files = [*(of.stored for of in found.shards), *(of.stored for of in found.side_files)]
        return found if self.shards.issuperset((of.basename, of.bytes) for of in files) else None

    def find_all(
        self, job: Job, windows: Iterable[Window], dropped: Dropped
    ) -> dict[int, UnitRecord]:
        """Number -> record, of the finished windows among those of a unit."""
        found = {w.number: self.find(job, w, dropped.get(w.number, b"")) for w in windows}
        return {number: record for number, record in found.items() if record}

    def file_of(self, key: str, window: Window) -> str:
        """The file or segment that holds a unit of this key, of this window where there are
        several; blank where there is none.
        """
        return self.files.get(bad_name(key, window)) or self.files.get(key, "")

    def hashes_of(self, base: str) -> str:
        """The file or segment that holds the fingerprints of this key; blank where there
        is none.
        """
        return self.files.get(hashes_name(base), "")


def list_stored(job: Job) -> StoredUnits:
    target, *versions = job.shard_folders
    kept, *shards = map_threads(lambda at: dict(at.list()), [target / FOLDER, target, *versions])
    names = sorted(kept, key=lambda name: kept[name].modified)
    segment_files = list(filter(SEGMENT.fullmatch, names))
    segments = dict(
        zip(segment_files, map_threads(partial(read_units, target), segment_files), strict=True)
    )
    files = dict[str, str]()
    for name, units in segments.items():
        files |= names_in(units, name)
    sizes = frozenset((name, stat.size) for of in shards for name, stat in of.items())
    return StoredUnits(files | _own(names), segments, sizes)


def _own(names: Iterable[str]) -> dict[str, str]:
    """Name of a part of a unit's file -> the unit's file, told by file names alone."""
    found = dict[str, str]()
    for name in names:
        if unit := UNIT.fullmatch(name):
            found |= dict.fromkeys((unit[1], name.removesuffix(".unit")), name)
        elif FINGERPRINTS.fullmatch(name):
            found[name] = name
    return found


def read_hashes(folder: Location, wanted: Sequence[tuple[str, str]]) -> Iterator[Fingerprints]:
    """The fingerprints of these keys in these files; uint64 [n, 2] each. Unreachable where some are
    damaged.
    """
    for (_, file), blob in zip(wanted, read_blobs(folder, wanted), strict=True):
        content = decompress_frame(blob)
        if content is None:
            raise lost(folder, file)
        yield np.frombuffer(content, "<u8").reshape(-1, 2)


FEWEST = 100
"""Units with files of their own that are worth a segment: they are read in a second, 16 at a time
and 20 ms each.
"""
MOST_FILES = 1000
"The most files in a segment: 4 MB of records as lines, 0.5 MB as stored."
MOST_BYTES = 4 << 20
"The most bytes of the files in a segment, which is read whole; one file may have more."


def join(
    folder: Location, stored: StoredUnits, windows: Sequence[DoneWindow], drops: bool
) -> tuple[StoredUnits, list[str]]:
    """Joins the files of finished windows into segments. Returns the units at the target after it,
    and the joined files, which are deleted when the stream is published.

    The next run then reads a few files instead of one for each unit. A run that is killed before
    the files are deleted leaves units twice, which the next run mends. A unit is done again where
    its file is damaged, or where a job of an array (`--part`) had listed the file before it was
    joined. No published byte depends on any of this.
    """
    files = {**stored.files, **_own(done.file for done in windows if done.is_new)}
    stored, own = replace(stored, files=files), dict[str, str]()
    for done in windows:
        file = stored.file_of(done.record.key, done.window)
        if UNIT.fullmatch(file):
            own[file] = hashes_name(done.base)
    if len(own) < FEWEST:
        return stored, []
    # Fingerprints before their unit, so that they go first: a unit's file that stays is joined
    # again.
    each = ((hashes, file) if drops else (file,) for file, hashes in own.items())
    gone = [*chain.from_iterable(each)]
    contents = map_in_batches(partial(bytes_of, folder), gone)
    for some in gathered(contents, lambda of: max(len(of) / MOST_BYTES, 1 / MOST_FILES), 1):
        files |= write_segment(folder, some)
    return stored, gone


def delete_joined(folder: Location, files: Sequence[str], held: Lease) -> None:
    """Deletes files that segments hold. Where the store fails nothing is lost but the next run's
    time.
    """
    with suppress(Unreachable):
        if held.is_held_recently():
            (folder / FOLDER).delete_all(files)


BLOCK = 1 << 20
_HASHED = [SHARD_NAME.pattern, SEGMENT.pattern, *NAME_PATTERNS.values()]
"Files whose names begin with the hash of their bytes."
_LOOKED_AT = re.compile("|".join([*_HASHED, UNIT.pattern, FINGERPRINTS.pattern]))


def delete_damaged(job: Job, held: Lease, say: Say) -> str:
    """Deletes the files at the target that are not what their names say, and calls `say` for each.
    Returns a sentence on what was checked and found. Unreachable where one cannot be read.

    A run trusts a shard that lies there in its full size. Here every shard that it might reuse,
    those of older versions too, is read and hashed, which needs no index; a unit whose record names
    a missing shard is then converted again. A shard that only an older index or version names is
    not made again: its reader then misses a shard, where it would have trained on damage.
    """
    places = [*job.shard_folders, job.folder / FOLDER]
    files = [at / name for at in places for name, _ in at.list() if _LOOKED_AT.fullmatch(name)]
    damaged = [
        at for at, found in zip(files, map_threads(is_whole, files), strict=True) if not found
    ]
    for at in damaged:
        say(f"{job.name}: {at} is damaged: it is deleted, and made anew if the stream needs it")
        held.delete(at)
    result = f"{len(damaged):,} damaged, made anew" if damaged else "all whole"
    return f"{plural(len(files), 'file')} at the target read and hashed: {result}"


def is_whole(at: Location) -> bool:
    """Whether a file has the hash that its name begins with; of a unit's own file, whether all its
    blobs are whole.
    """
    if not at.name.endswith((".unit", ".hashes")):
        return at.name.startswith(stored_hash(at))
    stored = at.read()
    units = parse(stored)
    blobs = [decompress_frame(stored[blob]) for blob in units.blobs.values()]
    return bool(blobs or units.records) and None not in blobs


def stored_hash(at: Location) -> str:
    """xxh128 of a file's bytes, with which the name of a shard, a segment or a file beside the
    manifest begins where it is whole.
    """
    digest = xxhash.xxh128()
    with at.open() as stored:
        while block := stored.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()

"""Finished units, their fingerprints and their bad records at a target: find them when a conversion
begins, and join their files when it publishes.

Finding takes two listings and reading the segments, not a request for every shard and every unit. A
window counts as done only if all shards and other files that its record names are listed. A listed
file stays, because `gc` and `repair` delete only under the lease, which this run has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.conversion.job import Dropped, Job
from mdsmix.conversion.keys import (
    bad_records_name,
    hashes_file_name,
    unit_file_name,
    window_key,
)
from mdsmix.conversion.unit_files import (
    FINGERPRINTS,
    FOLDER,
    SEGMENT,
    UNIT,
    BlobRef,
    UnitFile,
    UnitRecord,
    make_lost_error,
    map_names_to_file,
    parse_record,
    parse_unit_file,
    read_blobs,
    read_if_exists,
    read_unit_file,
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
"uint64 [n, 2]: the two halves of each fingerprint; both are 0 if the record has none."


class DoneWindow(NamedTuple):
    """A converted window."""

    record: UnitRecord
    window: Window
    is_new: bool
    "Whether this run converted it."

    @property
    def bad_records_name(self) -> str:
        return bad_records_name(self.record.key, self.window)

    @property
    def file(self) -> str:
        """The name of the file that its worker wrote."""
        return unit_file_name(self.record.key, self.window)

    @property
    def base(self) -> str:
        """The key that names its fingerprints."""
        return self.record.base or self.record.key


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """A converted unit, of this run or an earlier one."""

    content: Content
    records: list[UnitRecord]
    "One per window."
    reused: frozenset[int]
    "Numbers of the windows that were converted before this run."

    @property
    def total(self) -> Records:
        """The counts of its records by what became of them."""
        return sum((record.records for record in self.records), Records())

    @property
    def windows(self) -> Iterator[DoneWindow]:
        for record, window in zip(self.records, self.content.windows, strict=True):
            yield DoneWindow(record, window, window.number not in self.reused)


@dataclass(frozen=True)
class StoredUnits:
    """The finished units and the shards at a target. A shard counts only in its full size."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Key of a unit, name of its bad records or file name of its fingerprints -> the newest file or
    segment that contains it.
    """
    segments: Mapping[str, UnitFile] = field(default_factory=dict)
    shards: frozenset[tuple[str, int]] = frozenset()
    "Names and sizes of files in the target and in its versions."

    def find_record(self, job: Job, window: Window, dropped: bytes) -> UnitRecord | None:
        """Return the record of a window that need not be converted. None if the window never was
        converted, or its shards are gone.
        """
        key = window_key(job, window, dropped)
        file = self.find_file(key, window)
        unit_file = self.segments.get(file) or read_unit_file(job.folder, file)
        record = parse_record(unit_file.records.get(key, b""))
        if record is None or not job.trusts(record.backend):
            return None
        if record.records.bad and bad_records_name(key, window) not in self.files:
            return None
        files = [shard.stored for shard in record.shards]
        files += [side_file.stored for side_file in record.side_files]
        is_complete = all((file.basename, file.bytes) in self.shards for file in files)
        return record if is_complete else None

    def find_records(
        self, job: Job, windows: Iterable[Window], dropped: Dropped
    ) -> dict[int, UnitRecord]:
        """Return number -> record of those windows of a unit that need not be converted."""
        records = dict[int, UnitRecord]()
        for window in windows:
            record = self.find_record(job, window, dropped.get(window.number, b""))
            if record:
                records[window.number] = record
        return records

    def find_file(self, key: str, window: Window) -> str:
        """Return the name of the file or segment with the record of this key, the window's own if
        several windows have the key; empty if there is none.
        """
        return self.files.get(bad_records_name(key, window)) or self.files.get(key, "")

    def find_hashes_file(self, base: str) -> str:
        """Return the name of the file or segment with the fingerprints of the `lines_key` `base`;
        empty if there is none.
        """
        return self.files.get(hashes_file_name(base), "")


def list_stored(job: Job) -> StoredUnits:
    """List the finished units at a job's target and the shards that it may reuse."""
    target, *versions = job.shard_folders
    folders = [target / FOLDER, target, *versions]
    unit_files, *shard_listings = map_threads(lambda folder: dict(folder.list()), folders)
    names = sorted(unit_files, key=lambda name: unit_files[name].modified)
    segment_names = list(filter(SEGMENT.fullmatch, names))
    heads = map_threads(partial(read_unit_file, target), segment_names)
    segments = dict(zip(segment_names, heads, strict=True))
    files = dict[str, str]()
    for name, head in segments.items():
        files |= map_names_to_file(head, name)
    files |= _map_names_to_own_files(names)
    shards = set[tuple[str, int]]()
    for listing in shard_listings:
        shards.update((name, stat.size) for name, stat in listing.items())
    return StoredUnits(files, segments, frozenset(shards))


def _map_names_to_own_files(file_names: Iterable[str]) -> dict[str, str]:
    """Map the names of what units' own files contain to these files, as `map_names_to_file` does.
    The file names say enough, so no file is read.
    """
    files = dict[str, str]()
    for file_name in file_names:
        if match := UNIT.fullmatch(file_name):
            files[match[1]] = file_name
            files[file_name.removesuffix(".unit")] = file_name
        elif FINGERPRINTS.fullmatch(file_name):
            files[file_name] = file_name
    return files


def read_hashes(folder: Location, refs: Sequence[BlobRef]) -> Iterator[Fingerprints]:
    """Yield these blobs as fingerprints, uint64 [n, 2] each.

    Raises Unreachable if one is damaged.
    """
    for ref, blob in zip(refs, read_blobs(folder, refs), strict=True):
        content = decompress_frame(blob)
        if content is None:
            raise make_lost_error(folder, ref.file)
        yield np.frombuffer(content, "<u8").reshape(-1, 2)


FEWEST = 100
"""Join from so many units with files of their own. Fewer are read in a second, 16 at a time and
20 ms each.
"""
MOST_FILES = 1000
"The most files in a segment: 4 MB of records as lines, 0.5 MB as stored."
MOST_BYTES = 4 << 20
"The most bytes of the files in a segment, which is read whole; one file may have more."


class Joined(NamedTuple):
    """The units at a target after their files were joined."""

    stored: StoredUnits
    obsolete: list[str]
    "The files that segments contain now. They are deleted when the stream is published."


def join_unit_files(
    folder: Location, stored: StoredUnits, windows: Sequence[DoneWindow], drops: bool
) -> Joined:
    """Join the files of finished windows into segments, so that the next run reads a few files
    instead of one per unit.

    A run that is killed before the files are deleted leaves units twice, and the next run joins
    them again. A unit is converted again if its file is damaged, or if a job of an array (`--part`)
    listed the file before it was joined. No published byte depends on any of this.

    Args:
        drops: whether fingerprints have files of their own (`duplicates: drop`).
    """
    files = dict(stored.files)
    files |= _map_names_to_own_files(done.file for done in windows if done.is_new)
    stored = replace(stored, files=files)
    hashes_files = dict[str, str]()  # a unit's own file -> the file of its fingerprints
    for done in windows:
        file = stored.find_file(done.record.key, done.window)
        if UNIT.fullmatch(file):
            hashes_files[file] = hashes_file_name(done.base)
    if len(hashes_files) < FEWEST:
        return Joined(stored, [])
    # Fingerprints come before their unit and so are deleted first: if the deletion is interrupted,
    # the unit's own file remains and both are joined again.
    obsolete = list[str]()
    for file, hashes_file in hashes_files.items():
        if drops:
            obsolete.append(hashes_file)
        obsolete.append(file)
    contents = map_in_batches(partial(read_if_exists, folder), obsolete)
    for batch in _batch_for_segments(contents):
        files |= write_segment(folder, batch)
    return Joined(stored, obsolete)


def _batch_for_segments(contents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the contents in lists. A list ends with the file that brings it to MOST_BYTES or
    MOST_FILES.
    """
    batch = list[bytes]()
    fill = 0.0
    for content in contents:
        batch.append(content)
        fill += max(len(content) / MOST_BYTES, 1 / MOST_FILES)
        if fill >= 1:
            yield batch
            batch = []
            fill = 0.0
    if batch:
        yield batch


def delete_joined(folder: Location, files: Sequence[str], held_lease: Lease) -> None:
    """Delete files that segments contain. If the store fails, only the next run's time is lost."""
    with suppress(Unreachable):
        if held_lease.is_held_recently():
            (folder / FOLDER).delete_all(files)


BLOCK_BYTES = 1 << 20
_NAMED_BY_HASH = [SHARD_NAME.pattern, SEGMENT.pattern, *NAME_PATTERNS.values()]
"Files whose names begin with the hash of their bytes."
_CHECKED = re.compile("|".join([*_NAMED_BY_HASH, UNIT.pattern, FINGERPRINTS.pattern]))


def delete_damaged(job: Job, held_lease: Lease, say: Say) -> str:
    """Delete the files at the target whose contents don't match their names, call `say` for each,
    and return a sentence with the number of files read and damaged.

    A run trusts an existing shard of the right size. Here every shard that it might reuse is read
    and hashed, those of older versions too. This needs no index: a unit whose record names a
    missing shard is converted again. A shard that only an older index or version names is not made
    again; a reader of that version then misses a shard instead of training on damaged data.

    Raises Unreachable if a file cannot be read.
    """
    folders = [*job.shard_folders, job.folder / FOLDER]
    files = list[Location]()
    for folder in folders:
        files += [folder / name for name, _ in folder.list() if _CHECKED.fullmatch(name)]
    damaged = list[Location]()
    for file, is_whole in zip(files, map_threads(is_intact, files), strict=True):
        if not is_whole:
            damaged.append(file)
    for file in damaged:
        say(f"{job.name}: {file} is damaged: it is deleted, and made again if the stream needs it")
        held_lease.delete(file)
    result = f"{len(damaged):,} damaged, made again" if damaged else "none damaged"
    return f"{plural(len(files), 'file')} at the target read and hashed: {result}"


def is_intact(file: Location) -> bool:
    """Return whether a file has the hash that its name begins with. A unit's own file is intact if
    it isn't empty and all its blobs can be decompressed.
    """
    if not file.name.endswith((".unit", ".hashes")):
        return file.name.startswith(hash_file(file))
    content = file.read()
    unit_file = parse_unit_file(content)
    blobs = [decompress_frame(content[position]) for position in unit_file.blobs.values()]
    return bool(blobs or unit_file.records) and None not in blobs


def hash_file(file: Location) -> str:
    """Return the xxh128 of a file's bytes. The name of an intact shard, segment or file next to the
    manifest begins with it.
    """
    digest = xxhash.xxh128()
    with file.open() as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()

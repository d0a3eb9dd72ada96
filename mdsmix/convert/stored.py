"""What lies at a target when the work on it begins: two listings and the segments of unit records, instead of a request for every shard
and every unit record; and how a finished unit is found in it.

A window's record says which shards and other files it has. The window counts as done only while all of them are there. A listed
file stays, because `gc` and `repair` delete only under the lease, which this run holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mdsmix.convert.job import Job
from mdsmix.convert.keys import Dropped, window_key
from mdsmix.convert.ledger import FOLDER, RECORD, UnitRecord, read_record
from mdsmix.convert.quarantine import bad_name, kept_name
from mdsmix.convert.segments import UnitSegment, joined, read_segments
from mdsmix.shards.index import StoredFile
from mdsmix.sources import Content, Window
from mdsmix.storage import Location, together


@dataclass(frozen=True, slots=True)
class StoredUnits:
    """Names of unit records, and names and sizes of shards: a file of another size is not the shard."""

    kept: frozenset[str] = frozenset()
    "Files of units: their records, fingerprints and bad records."
    segments: Mapping[str, UnitSegment] = field(default_factory=dict)
    "By their names."
    joined: UnitSegment = field(default_factory=UnitSegment)
    "What all of them hold, less the records that have files of their own."
    shards: frozenset[tuple[str, int]] = frozenset()
    "In the target."
    versions: frozenset[tuple[str, int]] = frozenset()

    @property
    def records(self) -> Iterator[str]:
        """The keys of all unit records."""
        yield from self.joined.records
        yield from filter(RECORD.fullmatch, self.kept)

    def has(self, file: StoredFile) -> bool:
        shard = file.basename, file.bytes
        return shard in self.shards or shard in self.versions

    def find(self, job: Job, window: Window, dropped: bytes = b"") -> UnitRecord | None:
        """The record of a finished window, None where the window is to be done (again): it never was, or its shards are gone."""
        key = window_key(job, window, dropped)
        is_alone = key in self.kept
        record = read_record(job.folder, key) if is_alone else self.joined.record(key)
        if record is None or not job.trusts(record.backend):
            return None
        if record.records.bad and kept_name(bad_name(key, window)) not in self.kept:
            return None
        files = [shard.stored for shard in record.shards]
        files += [side.stored for side in record.side_files]
        return record if all(map(self.has, files)) else None

    def find_unit(self, job: Job, content: Content, dropped: Dropped) -> UnitResult | None:
        """The unit as it was done before, where every window of it was."""
        records = [self.find(job, w, dropped.get(w.number, b"")) for w in content.windows]
        done = [record for record in records if record]
        if len(done) < len(records):
            return None
        kept = tokens_of(done)
        return UnitResult(content=content, records=done, reused=len(done), reused_tokens=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """A unit that is done, by this run or by one before."""

    content: Content
    records: list[UnitRecord]
    "One per window."
    reused: int
    "Records that were there already."
    reused_tokens: int
    "In their samples."


def tokens_of(records: Iterable[UnitRecord]) -> int:
    return sum(record.totals.tokens for record in records)


def list_stored(job: Job) -> StoredUnits:
    target, *versions = job.shard_folders
    kept, shards, *others = together(_sizes, [target / FOLDER, target, *versions])
    names = frozenset(name for name, _ in kept)
    segments = read_segments(target, names)
    return StoredUnits(
        kept=names,
        segments=segments,
        joined=joined(segments.values(), own=names),
        shards=shards,
        versions=frozenset().union(*others),
    )


def _sizes(folder: Location) -> frozenset[tuple[str, int]]:
    return frozenset((name, stat.size) for name, stat in folder.list())

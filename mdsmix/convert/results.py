"""What became of a work unit, and how one that is done is found again: by its records at the target.

A window's record says which shards and other files it has. The window counts as done only while all of them are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mdsmix.convert.job import Job
from mdsmix.convert.keys import Dropped, window_key
from mdsmix.convert.ledger import UnitRecord, read_record
from mdsmix.convert.packs import packed_record
from mdsmix.convert.quarantine import bad_name, is_kept, kept_name
from mdsmix.convert.stored import Stored, stored_at
from mdsmix.shards.index import StoredFile
from mdsmix.sources import Content, Window
from mdsmix.storage import Location


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


def find_record(job: Job, window: Window, dropped: bytes = b"") -> UnitRecord | None:
    """The record of a finished window, None where the window is to be done (again): it never was, or its shards are gone."""
    stored, key = stored_at(job), window_key(job, window, dropped)
    record = _record(job.folder, key, stored)
    if record is None or not job.trusts(record.backend):
        return None
    if record.records.bad and not _is_kept(job, bad_name(key, window)):
        return None
    files = [shard.stored for shard in record.shards]
    files += [side.stored for side in record.side_files]
    return record if all(_is_there(job, file) for file in files) else None


def _record(folder: Location, key: str, stored: Stored | None) -> UnitRecord | None:
    if stored and key not in stored.kept:
        return stored.packed.record(key)
    return read_record(folder, key) or packed_record(folder, key)


def recorded(job: Job, content: Content, dropped: Dropped) -> UnitResult | None:
    """The unit as it was done before, where every window of it was."""
    windows = content.windows
    records = [find_record(job, window, dropped.get(window.number, b"")) for window in windows]
    done = [record for record in records if record]
    if len(done) < len(records):
        return None
    kept = tokens_of(done)
    return UnitResult(content=content, records=done, reused=len(done), reused_tokens=kept)


def tokens_of(records: Iterable[UnitRecord]) -> int:
    return sum(record.totals.tokens for record in records)


def _is_kept(job: Job, name: str) -> bool:
    stored = stored_at(job)
    return kept_name(name) in stored.kept if stored else is_kept(job.folder, name)


def _is_there(job: Job, file: StoredFile) -> bool:
    """Asks versions first, because most shards are published; the target holds those that are not yet."""
    if stored := stored_at(job):
        return stored.has(file)
    target, *versions = job.shard_folders
    stats = ((place / file.basename).stat() for place in (*versions, target))
    return any(stat and stat.size == file.bytes for stat in stats)

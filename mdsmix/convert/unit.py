"""One work unit, from its source bytes to its stored shards and its record: what a worker does.

A unit is done again only where no record of it is found under its key. A compressed file is one unit of many windows,
because only reading tells where they begin; each window has a record of its own, so a killed run repeats no window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mdsmix.convert.assemble import open_assembler
from mdsmix.convert.encoders import open_encoder
from mdsmix.convert.job import Job
from mdsmix.convert.ledger import UnitRecord, pack_tokens, read_record, write_record
from mdsmix.convert.quarantine import described, keep
from mdsmix.convert.seen import fingerprint
from mdsmix.encode.backends import Backend, open_backend
from mdsmix.encode.base import Encoded
from mdsmix.shards.index import StoredFile
from mdsmix.shards.manifest import Records
from mdsmix.shards.shardfiles import store_shards
from mdsmix.sources import RecordBatch, Unit, content_hash, has_one_window, read

Told = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """A unit that is done, by this run or by one before."""

    content: str
    windows: tuple[int, ...]
    records: list[UnitRecord]
    "One per window."
    reused: int
    "Records that were there already."


def convert_unit(job: Job, unit: Unit, limit: int | None, told: Told) -> UnitResult:
    """Does what is not done of the unit; `told` hears of source bytes read and tokens made."""
    # A first look must not read the whole source: it knows files by their size and stamp.
    content = fingerprint(unit) if limit else content_hash(unit)
    if has_one_window(unit) and (record := find_record(job, content, 0)):
        told(record.size, 0)
        return UnitResult(content=content, windows=(0,), records=[record], reused=1)
    records: dict[int, UnitRecord] = {}
    reused = 0
    for window, batches in groupby(read(unit, limit), key=lambda batch: batch.window):
        if record := find_record(job, content, window):
            reused += 1
            told(record.size, 0)
        else:
            record = _convert(job, window_key(job, content, window), batches, told)
        records[window] = record
    if not records:  # no line starts in the unit
        records[0] = _convert(job, window_key(job, content, 0), iter(()), told)
    return UnitResult(
        content=content, windows=tuple(records), records=list(records.values()), reused=reused
    )


def window_key(job: Job, content: str, window: int) -> str:
    return job.key(f"{content} {window}")


def find_record(job: Job, content: str, window: int) -> UnitRecord | None:
    """The record of a finished window, None where it is to be done (again): somebody may have removed a shard."""
    record = read_record(job.folder, window_key(job, content, window))
    if record is None or not job.trusts(record.backend):
        return None
    return record if all(_is_there(job, shard.stored) for shard in record.shards) else None


def _is_there(job: Job, file: StoredFile) -> bool:
    """Versions are asked first: they hold what was published, the target what was not yet."""
    target, *versions = job.shard_folders
    stats = ((place / file.basename).stat() for place in (*versions, target))
    return any(stat and stat.size == file.bytes for stat in stats)


def _convert(job: Job, key: str, batches: Iterator[RecordBatch], told: Told) -> UnitRecord:
    """Encodes the batches, stores the shards, and then the record that says so."""
    backend = _backend(job)
    encoder, rows = open_encoder(job, backend), open_assembler(job)
    compared, tally = backend.compared, _Tally()
    for batch in batches:
        encoded = encoder.encode(batch.records)
        rows.add(encoded)
        tally.add(batch, encoded)
        told(batch.size, encoded.tokens)
    full, totals, leftover = rows.finish()
    record = UnitRecord(
        key=key,
        backend=backend.label,
        shards=store_shards(job.folder, job.layout, full),
        totals=replace(totals, compared=backend.compared - compared),
        records=tally.records,
        size=tally.size,
        lines=tally.lines,
        leftover=pack_tokens(leftover),
    )
    if tally.bad:
        keep(job.folder, key, tally.bad)
    write_record(job.folder, record)
    return record


class _Tally:
    """What became of the records, batch by batch."""

    def __init__(self) -> None:
        self.records, self.bad = Records(), list[dict[str, Any]]()
        self.size = self.lines = 0

    def add(self, batch: RecordBatch, encoded: Encoded) -> None:
        dropped = Counter(r.reason for r in encoded.rejected if r.filtered)
        bad = [(line.origin, line.reason) for line in batch.bad]
        bad += [(batch.origin(r.position), r.reason) for r in encoded.rejected if not r.filtered]
        self.records += Records(
            read=len(batch.records) + len(batch.bad),
            written=len(batch.records) - len(encoded.rejected),
            filtered=dict(dropped),
            quarantined=dict(Counter(reason for _, reason in bad)),
        )
        self.bad += [described(origin, reason) for origin, reason in bad]
        self.size += batch.size
        self.lines += batch.lines


_backends: dict[tuple[str, str], Backend] = {}


def _backend(job: Job) -> Backend:
    """One per process, kept from unit to unit and stream to stream: a tokenizer of 128,000 ids takes half a second and
    100 MB to open."""
    key = (job.tokenizer.path, job.backend)
    if key not in _backends:
        _backends.clear()
        _backends[key] = open_backend(job.tokenizer, job.backend)
    return _backends[key]

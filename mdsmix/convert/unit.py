"""One work unit, from its source bytes to its stored shards and its record: what a worker does.

A window's key is a hash of its lines and of the settings; a window is done again only where no record has that key. A compressed
file is one unit of many windows, because only reading it tells where they begin; each window has a record of its own, so a run
that was killed repeats none that was finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import numpy as np
import orjson

from mdsmix.convert.bad_records import Pace, Tally
from mdsmix.convert.image_stamps import folders_of, keep_stamps, whole_content
from mdsmix.convert.job import Dropped, Job, bad_name, lines_key, unit_name, window_key
from mdsmix.convert.known_sources import KnownSources
from mdsmix.convert.ledger import FOLDER, UnitRecord, compressed, pack, pack_tokens, read_units
from mdsmix.convert.pretrained_folders import at_hand, fetch_processor
from mdsmix.convert.stored import UnitResult
from mdsmix.encode.backends import Backend, open_backend
from mdsmix.engines.tasks import Attempt, Reporter, skipped
from mdsmix.errors import Unreachable
from mdsmix.kinds.assemble import Assembler
from mdsmix.kinds.membership import Fingerprints
from mdsmix.kinds.read_records import Reading, open_reading
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_files import store_shards
from mdsmix.shards.side_files import RowIds
from mdsmix.sources import (
    Content,
    Digests,
    RecordBatch,
    Unit,
    Window,
    read,
    shown_unit,
)
from mdsmix.storage import CHANGED, Location

STALE = (
    "{url} holds other records than when it was read before, and has the size and modification time that it had then: run the "
    "same command with --verify-source, which reads it again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookTask:
    """Reads a unit for what it holds, and what its images hold, as a task of an engine: its records may be stored under another name."""

    job: Job
    unit: Unit
    dropped: Dropped = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"of {shown_unit(self.unit)}"

    def do(self, attempt: Attempt, reporter: Reporter) -> Content:
        return whole_content(self.job, self.unit, self.dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTask:
    """One work unit as a task of an engine."""

    job: Job
    unit: Unit
    windows: Mapping[int, Window] = field(default_factory=dict)
    "What is known of the unit: windows by their numbers."
    records: Mapping[int, UnitRecord] = field(default_factory=dict)
    "Of those of them that are done."
    dropped: Dropped = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"of {shown_unit(self.unit)}"

    def do(self, attempt: Attempt, reporter: Reporter) -> UnitResult:
        """Converts the unit's unfinished windows. Their bytes are hashed while they are read, which gives the records their keys."""
        job, unit, limit = self.job, self.unit, self.job.limit
        known, records = {**self.windows}, {**self.records}
        if attempt.deaths:
            self._learn_of_the_dead(known, records)
        reporter.on_progress(sum(record.size for record in records.values()), 0)
        reused, digests = frozenset(records), Digests(unit)
        convert = partial(_convert, job, unit, self.dropped, digests, attempt, reporter)
        batches = read(unit, limit, reporter.memory, digests, reused)
        for number, of_window in groupby(batches, key=lambda batch: batch.window):
            records[number] = convert(number, of_window)
            if not limit:
                KnownSources.at(job.target).note_window(unit, digests.window(number))
        for number in reused:  # not read again: they are as they were when they were known
            digests.add_images(number, known[number].images)
        content = digests.content()
        windows = {window.number: window for window in content.windows}
        if job.drops and not limit and _lines(windows) != _lines(self.windows):
            raise Unreachable(STALE.format(url=unit.files[0].location.url))
        if any(windows.get(number) != known[number] for number in reused):
            # The cache was wrong: a file was changed and kept its size and stamp.
            if attempt.deaths:
                raise Unreachable(CHANGED.format(url=unit.files[0].location.url))
            return replace(self, windows={}, records={}).do(attempt, reporter)
        if not records:  # no record starts in the unit
            records[0] = convert(0, iter(()))
        done_now = [records[number] for number in windows]
        return UnitResult(content=content, records=done_now, reused=reused)

    def _learn_of_the_dead(self, known: dict[int, Window], records: dict[int, UnitRecord]) -> None:
        """Adds the windows that workers of this machine had stored of the unit before they died."""
        job = self.job
        for number, window in KnownSources.of(job.target).begun(self.unit).items():
            key = window_key(job, window, self.dropped.get(number, b""))
            found = read_units(job.folder, unit_name(key, window))
            record = found.record(key) if found else None
            if record and job.trusts(record.backend):
                known[number], records[number] = window, record


def _lines(windows: Mapping[int, Window]) -> dict[int, str]:
    """What the windows hold, whatever images their records name: those are not read for duplicates."""
    return {number: window.digest for number, window in windows.items()}


def _convert(
    job: Job,
    unit: Unit,
    dropped_from: Dropped,
    digests: Digests,
    attempt: Attempt,
    reporter: Reporter,
    number: int,
    batches: Iterator[RecordBatch],
) -> UnitRecord:
    """Encodes the batches of a window, stores the shards, and then the record that says so."""
    dropped = dropped_from.get(number, b"")
    made = _begin(job, dropped)
    _encode(job, folders_of(job, unit), batches, made, attempt, reporter)
    rest, totals, leftover, documents = made.rows.finish()
    if job.names_rows and documents is not None:
        made.ids.pack(documents)
    pictures = made.reading.pictures
    if pictures:
        digests.add_images(number, pictures.seen.digest)
    window = digests.window(number)  # all of it has been read now
    base, key = lines_key(job, window), window_key(job, window, dropped)
    made.shards += store_shards(job.folder, job.layout, rest, is_new=True)
    record = UnitRecord(
        key=key,
        base=base if base != key else "",
        fetched=pictures.seen.fetched if pictures else {},
        backend=made.backend.label,
        shards=made.shards,
        side_files=made.ids.store(job.folder, made.shards) if job.names_rows else [],
        totals=totals,
        records=replace(made.tally.records, **made.reading.oddities.counts),
        size=made.tally.size,
        lines=made.tally.lines,
        leftover=pack_tokens(leftover),
    )
    blobs = dict[str, bytes]()
    if not job.drops:  # where some are dropped, they were there first
        blobs[base] = compressed(made.seen.finish(made.read))
    if made.tally.bad:
        blobs[bad_name(key, window)] = made.tally.bad.frame()
    (job.folder / FOLDER / unit_name(key, window)).write(pack([orjson.dumps(record)], blobs))
    if pictures and not job.limit:
        keep_stamps(job, window, pictures.seen.stamps)
    return record


@dataclass(slots=True, kw_only=True)
class _Made:
    """What a window has come to while its batches are encoded."""

    backend: Backend
    seen: Fingerprints
    reading: Reading
    rows: Assembler
    tally: Tally
    read: int = 0
    "Records."
    ids: RowIds = field(default_factory=RowIds)
    shards: list[Shard] = field(default_factory=list)


def _begin(job: Job, dropped: bytes) -> _Made:
    backend = open_tokenizer_backend(job)
    backend.begin(job.name)
    seen = Fingerprints(np.unpackbits(np.frombuffer(dropped, np.uint8), bitorder="little") > 0)
    fetch_processor(job)
    reading = open_reading(job.encoding, job.tokenizer, backend, seen, job.images_root)
    return _Made(
        backend=backend,
        seen=seen,
        reading=reading,
        rows=job.kind.open_rows(job.layout, job.tokenizer.dtype),
        tally=Tally(job.kind.splits_records, reading.sample, job.kind.has_images),
    )


def _encode(
    job: Job,
    beside: Mapping[str, Location],
    batches: Iterator[RecordBatch],
    made: _Made,
    attempt: Attempt,
    reporter: Reporter,
) -> None:
    """Encodes the batches piece by piece and stores each shard that is full. `beside`: the folder of each file, where records name images."""
    pace = Pace(attempt, reporter, made.reading.pictures)
    for batch in batches:
        without = skipped(batch, attempt)
        for piece in pace.pieces(batch, without):
            records = batch.records[piece.start : piece.stop]
            folders = [beside[name] for name in batch.files(piece)] if beside else ()
            encoded = made.reading.encode(records, made.read + piece.start, folders)
            for full in made.rows.add(encoded):
                made.shards += store_shards(job.folder, job.layout, full, is_new=True)
            made.ids.add(encoded.ids)
            made.tally.add(batch, piece, encoded)
            reporter.on_progress(
                batch.size * len(piece) // len(batch.records), encoded.totals.tokens
            )
        made.tally.end(batch, without)
        made.reading.oddities.look_at_columns(batch.unread, batch.unseen)
        made.read += len(batch.records)


_backends: dict[tuple[str, str], Backend] = {}


def open_tokenizer_backend(job: Job) -> Backend:
    """One per process, kept from stream to stream: a tokenizer of 128,000 ids takes half a second and 100 MB to open."""
    backend = "reference" if job.unequal and job.backend == "auto" else job.backend
    key = (job.tokenizer.path, backend)
    if key not in _backends:
        _backends.clear()
        _backends[key] = open_backend(at_hand(job), backend)
    return _backends[key]

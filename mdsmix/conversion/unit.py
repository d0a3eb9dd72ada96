"""One work unit, from its source bytes to its stored shards and its record: what a worker does.

A window's key is a hash of its lines and of the settings; a window is done again only where no
record has that key. A compressed file is one unit of many windows, because only reading it tells
where they begin; each window has a record of its own, so a run that was killed repeats none that
was finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from mdsmix.conversion.bad_records import Tally
from mdsmix.conversion.finished_units import UnitResult, list_stored
from mdsmix.conversion.job import (
    Dropped,
    Job,
    bad_name,
    hashes_name,
    lines_key,
    unit_name,
    window_key,
)
from mdsmix.conversion.publish_pretrained import fetch_processor, fetch_tokenizer
from mdsmix.conversion.source_cache import KnownSources, keep_stamps
from mdsmix.conversion.unit_files import FOLDER, UnitRecord, compressed, pack, pack_array
from mdsmix.encode.backends import Backend, open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.engines.tasks import ActiveRecords, Attempt, Reporter, split_positions
from mdsmix.errors import Unreachable
from mdsmix.kinds.assemble import Assembled
from mdsmix.kinds.membership import DUPLICATE
from mdsmix.kinds.read_records import open_looking, open_pictures, open_reading
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_files import store_shards
from mdsmix.shards.side_files import group_names, store_record_names
from mdsmix.sources import (
    Content,
    Digests,
    RecordBatch,
    Unit,
    Window,
    content_of,
    describe_unit,
    read_batches,
)
from mdsmix.storage import Location

if TYPE_CHECKING:
    from mdsmix.images.reader import ImageReader

STALE = (
    "{url} holds other records than when it was read before, and has the size and modification time that it had then: run the "
    "same command with --verify-source, which reads it again"
)
MOST_SHRUNK = 5
"""Halve a batch of 4 MB at most five times for want of memory: below 128 KB the worker's fixed
memory dominates.
"""


@dataclass(frozen=True, kw_only=True)
class _OfUnit:
    """The plain data that every task over a unit is given."""

    job: Job
    unit: Unit
    dropped: Dropped = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"of {describe_unit(self.unit)}"


@dataclass(frozen=True, kw_only=True)
class ReadTask(_OfUnit):
    """Reads a unit for what it holds, as a task of an engine: its windows, whose records may be
    stored under another name, the images that they name and, if they are `hashed`, the fingerprints
    of its records, which are stored.
    """

    hashed: bool = False

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], Content]:
        """Gives the content by which the unit is known again; nothing else of it is kept."""
        job, unit = self.job, self.unit
        if not (self.hashed or job.kind.has_images):
            known = content_of(unit)
            return lambda: known
        digests, folders = Digests(unit), job.image_folders(unit)
        done, batches = set[int](), read_batches(unit, None, reporter.memory, digests)
        for number, of_window in groupby(batches, key=lambda batch: batch.window):
            count, pictures = 0, None
            if not self.hashed:
                pictures = open_pictures(job.encoding, job.images_root, judges=False)
            looking = open_looking(job.encoding, self.dropped.get(number, b""), pictures)
            for batch in of_window:
                reporter.wait_for_room()
                reporter.on_progress(batch.size * self.hashed, 0)
                for piece in _cut_by_images([range(len(batch.records))], pictures):
                    looking.read(*_given(batch, piece, count, folders))
                count += len(batch.records)
            if pictures:
                digests.add_images(number, pictures.window_images.digest)
                keep_stamps(job, digests.window(number), pictures.window_images.stamps)
            if self.hashed:
                hashes = looking.members.fingerprints(count)
                _store_hashes(job, digests.window(number), hashes)
            done.add(number)
        content = digests.content()
        for window in content.windows:
            if self.hashed and window.number not in done:  # no record starts in it
                _store_hashes(job, window, b"")
        return lambda: content


def _cut_by_images(pieces: Iterable[range], pictures: ImageReader | None) -> Iterator[range]:
    """Cuts pieces further, so that the images of each are about AIM_BYTES, judged by the images
    before.
    """
    for piece in pieces:
        while piece:
            most = pictures.most_records if pictures else len(piece)
            yield piece[:most]
            piece = piece[most:]


def _store_hashes(job: Job, window: Window, fingerprints: bytes) -> None:
    key = lines_key(job, window)
    (job.folder / FOLDER / hashes_name(key)).write(pack((), {key: compressed(fingerprints)}))


def _given(
    batch: RecordBatch, piece: range, first: int, folders: Mapping[str, Location]
) -> tuple[Sequence[Any], int, Sequence[Location]]:
    """The arguments of a Reading for a piece of a batch: records, the number of the first in its
    window, folders of images. `first`: records of the window before the batch. `folders`: file ->
    folder of its images, where records name any.
    """
    beside = [folders[name] for name in batch.files(piece)] if folders else ()
    return batch.records[piece.start : piece.stop], first + piece.start, beside


@dataclass(frozen=True, kw_only=True)
class UnitTask(_OfUnit):
    """One work unit as a task of an engine."""

    windows: dict[int, Window] = field(default_factory=dict)
    "Number -> window, of the known windows of the unit."
    records: Mapping[int, UnitRecord] = field(default_factory=dict)
    "Number -> record, of the windows that are done."

    def done(self, content: Content | None) -> UnitResult | None:
        """The result of a unit of this content; None where some of it is still to be done."""
        if content is None or len(self.records) < len(content.windows):
            return None
        records = [self.records[window.number] for window in content.windows]
        return UnitResult(content=content, records=records, reused=frozenset(self.records))

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], UnitResult]:
        """Converts the unit's unfinished windows. Their bytes are hashed while they are read, which
        gives the records their keys. What is returned stores the last window.
        """
        job, unit, known, records = self.job, self.unit, self.windows, {**self.records}
        if attempt.deaths:
            known, records = self._left_by_the_dead()
        reporter.on_progress(sum(record.size for record in records.values()), 0)
        reused, digests, last = frozenset(records), Digests(unit), list[_OpenWindow]()
        batches = read_batches(unit, job.limit, reporter.memory, digests, reused)
        for number, of_window in groupby(batches, key=lambda batch: batch.window):
            for window in last:
                records[window.number] = self._store(window, digests)
            last = [self._encode(number, of_window, attempt, reporter)]
        # Their images are not read again: the known windows say what these hold.
        for number in reused:
            digests.add_images(number, known[number].images)
        if not records and not last:  # no record starts in the unit
            last = [self._encode(0, iter(()), attempt, reporter)]

        def finish() -> UnitResult:
            for window in last:
                records[window.number] = self._store(window, digests)
            content = digests.content()
            digest = {window.number: window.digest for window in content.windows}
            # Reused windows must be as they were, and under `drop` all windows, since the list of
            # dropped records was made of them.
            if any(digest.get(n) != known[n].digest for n in (known if job.drops else reused)):
                raise Unreachable(STALE.format(url=unit.files[0].location.url))
            return UnitResult(
                content=content,
                records=[records[number] for number in digest],
                # Windows of a worker that died are of this run: its listing of the target does not
                # show them.
                reused=frozenset(self.records),
            )

        return finish

    def _left_by_the_dead(self) -> tuple[dict[int, Window], dict[int, UnitRecord]]:
        """The known windows and finished records of the unit, with those that workers of this
        machine had stored before they died. The target is listed again, since the shards of an
        older record may be gone.
        """
        windows = self.windows | KnownSources.of(self.job.target).windows_of(self.unit)
        return windows, list_stored(self.job).find_all(self.job, windows.values(), self.dropped)

    def _store(self, made: _OpenWindow, digests: Digests) -> UnitRecord:
        """Stores the shards of a window, all of which has been read, and then the record that says
        so.
        """
        job, pictures, tally = self.job, made.reading.pictures, made.tally
        rest, totals, leftover, _ = made.finished
        if pictures:
            digests.add_images(made.number, pictures.window_images.digest)
        window = digests.window(made.number)
        base, key = lines_key(job, window), window_key(job, window, made.dropped)
        made.shards += store_shards(job.folder, job.layout, rest, is_new=True)
        record = UnitRecord(
            key=key,
            base=base if base != key else "",
            fetched=pictures.window_images.fetched if pictures else {},
            backend=made.backend.label,
            shards=made.shards,
            side_files=store_record_names(job.folder, made.names, made.shards)
            if job.names_rows
            else [],
            totals=totals,
            records=replace(tally.records, **made.reading.oddities.counts),
            size=tally.size,
            lines=tally.lines,
            leftover=pack_array(leftover),
            unwritten=made.unwritten(),
        )
        blobs = dict[str, bytes]()
        if not job.drops:  # under `drop` the fingerprints were stored before
            blobs[base] = compressed(made.reading.members.fingerprints(made.read))
        if tally.records.bad:
            blobs[bad_name(key, window)] = tally.bad.frame()
        (job.folder / FOLDER / unit_name(key, window)).write(pack([orjson.dumps(record)], blobs))
        if pictures and not job.limit:
            keep_stamps(job, window, pictures.window_images.stamps)
        if not job.limit:
            KnownSources.at(job.target).note(self.unit, Content(windows=(window,), files=()))
        return record

    def _encode(
        self, number: int, batches: Iterator[RecordBatch], attempt: Attempt, reporter: Reporter
    ) -> _OpenWindow:
        """Encodes the batches of a window in pieces, fewer records at once where memory is tight or
        workers have died of them, and stores each shard that is full.
        """
        job, folders, shrunk = self.job, self.job.image_folders(self.unit), 0
        made = _OpenWindow(job, number, self.dropped.get(number, b""))
        for batch in batches:
            count, without = len(batch.records), find_skipped(batch, attempt)
            cut = split_positions(count, attempt.halvings + shrunk, without)
            for piece in _cut_by_images(cut, made.reading.pictures):
                reporter.wait_for_room()
                reporter.on_records(describe_active(batch, piece))
                encoded = made.reading.encode(*_given(batch, piece, made.read, folders))
                for full in made.rows.add(encoded):
                    made.shards += store_shards(job.folder, job.layout, full, is_new=True)
                made.names += encoded.ids
                made.note_unwritten(encoded, made.read + piece.start)
                made.tally.add(batch, piece, encoded)
                reporter.on_progress(batch.size * len(piece) // count, encoded.totals.tokens)
            reporter.on_records(None)
            shrunk = min(MOST_SHRUNK, shrunk + bool(reporter.is_tight()))
            made.tally.end(batch, without)
            made.reading.oddities.add("unseen", batch.unseen)
            made.read += count
            del batch  # or it stays beside the next one
        made.finish()
        return made


class _OpenWindow:
    """A window while its batches are encoded, and until it is stored."""

    finished: Assembled

    def __init__(self, job: Job, number: int, dropped: bytes) -> None:
        """`dropped`: a bit for each of its records."""
        self.number, self.dropped = number, dropped
        self.backend = open_tokenizer_backend(job)
        self.backend.begin(job.name)
        fetch_processor(job)
        self.reading = open_reading(
            job.encoding, job.tokenizer, self.backend, job.images_root, dropped
        )
        self.rows = job.kind.open_rows(job.layout, job.tokenizer.dtype)
        self.tally = Tally(job.kind.splits_records, self.reading.members, job.kind.has_images)
        self.names, self.shards, self.read = list[Any](), list[Shard](), 0
        self._unwritten = list[int]()

    def note_unwritten(self, encoded: Encoded, first: int) -> None:
        """Note the records of a piece that became no sample, but for dropped duplicates. `first`:
        the number of its first record.
        """
        for position, reason in encoded.rejected.items():
            if reason != DUPLICATE:
                self._unwritten.append(first + position)

    def unwritten(self) -> str:
        """Return the bits of `UnitRecord.unwritten`."""
        if not self._unwritten:
            return ""
        hashes = self.reading.members.fingerprints(self.read)
        has_hash = np.frombuffer(hashes, "<u8").reshape(-1, 2).any(axis=1)
        bits = np.zeros(self.read, bool)
        bits[self._unwritten] = True
        bits &= has_hash
        return pack_array(np.packbits(bits, bitorder="little")) if bits.any() else ""

    def finish(self) -> None:
        """Lays out the rows that are left."""
        self.finished = self.rows.finish()
        if self.names and self.finished.documents is not None:
            self.names = group_names(self.names, self.finished.documents)


_backends: dict[tuple[str, str], Backend] = {}


def open_tokenizer_backend(job: Job) -> Backend:
    """The job's tokenizer backend. A process keeps the last one: a tokenizer of 128,000 ids takes
    half a second and 100 MB to open.
    """
    backend = "reference" if job.unequal and job.backend == "auto" else job.backend
    key = (job.tokenizer.path, backend)
    if key not in _backends:
        _backends.clear()
        _backends[key] = open_backend(fetch_tokenizer(job), backend)
    return _backends[key]


def find_skipped(batch: RecordBatch, attempt: Attempt) -> set[int]:
    """Return the positions in the batch of the records that are set aside (`Attempt.skipped`)."""
    if not attempt.skipped:
        return set()
    origins = map(batch.origin, range(len(batch.records)))
    return {
        position
        for position, origin in enumerate(origins)
        if (origin.file, origin.ordinal) in attempt.skipped
    }


def describe_active(batch: RecordBatch, positions: range) -> ActiveRecords:
    """Return the records of a batch at `positions` as a reporter takes them."""
    origin = batch.origin(positions.start)
    return ActiveRecords(
        file=origin.file,
        ordinal=origin.ordinal,
        where=origin.where,
        length=origin.length,
        records=len(positions),
        size=batch.size,
    )

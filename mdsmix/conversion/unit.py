"""Converts one work unit in a worker: from its source bytes to its stored shards and record.

A unit is read in windows, which are slices of its source. The key of a window is a hash of its
lines and of the settings. A window is converted again only if no stored record has its key. A
compressed file is one unit of many windows, because their beginnings are known only when the file
is read. Each window has its own record, so after a run was killed, no finished window is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from mdsmix.conversion.bad_records import Tally
from mdsmix.conversion.finished_units import UnitResult, list_stored
from mdsmix.conversion.job import Dropped, Job
from mdsmix.conversion.keys import (
    bad_records_name,
    hashes_file_name,
    lines_key,
    unit_file_name,
    window_key,
)
from mdsmix.conversion.publish_pretrained import fetch_processor, fetch_tokenizer
from mdsmix.conversion.source_cache import KnownSources, remember_image_stamps
from mdsmix.conversion.unit_files import (
    FOLDER,
    UnitRecord,
    compress_with_checksum,
    pack_array,
    pack_unit_file,
)
from mdsmix.encode.backends import Backend, open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.engines.tasks import ActiveRecords, Attempt, Reporter, split_positions
from mdsmix.errors import Unreachable
from mdsmix.kinds.assemble import Assembled
from mdsmix.kinds.membership import DUPLICATE
from mdsmix.kinds.read_records import (
    open_image_reader,
    open_record_encoder,
    open_record_reader,
)
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_files import store_shards
from mdsmix.shards.side_files import SideFile, group_names, store_record_names
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
    "the source file {url} has other records than when it was last read, but the same size and "
    "modification time: run the same command with --verify-source, which reads the file again"
)
MOST_HALVINGS = 5
"""A batch of 4 MB is halved at most so often when memory is short. Pieces of less than 128 KB would
save nothing, since the worker's fixed memory is much larger.
"""


@dataclass(frozen=True, kw_only=True)
class _UnitOfJob:
    """The base of `ReadTask` and `UnitTask`: the data of any task on a work unit."""

    job: Job
    unit: Unit
    dropped: Dropped = field(default_factory=dict)
    "The duplicates to drop from each window of the unit."

    @property
    def name(self) -> str:
        """The unit for people, as messages write it after "the work unit"."""
        return f"of {describe_unit(self.unit)}"


@dataclass(frozen=True, kw_only=True)
class ReadTask(_UnitOfJob):
    """An engine's task that reads a unit without encoding it.

    It hashes the unit's windows (slices of its source), so that a window which was moved to another
    file is recognized by its content.
    """

    is_hashed: bool = False
    """Whether the fingerprints of the unit's records are stored. If not, the images that the
    records name are hashed.
    """

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], Content]:
        """Read the unit, and return a function that returns its content (the hashes of its windows
        and files).
        """
        if self.is_hashed or self.job.kind.has_images:
            content = self._read_records(reporter)
        else:
            content = content_of(self.unit)
        return lambda: content

    def _read_records(self, reporter: Reporter) -> Content:
        """Read all records of the unit, window by window, and return the unit's content."""
        # The batches of a window are consecutive.
        digests = Digests(self.unit)
        numbers = set[int]()
        batches = read_batches(self.unit, None, reporter.memory, digests)
        for number, window_batches in groupby(batches, key=lambda batch: batch.window):
            self._read_window(number, window_batches, digests, reporter)
            numbers.add(number)
        content = digests.content()
        if self.is_hashed:
            for window in content.windows:
                if window.number not in numbers:  # no record starts in the window
                    _store_hashes(self.job, window, b"")
        return content

    def _read_window(
        self, number: int, batches: Iterator[RecordBatch], digests: Digests, reporter: Reporter
    ) -> None:
        """Read the records of a window. Store their fingerprints if `is_hashed`; otherwise hash the
        images that they name.

        Args:
            number: the number of the window in its unit.
            batches: the batches of this window only.
            digests: the hashes of the unit; the hash of the window's images is added.
            reporter: the connection to the engine.
        """
        # Open what reads the records.
        job = self.job
        folders = job.image_folders(self.unit)
        pictures = None
        if not self.is_hashed:
            pictures = open_image_reader(job.encoding, job.images_root, judges=False)
        reading = open_record_reader(job.stream, self.dropped.get(number, b""), pictures)
        # Read them.
        count = 0  # records of the window so far
        for batch in batches:
            reporter.wait_for_room()
            reporter.on_progress(batch.size if self.is_hashed else 0, 0)
            for piece in _cut_by_images([range(len(batch.records))], pictures):
                reading.read(*_slice_batch(batch, piece, count, folders))
            count += len(batch.records)
        # Store the hashes of images, or the fingerprints.
        if pictures:
            digests.add_images(number, pictures.window_images.digest)
            remember_image_stamps(job, digests.window(number), pictures.window_images.stamps)
        if self.is_hashed:
            _store_hashes(job, digests.window(number), reading.membership.fingerprints(count))


def _cut_by_images(pieces: Iterable[range], pictures: ImageReader | None) -> Iterator[range]:
    """Split ranges of positions, so that the images of each range have about AIM_BYTES together.
    The average size of the images so far decides how many records a range has.

    Args:
        pieces: the ranges.
        pictures: reads the images, and knows their average size; None: nothing is split.
    """
    for piece in pieces:
        while piece:
            limit = pictures.most_records if pictures else len(piece)
            yield piece[:limit]
            piece = piece[limit:]


def _store_hashes(job: Job, window: Window, fingerprints: bytes) -> None:
    """Write the file with the fingerprints of a window."""
    key = lines_key(job, window)
    content = pack_unit_file((), {key: compress_with_checksum(fingerprints)})
    (job.folder / FOLDER / hashes_file_name(key)).write(content)


class _BatchSlice(NamedTuple):
    """Some records of a batch: the arguments of `RecordReader.read` and `encode`."""

    records: Sequence[Any]
    first: int
    "The number of the first of these records in its window."
    folders: Sequence[Location]
    "The folder of each record's images; empty if records name no images."


def _slice_batch(
    batch: RecordBatch, piece: range, batch_first: int, folders: Mapping[str, Location]
) -> _BatchSlice:
    """Return the records of a batch at the positions `piece`.

    Args:
        batch: the batch.
        piece: the positions.
        batch_first: the number of records of the window before the batch.
        folders: name of a source file -> folder of its images; empty if records name no images.
    """
    image_folders = [folders[name] for name in batch.files(piece)] if folders else []
    return _BatchSlice(
        records=batch.records[piece.start : piece.stop],
        first=batch_first + piece.start,
        folders=image_folders,
    )


@dataclass(frozen=True, kw_only=True)
class UnitTask(_UnitOfJob):
    """An engine's task that converts a work unit window by window (slices of its source)."""

    windows: dict[int, Window] = field(default_factory=dict)
    "The unit's windows that are known before it is read: number -> window."
    records: Mapping[int, UnitRecord] = field(default_factory=dict)
    "The records of windows that are converted already: number of the window -> record."

    def finished_result(self, content: Content | None) -> UnitResult | None:
        """Return the result of the unit if all its windows are converted already; otherwise None.

        Args:
            content: the content of the unit, with all its windows; None if it is not known.
        """
        if content is None or len(self.records) < len(content.windows):
            return None
        records = [self.records[window.number] for window in content.windows]
        return UnitResult(content=content, records=records, reused=frozenset(self.records))

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], UnitResult]:
        """Convert the unit's unfinished windows. The last window is stored by the returned
        function, which returns the result of the unit.

        The bytes of the source are hashed while they are read; the hashes give the keys of windows.
        """
        # Find the windows that are converted already, and report their bytes as read.
        windows = self.windows
        records = dict(self.records)
        if attempt.deaths:
            windows, records = self._find_finished_after_death()
        reused = frozenset(records)
        reporter.on_progress(sum(record.size for record in records.values()), 0)
        # Encode window after window. A window is stored when the next window begins.
        digests = Digests(self.unit)
        batches = read_batches(self.unit, self.job.limit, reporter.memory, digests, reused)
        open_window: _OpenWindow | None = None
        for number, window_batches in groupby(batches, key=lambda batch: batch.window):
            if open_window:
                records[open_window.number] = self._store(open_window, digests)
            open_window = self._encode(number, window_batches, attempt, reporter)
        # The images of reused windows are not read again: the digests that are known count.
        for number in reused:
            digests.add_images(number, windows[number].images)
        if not records and not open_window:  # no record starts in the unit
            open_window = self._encode(0, iter(()), attempt, reporter)

        def finish() -> UnitResult:
            """Store the last window, and return the result of the whole unit."""
            if open_window:
                records[open_window.number] = self._store(open_window, digests)
            content = digests.content()
            self._refuse_stale(content, windows, reused)
            return UnitResult(
                content=content,
                records=[records[window.number] for window in content.windows],
                # Windows that a worker stored before it died count as new, since the target had no
                # files of them when the run began.
                reused=frozenset(self.records),
            )

        return finish

    def _refuse_stale(
        self, content: Content, windows: Mapping[int, Window], reused: frozenset[int]
    ) -> None:
        """Raise Unreachable if the content of a reused window has changed. Under `duplicates: drop`
        all known windows are checked, since they decided which records are dropped.

        Args:
            content: the content of the unit as it was read now.
            windows: the windows that were known before: number -> window.
            reused: the numbers of the windows that are not converted again.
        """
        digests = {window.number: window.digest for window in content.windows}
        checked = set(windows) if self.job.drops else reused
        for number in checked:
            if digests.get(number) != windows[number].digest:
                raise Unreachable(STALE.format(url=self.unit.files[0].location.url))

    def _find_finished_after_death(self) -> tuple[dict[int, Window], dict[int, UnitRecord]]:
        """Return the known windows of the unit and the records of the finished ones, including the
        windows that workers of this machine stored before they died: (number -> window, number ->
        record). The target is listed again, since the shards of an older record may be gone.
        """
        windows = self.windows | KnownSources.load(self.job.target).windows_of(self.unit)
        stored = list_stored(self.job)
        return windows, stored.find_records(self.job, windows.values(), self.dropped)

    def _store(self, open_window: _OpenWindow, digests: Digests) -> UnitRecord:
        """Store the last shards of a window that was read to its end, and then its record.

        Args:
            open_window: the window.
            digests: the hashes of the unit.
        """
        job = self.job
        pictures = open_window.reading.images
        tally = open_window.tally
        assembled = open_window.assembled
        # The window's keys follow from its content.
        if pictures:
            digests.add_images(open_window.number, pictures.window_images.digest)
        window = digests.window(open_window.number)
        base = lines_key(job, window)
        key = window_key(job, window, open_window.dropped)
        # Store the last shards, and the names of their rows.
        shards = open_window.shards
        shards += store_shards(job.folder, job.layout, assembled.rows, is_new=True)
        side_files = list[SideFile]()
        if job.names_rows:
            side_files = store_record_names(job.folder, open_window.names, shards)
        # Store the record with its fingerprints and bad records.
        record = UnitRecord(
            key=key,
            base=base if base != key else "",
            fetched=pictures.window_images.fetched if pictures else {},
            backend=open_window.backend.label,
            shards=shards,
            side_files=side_files,
            totals=assembled.totals,
            records=replace(tally.records, **open_window.reading.diagnostics.counts),
            size=tally.size,
            lines=tally.lines,
            leftover=pack_array(assembled.leftover),
            unwritten=open_window.pack_unwritten(),
        )
        blobs = dict[str, bytes]()
        if not job.drops:  # under `duplicates: drop` fingerprints are stored by a ReadTask
            fingerprints = open_window.reading.membership.fingerprints(open_window.records_read)
            blobs[base] = compress_with_checksum(fingerprints)
        if tally.records.bad:
            blobs[bad_records_name(key, window)] = tally.bad.frame()
        content = pack_unit_file([orjson.dumps(record)], blobs)
        (job.folder / FOLDER / unit_file_name(key, window)).write(content)
        # Remember the window on this machine, unless it was read in part only.
        if not job.limit:
            if pictures:
                remember_image_stamps(job, window, pictures.window_images.stamps)
            known_sources = KnownSources.empty(job.target)
            known_sources.note(self.unit, Content(windows=(window,), files=()))
        return record

    def _encode(
        self, number: int, batches: Iterator[RecordBatch], attempt: Attempt, reporter: Reporter
    ) -> _OpenWindow:
        """Encode the batches of a window, and store each shard as soon as it is full.

        Batches are encoded in pieces. The pieces have fewer records when memory is short, or when
        workers have died on the unit.

        Args:
            number: the number of the window in its unit.
            batches: the batches of this window only.
            attempt: how to convert the unit after workers have died on it.
            reporter: the connection to the engine.
        """
        job = self.job
        folders = job.image_folders(self.unit)
        halvings = 0
        window = _OpenWindow(job, number, self.dropped.get(number, b""))
        for batch in batches:
            count = len(batch.records)
            crashed = find_skipped(batch, attempt)
            cut = split_positions(count, attempt.halvings + halvings, crashed)
            for piece in _cut_by_images(cut, window.reading.images):
                reporter.wait_for_room()
                reporter.on_records(describe_active(batch, piece))
                batch_slice = _slice_batch(batch, piece, window.records_read, folders)
                encoded = window.reading.encode(*batch_slice)
                for rows in window.rows.add(encoded):
                    window.shards += store_shards(job.folder, job.layout, rows, is_new=True)
                window.names += encoded.ids
                window.note_unwritten(encoded, batch_slice.first)
                window.tally.add(batch, piece, encoded)
                reporter.on_progress(batch.size * len(piece) // count, encoded.totals.tokens)
            reporter.on_records(None)
            if reporter.is_tight():
                halvings = min(MOST_HALVINGS, halvings + 1)
            window.tally.finish_batch(batch, crashed)
            window.reading.diagnostics.add("unseen", batch.unseen)
            window.records_read += count
            del batch  # otherwise it stays in memory while the next one is read
        window.finish()
        return window


class _OpenWindow:
    """A window (a slice of a work unit's source) while it is encoded, and until it is stored."""

    assembled: Assembled
    "The rows that are in no shard yet; set by `finish`."

    def __init__(self, job: Job, number: int, dropped: bytes) -> None:
        """Open the window.

        Args:
            job: the job of the stream.
            number: the number of the window in its unit.
            dropped: a bit for each record of the window, as in `job.Dropped`.
        """
        self.number = number
        self.dropped = dropped
        self.backend = open_tokenizer_backend(job)
        self.backend.begin(job.name)
        fetch_processor(job)
        self.reading = open_record_encoder(
            job.stream, job.tokenizer, self.backend, job.images_root, dropped
        )
        self.rows = job.kind.open_rows(job.layout, job.tokenizer.dtype)
        self.tally = Tally(job.kind.splits_records, self.reading.membership, job.kind.has_images)
        self.names = list[Any]()
        self.shards = list[Shard]()
        self.records_read = 0
        self._unwritten = list[int]()

    def note_unwritten(self, encoded: Encoded, first: int) -> None:
        """Note the records that became no sample, except for dropped duplicates.

        Args:
            encoded: the result of encoding some records of the window.
            first: the number of the first of these records in the window.
        """
        for position, reason in encoded.rejected.items():
            if reason != DUPLICATE:
                self._unwritten.append(first + position)

    def pack_unwritten(self) -> str:
        """Return the value of `UnitRecord.unwritten`: a bit for each record, in base64."""
        if not self._unwritten:
            return ""
        # A fingerprint is two numbers; both are 0 if the record has none.
        fingerprints = self.reading.membership.fingerprints(self.records_read)
        has_fingerprint = np.frombuffer(fingerprints, "<u8").reshape(-1, 2).any(axis=1)
        bits = np.zeros(self.records_read, bool)
        bits[self._unwritten] = True
        bits &= has_fingerprint
        return pack_array(np.packbits(bits, bitorder="little")) if bits.any() else ""

    def finish(self) -> None:
        """Lay out the remaining rows, and the names of records for each row."""
        self.assembled = self.rows.finish()
        if self.names and self.assembled.documents is not None:
            self.names = group_names(self.names, self.assembled.documents)


_backends: dict[tuple[str, str], Backend] = {}


def open_tokenizer_backend(job: Job) -> Backend:
    """Return the job's tokenizer backend. A process keeps the last backend that it has opened,
    since opening a tokenizer of 128,000 ids takes half a second and 100 MB.
    """
    backend = job.backend
    if backend == "auto" and job.unequal:
        backend = "reference"
    key = (job.tokenizer.path, backend)
    if key not in _backends:
        _backends.clear()
        _backends[key] = open_backend(fetch_tokenizer(job), backend)
    return _backends[key]


def find_skipped(batch: RecordBatch, attempt: Attempt) -> set[int]:
    """Return the positions of records that are put into quarantine without converting them.

    Args:
        batch: the batch that contains the records.
        attempt: names these records (`skipped`).
    """
    if not attempt.skipped:
        return set()
    origins = map(batch.origin, range(len(batch.records)))
    return {
        position
        for position, origin in enumerate(origins)
        if (origin.file, origin.ordinal) in attempt.skipped
    }


def describe_active(batch: RecordBatch, positions: range) -> ActiveRecords:
    """Describe the records of a batch at `positions`, for `Reporter.on_records`."""
    origin = batch.origin(positions.start)
    return ActiveRecords(
        file=origin.file,
        ordinal=origin.ordinal,
        where=origin.where,
        length=origin.length,
        records=len(positions),
        size=batch.size,
    )

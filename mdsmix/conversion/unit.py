"""Converts one work unit in a worker: from its source bytes to its stored shards and record.

A unit is read in windows, which are slices of its source. The key of a window is a hash of its
lines and of the settings. A window is converted again only if no stored record has its key. A
compressed file is one unit of many windows, because their beginnings are known only when the file
is read. Each window has its own record, so after a run was killed, no finished window is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import orjson

from mdsmix.conversion.bad_records import Tally
from mdsmix.conversion.finished_units import UnitResult, list_stored
from mdsmix.conversion.job import Dropped, Job
from mdsmix.conversion.keys import (
    make_lines_key,
    make_window_key,
    name_bad_records,
    name_hashes_file,
    name_unit_file,
)
from mdsmix.conversion.publish_pretrained import fetch_processor, fetch_tokenizer
from mdsmix.conversion.shared_batches import (
    BatchToEncode,
    EncodedBatch,
    EncodedPiece,
    SharedBatches,
    describe_records,
    encode_batch,
)
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
from mdsmix.engines.tasks import Attempt, Reporter, split_positions
from mdsmix.errors import Unreachable
from mdsmix.frozen import frozen
from mdsmix.kinds.assemble import Assembled
from mdsmix.kinds.membership import DUPLICATE, Membership
from mdsmix.kinds.read_records import (
    RecordReader,
    open_image_reader,
    open_record_encoder,
    open_record_reader,
)
from mdsmix.lazy_numpy import np
from mdsmix.shards.index import Shard
from mdsmix.shards.shard_files import store_shards
from mdsmix.shards.side_files import SideFile, group_names, store_record_names
from mdsmix.sources import (
    Content,
    Digests,
    RecordBatch,
    Unit,
    Window,
    compute_content,
    describe_unit,
    estimate_unit_size,
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


@frozen(kw_only=True)
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


@frozen(kw_only=True)
class ReadTask(_UnitOfJob):
    """An engine's task that reads a unit without encoding it.

    It hashes the unit's windows, so that a window which was moved to another file is recognized by
    its content.
    """

    is_hashed: bool = False
    """Whether the fingerprints of the unit's records are stored. If not, the images that the
    records name are hashed.
    """

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], Content]:
        """Read the unit, and return a function that returns its content: the hashes of its windows
        and files.

        Args:
            attempt: not used: reading is the same after a worker has died.
            reporter: the connection to the engine.
        """
        if self.is_hashed or self.job.kind.has_images:
            content = self._read_records(reporter)
        else:
            content = compute_content(self.unit)
        return lambda: content

    def _read_records(self, reporter: Reporter) -> Content:
        """Read all records of the unit, window by window, and return the unit's content: the hashes
        of its windows and files.
        """
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
        """Read the records of one window, without encoding them.

        With `is_hashed`, the records' fingerprints are stored at the target. Otherwise the images
        that the records name are hashed; their hash is added to `digests`, and their sizes and
        stamps are stored on this machine.

        Args:
            number: the number of the window in its unit.
            batches: the batches of records of this window, and of no other.
            digests: the hashes of the unit.
            reporter: the connection to the engine.
        """
        # Open what reads the records.
        job = self.job
        folders = job.image_folders(self.unit)
        pictures = None
        if not self.is_hashed:
            # The images are only hashed.
            pictures = open_image_reader(job.encoding, job.images_root, judges=False)
        reading = open_record_reader(job.stream, self.dropped.get(number, b""), pictures)
        # Read them.
        count = 0  # records of the window so far
        for batch in batches:
            reporter.wait_for_room()
            # The run expects to read its bytes twice only if duplicates are dropped (`is_hashed`).
            reporter.on_progress(batch.size if self.is_hashed else 0, 0)
            for positions in _cut_by_images([range(batch.length)], pictures):
                records = batch.records[positions.start : positions.stop]
                image_folders = find_folders(batch, positions, folders)
                reading.read(records, count + positions.start, image_folders)
            count += batch.length
        # Store the hashes of images, or the fingerprints.
        if pictures:
            digests.add_images(number, pictures.window_images.digest)
            remember_image_stamps(job, digests.window(number), pictures.window_images.stamps)
        if self.is_hashed:
            _store_hashes(job, digests.window(number), reading.membership.fingerprints(count))


def _cut_by_images(pieces: Iterable[range], pictures: ImageReader | None) -> Iterator[range]:
    """Split ranges of records, so that the images of each new range have about AIM_BYTES together.
    The average size of the images so far decides how many records a range has. Without images the
    ranges are yielded unchanged.

    Args:
        pieces: ranges of the positions of records in a batch.
        pictures: reads the images, and knows their average size; None: no images are read.
    """
    for piece in pieces:
        while piece:
            limit = pictures.most_records if pictures else len(piece)
            yield piece[:limit]
            piece = piece[limit:]


def _store_hashes(job: Job, window: Window, fingerprints: bytes) -> None:
    """Write the file `<key>.hashes` with the fingerprints of the records of a window.

    Args:
        job: the job of the stream.
        window: the window.
        fingerprints: 16 bytes for each record.
    """
    key = make_lines_key(job, window)
    content = pack_unit_file(records=(), blobs={key: compress_with_checksum(fingerprints)})
    (job.folder / FOLDER / name_hashes_file(key)).write(content)


def find_folders(
    batch: RecordBatch, positions: range, folders: Mapping[str, Location]
) -> Sequence[Location]:
    """Return the folder of the images of each record of a batch at `positions`; () if records name
    no images.

    Args:
        batch: records that were read together, all from one window.
        positions: the positions of the records in the batch.
        folders: name of a source file -> folder of its images; empty if records name no images.
    """
    return [folders[name] for name in batch.files(positions)] if folders else ()


@frozen(kw_only=True)
class UnitTask(_UnitOfJob):
    """An engine's task that converts a work unit, window by window."""

    windows: dict[int, Window] = field(default_factory=dict)
    "The unit's windows that are known before it is read: number -> window."
    records: Mapping[int, UnitRecord] = field(default_factory=dict)
    "The records of windows that are converted already: number of the window -> record."

    def find_finished_result(self, content: Content | None) -> UnitResult | None:
        """Return the result of the unit if all its windows are converted already; otherwise None.

        Args:
            content: the hashes of the unit's source, for all its windows; None if they are not
                known.
        """
        if content is None or len(self.records) < len(content.windows):
            return None
        records = [self.records[window.number] for window in content.windows]
        return UnitResult(content=content, records=records, reused=frozenset(self.records))

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], UnitResult]:
        """Convert the unit's windows that no earlier run has converted. Return a function that
        stores the last window and returns the result of the unit. The engine calls this function in
        a thread, while the worker does the next task.

        The bytes of the source are hashed while they are read; the hashes give the keys of windows.

        Args:
            attempt: how to convert the unit after workers have died on it.
            reporter: the connection to the engine.
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
            """Store the last window, and return the result of the whole unit.

            Raises Unreachable if the source has changed since an earlier run whose result is
            reused.
            """
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
        """Raise Unreachable if the source has changed although its size and time have not, so that
        the results of earlier runs do not fit it.

        The windows that are reused, not converted again, are checked. Under `duplicates: drop` all
        windows that were known before are checked, since their records decided which records are
        dropped.

        Args:
            content: the hashes of the unit's source as it was read now.
            windows: the windows that were known before: number -> window.
            reused: the numbers of the windows that are not converted again.
        """
        digests = {window.number: window.digest for window in content.windows}
        checked = set(windows) if self.job.drops else reused
        for number in checked:
            if digests.get(number) != windows[number].digest:
                raise Unreachable(STALE.format(url=self.unit.files[0].location.url))

    def _find_finished_after_death(self) -> tuple[dict[int, Window], dict[int, UnitRecord]]:
        """Find out which windows need not be converted, after a worker has died on this unit.
        Return (windows, records): number -> each known window, and number -> the stored record of
        each finished one.

        The windows that the dead worker stored are included. The target is listed again, since the
        shards of an older record may be gone.
        """
        windows = self.windows | KnownSources.load(self.job.target).windows_of(self.unit)
        stored = list_stored(self.job)
        return windows, stored.find_records(self.job, windows.values(), self.dropped)

    def _store(self, open_window: _OpenWindow, digests: Digests) -> UnitRecord:
        """Store the result of a window that was encoded to its end: its last shards, and then the
        unit file, named by `name_unit_file`. It has the window's UnitRecord (its shards and
        counts), its bad records, and the fingerprints of its records (16-byte hashes that find
        duplicates). Return the UnitRecord.

        The hash of the window's images is added to `digests`. The window is also noted in the cache
        of this machine.

        Args:
            open_window: the window, with its rows that fill no shard yet.
            digests: the hashes of the contents of the unit's windows.
        """
        job = self.job
        pictures = open_window.reading.images
        # The keys are hashes of the window's content, which is known now that all of it was read.
        # `key` names the record, and `base` the fingerprints of all records, dropped or not.
        if pictures:
            digests.add_images(open_window.number, pictures.window_images.digest)
        window = digests.window(open_window.number)
        base = make_lines_key(job, window)
        key = make_window_key(job, window, open_window.dropped)
        # Store the record, with fingerprints and bad records, in one file. It is written after the
        # shards, so a window with a record is complete.
        side_files = open_window.store_last()
        record = open_window.make_record(key, base, side_files)
        blobs = dict[str, bytes]()
        if not job.drops:  # under `duplicates: drop` fingerprints are stored by a ReadTask
            fingerprints = open_window.reading.membership.fingerprints(open_window.records_read)
            blobs[base] = compress_with_checksum(fingerprints)
        if open_window.tally.records.bad:
            blobs[name_bad_records(key, window)] = open_window.tally.bad.frame()
        content = pack_unit_file([orjson.dumps(record)], blobs)
        (job.folder / FOLDER / name_unit_file(key, window)).write(content)
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
        """Encode the records of a window, and store each shard as soon as it is full. Return the
        window with the rows that fill no shard; `_store` stores these.

        Args:
            number: the number of the window in its unit.
            batches: the batches of records of this window, and of no other.
            attempt: how to convert the unit after workers have died on it.
            reporter: the connection to the engine.
        """
        window = _OpenWindow(self.job, number, self.dropped.get(number, b""))
        encoder = _PieceEncoder(
            window.reading, self.job.image_folders(self.unit), attempt, reporter
        )
        shared = SharedBatches(window.reading.membership, encoder.encode, reporter)
        for batch, pieces in shared.encode(batches):
            for piece in pieces:
                window.add(batch, piece)
                size = batch.size * len(piece.positions) // batch.length
                reporter.on_progress(size, piece.part.encoded.totals.tokens)
            window.finish_batch(batch, find_skipped(batch, attempt))
            del batch  # otherwise it stays in memory while the next one is read
        window.finish()
        return window

    @cached_property
    def shared_bytes(self) -> int:
        """About how many bytes the task reads and can share. It cannot share a stream with images,
        since these are hashed in their order; nor a stream that a user's function reads, since the
        function may remember earlier records; nor the first records of a stream (`--limit`).
        """
        if self.job.kind.has_images or self.job.function or self.job.limit:
            return 0
        return estimate_unit_size(self.unit)

    def open_assistant(self) -> Callable[[BatchToEncode], EncodedBatch]:
        """Return a function that encodes batches of the unit, for an assistant."""
        backend = open_tokenizer_backend(self.job)
        backend.begin(self.job.name)
        reading = open_record_encoder(self.job.stream, self.job.tokenizer, backend)
        return partial(encode_batch, reading)


class _OpenWindow:
    """The state of one window from the first encoded record until it is stored: its rows, shards,
    counts and bad records so far.
    """

    assembled: Assembled
    "The rows that are in no shard yet; set by `finish`."

    def __init__(self, job: Job, number: int, dropped: bytes) -> None:
        """Start without records, and open the tokenizer backend that encodes them.

        Args:
            job: the job of the stream.
            number: the number of the window in its unit.
            dropped: a bit for each record of the window (see `job.Dropped`): 1 drops it as a
                duplicate.
        """
        self._job = job
        self.number = number
        self.dropped = dropped
        self.backend = open_tokenizer_backend(job)
        self.backend.begin(job.name)
        fetch_processor(job)  # into the cache of this machine
        self.reading = open_record_encoder(
            job.stream, job.tokenizer, self.backend, job.images_root, dropped
        )
        self.rows = job.kind.open_rows(job.layout, job.tokenizer.dtype)
        self.tally = Tally(job.kind.splits_records, self.reading.membership, job.kind.has_images)
        self.names = list[Any]()
        self.shards = list[Shard]()
        self.records_read = 0
        self._unwritten = list[int]()

    def add(self, batch: RecordBatch, piece: EncodedPiece) -> None:
        """Add the samples of some records, and count the records. Store each shard that is full.

        Args:
            batch: the batch of the records; earlier batches are finished.
            piece: the encoded records.
        """
        first = self.records_read + piece.positions.start
        encoded = piece.part.encoded
        self.reading.add_part(piece.part, first)
        for rows in self.rows.add(encoded):
            self.shards += store_shards(self._job.folder, self._job.layout, rows, is_new=True)
        self.names += encoded.ids
        self.note_unwritten(encoded, first)
        self.tally.add(batch, piece.positions, encoded)

    def finish_batch(self, batch: RecordBatch, crashed: Set[int]) -> None:
        """Count the records of a batch that are in no piece. All its pieces were added.

        Args:
            batch: the batch.
            crashed: positions of the records that crashed workers.
        """
        self.tally.finish_batch(batch, crashed)
        # Count the records that may have values in fields which are not read.
        self.reading.diagnostics.add("unseen", batch.unseen)
        self.records_read += batch.length

    def note_unwritten(self, encoded: Encoded, first: int) -> None:
        """Collect the numbers of the records that became no sample, for `pack_unwritten`. Dropped
        duplicates are left out.

        Args:
            encoded: the result of encoding some records of the window.
            first: the number of the first of these records in the window.
        """
        for position, reason in encoded.rejected.items():
            if reason != DUPLICATE:
                self._unwritten.append(first + position)

    def pack_unwritten(self) -> str:
        """Return the value of `UnitRecord.unwritten`, in base64: a bit for each record of the
        window. It is 1 if the record has a fingerprint but became no sample, so that no later
        record counts as its duplicate. Return "" if no bit is 1.
        """
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
        """Collect the rows that are in no shard yet, in `assembled`. If rows are packed from
        several documents, turn the names of the documents into one list of names per row.
        """
        self.assembled = self.rows.finish()
        if self.names and self.assembled.documents is not None:
            self.names = group_names(self.names, self.assembled.documents)

    def store_last(self) -> list[SideFile]:
        """Store the last shards (full ones were stored while encoding), and the names of all rows.
        Return the files with these names.
        """
        job = self._job
        self.shards += store_shards(job.folder, job.layout, self.assembled.rows, is_new=True)
        if not job.names_rows:
            return []
        return store_record_names(job.folder, self.names, self.shards)

    def make_record(self, key: str, base: str, side_files: list[SideFile]) -> UnitRecord:
        """Return the window's record: its shards and counts.

        Args:
            key: the key of the record.
            base: the key of the fingerprints of all records, dropped or not.
            side_files: the files with the names of the rows.
        """
        pictures = self.reading.images
        return UnitRecord(
            key=key,
            base=base if base != key else "",
            fetched=pictures.window_images.fetched if pictures else {},
            backend=self.backend.label,
            shards=self.shards,
            side_files=side_files,
            totals=self.assembled.totals,
            records=replace(self.tally.records, **self.reading.diagnostics.counts),
            size=self.tally.size,
            lines=self.tally.lines,
            leftover=pack_array(self.assembled.leftover),
            unwritten=self.pack_unwritten(),
        )


class _PieceEncoder:
    """Encodes batches of a window in this process, in pieces. A piece has fewer records when memory
    is short, when their images are large, or when workers have died on the unit.
    """

    def __init__(
        self,
        reading: RecordReader,
        folders: Mapping[str, Location],
        attempt: Attempt,
        reporter: Reporter,
    ) -> None:
        """Start with the piece size of the attempt.

        Args:
            reading: reads and encodes the records of the window.
            folders: for each file of the unit, the folder from which its image paths are resolved.
            attempt: how to convert the unit after workers have died on it.
            reporter: the connection to the engine.
        """
        self._reading = reading
        self._folders = folders
        self._attempt = attempt
        self._reporter = reporter
        self._halvings = 0
        "How often batches are halved because memory is short."

    def encode(self, batch: RecordBatch, membership: Membership) -> Iterator[EncodedPiece]:
        """Yield the encoded pieces of a batch, in order.

        Args:
            batch: the batch.
            membership: decides which records of the batch are in the stream.
        """
        reporter = self._reporter
        halvings = self._attempt.halvings + self._halvings
        crashed = find_skipped(batch, self._attempt)
        pieces = split_positions(batch.length, halvings, crashed)
        for positions in _cut_by_images(pieces, self._reading.images):
            reporter.wait_for_room()
            first = batch.origin(positions.start)
            reporter.on_records(describe_records(batch, first, len(positions)))
            part = self._reading.encode_part(
                batch.records[positions.start : positions.stop],
                membership.for_part(positions.start, len(positions)),
                find_folders(batch, positions, self._folders),
            )
            yield EncodedPiece(positions, part)
        reporter.on_records(None)
        if reporter.is_tight():
            self._halvings = min(MOST_HALVINGS, self._halvings + 1)


_backends: dict[tuple[str, str], Backend] = {}


def open_tokenizer_backend(job: Job) -> Backend:
    """Return the job's tokenizer backend. A process keeps the last backend that it has opened,
    since opening a tokenizer of 128,000 ids takes half a second and 100 MB.
    """
    backend = job.backend
    # `job.unequal` names a fast backend whose token ids were found to be wrong.
    if backend == "auto" and job.unequal:
        backend = "reference"
    key = (job.tokenizer.path, backend)
    if key not in _backends:
        _backends.clear()
        _backends[key] = open_backend(fetch_tokenizer(job), backend)
    return _backends[key]


def find_skipped(batch: RecordBatch, attempt: Attempt) -> set[int]:
    """Return the positions of the records that have killed workers before. They are put into
    quarantine (the folder of bad records) without converting them.

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

"""Finds the records that `duplicates: drop` drops from each work unit, before any unit is encoded.

The source is read for the fingerprints (128-bit hashes) of its records, unless they are stored
already. Then the fingerprints are compared. Of equal records the first one in the order of the plan
is kept. That is the order of units in the index: by the name of a unit's first file, then by where
the unit begins in the file.

The alternative would be to encode everything first, and then to encode the units with duplicates
again. It would be cheaper only if hardly any unit had a duplicate. But with one duplicate in a
hundred records, every window (a slice of a unit's source) of 20,000 records has some.

The list of dropped records is part of a unit's key. If the first copy of a record is edited away,
the unit with the next copy is converted again and keeps this copy. A unit with an unchanged list is
not converted again. The lists are stored in the cache of this machine as long as the stream has the
same windows, so a run with nothing to do does not compare fingerprints.

Fingerprints of the whole stream are compared, since the first copy may be in any window; they may
not fit into memory, so they are sorted on local disk. Each fingerprint is written, with its
record's position (24 bytes together), to one of 256 bucket files, chosen by its first bits. Then
the buckets are sorted one after the other. For a billion records a bucket has 100 MB, and sorting
takes three times that. For a larger bucket only one row per distinct fingerprint is kept in memory,
so a record that occurs a billion times takes no more than one that occurs twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from mdsmix.conversion.finished_units import Fingerprints, read_hashes
from mdsmix.conversion.keys import make_lines_keys, name_hashes_file
from mdsmix.conversion.source_cache import (
    group_dropped_by_unit,
    recall_dropped,
    remember_dropped,
)
from mdsmix.conversion.unit import ReadTask
from mdsmix.conversion.unit_files import BlobRef
from mdsmix.conversion.work import Work
from mdsmix.errors import Unreachable
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.messages import plural
from mdsmix.ragged import Ragged
from mdsmix.sources import Content, Unit, estimate_size

Rows = NDArray["np.uint64"]
"""uint64 [n, 3]: both halves of a fingerprint, and the position of its record in the stream; [n, 2]
without positions, if repeats are only counted.
"""

BUCKET_BITS = 8
"The leading bits of a fingerprint, which name its bucket: 256 buckets."
ROWS_AT_ONCE = 1 << 20
"""How many new rows are sorted at once. They are sorted together with the first row of each
fingerprint that came earlier in the same bucket.
"""


def count_repeats(windows: Iterable[Fingerprints]) -> int:
    """Return the number of records whose fingerprint equals that of an earlier record.

    Args:
        windows: the fingerprints of each window (a slice of a work unit's source) of the stream, in
            the order of the stream.
    """
    return sum(map(len, _find_repeats(map(_drop_empty, windows))))


def find_repeats(windows: Iterable[Fingerprints]) -> list[bytes]:
    """Find the records whose fingerprint equals that of an earlier record of the stream. Return a
    bit string for each window (a slice of a work unit's source).

    Bit `n % 8` of byte `n // 8` is 1 if record n of the window is a repeat. If records 0 and 9 of
    12 are repeats, the string is b"\\x01\\x02"; without repeats it is b"".

    Args:
        windows: the fingerprints of each window of the stream, in the order of the stream.
    """
    # The bits of all windows are in one array, where each window begins with a byte of its own:
    # windows of 12 and 3 records have the starts 0 and 16, and the last one ends at 24.
    starts = [0]  # `_number_rows` appends the start after each window
    bits = np.zeros(0, np.uint8)
    for repeats in _find_repeats(_number_rows(windows, starts)):
        positions = repeats[:, 2]
        # The first positions come after all windows were read, so the array's size is known here.
        if not len(bits):
            bits = np.zeros(starts[-1] >> 3, np.uint8)
        # Set the bit `position % 8` of the byte `position // 8`.
        flags = np.uint8(1) << (positions & 7).astype(np.uint8)
        np.bitwise_or.at(bits, positions >> 3, flags)
    # Cut the array into the bits of each window.
    bits_of_windows = list[bytes]()
    for start, end in pairwise(starts):
        window_bits = bits[start >> 3 : end >> 3]
        bits_of_windows.append(window_bits.tobytes() if window_bits.any() else b"")
    return bits_of_windows


def _number_rows(windows: Iterable[Fingerprints], starts: list[int]) -> Iterator[Rows]:
    """Yield the rows of each window (a slice of a work unit's source), with positions.

    A position is a record's number in the stream, but the first record of each window has a
    multiple of 8: windows of 12 and 3 records have the positions 0-11 and 16-18.

    Args:
        windows: the fingerprints of each window of the stream.
        starts: pass [0]. The start of each following window is appended, and the end of the last
            window: [0, 16, 24] in the example.
    """
    for window in windows:
        start = starts[-1]
        positions = np.arange(start, start + len(window), dtype=np.uint64)
        starts.append(start + 8 * math.ceil(len(window) / 8))
        yield _drop_empty(np.column_stack([window, positions]))


def _drop_empty(rows: Rows) -> Rows:
    """Return the rows without those that have no fingerprint: both halves are 0."""
    has_fingerprint = rows[:, 0] | rows[:, 1] > 0
    # Usually all have one, and `all` takes a tenth of the time of the copy.
    return rows if has_fingerprint.all() else rows[has_fingerprint]


def _find_repeats(rows_of_windows: Iterable[Rows]) -> Iterator[Rows]:
    """Yield arrays with the rows of repeats, unordered. A repeat is a record whose fingerprint
    equals that of an earlier record. Many fingerprints are sorted in temporary files, few in
    memory.

    Raises Unreachable if the disk for temporary files is full.

    Args:
        rows_of_windows: the rows of each window of the stream, in its order.
    """
    # One array of rows is sorted in memory.
    batches = _batch_rows(rows_of_windows)
    first = next(batches, None)
    if first is None:
        return
    second = next(batches, None)
    if second is None:
        yield first[_flag_repeats(first)]
        return
    # More rows are written to bucket files, and sorted bucket by bucket.
    import tempfile  # 1.5 ms, and few runs have so many records

    try:
        with tempfile.TemporaryDirectory(prefix="mdsmix-fingerprints-") as folder:
            for rows in chain((first, second), batches):
                _append_to_buckets(Path(folder), rows)
            for bucket in Path(folder).iterdir():
                yield from _find_repeats_in_bucket(bucket, first.shape[1])
    except OSError as error:
        raise Unreachable(
            "the fingerprints of the records cannot be compared in the temporary folder "
            f"{tempfile.gettempdir()} ({error.strerror}), so duplicates cannot be found. Comparing "
            "needs up to 24 bytes of disk per record: free space there, or set the environment "
            "variable TMPDIR to a folder on another disk."
        ) from None


def _batch_rows(rows_of_windows: Iterable[Rows]) -> Iterator[Rows]:
    """Yield the rows of all windows (slices of the source) in arrays of at least ROWS_AT_ONCE rows.
    The last array may be smaller. Many small windows share an array, since each array is written to
    up to 256 files.
    """
    batch = list[Rows]()
    row_count = 0
    for rows in rows_of_windows:
        batch.append(rows)
        row_count += len(rows)
        if row_count >= ROWS_AT_ONCE:
            yield np.concatenate(batch)
            batch = []
            row_count = 0
    if batch:
        yield np.concatenate(batch)


def _append_to_buckets(folder: Path, rows: Rows) -> None:
    """Append each row (fingerprint and position of a record) to one of 256 files in this folder.
    The name of the file is the number in the first BUCKET_BITS bits of the fingerprint, so equal
    fingerprints are in the same file. Rows of a file keep their order.
    """
    # Sort the rows by bucket, so that the rows of each bucket are one slice.
    buckets = (rows[:, 0] >> np.uint64(64 - BUCKET_BITS)).astype(np.uint8)
    # A row is taken as one value, in two thirds of the time of its numbers.
    whole_rows = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))
    whole_rows = whole_rows.ravel().take(np.argsort(buckets, kind="stable"))
    in_order = whole_rows.view(np.uint64).reshape(rows.shape)
    by_bucket = Ragged.from_lengths(in_order, np.bincount(buckets, minlength=1 << BUCKET_BITS))
    for bucket in np.flatnonzero(by_bucket.lengths):
        with (folder / str(bucket)).open("ab") as file:
            file.write(by_bucket[bucket].data)


def _find_repeats_in_bucket(bucket: Path, row_numbers: int) -> Iterator[Rows]:
    """Yield arrays with the rows of a bucket file whose fingerprint equals that of an earlier row
    of the file. (All rows of equal fingerprints are in one of 256 bucket files.) The file is read
    block by block.

    Args:
        row_numbers: the numbers of a row, 2 or 3.
    """
    firsts = np.empty((0, row_numbers), np.uint64)  # the first row of each fingerprint so far
    with bucket.open("rb") as file:
        block = np.fromfile(file, np.uint64, row_numbers * ROWS_AT_ONCE)
        while len(block):
            rows = np.concatenate([firsts, block.reshape(-1, row_numbers)])
            is_repeat = _flag_repeats(rows)
            yield rows[is_repeat]
            block = np.fromfile(file, np.uint64, row_numbers * ROWS_AT_ONCE)
            if len(block):
                firsts = rows[~is_repeat]


def _flag_repeats(rows: Rows) -> NDArray[np.bool_]:
    """Return for each row whether an earlier row has the same fingerprint: fingerprints a, b, a
    give [False, False, True].

    A row is sorted by 32 bits of its fingerprint only: by two stable sorts of 16 bits each, which
    numpy does by counting, in 4 ns a row each. Sorting by the 64 bits of a half takes 30 to 50 ns,
    and by both halves 70 to 200. Rows with equal bits are a group. Nearly always all rows of a
    group have the same fingerprint; only the others are sorted by both halves.
    """
    # Sort the rows into groups: by bits 0-15 of the first half, then by bits 16-31.
    first_halves = np.ascontiguousarray(rows[:, 0])
    order = np.argsort(first_halves.astype(np.uint16), kind="stable")
    high_bits = (first_halves >> np.uint64(16)).astype(np.uint16)
    order = order.take(np.argsort(high_bits.take(order), kind="stable"))
    first_halves = first_halves.take(order)
    second_halves = rows[:, 1].take(order)

    # A row that equals the row before it is a repeat, since the sorts keep equal rows in order.
    equals_previous = _equals_previous(first_halves) & _equals_previous(second_halves)
    is_repeat = np.zeros(len(rows), bool)
    is_repeat[order[equals_previous]] = True

    # In a group with several fingerprints equal rows need not be next to each other: a, b, a.
    groups = first_halves.astype(np.uint32)
    in_mixed = _find_mixed_groups(groups, equals_previous)
    if len(in_mixed):
        first_halves = first_halves.take(in_mixed)
        second_halves = second_halves.take(in_mixed)
        by_fingerprint = np.lexsort((second_halves, first_halves))
        equals_previous = _equals_previous(first_halves.take(by_fingerprint))
        equals_previous &= _equals_previous(second_halves.take(by_fingerprint))
        is_repeat[order.take(in_mixed[by_fingerprint[equals_previous]])] = True
    return is_repeat


def _equals_previous(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each value whether it equals the value before it: 5, 5, 7 give [False, True,
    False].
    """
    equals_previous = np.zeros(len(values), bool)
    equals_previous[1:] = values[1:] == values[:-1]
    return equals_previous


def _find_mixed_groups(
    groups: NDArray[np.uint32], equals_previous: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the positions of all rows whose group has several fingerprints, ascending.

    Args:
        groups: the group of each row. The rows of a group are next to each other.
        equals_previous: whether each row has the fingerprint of the row before it.
    """
    begins_group = ~_equals_previous(groups)
    is_other_in_group = ~(equals_previous | begins_group)
    if not is_other_in_group.any():
        return np.empty(0, np.int64)
    group_numbers = np.cumsum(begins_group) - 1
    is_mixed = np.zeros(group_numbers[-1] + 1, bool)
    is_mixed[group_numbers[is_other_in_group]] = True
    return np.flatnonzero(is_mixed.take(group_numbers))


def find_dropped(work: Work) -> Work:
    """Find the duplicates that `duplicates: drop` drops from each work unit. Return a copy of
    `work` with its field `dropped` set to these. Without `duplicates: drop`, `work` is returned
    unchanged.

    Raises Unreachable if stored fingerprints are damaged.

    Args:
        work: the work units of a stream, and all that is needed to convert them.
    """
    job = work.job
    if not job.drops:
        return work
    # Use the stored result if the stream has the same windows; otherwise compare fingerprints.
    contents = _read_fingerprints(work)
    dropped = recall_dropped(job, contents, work.cache)
    if dropped is None:
        keys = list[str]()
        for content in contents:
            keys += make_lines_keys(job, content)
        refs = list[BlobRef]()
        for key in keys:
            # If no file is listed, a worker has written the window's own file in this run.
            file = work.stored.find_hashes_file(key) or name_hashes_file(key)
            refs.append(BlobRef(key, file))
        bits = find_repeats(read_hashes(job.folder, refs))
        remember_dropped(work.cache, keys, bits)
        dropped = group_dropped_by_unit(bits, contents)
    return replace(work, dropped=dropped)


def _read_fingerprints(work: Work) -> list[Content]:
    """Let the engine read the work units whose fingerprints are not stored yet, or whose content is
    not known to this machine. Return the contents (hashes of the source) of all units of the
    stream.
    """
    job = work.job
    unread = list[Unit]()
    for unit in work.units:
        content = work.cache.content(unit)
        if content and all(map(work.stored.find_hashes_file, make_lines_keys(job, content))):
            # The unit need not be read here, so its bytes count as read, without tokens.
            work.watcher.on_progress(estimate_size(unit.files), 0)
        else:
            unread.append(unit)
    if unread:
        work.watcher.on_step(
            f"stream {job.name}: reading {plural(len(unread), 'work unit')} of its source to find "
            "duplicates, before the conversion begins"
        )
        work.open_shared()
        work.read_sources([ReadTask(job=job, unit=unit, is_hashed=True) for unit in unread])
    return work.cache.contents(work.units)

"""`duplicates: drop`: which records are dropped from each work unit, known before the first one is
encoded.

The source is read for the fingerprints of its records, where they are not kept from before, and the
fingerprints are joined: of equal records the first in the order of the plan stays. That is the
order of units in the index: by the name of a unit's first file, then by where it begins. Encoding
first, and then again the units that lose records, would cost less only where hardly any unit holds
a duplicate. Nobody asks for `drop` there: with one duplicate in a hundred records every window of
20,000 holds some.

The list of dropped records is part of a unit's key. So where the earlier copy is edited away, the
unit with the next copy is done again and keeps it; a unit whose list is as it was is not touched.
The lists are remembered in the cache of this machine as long as the stream holds the same windows,
so a run with nothing to do joins nothing.

Fingerprints are joined on local disk, since a first copy anywhere makes all later ones repeats.
Each fingerprint goes, with its record's position, 24 bytes together, into one of 256 bucket files
by its first bits; then one bucket after the other is sorted. For a billion records a bucket is 100
MB, and takes three times that while it is sorted. Of a larger bucket only one row of each
fingerprint is held, so a record that stands there a billion times takes no more than one that
stands there twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdsmix.conversion.finished_units import Fingerprints, read_hashes
from mdsmix.conversion.job import hashes_name, lines_keys
from mdsmix.conversion.source_cache import dropped_by_unit, known_dropped, remember_dropped
from mdsmix.conversion.unit import ReadTask
from mdsmix.conversion.unit_files import gathered
from mdsmix.conversion.work import Work
from mdsmix.errors import Unreachable
from mdsmix.messages import plural
from mdsmix.ragged import Ragged
from mdsmix.sources import Content, estimate_size

Rows = NDArray[np.uint64]
"uint64 [n, 3]: both halves of a fingerprint, and the position of its record."

BUCKET_BITS = 8
"The leading bits of a fingerprint, which name its bucket: 256 buckets."
FLAGS = np.uint64((1 << 16) - 1)
"The last bits of a first half, by which rows that may be equal are found."
ROWS_AT_ONCE = 1 << 20
"Rows that are sorted at once, with one of each fingerprint of a bucket's rows before them."
_NO_ROWS = np.empty((0, 3), np.uint64)


def count_repeats(windows: Iterable[Fingerprints]) -> int:
    """The number of records with the fingerprint of an earlier one. `windows`: those of the stream,
    in the order of its plan.
    """
    return sum(map(len, _repeats(windows, [0])))


def find_repeats(windows: Iterable[Fingerprints]) -> list[bytes]:
    """For each window a bit per record, the lowest bit of a byte first: 1 where an earlier record
    of the stream has the same fingerprint; b"" for a window without any. A byte holds bits of one
    window alone.
    """
    starts, bits = [0], np.zeros(0, np.uint8)
    for at in _repeats(windows, starts):
        bits = bits if len(bits) else np.zeros(starts[-1] >> 3, np.uint8)
        np.bitwise_or.at(bits, at >> 3, np.uint8(1) << (at & 7).astype(np.uint8))
    found = [bits[begin >> 3 : end >> 3] for begin, end in pairwise(starts)]
    return [each.tobytes() if each.any() else b"" for each in found]


def _repeats(windows: Iterable[Fingerprints], starts: list[int]) -> Iterator[NDArray[np.uint64]]:
    """The positions of later copies, in no order. Every window starts at a multiple of 8; these
    starts, and the end, are appended to `starts`. Rows beyond ROWS_AT_ONCE go through files.
    Unreachable where the disk for temporary files is full.
    """
    # Small windows are many, and each array is appended to up to 256 files.
    parts = map(np.concatenate, gathered(_rows(windows, starts), len, ROWS_AT_ONCE))
    rows, rest = next(parts, _NO_ROWS), next(parts, _NO_ROWS)
    if not len(rest):
        yield rows[_is_later(rows), 2]
        return
    try:
        with tempfile.TemporaryDirectory(prefix="mdsmix-fingerprints-") as folder:
            for some in chain((rows, rest), parts):
                _spill(Path(folder), some)
            for bucket in Path(folder).iterdir():
                yield from _of_bucket(bucket)
    except OSError as error:
        raise Unreachable(
            f"the fingerprints of the records cannot be joined in {tempfile.gettempdir()} ({error.strerror}), and without that "
            "nobody knows which records are duplicates; it takes 24 bytes a record: make room there, or set TMPDIR to another folder."
        ) from None


def _rows(windows: Iterable[Fingerprints], starts: list[int]) -> Iterator[Rows]:
    for window in windows:
        positions = np.arange(starts[-1], starts[-1] + len(window), dtype=np.uint64)
        starts.append(starts[-1] + -(-len(window) // 8) * 8)
        yield np.column_stack([window, positions])[window[:, 0] | window[:, 1] > 0]


def _spill(folder: Path, rows: Rows) -> None:
    """Appends each row to the file of its bucket; rows of a bucket keep their order."""
    buckets = (rows[:, 0] >> np.uint64(64 - BUCKET_BITS)).astype(np.uint8)
    in_order = rows.take(np.argsort(buckets, kind="stable"), axis=0)
    by_bucket = Ragged.from_lengths(in_order, np.bincount(buckets, minlength=1 << BUCKET_BITS))
    for bucket in np.flatnonzero(by_bucket.lengths):
        with (folder / str(bucket)).open("ab") as file:
            file.write(by_bucket[bucket].data)


def _of_bucket(bucket: Path) -> Iterator[NDArray[np.uint64]]:
    firsts = _NO_ROWS
    with bucket.open("rb") as file:
        while len(some := np.fromfile(file, np.uint64, 3 * ROWS_AT_ONCE)):
            rows = np.concatenate([firsts, some.reshape(-1, 3)])
            is_later = _is_later(rows)
            yield rows[is_later, 2]
            firsts = rows[~is_later]


def _is_later(rows: Rows) -> NDArray[np.bool_]:
    """Whether an earlier row has the same fingerprint. Only rows whose first half may stand twice
    are sorted as rows, for which sorting the first halves is enough: 30 ns a row, where sorting the
    rows takes 200.
    """
    high = np.sort(rows[:, 0])
    twins = high[1:][high[1:] == high[:-1]]
    may_repeat = np.zeros(int(FLAGS) + 1, bool)
    may_repeat[twins & FLAGS] = True
    some = np.flatnonzero(may_repeat.take(rows[:, 0] & FLAGS))
    order = some[np.lexsort((rows[some, 1], rows[some, 0]))]  # stable
    is_equal = (rows[order[1:], :2] == rows[order[:-1], :2]).all(axis=1)
    result = np.zeros(len(rows), bool)
    result[order[1:][is_equal]] = True
    return result


def without_duplicates(work: Work) -> Work:
    """The work with the duplicates to drop from each unit, where the recipe drops any; Unreachable
    where fingerprints are damaged.
    """
    job, cache = work.job, work.cache
    if not job.drops:
        return work
    contents = _hashed(work)
    dropped = known_dropped(job, contents, cache)
    if dropped is None:
        keys = [key for content in contents for key in lines_keys(job, content)]
        wanted = [(key, work.stored.hashes_of(key) or hashes_name(key)) for key in keys]
        bits = find_repeats(read_hashes(job.folder, wanted))
        remember_dropped(cache, keys, bits)
        dropped = dropped_by_unit(bits, contents)
    return replace(work, dropped=dropped)


def _hashed(work: Work) -> list[Content]:
    """The contents of all units of the stream. Units that are not known, or whose fingerprints are
    not kept, are read first.
    """
    job, cache, todo = work.job, work.cache, list[int]()
    for number, unit in enumerate(work.units):
        content = cache.content(unit)
        keys = lines_keys(job, content) if content else ()
        if content and all(map(work.stored.hashes_of, keys)):
            work.watcher.on_progress(estimate_size(unit.files), 0)
        else:
            todo.append(number)
    if todo:
        work.watcher.on_step(
            f"{job.name}: reads {plural(len(todo), 'work unit')} for duplicates, before they are converted"
        )
        work.prepare()
        work.learn([ReadTask(job=job, unit=work.units[number], hashed=True) for number in todo])
    return cache.contents(work.units)

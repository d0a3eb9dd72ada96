"""`duplicates: drop`: which records are dropped from each work unit, known before the first one is encoded.

The source is read for the fingerprints of its records, where they are not kept from before, and these are joined: of equal
records the first in the order of the plan stays. That is the order of units in the index: by the name of a unit's first file, then
by where it begins. Encoding first and doing again what loses records would cost less only where hardly any unit holds a duplicate,
and nobody asks for `drop` there: with one duplicate in a hundred records every window of 20,000 holds some.

What is dropped is part of a unit's key, so where the earlier copy is edited away, the unit with the next one is done again, which
then keeps its record; a unit whose list is as it was is not touched. The lists are remembered in the cache of this machine as
long as the stream holds the same windows, so a run with nothing to do joins nothing.

Fingerprints are joined on local disk, in memory that does not grow with the stream. A first copy anywhere makes all later ones repeats, so every fingerprint has to meet every other. They are thrown into bucket
files by their first 6 bits, where these are large by 6 more, 24 bytes each with where it stands, and one bucket after the other is sorted.
What is held is one buffer (a million rows, 25 MB) or one bucket (at last a 4,096th of the stream, so as much for 4 billion records), and
three times that while it is sorted. Of a larger bucket only one row of each fingerprint is held, so a record that stands there a billion times
takes no more than one that stands there twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdsmix.convert.job import lines_keys
from mdsmix.convert.known_sources import dropped_by_unit, known_dropped, remember_dropped
from mdsmix.convert.stored import Fingerprints, read_hashes
from mdsmix.convert.unit import ReadTask
from mdsmix.convert.work import Work
from mdsmix.errors import Unreachable
from mdsmix.sources import Content, size_of
from mdsmix.words import plural

Rows = NDArray[np.void]

ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("at", "<u8")])
BUFFER_ROWS = 1 << 20
BUCKET_ROWS = 1 << 20
"Rows of a bucket that are sorted at once, with one of each fingerprint of those before."
BUCKET_BITS, MOST_BITS = 6, 12
"Of a fingerprint, by which rows are thrown into 64 files; a file of more than a buffer is thrown into 64 again: 2 million rows took 4,096 files 2 s."


def count_repeats(windows: Iterable[Fingerprints]) -> int:
    """How many records have the fingerprint of an earlier one. `windows`: the stream's, in the order of its plan."""
    return sum(len(at) for at in _repeats(_rows(windows, [0])))


def find_repeats(windows: Iterable[Fingerprints]) -> list[bytes]:
    """Of each window a bit for each of its records, the lowest of a byte first: 1 where an earlier record of the stream has
    the same fingerprint; b"" where none has. A byte holds bits of one window alone."""
    starts, bits = [0], np.zeros(0, np.uint8)
    for at in _repeats(_rows(windows, starts)):
        bits = bits if len(bits) else np.zeros(starts[-1] >> 3, np.uint8)
        np.bitwise_or.at(bits, at >> 3, np.uint8(1) << (at & 7).astype(np.uint8))
    found = [bits[begin >> 3 : end >> 3] for begin, end in pairwise(starts)]
    return [each.tobytes() if each.any() else b"" for each in found]


def _rows(windows: Iterable[Fingerprints], starts: list[int]) -> Iterator[Rows]:
    """A row for each fingerprint; every window starts at a multiple of 8, which is added to `starts`, as is the end."""
    for window in windows:
        rows = np.empty(len(window), ROW)
        rows["high"], rows["low"] = window[:, 0], window[:, 1]
        rows["at"] = np.arange(starts[-1], starts[-1] + len(window), dtype=np.uint64)
        starts.append(starts[-1] + -(-len(window) // 8) * 8)
        rows = rows[window.any(axis=1)]
        for begin in range(0, len(rows), BUFFER_ROWS):
            yield rows[begin : begin + BUFFER_ROWS]


def _repeats(rows: Iterable[Rows], used: int = 0) -> Iterator[NDArray[np.uint64]]:
    """Where the later copies stand, in no order. Unreachable where the disk for temporary files is full. `used`: bits that all rows share."""
    buffers = _buffers(rows)
    first = list(islice(buffers, 2))
    if len(first) < 2 or used >= MOST_BITS:
        yield from _of_bucket(chain(first, buffers))
        return
    try:
        with tempfile.TemporaryDirectory(prefix="mdsmix-fingerprints-") as temporary:
            folder = Path(temporary)
            for each in chain(first, buffers):
                _spill(folder, each, used)
            for bucket in sorted(folder.iterdir()):
                yield from _repeats(_read(bucket), used + BUCKET_BITS)
                bucket.unlink()
    except OSError as error:
        raise Unreachable(
            f"the fingerprints of the records cannot be joined in {tempfile.gettempdir()} ({error.strerror}), and without that "
            "nobody knows which records are duplicates; it takes 24 bytes a record: make room there, or set TMPDIR to another folder."
        ) from None


def _buffers(rows: Iterable[Rows]) -> Iterator[Rows]:
    """The rows in arrays of about BUFFER_ROWS."""
    held, count = list[Rows](), 0
    for each in rows:
        if held and count + len(each) > BUFFER_ROWS:
            yield np.concatenate(held)
            held, count = [], 0
        held.append(each)
        count += len(each)
    if held:
        yield np.concatenate(held)


def _spill(folder: Path, rows: Rows, used: int) -> None:
    """Appends each row to the file of its bucket, by the bits behind those that are used; rows of a bucket keep their order."""
    bucket = rows["high"] << np.uint64(used) >> np.uint64(64 - BUCKET_BITS)
    for number in range(1 << BUCKET_BITS):
        if len(of := rows[bucket == number]):
            with (folder / f"{number:04x}").open("ab") as file:
                file.write(of.data)


def _read(bucket: Path) -> Iterator[Rows]:
    with bucket.open("rb") as file:
        while len(rows := np.fromfile(file, ROW, BUCKET_ROWS)):
            yield rows


def _of_bucket(pieces: Iterable[Rows]) -> Iterator[NDArray[np.uint64]]:
    firsts = np.empty(0, ROW)
    for piece in pieces:
        rows = np.concatenate([firsts, piece])
        is_later = _is_later(rows)
        yield rows["at"][is_later]
        firsts = rows[~is_later]


def _is_later(rows: Rows) -> NDArray[np.bool_]:
    """Whether an earlier row has the same fingerprint. Few first halves are there twice, so only their rows are sorted by both."""
    high, result = np.ascontiguousarray(rows["high"]), np.zeros(len(rows), bool)
    ordered = np.sort(high)
    some = np.flatnonzero(np.isin(high, ordered[1:][ordered[1:] == ordered[:-1]]))
    order = some[np.lexsort((rows["low"][some], high[some]))]  # stable
    high, low = high[order], rows["low"][order]
    result[order[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]] = True
    return result


def without_duplicates(work: Work) -> Work:
    """The work with what is dropped from each unit, or from each that a limit lets in, where the recipe asks for that; Unreachable where
    fingerprints are damaged."""
    job, cache = work.job, work.cache
    if not job.drops:
        return work
    if job.limit:
        limited = list(work.limited(partial(ReadTask, hashed=True)))
        contents = [unit.content for _, unit in limited]
        keys = [key for of, unit in limited for key in lines_keys(of, unit.content)]
    else:
        contents = _hashed(work)
        if (known := known_dropped(job, contents, cache)) is not None:
            return replace(work, dropped=known)
        keys = [key for content in contents for key in lines_keys(job, content)]
    bits = find_repeats(
        read_hashes(job.folder, [(key, work.stored.hashes_of(key)) for key in keys])
    )
    if not job.limit:
        remember_dropped(cache, keys, bits)
    return replace(work, dropped=dropped_by_unit(bits, contents))


def _hashed(work: Work) -> list[Content]:
    """All units of the stream, of which those are read that are not known, or whose fingerprints are not kept."""
    job, cache, stored, todo = work.job, work.cache, work.stored, list[int]()
    for number, unit in enumerate(work.units):
        content = cache.content(unit)
        keys = lines_keys(job, content) if content else ()
        if content and all(stored.hashes_of(key).file in stored.names for key in keys):
            work.watcher.on_progress(size_of(unit.files), 0)
        else:
            todo.append(number)
    if todo:
        work.watcher.on_step(
            f"{job.name}: reads {plural(len(todo), 'work unit')} for duplicates, before they are converted"
        )
        work.prepare()
        work.learn([ReadTask(job=job, unit=work.units[number], hashed=True) for number in todo])
    return cache.contents(work.units)

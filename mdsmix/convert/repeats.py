"""Which fingerprints of a stream are repeats: joined on local disk, in memory that does not grow with the stream.

A first copy anywhere makes all later ones repeats, so every fingerprint has to meet every other. They are thrown into bucket
files by their first 12 bits, 24 bytes each with where it stands, and one bucket after the other is sorted. What is held is one
buffer (a million rows, 25 MB) or one bucket (a 4,096th of the stream, so as much for 4 billion records), and three times that
while it is sorted. Of a larger bucket only one row of each fingerprint is held, so a record that stands there a billion times
takes no more than one that stands there twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import Unreachable

Rows = NDArray[np.void]
Fingerprints = NDArray[np.uint64]
"[n, 2]: the two halves of each; both are 0 where a record has none."

ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("at", "<u8")])
BUFFER_ROWS = 1 << 20
BUCKET_ROWS = 1 << 20
"Rows of a bucket that are sorted at once, with one of each fingerprint of those before."
BUCKET_BITS = 12


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


def _repeats(rows: Iterable[Rows]) -> Iterator[NDArray[np.uint64]]:
    """Where the later copies stand, in no order. Unreachable where the disk for temporary files is full."""
    held, count, folder = list[Rows](), 0, None
    try:
        with ExitStack() as ends:
            for each in rows:
                if held and count + len(each) > BUFFER_ROWS:
                    folder = folder or Path(ends.enter_context(_temporary()))
                    _spill(folder, np.concatenate(held))
                    held, count = [], 0
                held.append(each)
                count += len(each)
            if folder is None:
                yield from _of_bucket([np.concatenate(held)] if held else [])
                return
            _spill(folder, np.concatenate(held))
            held = []
            for bucket in sorted(folder.iterdir()):
                yield from _of_bucket(_read(bucket))
                bucket.unlink()
    except OSError as error:
        raise Unreachable(
            f"the fingerprints of the records cannot be joined in {tempfile.gettempdir()} ({error.strerror}), and without that "
            "nobody knows which records are duplicates; it takes 24 bytes a record: make room there, or set TMPDIR to another folder."
        ) from None


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mdsmix-fingerprints-")


def _spill(folder: Path, rows: Rows) -> None:
    """Appends each row to the file of its bucket; rows of a bucket keep their order."""
    bucket = (rows["high"] >> np.uint64(64 - BUCKET_BITS)).astype(np.uint16)
    order = np.argsort(bucket, kind="stable")
    rows, bucket = rows[order], bucket[order]
    cuts = np.flatnonzero(bucket[1:] != bucket[:-1]) + 1
    for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        with (folder / f"{bucket[begin]:04x}").open("ab") as file:
            file.write(rows[begin:end].data)


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
    """Whether an earlier row has the same fingerprint. Few rows share even half of it with another, and only those are sorted by all of it."""
    order = np.argsort(rows["high"], kind="stable")
    high = rows["high"][order]
    is_equal = high[1:] == high[:-1]
    is_shared = np.zeros(len(rows), bool)
    is_shared[1:] = is_equal
    is_shared[:-1] |= is_equal
    shared = order[is_shared]
    by_all = shared[np.lexsort((rows["low"][shared], rows["high"][shared]))]  # stable
    high, low = rows["high"][by_all], rows["low"][by_all]
    later = by_all[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
    result = np.zeros(len(rows), bool)
    result[later] = True
    return result

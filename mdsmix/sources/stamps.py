"""Stores on this machine which files a stream was converted from: digests of their names, sizes and
stamps (a stamp changes when the file is written, such as its mtime).

With these digests `check` can report that a file was edited, without reading the file. A machine
that did not convert the stream knows only names and sizes, from the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.sources.units import SourceFile

DIGEST_BYTES = 8
Stamps = Counter[bytes]
"Digest of a file (`compute_stamp`) -> number of files with this digest."


def compute_stamp(file: SourceFile) -> bytes:
    """Return a digest of a file's name, size and stamp (a value that changes when the file is
    written, such as its mtime). The folder is left out of the name, because it may be moved.
    """
    name = file.name.rpartition("/")[2]
    return xxhash.xxh3_64_digest(f"{name} {file.stat.size} {file.stat.stamp}")


def remember_stamps(target: str, index_hash: str, files: Iterable[SourceFile]) -> None:
    """Store digests (`compute_stamp`) of the files that a stream was converted from, in this
    machine's cache. `mdsmix check` later warns with them of files that were edited.

    Args:
        target: the location where the stream is published.
        index_hash: the hash of the stream's index, in hex digits.
        files: the files of the stream's source.
    """
    stored = bytes.fromhex(index_hash) + b"".join(sorted(map(compute_stamp, files)))
    # If the cache cannot be written, `check` does not warn of files that are edited later.
    with suppress(Unreachable):
        keep_in_cache(_locate_file(target), stored)


def recall_stamps(target: str, index_hash: str) -> Stamps | None:
    """Return the digests (`compute_stamp`) that `remember_stamps` stored: of the names, sizes and
    write times of the files that the stream at `target` was converted from.

    None if this machine has stored no digests for the stream, or only those of an earlier
    conversion of it.

    Args:
        target: the location where the stream is published.
        index_hash: the hash of the stream's index, in hex digits.
    """
    head = bytes.fromhex(index_hash)
    try:
        stored = _locate_file(target).read_bytes()
    except OSError:
        return None
    if not stored.startswith(head):
        return None
    starts = range(len(head), len(stored), DIGEST_BYTES)
    return Counter(stored[start : start + DIGEST_BYTES] for start in starts)


def _locate_file(target: str) -> Path:
    return cache_folder() / "seen" / f"{xxhash.xxh128_hexdigest(target)}.stamps"

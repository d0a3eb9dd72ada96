"""Notes on this machine of the files that a stream was converted from: their names, sizes and
stamps (a stamp changes when the file is written, such as its mtime).

With them `check` can report that a file was edited, without reading the file. A machine that did
not convert the stream knows only names and sizes, from the manifest.
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
"Digest of a file (`stamp_of`) -> number of files with this digest."


def stamp_of(file: SourceFile) -> bytes:
    """Return a digest of a file's name, size and stamp. Its folder, which may be moved, is left
    out.
    """
    name = file.name.rpartition("/")[2]
    return xxhash.xxh3_64_digest(f"{name} {file.stat.size} {file.stat.stamp}")


def remember_stamps(target: str, index_hash: str, files: Iterable[SourceFile]) -> None:
    """Store which files a stream was converted from.

    Args:
        target: the location where the stream is published.
        index_hash: the hash of the stream's index, in hex digits.
        files: the files of its source.
    """
    stored = bytes.fromhex(index_hash) + b"".join(sorted(map(stamp_of, files)))
    with suppress(Unreachable):  # without the notes, `check` does not warn of files edited later
        keep_in_cache(_path(target), stored)


def recall_stamps(target: str, index_hash: str) -> Stamps | None:
    """Return digests of the files that the stream at `target` was converted from.

    None if this machine has not stored them, or has stored those of another version of the stream.
    """
    head = bytes.fromhex(index_hash)
    try:
        stored = _path(target).read_bytes()
    except OSError:
        return None
    if not stored.startswith(head):
        return None
    starts = range(len(head), len(stored), DIGEST_BYTES)
    return Counter(stored[start : start + DIGEST_BYTES] for start in starts)


def _path(target: str) -> Path:
    return cache_folder() / "seen" / f"{xxhash.xxh128_hexdigest(target)}.stamps"

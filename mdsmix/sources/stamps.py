"""Remembers on this machine which files a stream was made of, by their names, sizes and stamps.

So `check` can say that a file was edited without reading it. A machine that did not convert the
stream knows names and sizes alone, from the manifest.
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


def stamp_of(file: SourceFile) -> bytes:
    """Return a digest of a file's last name, size and stamp: a folder may be moved."""
    last = file.name.rpartition("/")[2]
    return xxhash.xxh3_64_digest(f"{last} {file.stat.size} {file.stat.stamp}")


def remember_stamps(target: str, index_hash: str, files: Iterable[SourceFile]) -> None:
    """Keep the files that the stream published at `target`, with this index, was made of."""
    stored = bytes.fromhex(index_hash) + b"".join(sorted(map(stamp_of, files)))
    with suppress(Unreachable):  # all that is lost is a warning on a file that is edited later
        keep_in_cache(_path(target), stored)


def recall_stamps(target: str, index_hash: str) -> Stamps | None:
    """Return the files of the stream at `target`; None if this machine does not know them, as when
    another machine has published another index.
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

"""A record on this machine of the files that a stream was made from: names, sizes and stamps.

So `check` can report that a file was edited without reading it. A machine that did not convert the
stream knows only names and sizes, from the manifest.
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
"Digests of files (`stamp_of`), each with the number of files that have it."


def stamp_of(file: SourceFile) -> bytes:
    """Return a digest of a file's name, size and stamp; without its folder, which may be moved."""
    name = file.name.rpartition("/")[2]
    return xxhash.xxh3_64_digest(f"{name} {file.stat.size} {file.stat.stamp}")


def remember_stamps(target: str, index_hash: str, files: Iterable[SourceFile]) -> None:
    """Store the files that the stream with this index, published at `target`, was made from."""
    stored = bytes.fromhex(index_hash) + b"".join(sorted(map(stamp_of, files)))
    with suppress(Unreachable):  # without it `check` only fails to warn about a file edited later
        keep_in_cache(_path(target), stored)


def recall_stamps(target: str, index_hash: str) -> Stamps | None:
    """Return the files that the stream at `target` was made from.

    None if this machine has not stored them, or stored those of another index.
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

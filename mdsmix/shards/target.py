"""Writing at the target only what is not there yet, so that a run that changes nothing leaves every file as it was.

A look costs one request where a needless write would cost a whole upload, and whoever watches the folder (a sync, a
backup, a running job) sees a change only where there is one.
"""

from __future__ import annotations

import xxhash

from mdsmix.shards.index import BASENAME, Index
from mdsmix.storage import Location

SUPERSEDED = ".mdsmix/{hash}.index"
"Where an index that was replaced is kept."


def write_if_new(at: Location, content: bytes) -> None:
    """For files whose content may change under one name: the bytes are compared."""
    stat = at.stat()
    if stat is None or stat.size != len(content) or at.read() != content:
        at.write(content)


def write_once(at: Location, parts: list[memoryview]) -> None:
    """For files named by the hash of their bytes: one that is there in its full size is these bytes."""
    stat = at.stat()
    if stat is None or stat.size != sum(part.nbytes for part in parts):
        at.write(*parts)


def replace_index(folder: Location, index: Index) -> None:
    """Makes this the index of the stream. The one before is kept for a while, and its shards with it (`mdsmix gc`): caches
    may hold it, and running jobs read by it."""
    at = folder / BASENAME
    if at.stat():
        before = at.read()
        if before == index.content:
            return
        (folder / SUPERSEDED.format(hash=xxhash.xxh128_hexdigest(before))).write(before)
    at.write(index.content)

"""Writing only what is not there yet, so that a run that changes nothing leaves every file as it was.

A look costs one request where a needless write would cost a whole upload, and whoever watches the folder (a sync, a
backup, a running job) sees a change only where there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.shards.index import Index, parse_index
from mdsmix.storage import Location

SUPERSEDED = ".mdsmix/{hash}.index"
"Where an index that was replaced is kept."
REPLACED = ".mdsmix/{hash}.replaced"
"A file whose time stamp says when a version, named by the first 8 digits of its index's hash, ceased to be current."


def write_if_new(at: Location, content: bytes) -> None:
    """For files whose content may change under one name: the bytes are compared."""
    found = at.fetch(len(content))
    if found is None or found[1] != content:
        at.write(content)


def write_once(
    at: Location, parts: list[memoryview], held: Collection[tuple[str, int]] | None = None
) -> None:
    """For files named by the hash of their bytes: one that is there in its full size is these bytes. `held`: names and sizes
    of what is there, where that was listed."""
    size = sum(part.nbytes for part in parts)
    if held is None:
        stat = at.stat()
        is_there = stat is not None and stat.size == size
    else:
        is_there = (at.name, size) in held
    if not is_there:
        at.write(*parts)


def keep_index(folder: Location, index: bytes) -> None:
    """Keeps an index that is about to be replaced."""
    (folder / SUPERSEDED.format(hash=xxhash.xxh128_hexdigest(index))).write(index)


def superseded(folder: Location) -> Iterator[Index]:
    """The replaced indexes that are kept in this folder, except damaged ones, which no reader can be using."""
    kept = folder / SUPERSEDED.partition("/")[0]
    for name, _ in kept.list():
        if name.endswith(".index"):
            with suppress(Unreachable):
                yield parse_index((kept / name).read(), name)

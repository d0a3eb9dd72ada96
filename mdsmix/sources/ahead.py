"""Small objects of a bucket, fetched before they are read: a request takes as long for 1 KB as for 1 MB.

One after the other, 2,300 objects of 5 KB at 20 ms a request take 46 s; a worker that reads them has 16 on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from mdsmix.sources.units import SourceFile

SMALL_BYTES = 1 << 20
MOST = 16
"At a time, so that 16 MB are held at most."


def fetched_ahead(files: Sequence[SourceFile]) -> Iterator[SourceFile]:
    """The files in their order, small objects with their bytes."""
    if sum(map(_is_small, files)) < 2:
        yield from files
        return
    pool, coming = ThreadPoolExecutor(MOST), deque[Future[SourceFile]]()
    try:
        rest = iter(files)
        while True:
            while len(coming) < MOST and (file := next(rest, None)):
                coming.append(pool.submit(_fetched, file))
            if not coming:
                return
            yield coming.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _is_small(file: SourceFile) -> bool:
    return file.location.is_store and file.stat.size <= SMALL_BYTES


def _fetched(file: SourceFile) -> SourceFile:
    if not _is_small(file):
        return file
    with file.open() as stored:
        return replace(file, held=stored.read())

"""Images by their paths: where they are, and their bytes, read with enough in flight.

On a disk that answers at once a file is read in 30 us, and a thread would take as long; a store takes 20 ms, and so do a
network's disk and a cold one. So files of a folder are read one after the other until they are slow, and those of a bucket
are 16 at a time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import NamedTuple, TypeVar

from mdsmix.errors import Denied, NoSuchPlace, Unreachable
from mdsmix.images.check import Bad
from mdsmix.images.http import AT_ONCE, fetch
from mdsmix.images.paths import ImagePlace
from mdsmix.storage import Stat

MOST_BYTES = 256 << 20
"Of one file."
IN_FLIGHT = 16
AHEAD_BYTES = 32 << 20
"Of images that are read and not looked at yet, while they are no larger than those before."
FIRST_BYTES = 8 << 20
"Of an image, before one was read."
SLOW_SECONDS = 0.001
"A file that takes longer on average is not in this machine's memory: several are asked for at once."

T = TypeVar("T")
R = TypeVar("R")


class Read(NamedTuple):
    """What was read of an image."""

    data: bytes = b""
    stat: Stat | None = None
    reason: str = ""
    "Why it could not be."
    why: str = ""


@dataclass(slots=True)
class Files:
    """Reads images for one worker."""

    fetches: bool = False
    "Whether http URLs are asked."
    _seconds: float = 0.0
    "Of one file, on average over the last ones."
    _bytes: float = FIRST_BYTES
    "Of the largest of the last ones, the less the longer ago it was."

    def read(self, places: Sequence[ImagePlace]) -> Iterator[Read]:
        """The images at these places, in order. Unreachable where a store does not answer; what it or a disk refuses, or has not, is
        said of that image alone."""
        if any(at.place is None for at in places):
            found = self._ahead(AT_ONCE, places)
        elif self._seconds > SLOW_SECONDS or any(at.place and at.place.is_store for at in places):
            found = self._ahead(IN_FLIGHT, places)
        else:
            found = map(self._one, places)
        began = time.perf_counter()
        for each in found:
            self._seconds += (time.perf_counter() - began - self._seconds) / 16
            self._bytes = max(len(each.data), self._bytes * 15 / 16)
            yield each
            began = time.perf_counter()

    def _ahead(self, most: int, places: Sequence[ImagePlace]) -> Iterator[Read]:
        """As many at once as hold few enough bytes."""
        return ahead(
            most,
            lambda: max(1, min(most, int(AHEAD_BYTES / max(self._bytes, 1)))),
            self._one,
            places,
        )

    def _one(self, at: ImagePlace) -> Read:
        if at.place is None:
            return self._from_http(at.url)
        try:
            found = at.place.fetch(MOST_BYTES)
        except NoSuchPlace as error:
            return Read(reason="image_not_found", why=_without_path(error))
        except Unreachable as error:
            if at.place.is_store and not isinstance(error, Denied):
                raise
            return Read(reason="image_unreadable", why=_without_path(error))
        if found is None:
            is_folder = not at.place.is_store and os.path.isdir(at.url)
            why = "it is a folder" if is_folder else "there is no such file"
            why += ": a backslash is a letter of a name here, / parts folders" * ("\\" in at.url)
            return Read(reason="image_not_found", why=why)
        stat, data = found
        if stat.size > MOST_BYTES:
            why = f"the file has {stat.size} bytes, and {MOST_BYTES} are the most that are read"
            return Read(stat=stat, reason="image_file_too_large", why=why)
        return Read(data, stat)

    def _from_http(self, url: str) -> Read:
        if not self.fetches:
            return Read(
                reason="remote_image", why="it is at an http URL: images.http: fetch asks for it"
            )
        try:
            return Read(fetch(url))
        except Bad as bad:
            return Read(reason=bad.reason, why=bad.why)


def _without_path(error: Unreachable) -> str:
    """What is said of a path that is another elsewhere."""
    return str(error).partition(": ")[2]


def ahead(
    threads: int, room: Callable[[], int], do: Callable[[T], R], items: Iterable[T]
) -> Iterator[R]:
    """What `do` gives for each item, in order, of as many at a time as there is room for."""
    pool, coming, rest = _pool(threads, os.getpid()), deque[Future[R]](), iter(items)
    try:
        while True:
            for item in islice(rest, max(0, room() - len(coming))):
                coming.append(pool.submit(do, item))
            if not coming:
                return
            yield coming.popleft().result()
    finally:
        for waiting in coming:
            waiting.cancel()


@cache
def _pool(most: int, process: int) -> ThreadPoolExecutor:
    """One in each process: threads do not come along where a worker is forked."""
    return ThreadPoolExecutor(most, thread_name_prefix="images")

"""The keys of a window: of its record, and of the fingerprints of its records, which no image shapes."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from mdsmix.convert.job import Job
from mdsmix.sources import Content, Window

Dropped = Mapping[int, bytes]
"Number of a window -> a bit for each of its records, the lowest of a byte first: 1 where the record is a duplicate and dropped."


def window_key(job: Job, window: Window, dropped: bytes = b"") -> str:
    """The key of a window's record. That of a window from which nothing is dropped is as it is without the setting."""
    without = f" without {xxhash.xxh3_128_hexdigest(dropped)}" if dropped else ""
    return job.key(window.said + without)


def window_keys(job: Job, content: Content, dropped: Dropped | None = None) -> list[str]:
    """The keys of all windows of a unit that is known."""
    gone = dropped or {}
    return [window_key(job, window, gone.get(window.number, b"")) for window in content.windows]


def lines_key(job: Job, window: Window) -> str:
    """The key that the window has where nothing is dropped from it and its records name no images."""
    return job.key(window.digest)


def lines_keys(job: Job, content: Content) -> list[str]:
    return [lines_key(job, window) for window in content.windows]

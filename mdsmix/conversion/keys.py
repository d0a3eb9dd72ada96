"""The keys of converted windows, and the names of the files that are named by them.

A key is a hash of the window's content and of every setting that shapes its bytes, so a window is
converted again only if one of these has changed.
"""

from __future__ import annotations

import xxhash

from mdsmix.conversion.job import Job
from mdsmix.sources import Content, Window


def window_key(job: Job, window: Window, dropped: bytes) -> str:
    """Return the key of a window's record.

    Without dropped records it is the same key as under `duplicates: keep`.

    Args:
        dropped: a bit for each record of the window (`job.Dropped`); empty if none is dropped.
    """
    suffix = f" without {xxhash.xxh3_128_hexdigest(dropped)}" if dropped else ""
    return job.key(window.full_digest + suffix)


def lines_key(job: Job, window: Window) -> str:
    """Return the key that the window has when none of its records is dropped or names an image."""
    return job.key(window.digest)


def lines_keys(job: Job, content: Content) -> list[str]:
    return [lines_key(job, window) for window in content.windows]


def bad_records_name(key: str, window: Window) -> str:
    """Return the name of a window's bad records, `<key>-<place>`. The place is in it because each
    bad record is stored with its file and line.
    """
    return f"{key}-{window.place}"


def unit_file_name(key: str, window: Window) -> str:
    """Return the name of the file that contains a window's result until segments are written."""
    return f"{bad_records_name(key, window)}.unit"


def hashes_file_name(lines_key: str) -> str:
    """Return the name of the file with a window's fingerprints, under `duplicates: drop`."""
    return f"{lines_key}.hashes"

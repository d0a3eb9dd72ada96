"""Makes the keys of converted windows (slices of a work unit's source), and the names of the files
that begin with a key.

A key is a hash of the window's content and of every setting on which its converted bytes depend, so
a window is converted again only if one of these has changed.
"""

from __future__ import annotations

import xxhash

from mdsmix.conversion.job import Job
from mdsmix.sources import Content, Window


def window_key(job: Job, window: Window, dropped: bytes) -> str:
    """Return the key of the record of a window (a slice of a work unit's source). If no record of
    the window is dropped, it is the same key as under `duplicates: keep`.

    Args:
        job: the job of the stream.
        window: the window.
        dropped: a bit for each record of the window (`job.Dropped`); empty if none is dropped.
    """
    suffix = f" without {xxhash.xxh3_128_hexdigest(dropped)}" if dropped else ""
    return job.key(window.full_digest + suffix)


def lines_key(job: Job, window: Window) -> str:
    """Return the key of a window's lines alone, which names its fingerprints. It equals the
    window's key unless a record of the window is dropped or names an image.
    """
    return job.key(window.digest)


def lines_keys(job: Job, content: Content) -> list[str]:
    """Return the `lines_key` of each window of a unit."""
    return [lines_key(job, window) for window in content.windows]


def bad_records_name(key: str, window: Window) -> str:
    """Return the name of a window's bad records, `<key>-<place>`. Windows with equal content at two
    places have two names, because a bad record is stored with its file and line.
    """
    return f"{key}-{window.place}"


def unit_file_name(key: str, window: Window) -> str:
    """Return the name of the unit file: the file in which a worker stores a window's result."""
    return f"{bad_records_name(key, window)}.unit"


def hashes_file_name(lines_key: str) -> str:
    """Return the name of the file with a window's fingerprints (`duplicates: drop`).

    Args:
        lines_key: the `lines_key` of the window.
    """
    return f"{lines_key}.hashes"

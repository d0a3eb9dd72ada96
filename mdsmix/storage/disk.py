"""A disk's errors as sentences that tell what to do, and the files below a folder: all, or those that match a pattern.

A file that is deleted during a listing, and a link that leads nowhere, are left out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mdsmix.errors import Unreachable
from mdsmix.storage.location import Stat, name_matches

_REASONS = {
    errno.ENOENT: "there is no such file or folder; check the path",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "permission denied; give this user the right, or use another folder",
    ),
    errno.EROFS: "the file system is read-only; use a folder that can be written",
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EFBIG: "a file may not be this large here (ulimit -f, or the file system); raise the limit or use another folder",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EISDIR: "it is a folder, and a file is needed; name a file in it",
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST),
        "a part of the path is a file, not a folder; check the path",
    ),
    errno.ENAMETOOLONG: "the name is too long for this file system; shorten it",
    errno.EIO: "the disk failed; check its health, then run the same command again",
}

ABSENT = suppress(FileNotFoundError, NotADirectoryError)


@contextmanager
def explained(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or type(error).__name__)
        raise Unreachable(f"cannot {action} {path}: {reason}") from error


def stat_of(found: os.stat_result) -> Stat:
    return Stat(found.st_size, f"{found.st_mtime_ns}-{found.st_ino}", found.st_mtime)


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    with ABSENT, os.scandir(folder) as found:
        return list(found)
    return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def walked(folder: str, prefix: str, recursive: bool) -> Iterator[tuple[str, Stat]]:
    for entry in entries_of(folder):
        if not _is_folder(entry):
            # It may be deleted since it was listed, or a link to nowhere or to itself.
            with suppress(OSError):
                yield prefix + entry.name, stat_of(entry.stat())
        elif recursive and not entry.is_symlink():  # a link to a parent would never end
            yield from walked(entry.path, f"{prefix}{entry.name}/", recursive)


def matching(folder: str, patterns: list[str]) -> Iterator[str]:
    """The files below `folder` whose path matches; `**` does not follow links to folders."""
    head, *rest = patterns
    if head == "**":
        yield from matching(folder, rest or ["*"])
    for entry in entries_of(folder):
        if head == "**":
            if not entry.name.startswith(".") and _is_folder(entry) and not entry.is_symlink():
                yield from matching(entry.path, patterns)
        elif name_matches(entry.name, head):
            if _is_folder(entry) and rest:
                yield from matching(entry.path, rest)
            elif not _is_folder(entry) and not rest:
                yield entry.path

"""What a disk says when it refuses, in words that tell what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from mdsmix.errors import Unreachable

_REASONS = {
    errno.ENOENT: "there is no such file or folder; check the path",
    errno.EACCES: "permission denied; give this user the right, or use another folder",
    errno.EPERM: "permission denied; give this user the right, or use another folder",
    errno.EROFS: "the file system is read-only; use a folder that can be written",
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EFBIG: "a file may not be this large here (ulimit -f, or the file system); raise the limit or use another folder",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EISDIR: "it is a folder, and a file is needed; name a file in it",
    errno.ENOTDIR: "a part of the path is a file, not a folder; check the path",
    errno.EEXIST: "a part of the path is a file, not a folder; check the path",
    errno.ENAMETOOLONG: "the name is too long for this file system; shorten it",
    errno.EIO: "the disk failed; check its health, then run the same command again",
}


@contextmanager
def explained(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or type(error).__name__)
        raise Unreachable(f"cannot {action} {path}: {reason}") from error

"""Writing the file that a user named: as a shell redirection treats it, and yet never half of one.

A stream's files are nobody's to link or to chmod, so storage replaces them by a rename and makes their folders. A config
is its owner's: a symlink is followed, the mode is kept, a FIFO or a device is written into, and a folder that does not
exist is a slip of the pen. The price is a second writer beside the one in storage.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.storage import locate

DESCRIPTORS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
"""Behind one of these may stand a regular file that the shell holds open: it is written into, never replaced. Of all else the
file system says what it is, since `/dev/shm` is a folder like any other."""


def require_place(target: str) -> None:
    """RecipeError where the target cannot be a file, before any work is done for it."""
    place = locate(target)
    if place.is_s3:
        return
    path = os.path.realpath(place.url)
    if os.path.isdir(path):
        raise RecipeError(f"{target} is a folder: name a file in it.")
    if not os.path.exists(place.url) and not os.path.isdir(os.path.dirname(path)):
        raise RecipeError(
            f"{target} cannot be written: there is no folder {os.path.dirname(path)}; make it or correct the path."
        )


def write(target: str, text: str) -> None:
    """The text into the target: one PUT, straight into a FIFO or device, else by a rename behind the symlinks."""
    require_place(target)
    place, content = locate(target), text.encode()
    if place.is_s3:
        place.write(content)
        return
    with _explained(target):
        if is_device(place.url):
            _write_all(os.open(place.url, os.O_WRONLY | os.O_APPEND), content)
        else:
            _replace(os.path.realpath(place.url), content)


def is_device(path: str) -> bool:
    """Whether it is written into, and no file that lies there."""
    return path.startswith(DESCRIPTORS) or (os.path.exists(path) and not os.path.isfile(path))


def _replace(path: str, content: bytes) -> None:
    """The file with its mode, and where this user may give it away its owner, in one rename."""
    old = os.stat(path) if os.path.exists(path) else None
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if old else 0o666)
    try:
        _write_all(made, content, old)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _write_all(descriptor: int, content: bytes, like: os.stat_result | None = None) -> None:
    with open(descriptor, "wb", buffering=0) as file:
        if like:
            with suppress(OSError):
                os.fchown(descriptor, like.st_uid, like.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
        while content:
            content = content[file.write(content) :]
        with suppress(OSError):  # a FIFO has nothing to flush
            os.fsync(descriptor)


@contextmanager
def _explained(target: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # who reads the FIFO has gone: the end that main gives every pipe
    except OSError as error:
        raise Unreachable(f"cannot write {target}: {error.strerror or error}.") from None

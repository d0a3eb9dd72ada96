"""Files on a local disk: a reader sees the old file or the new one and never half of one.

A write goes to a temporary name beside its target, is flushed to the disk and renamed; then the
folder is flushed. Without these flushes a power cut may undo any of the renames, so that an index
would be there and its shards would not. They cost 0.2 to 1.2 ms a file on an SSD; a file of 32 MiB
takes 65 ms. A killed process leaves at most a `*.tmp` file, which `unfinished` finds so that `gc`
can delete it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mdsmix.errors import Unreachable
from mdsmix.storage.location import (
    CHANGED,
    Bytes,
    FoundFiles,
    Listing,
    Location,
    Stat,
    fixed_prefix,
    has_pattern,
    name_matches,
)

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

_ABSENT = suppress(FileNotFoundError, NotADirectoryError)
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP)
"Errors of network file systems that cannot flush a folder."
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"Errors of os.link on a file system without hard links."
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp$")


class LocalPath(Location):
    """An absolute path, not resolved: a symlink keeps its own name."""

    __slots__ = ()

    @property
    def is_store(self) -> bool:
        return False

    @property
    def parent(self) -> LocalPath:
        return LocalPath(os.path.dirname(self.path))

    def __truediv__(self, name: str) -> LocalPath:
        return LocalPath(os.path.normpath(super().__truediv__(name).path))

    def stat(self) -> Stat | None:
        with explained("look at", self.path), _ABSENT:
            found = _looked_at(self.path)
            return None if stat.S_ISDIR(found.st_mode) else _stat_of(found)
        return None

    def fetch(self, most: int = 1 << 62) -> tuple[Stat, bytes] | None:
        with (
            explained("read", self.path),
            _ABSENT,
            suppress(IsADirectoryError),
            self._opened() as file,
        ):
            found = _stat_of_open(file)
            return found, b"" if found.size > most else file.read()
        return None

    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        with explained("read", self.path):
            file = self._opened(1 << 20)
            if stamp and _stat_of_open(file).stamp != stamp:
                file.close()
                raise Unreachable(CHANGED.format(url=self.path))
            file.seek(start)
            return file

    def _opened(self, buffering: int = -1) -> BinaryIO:
        _looked_at(self.path)
        return Path(self.path).open("rb", buffering)

    def open_random(self, found: Stat, ahead: int = 1 << 20) -> BinaryIO:
        return self.open(stamp=found.stamp)

    def write(self, *parts: Bytes) -> None:
        with explained("write", self.path), self._beside() as temporary:
            _make(temporary, *parts)
            os.replace(temporary, self.path)

    def create(self, content: bytes) -> Stat | None:
        with (
            explained("write", self.path),
            suppress(FileExistsError),
            self._beside() as temporary,
        ):
            made = _make(temporary, content)
            try:
                os.link(temporary, self.path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # Still only one writer succeeds, but a reader may meanwhile find half a file.
                made = _make(Path(self.path), content)
            return made
        return None

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        with explained("write", self.path), suppress(FileNotFoundError):  # noqa: SIM117
            with Path(self.path).open("r+b") as file:
                # Only the holder of the lock replaces the file, if the name still means the locked
                # file.
                with suppress(OSError):  # a file system without locks: look and write, at once
                    fcntl.flock(file, fcntl.LOCK_EX)
                found = self.stat()
                if found is not None and found.stamp == stamp:
                    with self._beside() as temporary:
                        made = _make(temporary, content)
                        os.replace(temporary, self.path)
                        return made
        return None

    def try_conditions(self) -> bool:
        return True

    def copy_to(self, other: Location) -> None:
        """On a disk, copies without the whole file in memory: sixteen shards at a time would be a
        gigabyte.
        """
        if not isinstance(other, LocalPath):
            other.write(self.read())
            return
        with explained("copy", f"{self.path} to {other.path}"), other._beside() as temporary:
            shutil.copyfile(self.path, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, other.path)

    def link_to(self, other: Location) -> None:
        if isinstance(other, LocalPath):
            # Two file systems, one without links, or another file in the way.
            with suppress(OSError):
                other._make_folder()
                os.link(self.path, other.path)
                return
        self.copy_to(other)

    @contextmanager
    def _beside(self) -> Iterator[Path]:
        """A temporary name beside this one (`_TEMPORARY`), for a file that will replace this one.
        After the block the temporary file is deleted, if it is still there, and the folder flushed.
        """
        self._make_folder()
        temporary = Path(f"{self.path}.{secrets.token_hex(8)}.tmp")
        try:
            yield temporary
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        self.parent.flush()

    def _make_folder(self) -> None:
        """Makes the folder of this file and the folders above it, and flushes each new name to the
        disk.
        """
        folder = self.parent
        if not os.path.isdir(folder.path):
            folder._make_folder()
            # Another process made the folder meanwhile, or a file is in the way.
            with suppress(FileExistsError):
                os.mkdir(folder.path)
            folder.parent.flush()

    def flush(self) -> None:
        with explained("write", self.path):
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno not in _CANNOT_FLUSH:
                    raise
            finally:
                os.close(folder)

    def delete(self) -> None:
        with explained("delete", self.path), _ABSENT:
            try:
                os.unlink(self.path)
            except IsADirectoryError:
                with suppress(OSError):  # it is not empty
                    os.rmdir(self.path)

    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        with explained("list", self.path):
            yield from sorted(_walked(self.path, "", recursive), key=lambda item: item[0])

    def folders(self) -> Iterator[str]:
        with explained("list", self.path):
            yield from sorted(
                [e.name for e in _entries(self.path) if e.is_dir(follow_symlinks=False)]
            )

    def unfinished(self) -> Listing:
        yield from (each for each in self.list(recursive=True) if _TEMPORARY.search(each[0]))

    def expand(self) -> FoundFiles:
        itself = self._source()
        if itself is not None:
            return [(self, itself)]
        if not has_pattern(self.path):
            return []
        root = fixed_prefix(self.path)
        patterns = self.path[len(root) + 1 :].split("/")
        with explained("list", root or "/"):
            paths = sorted(set(_matching(root or "/", patterns)))
        places = map(LocalPath, paths)
        return [(place, found) for place in places if (found := place._source()) is not None]

    def _source(self) -> Stat | None:
        """As `stat`, but Unreachable for a link that leads nowhere: its file would be missing
        without a word.
        """
        found = self.stat()
        if found is None and os.path.islink(self.path):
            raise Unreachable(
                f"cannot read {self.path}: it is a link to {os.path.realpath(self.path)}, where there is no file; bring "
                "that back, or take the link away"
            )
        return found


def _looked_at(path: str) -> os.stat_result:
    """`os.stat` of the path; Unreachable for a pipe, a socket or a device, whose reading may never
    end.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise Unreachable(
            f"cannot read {path}: it is a pipe, a socket or a device, whose end cannot be known; copy what comes out of "
            "it into a file"
        )
    return found


def _make(path: Path, *parts: Bytes) -> Stat:
    """Writes a new file of the joined parts and flushes it to the disk; FileExistsError where a
    file is there.
    """
    with path.open("xb") as file:
        try:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:  # no half file stays, as after a full disk
            os.unlink(path)
            raise
        return _stat_of_open(file)


def _stat_of_open(file: BinaryIO) -> Stat:
    return _stat_of(os.fstat(file.fileno()))


@contextmanager
def explained(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or type(error).__name__)
        raise Unreachable(f"cannot {action} {path}: {reason}") from error


def _stat_of(found: os.stat_result) -> Stat:
    return Stat(found.st_size, f"{found.st_mtime_ns}-{found.st_ino}", found.st_mtime)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with _ABSENT, os.scandir(folder) as found:
        return list(found)
    return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walked(folder: str, prefix: str, recursive: bool) -> Listing:
    for entry in _entries(folder):
        if not _is_folder(entry):
            # It may be deleted since it was listed, or a link to nowhere or to itself.
            with suppress(OSError):
                yield prefix + entry.name, _stat_of(entry.stat())
        elif recursive and not entry.is_symlink():  # a link to a parent would never end
            yield from _walked(entry.path, f"{prefix}{entry.name}/", recursive)


def _matching(folder: str, patterns: list[str]) -> Iterator[str]:
    """The files below `folder` whose path matches; `**` does not follow links to folders."""
    head, *rest = patterns
    if head == "**":
        yield from _matching(folder, rest or ["*"])
    for entry in _entries(folder):
        if head == "**":
            if not entry.name.startswith(".") and _is_folder(entry) and not entry.is_symlink():
                yield from _matching(entry.path, patterns)
        elif name_matches(entry.name, head):
            if _is_folder(entry) and rest:
                yield from _matching(entry.path, rest)
            elif not _is_folder(entry) and not rest:
                yield entry.path

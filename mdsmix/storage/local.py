"""Files on a local disk: a reader sees the old file or the new one and never half of one.

A file is written under a temporary name next to its target, flushed to the disk and renamed; then
the folder is flushed. Without these flushes a power cut may undo any of the renames, so that an
index would exist without its shards. The flushes cost 0.2 to 1.2 ms a file on an SSD; a file of
32 MiB takes 65 ms. A killed process leaves at most a `*.tmp` file. `unfinished` lists such files,
so that `mdsmix gc` can delete them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mdsmix.errors import Unreachable
from mdsmix.storage.location import (
    CHANGED,
    NO_LIMIT,
    Bytes,
    FoundFiles,
    Listing,
    Location,
    SkippedLink,
    Stat,
    cut_before_pattern,
    has_pattern,
    name_matches,
)

_REASONS = {
    errno.ENOENT: "there is no such file or folder; check the path",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "permission denied; give this user the permission, or use another folder",
    ),
    errno.EROFS: "the file system is read-only; use a folder that can be written",
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EFBIG: "a file may not be this large here (ulimit -f, or the file system); "
    "raise the limit or use another folder",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EISDIR: "it is a folder, and a file is needed; name a file in it",
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST),
        "a part of the path is a file, not a folder; check the path",
    ),
    errno.ENAMETOOLONG: "the name is too long for this file system; shorten it",
    errno.EIO: "the disk failed; check its health, then run the same command again",
}

_IGNORE_MISSING = suppress(FileNotFoundError, NotADirectoryError)
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP)
"Errors of network file systems that cannot flush a folder."
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"Errors of os.link on a file system without hard links."
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp$")


class LocalPath(Location):
    """A file or folder on a disk, by its absolute path. A link is not replaced by its target."""

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
        with explain_errors("look at", self.path), _IGNORE_MISSING:
            status = _stat_regular(self.path)
            if not stat.S_ISDIR(status.st_mode):
                return _make_stat(status)
        return None

    def fetch(self, max_bytes: int = NO_LIMIT) -> tuple[Stat, bytes] | None:
        """Return (Stat, bytes) of the file. Return None if it is missing, or if it is a folder. If
        it has more than `max_bytes`, no bytes are read, and the result is (Stat, b"").
        """
        with (
            explain_errors("read", self.path),
            _IGNORE_MISSING,
            suppress(IsADirectoryError),
            self._open_binary() as file,
        ):
            status = _stat_of_open(file)
            content = file.read() if status.size <= max_bytes else b""
            return status, content
        return None

    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        """Return a reader of the file from byte `start` on.

        `until`, the likely end of reading, is a hint for stores, and not used here.

        Raises Unreachable if the file is missing, or has another stamp than `stamp` ("": any
        stamp).
        """
        with explain_errors("read", self.path):
            file = self._open_binary(1 << 20)
            if stamp and _stat_of_open(file).stamp != stamp:
                file.close()
                raise Unreachable(CHANGED.format(url=self.path))
            file.seek(start)
            return file

    def _open_binary(self, buffering: int = -1) -> BinaryIO:
        _stat_regular(self.path)
        return Path(self.path).open("rb", buffering)

    def open_random(self, stat: Stat, ahead: int = 1 << 20) -> BinaryIO:
        return self.open(stamp=stat.stamp)

    def write(self, *parts: Bytes) -> None:
        with explain_errors("write", self.path), self._make_temporary_file() as temporary:
            _write_new(temporary, *parts)
            os.replace(temporary, self.path)

    def create(self, content: bytes) -> Stat | None:
        """Write a new file and return its Stat. If the file exists, write nothing and return None.

        A temporary file is written first. Then a link with the file's name is made, which fails if
        the name exists. So only one of several writers succeeds.
        """
        with (
            explain_errors("write", self.path),
            suppress(FileExistsError),
            self._make_temporary_file() as temporary,
        ):
            status = _write_new(temporary, content)
            try:
                os.link(temporary, self.path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # Still only one writer succeeds, but a reader may see half a file meanwhile.
                status = _write_new(Path(self.path), content)
            return status
        return None

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        """Write `content` over the file and return the new Stat. If the file is missing, or its
        stamp (time and inode) is not `stamp`, write nothing and return None. The file is locked
        meanwhile.
        """
        with explain_errors("write", self.path), suppress(FileNotFoundError):  # noqa: SIM117
            with Path(self.path).open("r+b") as file:
                # Only the process with the lock replaces the file, and only if the file still has
                # this stamp. On a file system without locks (OSError), another process may replace
                # the file between the check and the write.
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                current = self.stat()
                if current is not None and current.stamp == stamp:
                    with self._make_temporary_file() as temporary:
                        status = _write_new(temporary, content)
                        os.replace(temporary, self.path)
                        return status
        return None

    def try_conditions(self) -> bool:
        return True

    def copy_to(self, target: Location) -> None:
        """Copy this file to `target`.

        If the target is on a disk too, the file is copied without reading it whole into memory:
        sixteen shards, which are copied at a time, would take a gigabyte.
        """
        if not isinstance(target, LocalPath):
            target.write(self.read())
            return
        action = f"{self.path} to {target.path}"
        with explain_errors("copy", action), target._make_temporary_file() as temporary:
            shutil.copyfile(self.path, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target.path)

    def link_to(self, target: Location) -> None:
        """Make this file also available as `target`: by a hard link if that is possible, otherwise
        by a copy.
        """
        if isinstance(target, LocalPath):
            # Linking fails between two file systems, on one without links, or if the target exists.
            with suppress(OSError):
                target._make_folder()
                os.link(self.path, target.path)
                return
        self.copy_to(target)

    @contextmanager
    def _make_temporary_file(self) -> Iterator[Path]:
        """Yield the path of a temporary file in the folder of this file. The caller writes the
        temporary file and renames it to this file.

        After the `with` block the temporary file is deleted if it still exists, and the folder is
        flushed to the disk.
        """
        self._make_folder()
        temporary = Path(f"{self.path}.{os.urandom(8).hex()}.tmp")
        try:
            yield temporary
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        self.parent.flush()

    def _make_folder(self) -> None:
        """Make the folder of this file and the folders above it if they are missing. Flush the name
        of each new folder to the disk.
        """
        folder = self.parent
        if not os.path.isdir(folder.path):
            folder._make_folder()
            # The name exists: another process has made the folder, or it is a file. If it is a
            # file, the write that follows raises an error.
            with suppress(FileExistsError):
                os.mkdir(folder.path)
            folder.parent.flush()

    def flush(self) -> None:
        """Flush this folder to the disk, so that links and deletions in the folder survive a power
        cut. Some file systems cannot flush a folder; there nothing is done.
        """
        with explain_errors("write", self.path):
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno not in _CANNOT_FLUSH:
                    raise
            finally:
                os.close(folder)

    def delete(self) -> None:
        """Delete the file or empty folder. Do nothing if it is missing, or a folder with files."""
        with explain_errors("delete", self.path), _IGNORE_MISSING:
            try:
                os.unlink(self.path)
            except IsADirectoryError:
                with suppress(OSError):  # it is not empty
                    os.rmdir(self.path)

    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        with explain_errors("list", self.path):
            yield from sorted(_walk(self.path, "", recursive), key=lambda item: item[0])

    def folders(self) -> Iterator[str]:
        with explain_errors("list", self.path):
            entries = _scan(self.path)
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            yield from sorted(names)

    def unfinished(self) -> Listing:
        for path, status in self.list(recursive=True):
            if _TEMPORARY.search(path):
                yield path, status

    def expand(self) -> FoundFiles:
        """Return (Location, Stat) of the file with this path; or, if the path is a pattern, of all
        files that match the pattern, sorted by path. [] if there are none.

        Raises Unreachable if a file is a link to a missing file.
        """
        status = self._stat_source()
        if status is not None:
            return [(self, status)]
        if not has_pattern(self.path):
            return []

        # `/a/b/*/c.csv` has the root `/a/b` and the patterns ["*", "c.csv"].
        root = cut_before_pattern(self.path)
        patterns = self.path[len(root) + 1 :].split("/")
        with explain_errors("list", root or "/"):
            paths = sorted(set(_find_matches(root or "/", patterns)))
        files = list[tuple[Location, Stat]]()
        for path in paths:
            file = LocalPath(path)
            status = file._stat_source()
            if status is not None:
                files.append((file, status))
        return files

    def skipped_links(self) -> Sequence[SkippedLink]:
        if not has_pattern(self.path) or os.path.isdir(self.path):
            root, patterns = self.path, ["**"]
        else:
            root = cut_before_pattern(self.path)
            patterns = self.path[len(root) + 1 :].split("/")
        if "**" not in patterns:
            return []
        with explain_errors("list", root or "/"):
            links = sorted(set(_find_skipped_links(root or "/", patterns)))
            found = set[str]()
            if any(link.files for link in links):
                found = {*map(os.path.realpath, _find_matches(root or "/", patterns))}
        # A link to a parent is a loop. Files that are found by their own paths are not missing.
        inside = f"{os.path.realpath(root or '/')}/"
        return [
            link
            for link in links
            if link.is_broken
            or not (inside.startswith(f"{link.target}/") or found.issuperset(link.files))
        ]

    def _stat_source(self) -> Stat | None:
        """Return the Stat of a source's file, as `stat` does.

        Raises Unreachable for a link to a missing file: otherwise this file would be left out of
        the source silently.
        """
        status = self.stat()
        if status is None and os.path.islink(self.path) and not os.path.exists(self.path):
            raise Unreachable(
                f"cannot read {self.path}: this is a link to {os.path.realpath(self.path)}, where "
                "there is no file; restore that file, or delete the link"
            )
        return status


def _stat_regular(path: str) -> os.stat_result:
    """Return `os.stat` of a file or folder.

    Raises Unreachable for a pipe, a socket or a device, because reading from it may never end.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise Unreachable(
            f"cannot read {path}: this is a pipe, a socket or a device, which may never end; "
            "copy its output into a file, and name that file"
        )
    return status


def _write_new(path: Path, *parts: Bytes) -> Stat:
    """Write the joined parts to a new file, flush the file to the disk, and return its Stat.

    Raises FileExistsError if the file exists.
    """
    with path.open("xb") as file:
        try:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:  # delete a half-written file, as after a full disk
            os.unlink(path)
            raise
        return _stat_of_open(file)


def _stat_of_open(file: BinaryIO) -> Stat:
    return _make_stat(os.fstat(file.fileno()))


@contextmanager
def explain_errors(action: str, path: str) -> Iterator[None]:
    """Turn an OSError that is raised in the `with` block into Unreachable, with a message such as
    `cannot read /a/b: permission denied; give this user ...`.

    Args:
        action: the verb of the message, such as `read`.
        path: the path that the message names.
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or type(error).__name__)
        # Of a search, the inner folder that could not be listed.
        if str(error.filename).startswith(f"{path.rstrip('/')}/"):
            path = str(error.filename)
        raise Unreachable(f"cannot {action} {path}: {reason}") from error


def _make_stat(status: os.stat_result) -> Stat:
    """Return the Stat of a file. Its stamp consists of modification time and inode."""
    return Stat(status.st_size, f"{status.st_mtime_ns}-{status.st_ino}", status.st_mtime)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; [] if the folder is missing."""
    with _IGNORE_MISSING, os.scandir(folder) as entries:
        return list(entries)
    return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walk(folder: str, prefix: str, recursive: bool) -> Listing:
    """Yield (path, Stat) of the files in a folder, and in all folders below it if `recursive`.

    Args:
        folder: the absolute path of the folder.
        prefix: put before each file's path in the folder, such as `a/b/`.
        recursive: whether the files of inner folders are included.
    """
    for entry in _scan(folder):
        if not _is_folder(entry):
            # The file may be deleted since it was listed, or be a link to nowhere or to itself.
            with suppress(OSError):
                yield prefix + entry.name, _make_stat(entry.stat())
        elif recursive and not entry.is_symlink():  # a link to a parent would never end
            yield from _walk(entry.path, f"{prefix}{entry.name}/", recursive)


def _find_matches(folder: str, patterns: list[str]) -> Iterator[str]:
    """Yield the absolute paths of the files below `folder` that match.

    `**` matches any number of folders, also none, but no hidden folders and no links to folders. A
    path may be yielded more than once.

    Args:
        folder: the absolute path of the folder.
        patterns: a name or pattern for each part of the path: `["data", "**", "*.csv"]`.
    """
    head, *tail = patterns
    if head == "**":  # here it matches no folder; below, one folder and more
        yield from _find_matches(folder, tail or ["*"])
    for entry in _scan(folder):
        if head == "**":
            is_hidden = entry.name.startswith(".")
            if not is_hidden and _is_folder(entry) and not entry.is_symlink():
                yield from _find_matches(entry.path, patterns)
        elif name_matches(entry.name, head):
            if _is_folder(entry) and tail:
                yield from _find_matches(entry.path, tail)
            elif not _is_folder(entry) and not tail:
                yield entry.path


def _find_skipped_links(folder: str, patterns: list[str]) -> Iterator[SkippedLink]:
    """Yield the links that `_find_matches` does not follow: to a folder with files that match, or
    to nothing. A link may be yielded more than once.

    Args:
        folder: the absolute path of the folder.
        patterns: as those of `_find_matches`.
    """
    head, *tail = patterns
    if head == "**" and tail:
        yield from _find_skipped_links(folder, tail)
    for entry in _scan(folder):
        if head != "**":
            if tail and name_matches(entry.name, head) and _is_folder(entry):
                yield from _find_skipped_links(entry.path, tail)
        elif entry.name.startswith("."):
            continue
        elif not entry.is_symlink():
            if _is_folder(entry):
                yield from _find_skipped_links(entry.path, patterns)
        elif not os.path.exists(entry.path):
            yield SkippedLink(entry.path, os.path.realpath(entry.path), is_broken=True)
        elif _is_folder(entry):
            files = {*map(os.path.realpath, _find_matches(entry.path, patterns))}
            if files:
                target = os.path.realpath(entry.path)
                yield SkippedLink(entry.path, target, is_broken=False, files=tuple(sorted(files)))

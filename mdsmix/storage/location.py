"""The interface of every place, on a disk, in a bucket or on the hub: whole files, without modes.

It makes only promises that a local disk and an object store can both keep: a write is all or
nothing, a missing file is an answer and not an accident, and every failure is one `Unreachable`
sentence.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, ClassVar, TypeAlias

from mdsmix.errors import Unreachable

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Stat:
    """Size in bytes, and a stamp that changes with the file: mtime and inode on a disk, the ETag on
    S3, a hash on the hub.
    """

    size: int
    stamp: str
    modified: float = field(default=0.0, compare=False)
    "Seconds since 1970, by the clock of the disk or of the store."


Listing = Iterator[tuple[str, Stat]]
"Files below a folder: relative path and Stat of each."
Entries = tuple[dict[str, Stat], set[str]]
"The files directly in a folder, and the names of the folders in it."
CHANGED = (
    "{url} was changed while it was being read, so its records may be half old and half new: wait until it is complete and "
    "run the same command again"
)


@dataclass(frozen=True, slots=True)
class Location(ABC):
    """A file or folder on a disk, in a bucket or in a data set of the hub. Frozen, hashable and
    picklable.
    """

    scheme: ClassVar[str] = ""
    path: str
    """Absolute on a disk; `bucket/key` in a bucket; `datasets/org/name@revision/folder/file` on the
    hub.
    """

    @property
    def url(self) -> str:
        """`s3://bucket/key`, `hf://datasets/org/name/file`, or an absolute local path."""
        return self.scheme + self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def is_store(self) -> bool:
        """True for a bucket and the hub, false for a disk. A request to a store takes long, and
        brings the version that was asked for.
        """
        return True

    @property
    def parent(self) -> Location:
        return type(self)(self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Location:
        """The place of `name` below this one; Unreachable for a name that leads outside."""
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise Unreachable(
                f"the name {name!r} leads out of {self.url}, so it is not followed: "
                "whatever lists it is damaged or hostile, publish it again"
            )
        return type(self)(f"{self.path.rstrip('/')}/{name}".rstrip("/"))

    def __str__(self) -> str:
        return self.url

    @abstractmethod
    def stat(self) -> Stat | None:
        """Size and stamp; None where there is no such file (a folder is not a file)."""

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `start` on, fewer only at the end of the file; None: all. A missing
        file is Unreachable.
        """
        if length is None:
            with self.open(start) as file:
                return file.read()
        with self.open(start, start + max(1, length)) as file:
            return file.read(length)

    @abstractmethod
    def fetch(self, most: int = 1 << 62) -> tuple[Stat, bytes] | None:
        """Stat and bytes of one and the same file; None for a missing file. The bytes are empty
        where the file is larger than `most` bytes. A bucket is asked once.
        """

    @abstractmethod
    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        """A sequential reader from byte `start` on. `stamp`: Unreachable where the file has
        another. `until`: the likely end of reading; a store is asked for the bytes up to there, and
        for more where more is read.
        """

    @abstractmethod
    def open_random(self, found: Stat, ahead: int = 1 << 20) -> BinaryIO:
        """A seekable reader of the file with the stamp of `found`; Unreachable where the file has
        another. A disk tells when the file is opened, a bucket at each request. `ahead`: the least
        bytes that a request to a store asks for.
        """

    def write(self, *parts: Bytes) -> None:
        """Put the joined parts here, wholly or not at all, over whatever was here."""
        raise self._cannot_be_written()

    def create(self, content: bytes) -> Stat | None:
        """Put `content` here if no file is here, and return its Stat; None where a file is here."""
        raise self._cannot_be_written()

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        """Put `content` in the place of the file with this stamp; None where another file, or none,
        is here.
        """
        raise self._cannot_be_written()

    def _cannot_be_written(self) -> Unreachable:
        return Unreachable(
            f"{self.url} cannot be written: mdsmix only reads from the hub; publish to a folder or an s3:// URL"
        )

    def try_conditions(self) -> bool:
        """Whether only one of several writers succeeds that `create` or `replace` this file at the
        same moment. An unknown store is tried once a run, beside this file. In a store that fails,
        both look before they write, and a write in between is lost.
        """
        return False

    def copy_to(self, other: Location) -> None:
        """Write this file's bytes at `other`; inside the store, where both places are in
        one store.
        """
        other.write(self.read())

    def link_to(self, other: Location) -> None:
        """Put this file, which never changes, at `other` too: by a hard link where a disk has them,
        else by a copy.
        """
        self.copy_to(other)

    def flush(self) -> None:  # noqa: B027 - a store has done it
        """Make links and deletions in this folder survive a power cut. Files that were written here
        survive one anyway.
        """

    def delete(self) -> None:
        """Remove the file, or an empty folder; a missing file is fine."""
        raise self._cannot_be_written()

    def delete_all(self, names: Sequence[str]) -> None:
        """Remove the files of these names directly inside; missing files are fine."""
        for name in names:
            (self / name).delete()

    @abstractmethod
    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        """The files directly inside, or (`recursive`) all below, by relative path, sorted. A
        missing folder is empty. A store may leave out files whose relative path does not start with
        `beginning`.
        """

    def folders(self) -> Iterator[str]:
        """Names of the folders directly inside, sorted. A missing folder is empty, and the hub
        tells none.
        """
        return iter(())

    def entries(self) -> Entries:
        """Files and folders directly inside, at a store by one listing."""
        return dict(self.list()), set(self.folders())

    def unfinished(self) -> Listing:
        """The temporary files below this folder, by relative path, of writes that were killed or
        still go on. A store has none.
        """
        return iter(())

    def expand(self) -> FoundFiles:
        """The files that this path names, sorted: the path itself, or the matches of `*`, `?`,
        `[]`, `**`. A store is asked for one listing, and for each file whose stamp the listing
        leaves out.
        """
        if not has_pattern(self.path):
            itself = self.stat()
            return [(self, itself)] if itself else []
        root = type(self)(fixed_prefix(self.path))
        own = self.path[len(root.path) + 1 :]
        patterns = own.split("/")
        files = dict(root.list(len(patterns) > 1 or own == "**", re.split(r"[*?[]", own)[0]))
        # A file may be named as the pattern itself; the listing holds it, since it begins alike.
        names = [own] if own in files else files
        found = [
            (root / name, files[name])
            for name in names
            if name == own or path_matches(name.split("/"), patterns)
        ]
        return [(at, now) for at, stat in found if (now := stat if stat.stamp else at.stat())]


FoundFiles: TypeAlias = "list[tuple[Location, Stat]]"


def has_pattern(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def fixed_prefix(path: str) -> str:
    """The folders of `path` before the first one that holds a pattern."""
    parts = path.split("/")
    first = next((i for i, part in enumerate(parts) if has_pattern(part)), len(parts) - 1)
    return "/".join(parts[:first])


def name_matches(name: str, pattern: str) -> bool:
    """Whether one part of a path matches. As in a shell, `*` does not find `.hidden`."""
    hidden = name.startswith(".") and not pattern.startswith(".")
    return not hidden and fnmatch.fnmatchcase(name, pattern)


def path_matches(names: list[str], patterns: list[str]) -> bool:
    """Whether a path, part by part, matches; `**` stands for any number of visible folders."""
    if not patterns or not names:
        return not patterns and not names
    head, *rest = patterns
    if head != "**":
        return name_matches(names[0], head) and path_matches(names[1:], rest)
    if path_matches(names, rest or ["*"]):
        return True
    return not names[0].startswith(".") and path_matches(names[1:], patterns)

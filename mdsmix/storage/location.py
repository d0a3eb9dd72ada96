"""The interface of every location, on a disk, in a bucket or on the hub: whole files, no modes.

It makes only promises that a local disk and an object store can both keep: a write is complete or
has no effect, a missing file is an ordinary result and not an error, and every failure is one
`Unreachable` sentence.

A store is one subclass in a file of its own, and one line in `urls.py`. All that the rest of mdsmix
has to know about a store is an attribute or a method of that class.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
    "{url} was changed while it was being read, so its records may be half old and half new: "
    "wait until it is complete and run the same command again"
)
NO_LIMIT = 1 << 62
"More bytes than any file has."


@dataclass(frozen=True, slots=True)
class Location(ABC):
    """A file or folder on a disk, in a bucket or in a data set of the hub. Frozen, hashable and
    picklable.
    """

    scheme: ClassVar[str] = ""
    "The beginning of a URL, such as `s3://`. Empty for a disk."
    other_schemes: ClassVar[Sequence[str]] = ()
    "Schemes of other tools for the same store, such as `s3a`. They are refused with a suggestion."
    container_noun: ClassVar[str] = ""
    "What users call the container that no path may leave, such as `bucket`. Empty for a disk."
    container_depth: ClassVar[int] = 0
    "How many names at the beginning of a path are the container's: 1 in `bucket/key`."
    has_cheap_listings: ClassVar[bool] = False
    "One listing of a folder costs less than asking for the Stat of each file in it."
    needs_credentials: ClassVar[bool] = False
    "Whether `describe_access` has something to say to a user whose run fails."
    permissions: ClassVar[Mapping[str, str]] = {}
    """Operation (list, read, write, copy, delete) -> the store's name of the permission for it,
    such as `s3:GetObject`.
    """
    address_variables: ClassVar[Sequence[str]] = ()
    """Environment variables that say where the store is. Other nodes of a run get their values.
    Credentials are not among them.
    """

    path: str
    """Absolute on a disk; `bucket/key` in a bucket; `datasets/org/name@revision/folder/file` on the
    hub.
    """

    @classmethod
    def from_url(cls, url: str) -> Location:
        """Return the location of a URL that begins with the scheme of this store.

        Raises RecipeError if it does not name a file or folder of the store.
        """
        return cls(url.removeprefix(cls.scheme))

    @classmethod
    def describe_access(cls) -> str:
        """Return which server the store is and where its credentials come from, without showing
        them: `endpoint AWS, credentials from env`. Empty for a store without credentials.

        Raises Unreachable if there are no credentials.
        """
        return ""

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
        returns the version that was requested.
        """
        return True

    @property
    def container(self) -> str:
        """The part of the path that no relative path may leave: `bucket`, `datasets/org/name`."""
        return "/".join(self.path.split("/")[: self.container_depth])

    @property
    def parent(self) -> Location:
        return type(self)(self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Location:
        """Return the location of `name` below this one.

        Raises Unreachable if the name leads outside.
        """
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise Unreachable(
                f"the name {name!r} leads out of {self.url}, so it is not followed: "
                "the file that lists it is damaged or hostile, publish it again"
            )
        return type(self)(f"{self.path.rstrip('/')}/{name}".rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def fetch_command(self, folder: str) -> list[str]:
        """Return the words of the shell command by which a user copies this folder to the local
        `folder`.
        """
        return ["mdsmix", "fetch", self.url, folder]

    @abstractmethod
    def stat(self) -> Stat | None:
        """Return size and stamp; None if there is no such file (a folder is not a file)."""

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from `start` on, fewer only at the end of the file; all bytes from
        there without `length`.

        Raises Unreachable if the file is missing.
        """
        if length is None:
            with self.open(start) as file:
                return file.read()
        with self.open(start, start + max(1, length)) as file:
            return file.read(length)

    @abstractmethod
    def fetch(self, max_bytes: int = NO_LIMIT) -> tuple[Stat, bytes] | None:
        """Return Stat and bytes of one version of the file, by one request to a bucket; None if the
        file is missing. The bytes are empty if the file is larger than `max_bytes`.
        """

    @abstractmethod
    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        """Return a sequential reader from byte `start` on.

        Raises Unreachable if the file is missing, or has another stamp than `stamp`.

        Args:
            until: the likely end of reading. A store is asked for the bytes up to there, and again
            if more are read.
        """

    @abstractmethod
    def open_random(self, stat: Stat, ahead: int = 1 << 20) -> BinaryIO:
        """Return a seekable reader of the version of the file that has the stamp of `stat`.

        Raises Unreachable if the file has another stamp: on a disk when it is opened, in a bucket
        also at each later request.

        Args:
            ahead: bytes that a request to a store asks for at least.
        """

    def write(self, *parts: Bytes) -> None:
        """Write the joined parts to this file, over any earlier one: completely or not at all."""
        raise self._cannot_be_written()

    def create(self, content: bytes) -> Stat | None:
        """Write `content` and return its Stat; None, without writing, if the file exists."""
        raise self._cannot_be_written()

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        """Write `content` over the file with this stamp and return the new Stat; None, without
        writing, if the file is missing or has another stamp.
        """
        raise self._cannot_be_written()

    def _cannot_be_written(self) -> Unreachable:
        return Unreachable(
            f"{self.url} cannot be written: mdsmix only reads from the hub; publish to a folder or "
            "an s3:// URL"
        )

    def try_conditions(self) -> bool:
        """Return whether only one of several writers succeeds that `create` or `replace` this file
        at the same moment. An unknown store is tried once a run, with an object next to this file.
        In a store that fails, both methods look before they write, and a write in between is lost.
        """
        return False

    def copy_to(self, target: Location) -> None:
        """Write this file's bytes to `target`; without a download if both are in one store."""
        target.write(self.read())

    def link_to(self, target: Location) -> None:
        """Give this file, which never changes, a second name `target`: by a hard link if the disk
        has them, otherwise by a copy.
        """
        self.copy_to(target)

    def flush(self) -> None:  # noqa: B027 - a store has done it
        """Make links and deletions in this folder survive a power cut. Files that were written here
        survive one anyway.
        """

    def delete(self) -> None:
        """Delete the file, or an empty folder. A missing file is fine."""
        raise self._cannot_be_written()

    def delete_all(self, names: Sequence[str]) -> None:
        """Delete the files of these names in this folder. Missing files are fine."""
        for name in names:
            (self / name).delete()

    @abstractmethod
    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        """Yield the files directly in this folder, or (`recursive`) all below it, by relative path,
        sorted. A missing folder is empty.

        Args:
            beginning: a store may leave out files whose relative path does not start with this.
        """

    def folders(self) -> Iterator[str]:
        """Yield the names of the folders directly in this one, sorted; nothing for a missing
        folder, nor on the hub.
        """
        return iter(())

    def entries(self) -> Entries:
        """Return the files and folders directly in this folder, by one listing of a store."""
        return dict(self.list()), set(self.folders())

    def unfinished(self) -> Listing:
        """Yield the temporary files below this folder of writes that were killed or still go on, by
        relative path. A store has none.
        """
        return iter(())

    def expand(self) -> FoundFiles:
        """Return the files that this path names, sorted: the path itself, or the matches of `*`,
        `?`, `[]`, `**`. It costs one listing, and a request for each file whose stamp the listing
        leaves out.
        """
        if not has_pattern(self.path):
            stat = self.stat()
            return [(self, stat)] if stat else []
        root = type(self)(fixed_prefix(self.path))
        pattern = self.path[len(root.path) + 1 :]
        parts = pattern.split("/")
        beginning = re.split(r"[*?[]", pattern)[0]
        is_deep = len(parts) > 1 or pattern == "**"
        files = dict(root.list(is_deep, beginning))
        if pattern in files:
            names = [pattern]  # the pattern itself is the name of a file
        else:
            names = [name for name in files if path_matches(name.split("/"), parts)]
        matches = list[tuple[Location, Stat]]()
        for name in names:
            file = root / name
            stat = files[name] if files[name].stamp else file.stat()
            if stat:
                matches.append((file, stat))
        return matches


FoundFiles: TypeAlias = list[tuple[Location, Stat]]


def has_pattern(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def fixed_prefix(path: str) -> str:
    """Return the folders of `path` before the first part that contains a pattern."""
    parts = path.split("/")
    first = next((i for i, part in enumerate(parts) if has_pattern(part)), len(parts) - 1)
    return "/".join(parts[:first])


def name_matches(name: str, pattern: str) -> bool:
    """Return whether one part of a path matches. As in a shell, `*` does not match `.hidden`."""
    is_hidden = name.startswith(".") and not pattern.startswith(".")
    return not is_hidden and fnmatch.fnmatchcase(name, pattern)


def path_matches(names: list[str], patterns: list[str]) -> bool:
    """Return whether the parts of a path match those of a pattern; `**` matches any number of
    folders that are not hidden.
    """
    if not patterns or not names:
        return not patterns and not names
    head, *tail = patterns
    if head != "**":
        return name_matches(names[0], head) and path_matches(names[1:], tail)
    if path_matches(names, tail or ["*"]):
        return True
    return not names[0].startswith(".") and path_matches(names[1:], patterns)

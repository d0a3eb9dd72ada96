"""The interface of every location, on a disk, in a bucket or on the hub: whole files, no modes.

It makes only promises that a local disk and an object store can both keep: a write is complete or
has no effect, a missing file is an ordinary result and not an error, and every failure is one
`Unreachable` sentence.

A store is one subclass in a file of its own, and one line in `urls.py`. All that the rest of mdsmix
must know about a store is an attribute or a method of that class.
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
"Yields (relative path, Stat) of files below a folder."
Entries = tuple[dict[str, Stat], set[str]]
"Name -> Stat of the files directly in a folder, and the names of the folders in it."
CHANGED = (
    "{url} was changed while it was being read, so its records may be half old and half new: "
    "wait until it is complete and run the same command again"
)
NO_LIMIT = 1 << 62
"A limit on bytes that no file reaches."


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
    "The users' word for the container that no path may leave, such as `bucket`. Empty for a disk."
    container_depth: ClassVar[int] = 0
    "How many names at the beginning of a path make up the container: 1 in `bucket/key`."
    has_cheap_listings: ClassVar[bool] = False
    "One listing of a folder costs less than asking for the Stat of each file in it."
    needs_credentials: ClassVar[bool] = False
    "Whether `describe_access` may explain why a run fails."
    permissions: ClassVar[Mapping[str, str]] = {}
    """Operation (list, read, write, copy, delete) -> the store's name of the permission for it,
    such as `s3:GetObject`.
    """
    address_variables: ClassVar[Sequence[str]] = ()
    """Environment variables with the store's address, not with credentials. Their values are passed
    to other nodes of a run.
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
        """Return `length` bytes from `start` on, or fewer if the file ends before. If `length` is
        None, return all bytes from `start` on.

        Raises Unreachable if the file is missing.
        """
        if length is None:
            with self.open(start) as file:
                return file.read()
        with self.open(start, start + max(1, length)) as file:
            return file.read(length)

    @abstractmethod
    def fetch(self, max_bytes: int = NO_LIMIT) -> tuple[Stat, bytes] | None:
        """Return Stat and bytes of the same version of the file; None if the file is missing. The
        bytes are empty if the file is larger than `max_bytes`. A bucket needs one request for this.
        """

    @abstractmethod
    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        """Return a sequential reader from byte `start` on.

        Raises Unreachable if the file is missing, or has another stamp than `stamp`.

        Args:
            until: the byte at which reading probably ends. A store is asked for the bytes up to
                there, and asked again only if more are read.
        """

    @abstractmethod
    def open_random(self, stat: Stat, ahead: int = 1 << 20) -> BinaryIO:
        """Return a seekable reader of the version of the file that has the stamp of `stat`.

        Raises Unreachable if the file has another stamp: on a disk when it is opened, in a bucket
        also at each later request.

        Args:
            ahead: the least bytes of a request to a store.
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
        """Return whether only one of several writers succeeds if they `create` or `replace` this
        file at the same moment.

        An unknown store is tested once a run, with an object next to this file. In a store that
        fails the test, both methods check the object before they write, and would overwrite
        another write that comes in between.
        """
        return False

    def copy_to(self, target: Location) -> None:
        """Copy this file to `target`; without a download if both are in the same store."""
        target.write(self.read())

    def link_to(self, target: Location) -> None:
        """Make this file also available as `target`: by a hard link if the disk supports it,
        otherwise by a copy. Only for a file that never changes.
        """
        self.copy_to(target)

    def flush(self) -> None:  # noqa: B027 - a store has done it
        """Flush this folder to the disk, so that links and deletions in it survive a power cut.
        Files that `write` wrote survive one anyway.
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
        """Yield (relative path, Stat) of the temporary files below this folder. They belong to
        writes that were killed or are still in progress. A store has none.
        """
        return iter(())

    def expand(self) -> FoundFiles:
        """Return the files that this path names, sorted: the file itself, or all files that match
        its pattern (`*`, `?`, `[]`, `**`). A pattern takes one listing, and a request for each file
        whose stamp is not in the listing.
        """
        if not has_pattern(self.path):
            stat = self.stat()
            return [(self, stat)] if stat else []
        root = type(self)(fixed_prefix(self.path))
        pattern = self.path[len(root.path) + 1 :]
        parts = pattern.split("/")
        # The text before the first sign of a pattern, with which all matches begin.
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
    """Return whether the path contains a sign of a pattern: `*`, `?` or `[`."""
    return any(sign in path for sign in "*?[")


def fixed_prefix(path: str) -> str:
    """Return the folders of `path` before the first part that contains a pattern: `a/b` of
    `a/b/*/c.csv`. Without a pattern these are all folders.
    """
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

    Args:
        names: the parts of the path: `["a", "b", "c.csv"]`.
        patterns: the parts of the pattern: `["**", "*.csv"]`.
    """
    if not patterns or not names:
        return not patterns and not names
    head, *tail = patterns
    if head != "**":
        return name_matches(names[0], head) and path_matches(names[1:], tail)
    if path_matches(names, tail or ["*"]):
        return True
    return not names[0].startswith(".") and path_matches(names[1:], patterns)

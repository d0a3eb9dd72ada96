"""The interface of every location, on a disk, in a bucket or on the hub: whole files, no modes.

The interface makes only promises that a local disk and an object store can both keep: a write is
complete or has no effect, a missing file is an ordinary result and not an error, and every failure
is one `Unreachable` sentence.

A store is one subclass in a file of its own, and one line in `urls.py`. All that the rest of mdsmix
must know about a store is an attribute or a method of this subclass.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import BinaryIO, ClassVar, NamedTuple, TypeAlias

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.frozen import frozen

Bytes = bytes | bytearray | memoryview


@frozen(slots=True)
class Stat:
    """The size of a file in bytes, and a stamp: a string that changes with the file.

    On a disk the stamp consists of modification time and inode. On S3 and Azure it is the ETag,
    in Google Cloud Storage the generation, and on the hub a hash.
    """

    size: int
    stamp: str
    modified: float = field(default=0.0, compare=False)
    "Seconds since 1970, by the clock of the disk or of the store."


class SkippedLink(NamedTuple):
    """A link on a disk that a search of all inner folders does not follow."""

    path: str
    target: str
    is_broken: bool
    "Whether there is nothing at `target`."
    files: tuple[str, ...] = ()
    "The real paths of the files that the search would find through the link."


Listing = Iterator[tuple[str, Stat]]
"Yields (relative path, Stat) of files below a folder, such as (`a/b.csv`, Stat(...))."
Entries = tuple[dict[str, Stat], set[str]]
"(files, folders) directly in a folder: name -> Stat of the files, and the names of the folders."
CHANGED = (
    "{url} was changed while it was being read, so its records may be half old and half new: "
    "wait until it is complete and run the same command again"
)
NO_LIMIT = 1 << 62
"A limit on bytes that no file reaches."


@frozen(slots=True)
class Location(ABC):
    """A file or folder on a disk, in a bucket or in a data set of the hub. Frozen, hashable and
    picklable.
    """

    scheme: ClassVar[str] = ""
    "The beginning of a URL, such as `s3://`. Empty for a disk."
    example_url: ClassVar[str] = ""
    "A URL of a file in the store as messages show it: `s3://bucket/key`. Empty for a disk."
    is_read_only: ClassVar[bool] = False
    "Whether mdsmix only reads from the store."
    container_noun: ClassVar[str] = ""
    "The word for the part of a store that no path may leave, such as `bucket`. Empty for a disk."
    container_depth: ClassVar[int] = 0
    "How many names at the beginning of a path are the container: 1 in `bucket/key`."
    has_cheap_listings: ClassVar[bool] = False
    "Whether one listing of a folder costs less than requests for the Stat of each of its files."
    needs_credentials: ClassVar[bool] = False
    "Whether `describe_access` may explain why a run fails."
    permissions: ClassVar[Mapping[str, str]] = {}
    """Operation (list, read, write, copy, delete) -> the store's name of the permission for it,
    such as `s3:GetObject`.
    """
    address_variables: ClassVar[Sequence[str]] = ()
    """Environment variables with the store's address. Their values are passed to other nodes of a
    run, so none of them contains credentials.
    """

    path: str
    """Absolute on a disk; `bucket/key` in a bucket; `datasets/org/name@revision/folder/file` on the
    hub, and `org/name/key` in a bucket of the hub.
    """

    @classmethod
    def from_url(cls, url: str) -> Location:
        """Return the location of a URL that begins with the scheme of this store.

        Raises RecipeError if the URL does not name a file or folder of the store.
        """
        return cls(url.removeprefix(cls.scheme))

    @classmethod
    def describe_access(cls) -> str:
        """Return the store's server and the source of the credentials, but not the credentials:
        `endpoint AWS, credentials from env`. Empty for a store that needs no credentials.

        Raises Unreachable if no credentials are set.
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
        """Whether the location is in a bucket or on the hub, not on a disk. A request to a store
        takes long, and returns the version of the file that was requested.
        """
        return True

    @property
    def is_on_this_machine(self) -> bool:
        """Whether no request leaves this machine: the location is on a disk, or in a store whose
        server runs here.
        """
        return not self.is_store

    @property
    def container(self) -> str:
        """The part of the path that no relative path may leave: `bucket`, `datasets/org/name`."""
        return "/".join(self.path.split("/")[: self.container_depth])

    @property
    def parent(self) -> Location:
        return type(self)(self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Location:
        """Return the location of the file or folder `name` in this folder: `folder / "a/b.csv"`.

        Raises Unreachable if the name leads out of this folder.
        """
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise Unreachable(
                f"the name {name!r} leads out of {self.url}, so nothing is read there: "
                "the file that lists this name is damaged or hostile; publish the stream again"
            )
        return type(self)(f"{self.path.rstrip('/')}/{name}".rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def fetch_command(self, folder: str) -> list[str]:
        """Return the words of a shell command that copies this folder to a local folder:
        `["mdsmix", "fetch", "hf://datasets/a/b", "copy"]`.

        Args:
            folder: the local folder.
        """
        return ["mdsmix", "fetch", self.url, folder]

    @abstractmethod
    def stat(self) -> Stat | None:
        """Return size and stamp of this file; None if it is missing, or if it is a folder. The
        stamp is a string that changes with the file.
        """

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes of this file from byte `start` on.

        Args:
            length: the number of bytes; None: all up to the file's end. Fewer are returned if the
                file ends earlier.

        Raises Unreachable if the file is missing.
        """
        if length is None:
            with self.open(start) as file:
                return file.read()
        with self.open(start, start + max(1, length)) as file:
            return file.read(length)

    @abstractmethod
    def fetch(self, max_bytes: int = NO_LIMIT) -> tuple[Stat, bytes] | None:
        """Return (Stat, bytes) of the same version of this file; None if the file is missing. A
        bucket needs only one request for both.

        Args:
            max_bytes: if the file is larger, no bytes are read, and the result is (Stat, b"").
        """

    @abstractmethod
    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        """Return a reader of this file that begins at byte `start` and is only read forwards.

        Args:
            until: the byte at which reading probably ends. A store is asked for the bytes up to
                there, and asked again only if more bytes are read. None: the end of the file.
            stamp: the stamp that the file must have; "": any.

        Raises Unreachable if the file is missing or has another stamp.
        """

    @abstractmethod
    def open_random(self, stat: Stat, ahead: int = 1 << 20) -> BinaryIO:
        """Return a reader of this file that can seek.

        Args:
            stat: size and stamp of the version to read.
            ahead: the least bytes of a request to a store.

        Raises Unreachable if the file has another stamp. A disk checks the stamp when the file is
        opened, a bucket also at each later request.
        """

    def write(self, *parts: Bytes) -> None:
        """Write the joined parts to this file: completely or not at all. An existing file is
        replaced.
        """
        raise self._make_read_only_error()

    def create(self, content: bytes) -> Stat | None:
        """Write `content` to this file and return its Stat. If the file exists, write nothing and
        return None.
        """
        raise self._make_read_only_error()

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        """Write `content` over this file and return the new Stat. If the file is missing, or its
        stamp (a string that changes with the file) is not `stamp`, write nothing and return None.
        """
        raise self._make_read_only_error()

    def _make_read_only_error(self) -> Unreachable:
        """Return the error for the user about a write to a store that is only read."""
        return Unreachable(
            f"{self.url} cannot be written: mdsmix only reads there; publish to a local folder or "
            "a bucket"
        )

    def try_conditions(self) -> bool:
        """Return whether only one of several writers succeeds if they `create` or `replace` this
        file at the same moment.

        An unknown store is tested once a run, with an object in the folder of this file. If the
        store fails the test, `create` and `replace` check the file right before they write. They
        then overwrite a write of another process between the check and their own write.
        """
        return False

    def copy_to(self, target: Location) -> None:
        """Copy this file to `target`. Within a store the file is copied without a download."""
        target.write(self.read())

    def link_to(self, target: Location) -> None:
        """Make this file also available as `target`: by a hard link if the disk supports it,
        otherwise by a copy. Only for a file that never changes.
        """
        self.copy_to(target)

    def flush(self) -> None:  # noqa: B027 - a store has done it
        """Flush this folder to the disk, so that links and deletions in the folder survive a power
        cut. Files from `write` survive a power cut anyway.
        """

    def delete(self) -> None:
        """Delete this file or empty folder. Do nothing if it is missing."""
        raise self._make_read_only_error()

    def delete_all(self, names: Sequence[str]) -> None:
        """Delete the files with these names in this folder. Missing files are skipped."""
        for name in names:
            (self / name).delete()

    @abstractmethod
    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        """Yield (relative path, Stat) of the files in this folder, sorted by path. Nothing for a
        missing folder.

        Args:
            recursive: whether the files of all inner folders are included.
            beginning: a hint: a store may leave out files whose relative path does not start with
                this string.
        """

    def folders(self) -> Iterator[str]:
        """Yield the names of the folders directly in this folder, sorted. Nothing for a missing
        folder, and nothing on the hub.
        """
        return iter(())

    def entries(self) -> Entries:
        """Return (files, folders) directly in this folder: name -> Stat of the files, and the names
        of the folders. A bucket needs only one listing for both.
        """
        return dict(self.list()), set(self.folders())

    def unfinished(self) -> Listing:
        """Yield (relative path, Stat) of the temporary files in this folder and its inner folders.
        They belong to writes that were killed or are still in progress. A store has none.
        """
        return iter(())

    def skipped_links(self) -> Sequence[SkippedLink]:
        """Return the links that `expand` does not follow if this is a pattern with `**`, and that
        `list(recursive=True)` does not follow if it is a folder: links to a folder with files that
        match, and links to nothing. A store has no links.
        """
        return []

    def expand(self) -> FoundFiles:
        """Return (Location, Stat) of the file with this path; or, if the path is a pattern (`*`,
        `?`, `[]`, `**`), of all files that match the pattern, sorted by path. [] if there are none.

        A pattern takes one listing, and a request for each file whose stamp the listing lacks.
        """
        if not has_pattern(self.path):
            stat = self.stat()
            return [(self, stat)] if stat else []

        # List the folder before the pattern: `bucket/a` for `bucket/a/b*/c.csv`. All matches begin
        # with the part before the first sign of the pattern: `b`.
        root = type(self)(cut_before_pattern(self.path))
        pattern = self.path[len(root.path) + 1 :]
        parts = pattern.split("/")
        beginning = re.split(r"[*?[]", pattern)[0]
        is_deep = len(parts) > 1 or pattern == "**"
        files = dict(root.list(is_deep, beginning))

        # Choose the matches, and find their stamps.
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


def refuse_dots(url: str) -> None:
    """Raise RecipeError if a part of a URL's path is `.` or `..`. Some clients of stores take `..`
    for the folder above, which may be in another bucket, and others for a name.
    """
    for name in url.partition("://")[2].split("/"):
        if name in (".", ".."):
            raise RecipeError(
                f"{url} has the part {name}, which is not a folder in a store: write the URL "
                f"without {name}"
            )


def cut_before_pattern(path: str) -> str:
    """Return the folders of `path` before the first part that contains a sign of a pattern: `a/b`
    for `a/b/*/c.csv`. Without a pattern these are all folders: `a/b` for `a/b/c.csv`.
    """
    *folders, _ = path.split("/")
    for number, folder in enumerate(folders):
        if has_pattern(folder):
            return "/".join(folders[:number])
    return "/".join(folders)


def name_matches(name: str, pattern: str) -> bool:
    """Return whether one part of a path matches a pattern such as `*.csv`. As in a shell, `*` does
    not match `.hidden`.
    """
    is_hidden = name.startswith(".") and not pattern.startswith(".")
    return not is_hidden and fnmatch.fnmatchcase(name, pattern)


def path_matches(names: list[str], patterns: list[str]) -> bool:
    """Return whether the parts of a path match the parts of a pattern. `**` matches any number of
    folders that are not hidden, also none.

    Args:
        names: the parts of the path: `["a", "b", "c.csv"]`.
        patterns: the parts of the pattern: `["**", "*.csv"]`.
    """
    if not patterns or not names:
        return not patterns and not names
    head, *tail = patterns
    if head != "**":
        return name_matches(names[0], head) and path_matches(names[1:], tail)
    # `**` matches no folder, or the first folder and maybe more.
    if path_matches(names, tail or ["*"]):
        return True
    return not names[0].startswith(".") and path_matches(names[1:], patterns)

"""Data sets of the Hugging Face hub, `hf://datasets/org/name/folder/file` or
`...name@revision/...`, which are only read.

huggingface_hub's file system sends the requests, with the user's own login and endpoint
(`HF_ENDPOINT`). A file's stamp is its hash in git or LFS. Each reader reads from one commit: the
newest commit at the time when the reader is opened. So a file that was replaced since it was listed
is noticed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.messages import flatten_error
from mdsmix.storage.hub_errors import HUB_ERRORS, NO_ANSWERS, find_endpoint, hide_retry_lines
from mdsmix.storage.location import CHANGED, NO_LIMIT, Listing, Location, Stat, refuse_dots
from mdsmix.storage.retries import note_answer

_PATH = re.compile(r"datasets/[^/]+/[^/@]+(@[^/]+)?/.+")


class HubPath(Location):
    """A file or folder of a data set on the Hugging Face hub."""

    __slots__ = ()
    scheme = "hf://"
    example_url = "hf://datasets/org/name/file"
    is_read_only = True
    container_noun = "data set"
    container_depth = 3

    @classmethod
    def from_url(cls, url: str) -> HubPath:
        """Return the location of an `hf://` URL.

        Raises RecipeError if the URL does not name a file of a data set.
        """
        refuse_dots(url)
        path = url.removeprefix(cls.scheme).rstrip("/")
        if not _PATH.fullmatch(path):
            raise RecipeError(
                f"{url} does not name a file of a data set: write hf://datasets/ORG/NAME/FILE, "
                "where FILE may be a pattern with *, ** or ?"
            )
        return cls(path)

    def stat(self) -> Stat | None:
        """Return size and stamp (a hash) of this file; None if it is missing, or is a folder."""
        with _explain_errors(self.url):
            try:
                info = _open_file_system().info(self.path)
            except FileNotFoundError:
                return None
        return _make_stat(info) if info["type"] == "file" else None

    def fetch(self, max_bytes: int = NO_LIMIT) -> tuple[Stat, bytes] | None:
        """Return (Stat, bytes) of the same version of this file. Return None if it is missing, or
        if it is a folder. If it has more than `max_bytes`, no bytes are read, and the result is
        (Stat, b"").
        """
        stat = self.stat()
        if stat is None:
            return None
        if stat.size > max_bytes:
            return stat, b""
        with self.open(stamp=stat.stamp) as file:
            return stat, file.read()

    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        file = self._open_version(stamp, 1 << 20)
        file.seek(start)
        return file

    def open_random(self, stat: Stat, ahead: int = 1 << 20) -> BinaryIO:
        return self._open_version(stat.stamp, ahead)

    def _open_version(self, stamp: str, ahead: int) -> BinaryIO:
        """Return a reader of the file in the newest commit.

        Args:
            stamp: the stamp that the file must have; "": any.
            ahead: the least bytes of a request to the hub.

        Raises Unreachable if the file has another stamp in this commit.
        """
        with _explain_errors(self.url):
            commit = _find_commit(self.path)
            stat = _make_stat(_open_file_system().info(self.path, revision=commit))
            if stamp and stat.stamp != stamp:
                raise Unreachable(CHANGED.format(url=self.url))
            file = _open_file_system().open(self.path, "rb", revision=commit, block_size=ahead)
            return io.BufferedReader(_HubReader(self.url, file))

    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        """Yield (path relative to this folder, Stat) of the files in this folder, sorted by path;
        with `recursive` also those in inner folders. Nothing for a missing folder. `beginning` is
        not used.
        """
        depth = None if recursive else 1
        with _explain_errors(self.url):
            try:
                entries = _open_file_system().find(self.path, maxdepth=depth, detail=True)
            except FileNotFoundError:
                entries = {}
        for name in sorted(entries):
            yield name[len(self.path) + 1 :], _make_stat(entries[name])


class _HubReader(io.RawIOBase):
    """Reads a file of huggingface_hub's file system. An error of the hub is not one of the file's
    content, so the formats must not get it as an OSError.
    """

    def __init__(self, url: str, file: Any) -> None:
        """Store the arguments.

        Args:
            url: what error messages name.
            file: the file, which this reader closes.
        """
        super().__init__()
        self._url = url
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        with _explain_errors(self._url):
            return int(self._file.readinto(buffer))

    def readall(self) -> bytes:
        with _explain_errors(self._url):
            return bytes(self._file.read())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@cache
def _open_file_system() -> Any:
    """Return the hub as a file system of huggingface_hub. The file system is made once in a
    process, and does not cache listings.
    """
    from huggingface_hub import HfFileSystem

    return HfFileSystem(use_listings_cache=False)


def _find_commit(path: str) -> str:
    """Return the id of the data set's newest commit. If the path names a revision, return the
    newest commit of this revision.
    """
    resolved = _open_file_system().resolve_path(path)
    info = _open_file_system()._api.repo_info(
        resolved.repo_id, revision=resolved.revision, repo_type=resolved.repo_type
    )
    return str(info.sha)


def _make_stat(info: Mapping[str, Any]) -> Stat:
    """Return size and stamp of a file. The stamp is the SHA-256 of a large file (LFS), otherwise
    the file's id in git; "" if the hub sends neither.

    Args:
        info: the entry of the file, as huggingface_hub returns it.
    """
    stamp = info.get("blob_id") or ""
    if large_file := info.get("lfs"):
        stamp = large_file.get("sha256") or stamp
    return Stat(info["size"], str(stamp))


@contextmanager
def _explain_errors(url: str) -> Iterator[None]:
    """Turn errors that huggingface_hub raises in the `with` block into Unreachable, and show one
    sentence if a request waits. After a block without an error, the next wait for the hub is shown
    again.

    FileNotFoundError is not changed.

    Args:
        url: the file or folder, which the message names.
    """
    try:
        with hide_retry_lines():
            yield
        note_answer(find_endpoint())
    except (Unreachable, FileNotFoundError):
        raise
    except HUB_ERRORS.classes() as error:
        # The client's own text names only its retries if the hub did not answer.
        reason = NO_ANSWERS.get(HUB_ERRORS.find_code(error))
        if not reason:
            reason = (
                f"{flatten_error(error)[:300]}; check the file's name, the login (HF_TOKEN), the "
                "network, HF_ENDPOINT and HF_HUB_OFFLINE"
            )
        raise Unreachable(
            f"{url} cannot be read from the hub ({type(error).__name__}): {reason}, or copy the "
            "files to this machine and name the copies in the recipe"
        ) from None

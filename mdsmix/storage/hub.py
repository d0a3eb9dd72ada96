"""Data sets of the Hugging Face hub, `hf://datasets/org/name/folder/file` or
`...name@revision/...`, which are only read.

huggingface_hub's file system sends the requests, with the user's own login and endpoint
(`HF_ENDPOINT`). A file's stamp is its hash in git or LFS. Each reader reads from one commit, the
newest one when the reader was opened, so a file that was replaced meanwhile is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO, cast

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.messages import flatten_error
from mdsmix.storage.location import CHANGED, NO_LIMIT, Listing, Location, Stat

_PATH = re.compile(r"datasets/[^/]+/[^/@]+(@[^/]+)?/.+")


class HubPath(Location):
    """A file or folder of a data set."""

    __slots__ = ()
    scheme = "hf://"
    container_noun = "data set"
    container_depth = 3

    @classmethod
    def from_url(cls, url: str) -> HubPath:
        path = url.removeprefix(cls.scheme).rstrip("/")
        if not _PATH.fullmatch(path):
            raise RecipeError(
                f"{url} does not name a file of a data set: write hf://datasets/ORG/NAME/FILE, "
                "where FILE may contain *, ** and ?"
            )
        return cls(path)

    def stat(self) -> Stat | None:
        with _explained(self.url):
            try:
                info = _file_system().info(self.path)
            except FileNotFoundError:
                return None
        return _make_stat(info) if info["type"] == "file" else None

    def fetch(self, max_bytes: int = NO_LIMIT) -> tuple[Stat, bytes] | None:
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

        Raises Unreachable if the file has another stamp there.
        """
        with _explained(self.url):
            commit = _find_commit(self.path)
            stat = _make_stat(_file_system().info(self.path, revision=commit))
            if stamp and stat.stamp != stamp:
                raise Unreachable(CHANGED.format(url=self.url))
            file = _file_system().open(self.path, "rb", revision=commit, block_size=ahead)
            return cast(BinaryIO, file)

    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        depth = None if recursive else 1
        with _explained(self.url):
            try:
                entries = _file_system().find(self.path, maxdepth=depth, detail=True)
            except FileNotFoundError:
                entries = {}
        for name in sorted(entries):
            yield name[len(self.path) + 1 :], _make_stat(entries[name])


@cache
def _file_system() -> Any:
    """Return the hub as a file system of its client. Made once, and without a cache of listings."""
    from huggingface_hub import HfFileSystem

    return HfFileSystem(use_listings_cache=False)


def _find_commit(path: str) -> str:
    """Return the newest commit of the data set, or of the revision if the path names one."""
    resolved = _file_system().resolve_path(path)
    info = _file_system()._api.repo_info(
        resolved.repo_id, revision=resolved.revision, repo_type=resolved.repo_type
    )
    return str(info.sha)


def _make_stat(info: Mapping[str, Any]) -> Stat:
    """Return the Stat of a file. Its stamp is the SHA-256 of a large file (LFS), otherwise the id
    of the blob.

    Args:
        info: what the client tells about the file.
    """
    large_file = info.get("lfs") or {}
    return Stat(info["size"], str(large_file.get("sha256") or info.get("blob_id") or ""))


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turn errors of the hub or its client, raised in the block, into Unreachable. It catches base
    classes, since the client's own classes differ between releases.
    """
    try:
        yield
    except (Unreachable, FileNotFoundError):
        raise
    except (OSError, ValueError) as error:  # base classes of all errors of huggingface_hub
        raise Unreachable(
            f"{url} cannot be read from the hub ({type(error).__name__}): "
            f"{flatten_error(error)[:300]}; check the file's name, the login (HF_TOKEN), the "
            "network, HF_ENDPOINT and HF_HUB_OFFLINE, or copy the files and name the copies"
        ) from None

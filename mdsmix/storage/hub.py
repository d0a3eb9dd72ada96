"""Data sets of the Hugging Face hub, `hf://datasets/org/name/folder/file` or
`...name@revision/...`, which are only read.

huggingface_hub's file system asks the hub, by the user's own login and endpoint (`HF_ENDPOINT`). A
file is known by the hash that git or LFS has of it, and each reader reads from the commit that it
began with, so a file that is replaced meanwhile is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO, cast

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.messages import flatten_error
from mdsmix.storage.location import CHANGED, Listing, Location, Stat

_PATH = re.compile(r"datasets/[^/]+/[^/@]+(@[^/]+)?/.+")


class HubPath(Location):
    """A file or folder of a data set."""

    __slots__ = ()
    scheme = "hf://"

    def stat(self) -> Stat | None:
        with _explained(self.url):
            try:
                found = _files().info(self.path)
            except FileNotFoundError:
                return None
        return _stat(found) if found["type"] == "file" else None

    def fetch(self, most: int = 1 << 62) -> tuple[Stat, bytes] | None:
        found = self.stat()
        if found is None:
            return None
        if found.size > most:
            return found, b""
        with self.open(stamp=found.stamp) as file:
            return found, file.read()

    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        file = self._opened(stamp, 1 << 20)
        file.seek(start)
        return file

    def open_random(self, found: Stat, ahead: int = 1 << 20) -> BinaryIO:
        return self._opened(found.stamp, ahead)

    def _opened(self, stamp: str, ahead: int) -> BinaryIO:
        """A reader of the file in the newest commit; Unreachable where the file has another stamp
        there.
        """
        with _explained(self.url):
            commit = _commit(self.path)
            found = _stat(_files().info(self.path, revision=commit))
            if stamp and found.stamp != stamp:
                raise Unreachable(CHANGED.format(url=self.url))
            return cast(
                BinaryIO,
                _files().open(self.path, "rb", revision=commit, block_size=ahead),
            )

    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        with _explained(self.url):
            try:
                entries = _files().find(self.path, maxdepth=None if recursive else 1, detail=True)
            except FileNotFoundError:
                entries = {}
        for name in sorted(entries):
            yield name[len(self.path) + 1 :], _stat(entries[name])


def hub_path(text: str) -> HubPath:
    """The place that an `hf://` URL names; RecipeError where it names no file of a data set."""
    path = text.removeprefix("hf://").rstrip("/")
    if not _PATH.fullmatch(path):
        raise RecipeError(
            f"{text} names no file of a data set: write hf://datasets/ORG/NAME/FILE, where FILE may hold *, ** and ?"
        )
    return HubPath(path)


@cache
def _files() -> Any:
    from huggingface_hub import HfFileSystem

    return HfFileSystem(use_listings_cache=False)


def _commit(path: str) -> str:
    """The newest commit of the file's data set, or of the revision that it names."""
    place = _files().resolve_path(path)
    said = _files()._api.repo_info(
        place.repo_id, revision=place.revision, repo_type=place.repo_type
    )
    return str(said.sha)


def _stat(said: Any) -> Stat:
    large = said.get("lfs") or {}
    return Stat(said["size"], str(large.get("sha256") or said.get("blob_id") or ""))


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Errors of the hub or its client as one Unreachable sentence. Releases of the client name
    their errors differently.
    """
    try:
        yield
    except (Unreachable, FileNotFoundError):
        raise
    except (OSError, ValueError) as error:  # huggingface_hub's own are both
        raise Unreachable(
            f"{url} cannot be read from the hub ({type(error).__name__}): {flatten_error(error)[:300]}; check the file's name, the login (HF_TOKEN), the network, "
            "HF_ENDPOINT and HF_HUB_OFFLINE, or copy the files and name these"
        ) from None

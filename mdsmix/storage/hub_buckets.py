"""Files in a storage bucket of the Hugging Face hub, `hf://buckets/org/name/folder/file`.

huggingface_hub sends the requests, with the user's own login and endpoint (`HF_TOKEN`,
`HF_ENDPOINT`), and hf_xet uploads the bytes. A file's stamp is its Xet hash, the hash of its
content. A bucket has no versions: each answer with bytes of a file names the hash of the
whole file, which is compared with the stamp.

The hub has no conditional writes for buckets. So `create` and `replace` check the file right before
they write, and read it again after they have written: of two runs that write at the same moment, at
least the one notices whose file was overwritten before it read it again.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from inspect import signature
from typing import Any, BinaryIO, ClassVar, TypeVar
from urllib.parse import quote

from mdsmix.errors import NoSuchPlace, RecipeError, Unreachable
from mdsmix.storage.bucket import BucketPath
from mdsmix.storage.hub_errors import (
    HUB_ERRORS,
    find_endpoint,
    hide_retry_lines,
    show_hub_endpoint,
)
from mdsmix.storage.location import CHANGED, NO_LIMIT, Bytes, Entries, Location, Stat, refuse_dots
from mdsmix.storage.object_reader import make_random_reader
from mdsmix.storage.retries import Connection, has_answered, retry

T = TypeVar("T")

_PATH = re.compile(r"[^/@*?[]+/[^/@*?[]+(/.*)?")
_NEEDED = "1.10"
"The first release of huggingface-hub that adds, copies, deletes and lists files of buckets."
_AT_ONCE = 1000
"The most files that the hub deletes or describes by one request."
_READ_BYTES = 8 << 20
"Bytes of a request if a file is read from start to end."
_KNOCK_SECONDS = 10
"How long the first answer of the hub may take."
_LOOKS = 3
"How often a file that is replaced again and again is tried to be read whole."


class HubBucketPath(BucketPath):
    """A file or folder in a storage bucket of the Hugging Face hub. The path is `org/name/key`,
    without slashes around the key; the path of the bucket itself is `org/name`.
    """

    __slots__ = ()
    scheme = "hf://buckets/"
    example_url = "hf://buckets/org/name/key"
    container_depth = 2
    permissions: ClassVar[Mapping[str, str]] = {
        "list": "read access to the bucket",
        "write": "write access to the bucket",
        "read": "read access to the bucket",
        "copy": "write access to the bucket",
        "delete": "write access to the bucket",
    }
    address_variables = ("HF_ENDPOINT",)

    @classmethod
    def from_url(cls, url: str) -> HubBucketPath:
        """Return the location of an `hf://buckets/` URL.

        Raises RecipeError if the URL does not name a bucket.
        """
        refuse_dots(url)
        path = url.removeprefix(cls.scheme).rstrip("/")
        if not _PATH.fullmatch(path):
            raise RecipeError(
                f"{url} does not name a bucket of the hub: write hf://buckets/ORG/NAME/FOLDER, "
                "with the full names of the owner and the bucket, and no revision"
            )
        return cls(path)

    @classmethod
    def describe_access(cls) -> str:
        from huggingface_hub import get_token

        _require_buckets()
        if not get_token():
            source = "no login, which is enough to read public buckets"
        elif os.environ.get("HF_TOKEN"):
            source = "login from HF_TOKEN"
        else:
            source = "login stored by `hf auth login`"
        return f"hub {show_hub_endpoint()}, {source}"

    def _ask(self, request: Callable[[Any], T]) -> T:
        """Send a request to the hub, and return its result. Temporary failures are retried.

        Args:
            request: called with huggingface_hub's HfApi.
        """
        with hide_retry_lines():
            if not has_answered(find_endpoint()):
                retry(self.url, HUB_ERRORS, _connect, _send_probe)
            return retry(self.url, HUB_ERRORS, _connect, request)

    # Reading

    def stat(self) -> Stat | None:
        """Return size and stamp (Xet hash) of this file; None if it is missing, or is a folder."""
        if not self.key:
            return None
        for _, stat in self._describe([self.key]):
            return stat
        return None

    def _describe(self, keys: Sequence[str]) -> list[tuple[str, Stat]]:
        """Return (key, Stat) of those of these files that exist, by one request."""

        def describe(api: Any) -> list[tuple[str, Stat]]:
            files = api.get_bucket_paths_info(self.bucket, keys)
            return [(file.path, _make_stat(file)) for file in files]

        return self._ask(describe)

    def fetch(self, max_bytes: int = NO_LIMIT) -> tuple[Stat, bytes] | None:
        """Return (Stat, bytes) of the same version of this file. Return None if it is missing, or
        if it is a folder. If it has more than `max_bytes`, no bytes are read, and the result is
        (Stat, b"").
        """
        for _ in range(_LOOKS):
            stat = self.stat()
            if stat is None:
                return None
            if stat.size > max_bytes:
                return stat, b""
            content = self._read_range(stat, 0, stat.size)
            if content is not None:
                return stat, content
        raise Unreachable(CHANGED.format(url=self.url))

    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        stat = self.stat()
        if stat is None:
            raise NoSuchPlace(f"{self.url} cannot be read: there is no such file; check the path")
        if stamp and stat.stamp != stamp:
            raise Unreachable(CHANGED.format(url=self.url))
        expected = _READ_BYTES if until is None else until - start
        file = self.open_random(stat, max(1, min(expected, _READ_BYTES)))
        file.seek(start)
        return file

    def open_random(self, stat: Stat, ahead: int = 1 << 20) -> BinaryIO:
        """Return a reader of this file that can seek. It reads the version whose size and stamp
        are `stat`; a request asks for at least `ahead` bytes.

        Raises Unreachable at a read if the file has another stamp.
        """

        def fetch(start: int, end: int) -> bytes:
            """Return the bytes from `start` on and before `end`."""
            content = self._read_range(stat, start, end)
            if content is None:
                raise Unreachable(CHANGED.format(url=self.url))
            return content

        return make_random_reader(fetch, stat.size, ahead)

    def _read_range(self, stat: Stat, start: int, end: int) -> bytes | None:
        """Return the bytes of this file from `start` on and before `end`; None if the file is not
        the version `stat` any more.
        """
        if start >= end:
            return b""
        address = f"{find_endpoint()}/buckets/{self.bucket}/resolve/{quote(self.key)}"
        try:
            answer = self._ask(partial(_get_range, address, start, end))
        except NoSuchPlace:  # it was deleted, or the bucket was
            return None
        # The hub redirects to the bytes, and names their hash in this answer.
        hashes = [hop.headers.get("X-Xet-Hash") for hop in (*answer.history, answer)]
        stamp = next(filter(None, hashes), None)
        if stamp is None:  # a proxy has removed the header: ask what the file is now
            current = self.stat()
            stamp = current.stamp if current else ""
        if stamp != stat.stamp:
            return None
        content: bytes = answer.content
        if len(content) != end - start:
            raise Unreachable(
                f"{self.url} cannot be read: the hub sent {len(content)} bytes in place of "
                f"{end - start}; run the same command again"
            )
        return content

    def _list_entries(self, recursive: bool = False, beginning: str = "") -> Entries:
        # The hub lists no folders if it lists the files in inner folders.
        def list_all(api: Any) -> list[Any]:
            return list(api.list_bucket_tree(self.bucket, self.key or None, recursive=recursive))

        files = dict[str, Stat]()
        folders = set[str]()
        start = self._prefix
        for entry in self._ask(list_all):
            # The hub lists all paths that begin with the key: `logs.json` for `logs`, too.
            if not entry.path.startswith(start):
                continue
            name = entry.path[len(start) :]
            if entry.type == "file":
                files[name] = _make_stat(entry)
            else:
                folders.add(name)
        return files, folders

    # Writing

    def write(self, *parts: Bytes) -> None:
        self._put(b"".join(parts))

    def _put(self, content: bytes) -> None:
        """Upload `content`, then make it the content of this file. Until then a reader finds the
        old file.
        """
        self._ask(partial(_change, self.bucket, add=[(content, self.key)]))

    def create(self, content: bytes) -> Stat | None:
        return None if self.stat() else self._write_and_verify(content)

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        stat = self.stat()
        if stat is None or stat.stamp != stamp:
            return None
        return self._write_and_verify(content)

    def _write_and_verify(self, content: bytes) -> Stat | None:
        """Write `content` to this file, and return its Stat. Return None if another process has
        written the file since.
        """
        self._put(content)
        file = self.fetch()
        if file is None:
            return None
        stat, written = file
        return stat if written == content else None

    def copy_to(self, target: Location) -> None:
        """Copy this file to `target`. The hub itself copies it if `target` is in a bucket."""
        stat = self.stat()
        if not isinstance(target, HubBucketPath) or stat is None:
            Location.copy_to(self, target)  # which raises an error if this file is missing
            return
        copy = [("bucket", self.bucket, stat.stamp, target.key)]
        target._ask(partial(_change, target.bucket, copy=copy))

    def delete(self) -> None:
        try:
            self._ask(partial(_change, self.bucket, delete=[self.key]))
        except Unreachable:
            if self.stat() is not None:  # a missing file is no error
                raise

    def delete_all(self, names: Sequence[str]) -> None:
        """Delete the files with these names below this folder, up to a thousand by one request.

        Files that this request did not delete are then deleted one by one.
        """
        start = self._prefix
        for first in range(0, len(names), _AT_ONCE):
            keys = [start + name for name in names[first : first + _AT_ONCE]]
            # The hub refuses the files that are missing. Some releases of huggingface_hub report
            # nothing if others were not deleted either, so look which remain.
            with suppress(Unreachable):
                self._ask(partial(_change, self.bucket, delete=keys))
            remaining = [key for key, _ in self._describe(keys)]
            Location.delete_all(self, [key.removeprefix(start) for key in remaining])


def _require_buckets() -> None:
    """Raise Unreachable if the installed huggingface_hub does not know buckets."""
    from huggingface_hub import HfApi, __version__

    change = getattr(HfApi, "batch_bucket_files", None)
    if change is None or "copy" not in signature(change).parameters:
        raise Unreachable(
            f"hf://buckets/ needs huggingface-hub {_NEEDED} or later, and {__version__} is "
            "installed: install transformers 5 (pip install -U transformers huggingface-hub), or "
            "use the hub's S3 address, s3://NAME/... with S3_ENDPOINT_URL=https://s3.hf.co/ORG"
        )


@cache
def _make_api() -> Any:
    """Return huggingface_hub's client, one for the process.

    Raises Unreachable if the installed huggingface_hub does not know buckets.
    """
    _require_buckets()
    from huggingface_hub import HfApi, constants

    # There would be a bar for each file that is uploaded.
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        _import_utils().disable_progress_bars()
    # By itself hf_xet tries again for 200 s to reach a hub that does not answer, in silence.
    os.environ.setdefault("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    return HfApi()


def _import_utils() -> Any:
    """Return the module with huggingface_hub's functions for requests of one's own."""
    from huggingface_hub import utils

    return utils


def _connect() -> Connection:
    return Connection(_make_api(), find_endpoint())


def _send_probe(api: Any) -> None:
    """Send the hub a request that huggingface_hub does not repeat. Any answer will do.

    huggingface_hub repeats its own requests for 23 s. A hub that has never answered, such as one
    with a wrong address, is to be reported sooner.
    """
    _import_utils().get_session().head(find_endpoint(), timeout=_KNOCK_SECONDS)


def _make_stat(file: Any) -> Stat:
    """Return size, stamp and age of a file.

    Args:
        file: a BucketFile of huggingface_hub.
    """
    # `mtime` is a time that the uploader has sent. A file of unknown age counts as new: `gc` must
    # not delete it.
    uploaded = file.uploaded_at.timestamp() if file.uploaded_at else time.time()
    return Stat(file.size, file.xet_hash, uploaded)


def _get_range(address: str, start: int, end: int, api: Any) -> Any:
    """Return the hub's answer to a GET of the bytes from `start` on and before `end`.

    Args:
        address: the URL of the file.
    """
    from huggingface_hub import constants

    utils = _import_utils()
    headers = {
        **utils.build_hf_headers(token=api.token),
        "Range": f"bytes={start}-{end - 1}",
        "Accept-Encoding": "identity",
    }
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    answer = utils.http_backoff("GET", address, headers=headers, timeout=timeout)
    utils.hf_raise_for_status(answer)
    return answer


def _change(bucket: str, api: Any, **changes: list[Any]) -> None:
    """Add, copy or delete files of a bucket by one request.

    Args:
        bucket: the bucket's id, `org/name`.
        changes: `add`, `copy` or `delete`, as `HfApi.batch_bucket_files` takes them.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:  # hf_xet would upload the bytes all the same
        raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    try:
        api.batch_bucket_files(bucket, **changes)
    except ImportError as error:
        raise Unreachable(
            "writing to hf://buckets/ needs the package hf-xet, which cannot be imported "
            f"({type(error).__name__}): pip install hf-xet"
        ) from None

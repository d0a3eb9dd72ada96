"""Objects in a bucket of S3 or of a store that speaks its protocol (MinIO and others).

One object is one PUT: a store takes 5 GiB in one, a shard is 64 MiB, and one record is 4 GiB at most, so nothing is sent in
parts and nothing is left of a write that was killed. A read that breaks in the middle goes on where it broke, as long as the
object is still the same one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

from mdsmix.errors import Unreachable
from mdsmix.storage.joined import Joined
from mdsmix.storage.location import (
    CHANGED,
    Bytes,
    Found,
    Location,
    Stat,
    fixed_prefix,
    has_pattern,
    path_matches,
)
from mdsmix.storage.s3_client import Patience, ask
from mdsmix.storage.s3_conditions import are_kept, put_if
from mdsmix.storage.s3_errors import error_code, failures
from mdsmix.storage.s3_random import RandomReader

_MORE_BYTES = 1 << 20  # a line that is longer than was thought
_DELETED_AT_ONCE = 1000  # what S3 takes
_READ_BYTES = 8 << 20  # RawIOBase.readall would take 8 KiB at a time, 7 times slower


@dataclass(frozen=True, slots=True)
class S3Path(Location):
    """A bucket and a key without slashes around it; the empty key is the bucket as a folder."""

    bucket: str
    key: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def is_s3(self) -> bool:
        return True

    @property
    def parent(self) -> S3Path:
        return S3Path(self.bucket, self.key.rpartition("/")[0])

    def _below(self, name: str) -> S3Path:
        return S3Path(self.bucket, f"{self.key}/{name}".strip("/"))

    def _object(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}

    def stat(self) -> Stat | None:
        return ask(self.url, lambda client: _stat(client, self._object())) if self.key else None

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        with _Reader(self, start, None if length is None else start + length) as reader:
            return b"".join(iter(lambda: reader.read(_READ_BYTES), b""))

    def fetch(self, most: int = 1 << 62) -> tuple[Stat, bytes] | None:
        answer = ask(self.url, partial(_found, self._object()))
        if answer is None:
            return None
        found = _as_stat(answer, answer["ContentLength"])
        with _Reader(self, 0, None, (answer.get("ETag"), answer["Body"])) as reader:
            if found.size > most:
                return found, b""
            return found, b"".join(iter(lambda: reader.read(_READ_BYTES), b""))

    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        reader = _Reader(self, start, until, etag=f'"{stamp}"' if stamp else None, goes_on=True)
        return io.BufferedReader(reader, buffer_size=1 << 20)

    def open_random(self, found: Stat, ahead: int = 1 << 20) -> BinaryIO:
        def fetch(start: int, end: int) -> bytes:
            with _Reader(self, start, end, etag=f'"{found.stamp}"') as reader:
                data = b"".join(iter(lambda: reader.read(_READ_BYTES), b""))
            if len(data) < end - start:  # a store that heeds no If-Match
                raise Unreachable(CHANGED.format(url=self.url))
            return data

        return cast(BinaryIO, RandomReader(fetch, found.size, ahead))

    def write(self, *parts: Bytes) -> None:
        ask(self.url, partial(_put, self._object(), parts))

    def create(self, content: bytes) -> Stat | None:
        return ask(self.url, lambda client: put_if(client, self._object(), content, None))

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        return ask(self.url, lambda client: put_if(client, self._object(), content, stamp))

    def keeps_conditions(self) -> bool:
        return are_kept(self.url, self._object())

    def copy_to(self, other: Location) -> None:
        if not isinstance(other, S3Path):
            other.write(self.read())
            return
        wanted = {**other._object(), "CopySource": self._object()}
        ask(f"{self.url} (to copy it to {other.url})", lambda client: client.copy_object(**wanted))

    def delete(self) -> None:
        ask(self.url, lambda client: client.delete_object(**self._object()))

    def delete_all(self, names: Sequence[str]) -> None:
        """A thousand in a request; one by one where the store knows no such request, or did not delete them."""
        left = [self._below(name).key for name in names]
        while left:
            some, left = left[:_DELETED_AT_ONCE], left[_DELETED_AT_ONCE:]
            for key in self._delete_objects(some):
                S3Path(self.bucket, key).delete()

    def _delete_objects(self, keys: Sequence[str]) -> Sequence[str]:
        """Returns those that may not be deleted."""
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        try:
            answer = ask(self.url, lambda c: c.delete_objects(Bucket=self.bucket, Delete=wanted))
        except Unreachable:
            return keys
        return [error["Key"] for error in answer.get("Errors", ())]

    def list(self, recursive: bool = False) -> Iterator[tuple[str, Stat]]:
        yield from self._listed(recursive)

    def _listed(self, recursive: bool, beginning: str = "") -> Iterator[tuple[str, Stat]]:
        """The names that begin so: the store passes over all others."""
        for page in self._pages("" if recursive else "/", beginning):
            for entry in page.get("Contents", []):
                name = entry["Key"][len(self._prefix) :]
                if name and not name.endswith("/"):  # the mark of an empty folder
                    yield name, _as_stat(entry, entry["Size"])

    def folders(self) -> Iterator[str]:
        for page in self._pages("/"):
            for entry in page.get("CommonPrefixes", []):
                yield entry["Prefix"][len(self._prefix) : -1]

    def entries(self) -> tuple[dict[str, Stat], set[str]]:
        files, folders, start = dict[str, Stat](), set[str](), len(self._prefix)
        for page in self._pages("/"):
            folders |= {entry["Prefix"][start:-1] for entry in page.get("CommonPrefixes", [])}
            for entry in page.get("Contents", []):
                if name := entry["Key"][start:]:  # else the mark of this folder
                    files[name] = _as_stat(entry, entry["Size"])
        return files, folders

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""

    def _pages(self, delimiter: str, beginning: str = "") -> Iterator[dict[str, Any]]:
        prefix = self._prefix + beginning
        wanted = {"Bucket": self.bucket, "Prefix": prefix, "Delimiter": delimiter}
        while True:
            page = ask(self.url, partial(_page, wanted))
            yield page
            if not page["IsTruncated"]:
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    def expand(self) -> Found:
        if not has_pattern(self.key):
            itself = self.stat()
            return [(self, itself)] if itself else []
        root = S3Path(self.bucket, fixed_prefix(self.key))
        patterns = self.key[len(root.key) :].strip("/").split("/")
        deep = len(patterns) > 1 or patterns == ["**"]
        beginning = re.split(r"[*?[]", patterns[0])[0]
        listed = [*root._listed(deep, beginning)]
        # An object whose own name looks like a pattern begins as what the pattern finds.
        own = self.key[len(root._prefix) :]
        chosen = [each for each in listed if each[0] == own] or [
            each for each in listed if path_matches(each[0].split("/"), patterns)
        ]
        return [item for name, found in chosen if (item := _stamped(root / name, found))]


def _put(place: dict[str, str], parts: Sequence[Bytes], client: Any) -> None:
    body = Joined(parts)
    client.put_object(**place, Body=body, ContentLength=body.size)


def _stamped(place: Location, found: Stat) -> tuple[Location, Stat] | None:
    """With a stamp in any case: where a listing has none, the object itself is asked. None where it went since."""
    known = found if found.stamp else place.stat()
    return (place, known) if known else None


def _page(wanted: dict[str, str], client: Any) -> dict[str, Any]:
    page: dict[str, Any] = client.list_objects_v2(**wanted)
    _seen.add((client.meta.endpoint_url, wanted["Bucket"]))
    return page


_seen: set[tuple[str, str]] = set()
"Endpoint and bucket. Once a request inside a bucket was answered the bucket exists, so that a HEAD's bare 404 means the object."


def _stat(client: Any, place: dict[str, str]) -> Stat | None:
    """By a HEAD, once a request inside the bucket was answered; before that, and where it is refused, by a GET of one byte: a HEAD
    has no words that tell a missing object from a missing bucket or a wrong key."""
    from botocore.exceptions import ClientError

    if (client.meta.endpoint_url, place["Bucket"]) not in _seen:
        return _stat_by_get(client, place)
    try:
        head = client.head_object(**place)
    except ClientError as error:
        if error_code(error) not in ("400", "403", "404"):
            raise
        return None if error_code(error) == "404" else _stat_by_get(client, place)
    return _as_stat(head, head["ContentLength"])


def _stat_by_get(client: Any, place: dict[str, str]) -> Stat | None:
    from botocore.exceptions import ClientError

    try:
        answer = _found({**place, "Range": "bytes=0-0"}, client)
    except ClientError as error:
        if error_code(error) not in ("InvalidRange", "416"):
            raise
        head = client.head_object(**place)  # it has no byte
        return _as_stat(head, head["ContentLength"])
    if answer is None:
        return None
    with answer["Body"] as body:
        if answer["ContentLength"] == 1:  # else the store heeds no Range
            body.read()
    whole = answer.get("ContentRange", f"/{answer['ContentLength']}")
    return _as_stat(answer, int(whole.rpartition("/")[2]))


def _found(place: dict[str, str], client: Any) -> dict[str, Any] | None:
    """What a GET answers; None where the bucket has no such object."""
    from botocore.exceptions import ClientError

    try:
        answer: dict[str, Any] | None = client.get_object(**place)
    except ClientError as error:
        if error_code(error) == "404":  # without a word; a write would be told of a missing bucket
            return None
        if error_code(error) != "NoSuchKey":
            raise
        answer = None
    _seen.add((client.meta.endpoint_url, place["Bucket"]))
    return answer


def _as_stat(said: dict[str, Any], size: int) -> Stat:
    """From what a store says of an object, in a listing or for itself. Some list no ETag: then the stamp is empty."""
    return Stat(size, said.get("ETag", "").strip('"'), said["LastModified"].timestamp())


class _Reader(io.RawIOBase):
    """The bytes [start, end) of one version of an object, taken up again where a body breaks."""

    def __init__(
        self,
        place: S3Path,
        start: int,
        end: int | None,
        begun: tuple[str | None, Any] | None = None,
        etag: str | None = None,
        goes_on: bool = False,
    ) -> None:
        """`begun`: the ETag and the body of a request that was made already; `etag`: of the version that is to be read;
        `goes_on`: beyond `end` too, by further requests."""
        self._place, self._position, self._end = place, start, end
        self._etag, self._goes_on = etag, goes_on and end is not None
        self._patience: Patience | None = None
        if begun:
            self._etag, self._body = begun
        else:
            self._body = self._request()

    def _request(self) -> Any:
        wanted = self._place._object()
        if self._etag is not None:
            wanted["IfMatch"] = self._etag
        if self._position or self._end is not None:
            last = "" if self._end is None else self._end - 1
            wanted["Range"] = f"bytes={self._position}-{last}"
        etag, body = ask(self._place.url, partial(_get, wanted))
        self._etag = etag or self._etag
        return body

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        while True:
            try:
                data: bytes = self._body.read(len(target))
                if data or not target or not self._go_on():
                    break
            except failures() as error:
                self._resume(error)
        self._patience = None
        self._position += len(data)
        target[: len(data)] = data
        return len(data)

    def _go_on(self) -> bool:
        """Asks for more where all that was asked for has been read."""
        if not self._goes_on or self._position != self._end:
            return False
        self._body.close()
        self._end += _MORE_BYTES
        self._body = self._request()
        return True

    def _resume(self, error: Exception) -> None:
        self._body.close()
        self._patience = self._patience or Patience(self._place.url)
        self._patience.wait(error)
        self._body = self._request()

    def close(self) -> None:
        if not self.closed:
            self._body.close()
        super().close()


def _get(wanted: dict[str, str], client: Any) -> tuple[str | None, Any]:
    """The ETag and the body of a GET; nothing where the object ends before the range."""
    from botocore.exceptions import ClientError

    try:
        answer = client.get_object(**wanted)
    except ClientError as error:
        if error_code(error) != "InvalidRange":
            raise
        return None, io.BytesIO()
    return answer.get("ETag"), answer["Body"]

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
from typing import Any, BinaryIO

from mdsmix.errors import Unreachable
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
from mdsmix.storage.s3_client import ask, said_stat
from mdsmix.storage.s3_conditions import are_kept, put_if
from mdsmix.storage.s3_errors import error_code
from mdsmix.storage.s3_reader import ObjectReader, joined, random_reader

_DELETED_AT_ONCE = 1000  # what S3 takes
_HELD_BYTES = 8 << 20  # an object of so many is read before it is handed out
_seen: set[tuple[str, str]] = set()
"Endpoint and bucket. Once a request inside a bucket was answered the bucket exists, so that a HEAD's bare 404 means the object."


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
    def parent(self) -> S3Path:
        return S3Path(self.bucket, self.key.rpartition("/")[0])

    def _below(self, name: str) -> S3Path:
        return S3Path(self.bucket, f"{self.key}/{name}".strip("/"))

    def _object(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}

    def stat(self) -> Stat | None:
        return ask(self.url, partial(_stat, self._object())) if self.key else None

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        end = None if length is None else start + length
        return ObjectReader(self.url, self._object(), start, end).rest()

    def fetch(self, most: int = 1 << 62) -> tuple[Stat, bytes] | None:
        answer = ask(self.url, partial(_got, self._object()))
        if answer is None:
            return None
        found = said_stat(answer)
        with ObjectReader(self.url, self._object(), answer=answer, md5=True) as reader:
            return found, b"" if found.size > most else reader.whole()

    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        is_whole = start == 0 and until is None
        reader = ObjectReader(
            self.url, self._object(), start, until, stamp=stamp, goes_on=True, md5=is_whole
        )
        if is_whole and reader.size <= _HELD_BYTES:
            return io.BytesIO(reader.whole())
        return io.BufferedReader(reader, buffer_size=1 << 20)

    def open_random(self, found: Stat, ahead: int = 1 << 20) -> BinaryIO:
        def fetch(start: int, end: int) -> bytes:
            data = ObjectReader(self.url, self._object(), start, end, stamp=found.stamp).rest()
            if len(data) < end - start:  # a store that heeds no If-Match
                raise Unreachable(CHANGED.format(url=self.url))
            return data

        return random_reader(fetch, found.size, ahead)

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
            Location.copy_to(self, other)
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
        yield from self._listed("" if recursive else "/")[0].items()

    def folders(self) -> Iterator[str]:
        yield from sorted(self.entries()[1])

    def entries(self) -> tuple[dict[str, Stat], set[str]]:
        return self._listed("/")

    def _listed(self, delimiter: str, beginning: str = "") -> tuple[dict[str, Stat], set[str]]:
        """Files and folders whose names begin so: the store passes over all others."""
        files, folders, start = dict[str, Stat](), set[str](), len(self._prefix)
        for page in self._pages(delimiter, beginning):
            folders |= {entry["Prefix"][start:-1] for entry in page.get("CommonPrefixes", [])}
            for entry in page.get("Contents", []):
                name = entry["Key"][start:]
                if name and not name.endswith("/"):  # the mark of an empty folder
                    files[name] = said_stat(entry)
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
        listed = root._listed("" if deep else "/", beginning)[0].items()
        # An object whose own name looks like a pattern begins as what the pattern finds.
        own = self.key[len(root._prefix) :]
        chosen = [each for each in listed if each[0] == own] or [
            each for each in listed if path_matches(each[0].split("/"), patterns)
        ]
        return [item for name, found in chosen if (item := _stamped(root / name, found))]


def _put(place: dict[str, str], parts: Sequence[Bytes], client: Any) -> None:
    body = joined(parts)
    client.put_object(**place, Body=body, ContentLength=body.size)


def _page(wanted: dict[str, str], client: Any) -> dict[str, Any]:
    page: dict[str, Any] = client.list_objects_v2(**wanted)
    _seen.add((client.meta.endpoint_url, wanted["Bucket"]))
    return page


def _stat(place: dict[str, str], client: Any) -> Stat | None:
    """By a HEAD; where it is refused, and before a request inside the bucket was answered, by a GET: a HEAD has no words that tell a
    missing object from a missing bucket or a wrong key."""
    from botocore.exceptions import ClientError

    try:
        answer = client.head_object(**place)
    except ClientError as error:
        if error_code(error) not in ("400", "403", "404"):
            raise
        if error_code(error) == "404" and (client.meta.endpoint_url, place["Bucket"]) in _seen:
            return None
        answer = _got(place, client)
        if answer is None:
            return None
        answer["Body"].close()
    _seen.add((client.meta.endpoint_url, place["Bucket"]))
    return said_stat(answer)


def _got(place: dict[str, str], client: Any) -> dict[str, Any] | None:
    """What a GET answers; None where the bucket has no such object."""
    from botocore.exceptions import ClientError

    try:
        answer: dict[str, Any] | None = client.get_object(**place, ChecksumMode="ENABLED")
    except ClientError as error:
        if error_code(error) == "404":  # without a word; a write would be told of a missing bucket
            return None
        if error_code(error) != "NoSuchKey":
            raise
        answer = None
    _seen.add((client.meta.endpoint_url, place["Bucket"]))
    return answer


def _stamped(place: Location, found: Stat) -> tuple[Location, Stat] | None:
    """With a stamp in any case: where a listing has none, the object itself is asked. None where it went since."""
    known = found if found.stamp else place.stat()
    return (place, known) if known else None

"""Objects in a bucket of S3 or of a store that speaks its protocol (MinIO and others).

Each object is written by a single PUT, so a write that was killed leaves nothing in the store. A
PUT may have 5 GiB; a shard has 64 MiB, and a single record at most 4 GiB. A read that breaks in the
middle continues where it broke, if the object has not changed.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, ClassVar

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.storage.location import (
    CHANGED,
    NO_LIMIT,
    Bytes,
    Entries,
    Listing,
    Location,
    Stat,
    has_pattern,
)
from mdsmix.storage.s3_client import answer_unless, ask, find_credentials, stat_from
from mdsmix.storage.s3_conditions import head, keeps_conditions, put_if
from mdsmix.storage.s3_errors import (
    AWS,
    ENDPOINT_VARIABLES,
    Answer,
    Object,
    error_code,
    shown_endpoint,
)
from mdsmix.storage.s3_reader import ObjectReader, make_random_reader

_DELETED_AT_ONCE = 1000
"The most objects that S3 deletes by one request."


class S3Path(Location):
    """A bucket and a key without slashes around it; the empty key is the bucket as a folder."""

    __slots__ = ()
    scheme = "s3://"
    other_schemes = ("s3a", "s3n")
    container_noun = "bucket"
    container_depth = 1
    has_cheap_listings = True
    needs_credentials = True
    permissions: ClassVar[Mapping[str, str]] = {
        "list": "s3:ListBucket",
        "write": "s3:PutObject",
        "read": "s3:GetObject",
        "copy": "s3:GetObject and s3:PutObject",
        "delete": "s3:DeleteObject",
    }
    address_variables = (*ENDPOINT_VARIABLES, "AWS_REGION", "AWS_DEFAULT_REGION")

    @classmethod
    def from_url(cls, url: str) -> S3Path:
        bucket, _, key = url.removeprefix(cls.scheme).partition("/")
        if not bucket or has_pattern(bucket):
            raise RecipeError(
                f"{url} does not name a bucket: write s3://bucket/key, with the bucket's full name"
            )
        return cls(f"{bucket}/{key.strip('/')}".rstrip("/"))

    @classmethod
    def describe_access(cls) -> str:
        return f"endpoint {shown_endpoint()}, credentials from {find_credentials()}"

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]

    @property
    def key(self) -> str:
        return self.path.partition("/")[2]

    def _object(self) -> Object:
        return {"Bucket": self.bucket, "Key": self.key}

    def fetch_command(self, folder: str) -> list[str]:
        endpoint = shown_endpoint()
        options = [] if endpoint == AWS else ["--endpoint-url", endpoint]
        return ["aws", "s3", "cp", "--recursive", *options, self.url, folder]

    def stat(self) -> Stat | None:
        return ask(self.url, partial(_stat, self._object())) if self.key else None

    def fetch(self, max_bytes: int = NO_LIMIT) -> tuple[Stat, bytes] | None:
        answer = ask(self.url, partial(_get, self._object()))
        if answer is None:
            return None
        stat = stat_from(answer)
        with ObjectReader(self.url, self._object(), answer=answer) as reader:
            return stat, b"" if stat.size > max_bytes else reader.readall()

    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        reader = ObjectReader(self.url, self._object(), start, until, stamp=stamp)
        return io.BufferedReader(reader, buffer_size=1 << 20)

    def open_random(self, stat: Stat, ahead: int = 1 << 20) -> BinaryIO:
        def fetch(start: int, end: int) -> bytes:
            with self.open(start, end, stat.stamp) as reader:
                data = reader.read(end - start)
            if len(data) < end - start:  # a store that ignores If-Match
                raise Unreachable(CHANGED.format(url=self.url))
            return data

        return make_random_reader(fetch, stat.size, ahead)

    def write(self, *parts: Bytes) -> None:
        body = b"".join(parts)
        ask(self.url, lambda client: client.put_object(**self._object(), Body=body))

    def create(self, content: bytes) -> Stat | None:
        return ask(self.url, lambda client: put_if(client, self._object(), content, None))

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        return ask(self.url, lambda client: put_if(client, self._object(), content, stamp))

    def try_conditions(self) -> bool:
        trial = S3Path(f"{self.path}-trial-{secrets.token_hex(8)}")
        return keeps_conditions(trial, self.bucket)

    def copy_to(self, target: Location) -> None:
        if not isinstance(target, S3Path):
            Location.copy_to(self, target)
            return
        request = {**target._object(), "CopySource": self._object()}
        ask(
            f"{self.url} (to copy it to {target.url})",
            lambda client: client.copy_object(**request),
        )

    def delete(self) -> None:
        ask(self.url, lambda client: client.delete_object(**self._object()))

    def delete_all(self, names: Sequence[str]) -> None:
        """Delete up to a thousand objects by one request. Objects that it did not delete are then
        deleted one by one.
        """
        for start in range(0, len(names), _DELETED_AT_ONCE):
            remaining = names[start : start + _DELETED_AT_ONCE]
            keys = [{"Key": self._prefix + name} for name in remaining]
            request = {"Bucket": self.bucket, "Delete": {"Objects": keys, "Quiet": True}}
            with suppress(Unreachable):
                failed = ask(self.url, partial(_delete, request))
                remaining = [key.removeprefix(self._prefix) for key in failed]
            Location.delete_all(self, remaining)

    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        files, _ = self._list_entries("" if recursive else "/", beginning)
        yield from files.items()

    def folders(self) -> Iterator[str]:
        _, folders = self.entries()
        yield from sorted(folders)

    def entries(self) -> Entries:
        return self._list_entries("/")

    def _list_entries(self, delimiter: str, beginning: str = "") -> Entries:
        """Return the files and folders below this one whose names start with `beginning`. The store
        itself skips all others.

        Args:
            delimiter: "/": only what is directly in this folder; "": files at any depth.
        """
        files = dict[str, Stat]()
        folders = set[str]()
        start = len(self._prefix)
        request = {
            "Bucket": self.bucket,
            "Prefix": self._prefix + beginning,
            "Delimiter": delimiter,
        }
        while True:
            page = ask(self.url, partial(_list_page, request))
            folders |= {entry["Prefix"][start:-1] for entry in page.get("CommonPrefixes", [])}
            for entry in page.get("Contents", []):
                name = entry["Key"][start:]
                if name and not name.endswith("/"):  # otherwise the mark of an empty folder
                    files[name] = stat_from(entry)
            if not page["IsTruncated"]:
                return files, folders
            request["ContinuationToken"] = page["NextContinuationToken"]

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""


def _list_page(request: Object, client: Any) -> Answer:
    page: Answer = client.list_objects_v2(**request)
    return page


def _delete(request: dict[str, Any], client: Any) -> list[str]:
    """Delete many objects, and return the keys of those that were not deleted."""
    return [error["Key"] for error in client.delete_objects(**request).get("Errors", ())]


def _stat(target: Object, client: Any) -> Stat | None:
    """Return the Stat of an object; None if it is missing.

    The request is a HEAD. If that is refused, a GET follows, because its answer distinguishes
    expired credentials, a wrong access key and a wrong name.
    """
    from botocore.exceptions import ClientError

    try:
        answer = head(target, client)
    except ClientError as error:
        if error_code(error) not in ("400", "403"):
            raise
        answer = _get(target, client)
        if answer:
            answer["Body"].close()
    return stat_from(answer) if answer else None


def _get(target: Object, client: Any) -> Answer | None:
    """Return the answer to a GET; None if the object is missing. A bare 404 may also mean that the
    bucket is missing, which only a write would show.
    """
    request = {**target, "ChecksumMode": "ENABLED"}
    return answer_unless(("404", "NoSuchKey"), client.get_object, request)

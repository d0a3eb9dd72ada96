"""Objects in a bucket of S3 or of a store that speaks its protocol (MinIO and others).

One object is one PUT: a store takes 5 GiB in one, a shard is 64 MiB, and one record is 4 GiB at
most, so nothing is sent in parts and nothing is left of a write that was killed. A read that breaks
in the middle goes on where it broke, as long as the object is still the same one.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

from mdsmix.errors import Unreachable
from mdsmix.storage.location import CHANGED, Bytes, Entries, Listing, Location, Stat
from mdsmix.storage.s3_client import answered, ask, said_stat
from mdsmix.storage.s3_conditions import are_kept, head, put_if
from mdsmix.storage.s3_errors import Answer, Object, error_code
from mdsmix.storage.s3_reader import ObjectReader, random_reader

_DELETED_AT_ONCE = 1000  # what S3 takes


class S3Path(Location):
    """A bucket and a key without slashes around it; the empty key is the bucket as a folder."""

    __slots__ = ()
    scheme = "s3://"

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]

    @property
    def key(self) -> str:
        return self.path.partition("/")[2]

    def _object(self) -> Object:
        return {"Bucket": self.bucket, "Key": self.key}

    def stat(self) -> Stat | None:
        return ask(self.url, partial(_stat, self._object())) if self.key else None

    def fetch(self, most: int = 1 << 62) -> tuple[Stat, bytes] | None:
        answer = ask(self.url, partial(_got, self._object()))
        if answer is None:
            return None
        found = said_stat(answer)
        with ObjectReader(self.url, self._object(), answer=answer) as reader:
            return found, b"" if found.size > most else reader.readall()

    def open(self, start: int = 0, until: int | None = None, stamp: str = "") -> BinaryIO:
        return io.BufferedReader(
            ObjectReader(self.url, self._object(), start, until, stamp=stamp), buffer_size=1 << 20
        )

    def open_random(self, found: Stat, ahead: int = 1 << 20) -> BinaryIO:
        def fetch(start: int, end: int) -> bytes:
            with self.open(start, end, found.stamp) as reader:
                data = reader.read(end - start)
            if len(data) < end - start:  # a store that heeds no If-Match
                raise Unreachable(CHANGED.format(url=self.url))
            return data

        return random_reader(fetch, found.size, ahead)

    def write(self, *parts: Bytes) -> None:
        body = b"".join(parts)
        ask(self.url, lambda client: client.put_object(**self._object(), Body=body))

    def create(self, content: bytes) -> Stat | None:
        return ask(self.url, lambda client: put_if(client, self._object(), content, None))

    def replace(self, stamp: str, content: bytes) -> Stat | None:
        return ask(self.url, lambda client: put_if(client, self._object(), content, stamp))

    def try_conditions(self) -> bool:
        return are_kept(S3Path(f"{self.path}-trial-{secrets.token_hex(8)}"), self.bucket)

    def copy_to(self, other: Location) -> None:
        if not isinstance(other, S3Path):
            Location.copy_to(self, other)
            return
        wanted = {**other._object(), "CopySource": self._object()}
        ask(
            f"{self.url} (to copy it to {other.url})",
            lambda client: client.copy_object(**wanted),
        )

    def delete(self) -> None:
        ask(self.url, lambda client: client.delete_object(**self._object()))

    def delete_all(self, names: Sequence[str]) -> None:
        """Deletes a thousand objects in a request, then one by one those that the request did not
        delete.
        """
        for start in range(0, len(names), _DELETED_AT_ONCE):
            left = names[start : start + _DELETED_AT_ONCE]
            wanted = {
                "Objects": [{"Key": self._prefix + name} for name in left],
                "Quiet": True,
            }
            with suppress(Unreachable):
                delete = partial(_delete, {"Bucket": self.bucket, "Delete": wanted})
                left = [key.removeprefix(self._prefix) for key in ask(self.url, delete)]
            Location.delete_all(self, left)

    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        yield from self._listed("" if recursive else "/", beginning)[0].items()

    def folders(self) -> Iterator[str]:
        yield from sorted(self.entries()[1])

    def entries(self) -> Entries:
        return self._listed("/")

    def _listed(self, delimiter: str, beginning: str = "") -> Entries:
        """Files and folders whose names start with `beginning`; the store passes over all
        others.
        """
        files, folders, start = dict[str, Stat](), set[str](), len(self._prefix)
        wanted = {
            "Bucket": self.bucket,
            "Prefix": self._prefix + beginning,
            "Delimiter": delimiter,
        }
        while True:
            page = ask(self.url, partial(_page, wanted))
            folders |= {entry["Prefix"][start:-1] for entry in page.get("CommonPrefixes", [])}
            for entry in page.get("Contents", []):
                name = entry["Key"][start:]
                if name and not name.endswith("/"):  # the mark of an empty folder
                    files[name] = said_stat(entry)
            if not page["IsTruncated"]:
                return files, folders
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""


def _page(wanted: Object, client: Any) -> Answer:
    page: Answer = client.list_objects_v2(**wanted)
    return page


def _delete(wanted: dict[str, Any], client: Any) -> list[str]:
    """The keys that were not deleted."""
    return [error["Key"] for error in client.delete_objects(**wanted).get("Errors", ())]


def _stat(place: Object, client: Any) -> Stat | None:
    """Stat by a HEAD. A refused HEAD is followed by a GET: its answer tells expired credentials, a
    wrong key and a wrong name apart.
    """
    from botocore.exceptions import ClientError

    try:
        answer = head(place, client)
    except ClientError as error:
        if error_code(error) not in ("400", "403"):
            raise
        if answer := _got(place, client):
            answer["Body"].close()
    return said_stat(answer) if answer else None


def _got(place: Object, client: Any) -> Answer | None:
    """The answer to a GET; None where the bucket has no such object. A bare 404 does not tell a
    missing bucket; the answer to a write would.
    """
    return answered(client.get_object, {**place, "ChecksumMode": "ENABLED"}, "404", "NoSuchKey")

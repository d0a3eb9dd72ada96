"""What a store says of its objects, one by one and in listings, and what it is sent.

By its ETag an object is known to be the one that was looked at, and by its time `gc` knows how old it is. A store that tells neither
is refused: it could be read, but what is changed or in use there would not be noticed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NoReturn

from mdsmix.errors import Unreachable
from mdsmix.storage.location import Bytes, Stat
from mdsmix.storage.s3_errors import error_code, shown_endpoint


def page_of(wanted: dict[str, str], client: Any) -> dict[str, Any]:
    page: dict[str, Any] = client.list_objects_v2(**wanted)
    _seen.add((client.meta.endpoint_url, wanted["Bucket"]))
    return page


_seen: set[tuple[str, str]] = set()
"Endpoint and bucket. Once a request inside a bucket was answered the bucket exists, so that a HEAD's bare 404 means the object."


def stat_of(client: Any, place: dict[str, str]) -> Stat | None:
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
    return own_stat(head, head["ContentLength"])


def _stat_by_get(client: Any, place: dict[str, str]) -> Stat | None:
    from botocore.exceptions import ClientError

    try:
        answer = got({**place, "Range": "bytes=0-0"}, client)
    except ClientError as error:
        if error_code(error) not in ("InvalidRange", "416"):
            raise
        head = client.head_object(**place)  # it has no byte
        return own_stat(head, head["ContentLength"])
    if answer is None:
        return None
    with answer["Body"] as body:
        if answer["ContentLength"] == 1:  # else the store heeds no Range
            body.read()
    whole = answer.get("ContentRange", f"/{answer['ContentLength']}")
    return own_stat(answer, int(whole.rpartition("/")[2]))


def got(place: dict[str, str], client: Any) -> dict[str, Any] | None:
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


def own_stat(said: dict[str, Any], size: int) -> Stat:
    """From what a store answers of one object."""
    return Stat(size, own_stamp(said), _seconds(said))


def listed_stat(said: dict[str, Any]) -> Stat:
    """From a line of a listing. Some list no ETag: then the stamp is empty."""
    return Stat(said["Size"], _stamp(said), _seconds(said))


def own_stamp(said: dict[str, Any]) -> str:
    """The ETag of one object, without its quotes."""
    return _stamp(said) or _refuse("ETag")


def _stamp(said: dict[str, Any]) -> str:
    """A proxy that compresses makes weak ETags, `W/"..."`, of those that its store goes on to know."""
    return str(said.get("ETag", "")).removeprefix("W/").strip('"')


def _seconds(said: dict[str, Any]) -> float:
    at = said.get("LastModified") or _refuse("Last-Modified")
    return float(at.timestamp())


def _refuse(name: str) -> NoReturn:
    raise Unreachable(
        f"the store at {shown_endpoint()} answers without {name}, so an object that was changed, or is still in use, could not be told "
        "from others: look up in its manual what it knows of S3, or take another one."
    )


class Joined(io.RawIOBase):
    """Several buffers as the body of one request, without joining them in memory: a shard is 64 MiB. Reads like a file of `size` bytes; it may be read again from the beginning, as a request that is sent again is."""

    def __init__(self, buffers: Sequence[Bytes]) -> None:
        self._parts = [memoryview(buffer).cast("B") for buffer in buffers]
        self.size = sum(map(len, self._parts))
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        filled = begin = 0
        for part in self._parts:
            skipped = max(0, self._position - begin)
            piece = part[skipped : skipped + len(target) - filled]
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._position += len(piece)
            begin += len(part)
        return filled

"""Reads an object from its beginning, also where bodies break on the way, and compares its bytes with the checksum that its store knows.

botocore compares the checksum that a store sends of a body. Of an object that was put in one request without one, the ETag is the MD5:
that is compared here where the object is read whole, for 1.3 s of a processor a GB, beside 11 in which it becomes tokens.

What reads a directory or a footer (zip, parquet) asks for a few bytes at a time, first near the end, and a request takes as long for
1 KB as for 1 MB: a read beyond the bytes at hand is one range request, for a little more than was asked for.
"""

from __future__ import annotations

import errno
import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, BinaryIO, cast

from mdsmix.storage.location import Bytes
from mdsmix.storage.s3_client import Patience, ask, own_stamp, tell
from mdsmix.storage.s3_errors import DamagedOnItsWay, error_code, failures, refusal

_READ_BYTES = 8 << 20  # RawIOBase.readall would take 8 KiB at a time, 7 times slower
TRIES = 3
"Requests for an object that is read at once, where each body came damaged."
_without_md5: set[str] = set()
"Buckets in which an object came twice with the same bytes, of which its ETag is not the MD5."


class ObjectReader(io.RawIOBase):
    """The bytes [start, end) of one version of an object, taken up again where a body breaks."""

    def __init__(
        self,
        url: str,
        place: Mapping[str, str],
        start: int = 0,
        end: int | None = None,
        answer: dict[str, Any] | None = None,
        stamp: str = "",
        goes_on: bool = False,
        md5: bool = False,
    ) -> None:
        """`answer`: of a request that was made already; `stamp`: of the version that is to be read; `goes_on`: beyond `end` too, by
        one more request; `md5`: all of the object is held against its ETag, where that is one."""
        self._url, self._place, self._position, self._end = url, place, start, end
        self.stamp, self._goes_on = stamp, goes_on and end is not None
        self._patience: Patience | None = None
        answer = self._begin(answer)
        self.size = answer["ContentLength"]
        self._md5 = hashlib.md5(usedforsecurity=False) if md5 and self._has_md5(answer) else None

    def _begin(self, answer: dict[str, Any] | None = None) -> dict[str, Any]:
        """The body from the position on."""
        wanted = {**self._place, "ChecksumMode": "ENABLED"}
        if self.stamp:
            wanted["IfMatch"] = f'"{self.stamp}"'
        if self._position or self._end is not None:
            last = "" if self._end is None else self._end - 1
            wanted["Range"] = f"bytes={self._position}-{last}"
        answer = answer or ask(self._url, lambda client: _get(wanted, client))
        self._body = answer["Body"]
        if answer["ContentLength"]:
            self.stamp = own_stamp(answer)
        return answer

    def _has_md5(self, answer: Mapping[str, Any]) -> bool:
        """Whether nothing but the ETag may tell of the bytes, as their MD5: no checksum came with them, and the object was put in one
        request, under no key of its owner's."""
        from botocore.httpchecksum import StreamingChecksumBody

        is_keyed = (
            "kms" in answer.get("ServerSideEncryption", "") or "SSECustomerAlgorithm" in answer
        )
        return not (
            is_keyed
            or isinstance(self._body, StreamingChecksumBody)
            or self._place["Bucket"] in _without_md5
            or not re.fullmatch("[0-9a-f]{32}", self.stamp)
        )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._next(len(buffer))
        self._patience = None
        self._position += len(data)
        buffer[: len(data)] = data
        if self._md5:
            self._md5.update(data)
            if len(buffer) and not data:
                self._compare(self._md5.hexdigest())
        return len(data)

    def _next(self, size: int) -> bytes:
        while True:
            try:
                data: bytes = self._body.read(size)
                if data or not size or not self._goes_on or self._position != self._end:
                    return data
                self._goes_on, self._end = False, None
            except failures() as error:
                self._patience = self._patience or Patience(self._url)
                self._patience.wait(error)
            self._body.close()
            self._begin()

    def rest(self) -> bytes:
        """All bytes that are left, and the end of the reader."""
        with self:
            return b"".join(iter(lambda: self.read(_READ_BYTES), b""))

    def whole(self) -> bytes:
        """All bytes of an object of which none was read yet; asked for again where one was damaged on its way."""
        reader = self
        for _ in range(TRIES - 1):
            with suppress(DamagedOnItsWay):
                return reader.rest()
            reader = ObjectReader(self._url, self._place, stamp=self.stamp, md5=True)
        return reader.rest()

    def _compare(self, digest: str) -> None:
        """DamagedOnItsWay where the bytes that came are not those of the ETag, nor those that come when they are asked for again. Some
        stores have other ETags that look like an MD5."""
        from botocore.exceptions import FlexibleChecksumError

        self._md5 = None
        if digest == self.stamp:
            return
        again = hashlib.md5(usedforsecurity=False)
        with ObjectReader(self._url, self._place, stamp=self.stamp) as second:
            while data := second.read(_READ_BYTES):
                again.update(data)
        if again.hexdigest() != digest:
            raise refusal(self._url, FlexibleChecksumError(error_msg=""))
        bucket = self._place["Bucket"]
        _without_md5.add(bucket)
        tell(
            f"md5 of {bucket}",
            f"WARNING: the ETag of {self._url} looks like an MD5 and is none of its bytes, which came twice the same: the bucket {bucket} knows "
            "no MD5, or the object is damaged there; what is damaged on its way from this bucket is not noticed",
        )

    def close(self) -> None:
        if not self.closed:
            self._body.close()
        super().close()


def _get(wanted: Mapping[str, str], client: Any) -> dict[str, Any]:
    """What a GET answers; an empty body where the object ends before the range."""
    from botocore.exceptions import ClientError

    try:
        answer: dict[str, Any] = client.get_object(**wanted)
    except ClientError as error:
        if error_code(error) != "InvalidRange":
            raise
        return {"Body": io.BytesIO(), "ContentLength": 0}
    return answer


Fetch = Callable[[int, int], "bytes | memoryview"]
"What brings the bytes [start, end), or the first of them."


class Ranged(io.RawIOBase):
    """A seekable file of `size` bytes."""

    def __init__(self, fetch: Fetch, size: int) -> None:
        self._fetch, self.size, self._position = fetch, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        position = (0, self._position, self.size)[whence] + offset
        if position < 0:
            raise OSError(errno.EINVAL, "a seek to before the beginning")
        self._position = position
        return position

    def readinto(self, buffer: Any, /) -> int:
        start, end = self._position, min(self.size, self._position + len(buffer))
        data = self._fetch(start, end) if start < end else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def joined(parts: Sequence[Bytes]) -> Ranged:
    """Several buffers as the body of one request, without joining them in memory: a shard is 64 MiB."""
    views = [memoryview(part).cast("B") for part in parts]
    ends = list(accumulate(map(len, views)))

    def fetch(start: int, end: int) -> memoryview:
        number = next(number for number, stop in enumerate(ends) if start < stop)
        begin = ends[number] - len(views[number])
        return views[number][start - begin : end - begin]

    return Ranged(fetch, ends[-1] if ends else 0)


def random_reader(fetch: Callable[[int, int], bytes], size: int, ahead: int) -> BinaryIO:
    """A seekable file of `size` bytes. `fetch(start, end)` brings bytes; at least `ahead` of them are asked for, as far as the
    file goes, and kept until the next request, so that small reads beside each other make one."""
    first, held = 0, b""

    def at_hand(start: int, end: int) -> bytes:
        nonlocal first, held
        if not first <= start < first + len(held):
            goes_on = start == first + len(held)
            last = min(size, max(end, start + ahead))
            # Who jumps to the end looks for a directory there, and will read backwards from it.
            first = start if goes_on else min(start, max(0, last - ahead))
            held = b""
            held = fetch(first, last)
        return held[start - first : end - first]

    return cast(BinaryIO, io.BufferedReader(Ranged(at_hand, size), max(1, min(ahead, 8192))))

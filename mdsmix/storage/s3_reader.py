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
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from mdsmix.storage import waiting
from mdsmix.storage.s3_client import Patience, ask
from mdsmix.storage.s3_errors import DamagedOnItsWay, error_code, failures, refusal
from mdsmix.storage.s3_objects import own_stamp

_MORE_BYTES = 1 << 20  # a line that is longer than was thought
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
        further requests; `md5`: all of the object is held against its ETag, where that is one."""
        self._url, self._place, self._position, self._end = url, place, start, end
        self.stamp, self._goes_on = stamp, goes_on and end is not None
        self._patience: Patience | None = None
        answer = answer or self._ask()
        self.size = answer["ContentLength"]
        self._begin(answer)
        self._md5 = hashlib.md5(usedforsecurity=False) if md5 and self._has_md5(answer) else None

    def _ask(self) -> dict[str, Any]:
        wanted = {**self._place, "ChecksumMode": "ENABLED"}
        if self.stamp:
            wanted["IfMatch"] = f'"{self.stamp}"'
        if self._position or self._end is not None:
            last = "" if self._end is None else self._end - 1
            wanted["Range"] = f"bytes={self._position}-{last}"
        return ask(self._url, lambda client: _get(wanted, client))

    def _begin(self, answer: dict[str, Any]) -> None:
        self._body = answer["Body"]
        if self.size:
            self.stamp = own_stamp(answer)

    def _has_md5(self, answer: Mapping[str, Any]) -> bool:
        """Whether nothing but the ETag may tell of the bytes, as their MD5: no checksum came with them, and the object was put in one
        request, under no key of its owner's."""
        from botocore.httpchecksum import StreamingChecksumBody

        if isinstance(self._body, StreamingChecksumBody):
            return False
        is_keyed = (
            "kms" in answer.get("ServerSideEncryption", "") or "SSECustomerAlgorithm" in answer
        )
        is_md5 = re.fullmatch("[0-9a-f]{32}", self.stamp) and not is_keyed
        return bool(is_md5) and self._place["Bucket"] not in _without_md5

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
        if self._md5:
            self._md5.update(data)
            if target and not data:
                self._compare(self._md5.hexdigest())
        return len(data)

    def rest(self) -> bytes:
        """All bytes that are left, and the end of the reader."""
        with self:
            return b"".join(iter(lambda: self.read(_READ_BYTES), b""))

    def again(self) -> ObjectReader:
        """Another one, of all of the same version."""
        return ObjectReader(self._url, self._place, stamp=self.stamp, md5=True)

    def _go_on(self) -> bool:
        """Asks for more where all that was asked for has been read."""
        if not self._goes_on or self._position != self._end:
            return False
        self._body.close()
        self._end += _MORE_BYTES
        self._begin(self._ask())
        return True

    def _resume(self, error: Exception) -> None:
        self._body.close()
        self._patience = self._patience or Patience(self._url)
        self._patience.wait(error)
        self._begin(self._ask())

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
        waiting.tell(
            f"md5 of {bucket}",
            f"WARNING: the ETag of {self._url} looks like an MD5 and is none of its bytes, which came twice the same: the bucket {bucket} knows "
            "no MD5, or the object is damaged there; what is damaged on its way from this bucket is not noticed",
        )

    def close(self) -> None:
        if not self.closed:
            self._body.close()
        super().close()


def whole(reader: ObjectReader) -> bytes:
    """All bytes of an object of which none was read yet; asked for again where one was damaged on its way."""
    for _ in range(TRIES - 1):
        with suppress(DamagedOnItsWay):
            return reader.rest()
        reader = reader.again()
    return reader.rest()


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


class RandomReader(io.RawIOBase):
    """A seekable file of `size` bytes. `fetch(start, end)` brings bytes; at least `ahead` of them are asked for, as far as the
    file goes, and kept, so that small reads beside each other make one request."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, ahead: int) -> None:
        self._fetch, self._size, self._ahead = fetch, size, ahead
        self._position = self._start = 0
        self._held = b""
        "The bytes from `_start` on."

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "a seek to before the beginning")
        self._position = base + offset
        return self._position

    def readall(self) -> bytes:
        return self.read(max(0, self._size - self._position)) or b""

    def readinto(self, buffer: Any, /) -> int:
        """Fills the buffer, but for the end of the file."""
        target = memoryview(buffer).cast("B")
        target = target[: max(0, self._size - self._position)]
        filled = 0
        while filled < len(target):
            piece = self._at_hand(len(target) - filled)
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._position += len(piece)
        if len(self._held) > self._ahead:  # a large read is its reader's to keep
            self._start, self._held = self._position, b""
        return filled

    def _at_hand(self, wanted: int) -> memoryview:
        """Bytes from the position on: so many, or the first of them where the rest must be fetched."""
        offset = self._position - self._start
        if not 0 <= offset < len(self._held):
            self._fill(wanted)
            offset = self._position - self._start
        return memoryview(self._held)[offset : offset + wanted]

    def _fill(self, wanted: int) -> None:
        goes_on = self._position == self._start + len(self._held)
        end = min(self._size, self._position + max(wanted, self._ahead))
        # Who jumps to the end looks for a directory there, and will read backwards from it.
        start = self._position if goes_on else min(self._position, max(0, end - self._ahead))
        self._start, self._held = start, b""
        self._held = self._fetch(start, end)

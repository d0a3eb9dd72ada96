"""Readers of an object: one from its beginning, which goes on where a body breaks, and one for
parts in any order.

botocore compares a whole body with the checksum that a store sends. A reader of a directory or a
footer (zip, parquet) asks for a few bytes at a time, first near the end. A request takes as long
for 1 KB as for 1 MB, so a read beyond the bytes at hand is one range request, for a little more
than was asked for.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, cast

from mdsmix.storage.s3_client import answered, ask, own_stamp
from mdsmix.storage.s3_errors import Answer, Object

_READ_BYTES = 8 << 20  # RawIOBase's own would take 8 KiB at a time, 7 times slower


class ObjectReader(io.RawIOBase):
    """The bytes of one version of an object from `start` on, taken up again where a body breaks."""

    def __init__(
        self,
        url: str,
        place: Object,
        start: int = 0,
        end: int | None = None,
        answer: Answer | None = None,
        stamp: str = "",
    ) -> None:
        """`end`: the likely end of reading; reading beyond it takes one more request. `answer`: the
        answer to a GET that was already sent. `stamp`: the ETag of the version to read.
        """
        self._url = url
        self._place = place
        self._position = start
        self._end = end
        self._stamp = stamp
        # Python closes a reader also if its first request fails.
        self._body: Any = io.BytesIO()
        if answer:
            self._take(answer)
        else:
            ask(url, self._begin)

    def _begin(self, client: Any) -> None:
        """Requests the body from the position on."""
        wanted = {**self._place, "ChecksumMode": "ENABLED"}
        if self._stamp:
            wanted["IfMatch"] = f'"{self._stamp}"'
        if self._position or self._end is not None:
            last = "" if self._end is None else self._end - 1
            wanted["Range"] = f"bytes={self._position}-{last}"
        self._take(_get(wanted, client))

    def _take(self, answer: Answer) -> None:
        self._body, self._is_over = answer["Body"], False
        if answer["ContentLength"]:
            self._stamp = own_stamp(answer)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        data = ask(self._url, partial(self._next, len(buffer)))
        self._position += len(data)
        buffer[: len(data)] = data
        return len(data)

    def _next(self, size: int, client: Any) -> bytes:
        """The next bytes. The body is requested anew from the position on where the last read
        broke, or has come to the likely end.
        """
        if self._is_over:
            self._body.close()
            self._begin(client)
        self._is_over = True
        data: bytes = self._body.read(size)
        self._is_over = not data and size > 0 and self._position == self._end
        if self._is_over:
            self._end = None
            return self._next(size, client)
        return data

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(_READ_BYTES), b""))

    def close(self) -> None:
        if not self.closed:
            self._body.close()
        super().close()


def _get(wanted: Object, client: Any) -> Answer:
    """The answer to a GET; an empty body where the object ends before the range."""
    return answered(client.get_object, wanted, "InvalidRange") or {
        "Body": io.BytesIO(),
        "ContentLength": 0,
    }


class RandomReader(io.RawIOBase):
    """A seekable file of `size` bytes, which `fetch(start, end)` brings. A request asks for at
    least `ahead` bytes, up to the file's end. They are kept until the next request, so that small
    reads beside each other share one.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, ahead: int) -> None:
        self._fetch, self._size, self._ahead = fetch, size, ahead
        self._position, self._first, self._held = 0, 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        position = (0, self._position, self._size)[whence] + offset
        if position < 0:
            raise OSError(errno.EINVAL, "a seek to before the beginning")
        self._position = position
        return position

    def readinto(self, buffer: Any, /) -> int:
        start, end = self._position, min(self._size, self._position + len(buffer))
        if start >= end:
            return 0
        held_until = self._first + len(self._held)
        if not self._first <= start < held_until:
            last = min(self._size, max(end, start + self._ahead))
            # A jump to the end looks for a directory, from which reads go backwards: 5 requests for
            # a zip, not 19.
            self._first = start if start == held_until else min(start, max(0, last - self._ahead))
            self._held = b""
            self._held = self._fetch(self._first, last)
        data = self._held[start - self._first : end - self._first]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def random_reader(fetch: Callable[[int, int], bytes], size: int, ahead: int) -> BinaryIO:
    """A RandomReader with a buffer for reads of a few bytes."""
    return cast(
        BinaryIO, io.BufferedReader(RandomReader(fetch, size, ahead), max(1, min(ahead, 8192)))
    )

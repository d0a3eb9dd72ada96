"""Two readers of an object. `ObjectReader` reads from start to end, and continues if the answer's
body breaks off. `RandomReader` reads parts in any order.

For a request of a whole object, botocore compares the body with the checksum that the store sends.
Reading a directory or a footer (zip, parquet) means reads of a few bytes, first near the end. A
request takes as long for 1 KB as for 1 MB, so a read of bytes that are not in memory becomes one
range request, for more bytes than were asked for.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, cast

from mdsmix.storage.s3_client import answer_unless, ask, stamp_from
from mdsmix.storage.s3_errors import Answer, Object

_READ_BYTES = 8 << 20  # RawIOBase's own would take 8 KiB at a time, 7 times slower


class ObjectReader(io.RawIOBase):
    """Reads one version of an object from `start` on. It continues if the body breaks off."""

    def __init__(
        self,
        url: str,
        target: Object,
        start: int = 0,
        end: int | None = None,
        answer: Answer | None = None,
        stamp: str = "",
    ) -> None:
        """Send the first request, unless its answer is given.

        Args:
            end: the byte at which reading probably ends; reading beyond it takes another request.
            answer: the answer to a GET that was already sent.
            stamp: the ETag of the version to read.
        """
        self._url = url
        self._target = target
        self._position = start
        self._end = end
        self._stamp = stamp
        # `close` needs a body, even if the first request fails.
        self._body: Any = io.BytesIO()
        if answer:
            self._use(answer)
        else:
            ask(url, self._begin)

    def _begin(self, client: Any) -> None:
        """Request the bytes from the current position on."""
        request = {**self._target, "ChecksumMode": "ENABLED"}
        if self._stamp:
            request["IfMatch"] = f'"{self._stamp}"'
        if self._position or self._end is not None:
            last = "" if self._end is None else self._end - 1
            request["Range"] = f"bytes={self._position}-{last}"
        self._use(_get(request, client))

    def _use(self, answer: Answer) -> None:
        """Read from the body of this answer from now on. Its stamp is kept, so that later requests
        are for the same version.
        """
        self._body = answer["Body"]
        self._is_over = False
        if answer["ContentLength"]:
            self._stamp = stamp_from(answer)

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
        """Return the next bytes, at most `size`. If the last read broke, or reached the likely end
        (`end`), the body is first requested again, from the current position on.
        """
        if self._is_over:
            self._body.close()
            self._begin(client)
        self._is_over = True  # stays so if the read raises an error
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


def _get(request: Object, client: Any) -> Answer:
    """Return the answer to a GET, with an empty body if the object ends before the range."""
    empty = {"Body": io.BytesIO(), "ContentLength": 0}
    return answer_unless(("InvalidRange",), client.get_object, request) or empty


class RandomReader(io.RawIOBase):
    """A seekable file of `size` bytes, which `fetch(start, end)` returns in parts. A request asks
    for at least `ahead` bytes, up to the file's end. They are kept until the next request, so that
    small reads near each other share one.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, ahead: int) -> None:
        self._fetch = fetch
        self._size = size
        self._ahead = ahead
        self._position = 0
        self._block = b""
        "The bytes of the last request."
        self._block_start = 0

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
        """Fill the buffer, or its first part, with the next bytes. Return how many these are; 0 at
        the file's end. A request is sent only if the last one did not return the first byte.
        """
        start = self._position
        end = min(self._size, start + len(buffer))
        if start >= end:
            return 0
        block_end = self._block_start + len(self._block)
        if not self._block_start <= start < block_end:
            self._fetch_block(start, end, is_next=start == block_end)
        data = self._block[start - self._block_start : end - self._block_start]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _fetch_block(self, start: int, end: int, is_next: bool) -> None:
        """Request a block that contains bytes `start` to `end`.

        A jump to the end of the file usually looks for a directory, and the next reads are of bytes
        before it. So a block at the end begins earlier, which makes 5 requests for a zip instead of
        19.

        Args:
            is_next: whether the bytes follow the last block, as in sequential reading; the block
                then begins at `start`.
        """
        last = min(self._size, max(end, start + self._ahead))
        first = start if is_next else min(start, max(0, last - self._ahead))
        self._block = b""
        self._block_start = first
        self._block = self._fetch(first, last)


def make_random_reader(fetch: Callable[[int, int], bytes], size: int, ahead: int) -> BinaryIO:
    """Return a RandomReader with a buffer for reads of a few bytes."""
    buffer_size = max(1, min(ahead, 8192))
    return cast(BinaryIO, io.BufferedReader(RandomReader(fetch, size, ahead), buffer_size))

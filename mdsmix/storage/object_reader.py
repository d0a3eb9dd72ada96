"""Readers of objects, for every store. `ObjectReader` reads from start to end, and continues if
the answer's body breaks off. `RandomReader` reads parts of an object in any order. An upload reads
the parts of a file as one.

A reader of a directory or a footer (zip, parquet) reads a few bytes at a time, first near the end.
A request takes as long for 1 KB as for 1 MB. So `RandomReader` requests more bytes than were asked
for, and keeps them for the next reads.
"""

from __future__ import annotations

import errno
import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from mdsmix.errors import Unreachable
from mdsmix.storage.location import CHANGED, Bytes, Location, Stat

T = TypeVar("T")

_READ_BYTES = 8 << 20
"Bytes that `readall` reads at once. With the 8 KiB of RawIOBase's own it would be 7 times slower."


class OpenedBody(NamedTuple):
    """The body of an answer to a GET, not read yet."""

    body: Any
    "Has `read(size)` and `close()`."
    stamp: str
    'The version of the object; "" for an empty body.'


class Ask(Protocol):
    """Sends a request to the store by `request(client)`, again after temporary failures."""

    def __call__(self, request: Callable[[Any], T], /) -> T: ...


OpenBody: TypeAlias = "Callable[[Any, int, int | None, str], OpenedBody]"
"""Called with (client, start, end, stamp). Sends a GET for the bytes from `start` on and before
`end` (None: all) of the version `stamp` (empty: the newest), and returns the body of the answer. If
the object ends before `start`, the body is empty.
"""


class ObjectReader(io.RawIOBase):
    """Reads one version of an object from byte `start` on, from start to end. If the body of an
    answer breaks off, the rest is requested again.
    """

    def __init__(
        self,
        url: str,
        ask: Ask,
        open_body: OpenBody,
        start: int = 0,
        end: int | None = None,
        opened: OpenedBody | None = None,
        stamp: str = "",
    ) -> None:
        """Send the first request, unless its answer is given.

        Args:
            url: what error messages name.
            ask: sends a request to the store, and again after temporary failures.
            open_body: sends one GET for a part of the object.
            start: the byte at which reading begins.
            end: the byte at which reading probably ends; reading after it takes another request.
                None: the end of the object.
            opened: the answer to a GET that was already sent; None: send one.
            stamp: the version to read; "": the newest version.
        """
        self._url = url
        self._ask = ask
        self._open_body = open_body
        self._position = start
        self._end = end
        self._stamp = stamp
        # `close` needs a body, even if the first request fails.
        self._body: Any = io.BytesIO()
        if opened:
            self._use(opened)
        else:
            ask(self._begin)

    def _begin(self, client: Any) -> None:
        """Request the bytes from the current position on, and read from this answer from now on."""
        self._use(self._open_body(client, self._position, self._end, self._stamp))

    def _use(self, opened: OpenedBody) -> None:
        """Read from the body of this answer from now on. Keep the answer's stamp, so that later
        requests are for the same version of the object.

        Raises Unreachable if the answer has another stamp than the requested one: some stores
        ignore the condition of a GET.
        """
        self._body = opened.body
        self._is_over = False
        if self._stamp and opened.stamp and opened.stamp != self._stamp:
            raise Unreachable(CHANGED.format(url=self._url))
        self._stamp = opened.stamp or self._stamp

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        data = self._ask(partial(self._next, len(buffer)))
        self._position += len(data)
        buffer[: len(data)] = data
        return len(data)

    def _next(self, size: int, client: Any) -> bytes:
        """Return the next bytes, at most `size`; b"" at the object's end.

        If the last read failed, the bytes from the current position on are requested again. If the
        likely end (`end`) is reached, the bytes after it are requested.
        """
        if self._is_over:  # nothing more comes from this body: request the bytes after it
            self._body.close()
            self._begin(client)
        self._is_over = True  # if the read raises an error, the next call requests the bytes again
        data: bytes = self._body.read(size)
        self._is_over = not data and size > 0 and self._position == self._end
        if self._is_over:  # the likely end was reached
            self._end = None  # request all bytes up to the object's end
            return self._next(size, client)
        return data

    def readall(self) -> bytes:
        """Return all remaining bytes."""
        pieces = list[bytes]()
        while piece := self.read(_READ_BYTES):
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        if not self.closed:
            self._body.close()
        super().close()


class _SeekingReader(io.RawIOBase):
    """The position of a reader that can seek. A subclass has `readinto`."""

    def __init__(self, size: int) -> None:
        """Begin at the first byte.

        Args:
            size: the number of bytes that can be read.
        """
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to another position, as files of Python do. Return the new position."""
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        position = origins[whence] + offset
        if position < 0:
            raise OSError(
                errno.EINVAL, f"cannot seek to byte {position}, before the beginning of the file"
            )
        self._position = position
        return position


class RandomReader(_SeekingReader):
    """A reader of an object that can seek.

    A request asks for at least `ahead` bytes, up to the object's end. The bytes are kept until the
    next request, so that small reads near each other need only one request.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, ahead: int) -> None:
        """Store the arguments.

        Args:
            fetch: called with (start, end); returns the bytes from `start` on and before `end`.
            size: the number of bytes of the object.
            ahead: the least bytes of a request.
        """
        super().__init__(size)
        self._fetch = fetch
        self._ahead = ahead
        self._block = b""
        "The bytes of the last request."
        self._block_start = 0

    def readinto(self, buffer: Any, /) -> int:
        """Copy the next bytes into the buffer or into its first part. Return the number of copied
        bytes; 0 at the object's end.

        A request is sent only if the first of these bytes is not in memory.
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
        """Request a block (the bytes that are kept in memory) with the bytes from `start` on and
        before `end`.

        Usually a reader jumps to the end of a file to find a directory, and then reads bytes before
        the directory. So a block at the end of the file begins earlier than `start`. A zip then
        takes 5 requests instead of 19.

        Args:
            is_next: whether the bytes follow the last block directly. The block then begins at
                `start`, because the file is probably read from start to end.
        """
        last = min(self._size, max(end, start + self._ahead))
        first = start if is_next else min(start, max(0, last - self._ahead))
        self._block = b""  # if `fetch` raises an error, no bytes are in memory
        self._block_start = first
        self._block = self._fetch(first, last)


def make_random_reader(fetch: Callable[[int, int], bytes], size: int, ahead: int) -> BinaryIO:
    """Return a RandomReader with a buffer for reads of a few bytes."""
    buffer_size = max(1, min(ahead, 8192))
    return cast(BinaryIO, io.BufferedReader(RandomReader(fetch, size, ahead), buffer_size))


def make_version_reader(file: Location, stat: Stat, ahead: int) -> BinaryIO:
    """Return a reader of an object that can seek. It reads the version whose size and stamp are
    `stat`; a request asks for at least `ahead` bytes.

    Raises Unreachable at a read if the object has another stamp.
    """

    def fetch(start: int, end: int) -> bytes:
        """Return the bytes from `start` on and before `end`."""
        with file.open(start, end, stat.stamp) as reader:
            data = reader.read(end - start)
        # A store that ignores the condition may send a newer and shorter version of the object.
        if len(data) < end - start:
            raise Unreachable(CHANGED.format(url=file.url))
        return data

    return make_random_reader(fetch, stat.size, ahead)


class _PartsReader(_SeekingReader):
    """Reads parts of bytes one after the other, as if they were joined."""

    def __init__(self, parts: Sequence[Bytes]) -> None:
        """Store the parts, which must not change while they are read."""
        self._parts = [memoryview(part) for part in parts]
        self._ends = list(accumulate(map(len, parts)))
        super().__init__(self._ends[-1] if parts else 0)

    def readinto(self, buffer: Any, /) -> int:
        """Copy the next bytes of one part into the first bytes of the buffer. Return the number of
        copied bytes; 0 after the last part.
        """
        number = bisect_right(self._ends, self._position)
        if number == len(self._parts):
            return 0
        part = self._parts[number]
        start = len(part) - (self._ends[number] - self._position)
        data = part[start : start + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def make_parts_reader(parts: Sequence[Bytes]) -> BinaryIO:
    """Return a reader of the joined parts of a file, which can seek. It copies only the bytes that
    are read: to join the parts of a shard would take 64 MiB for each upload.

    Args:
        parts: bytes, one after the other. They must not change while they are read.
    """
    return cast(BinaryIO, io.BufferedReader(_PartsReader(parts)))

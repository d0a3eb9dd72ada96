"""Random access to an object: a read beyond the bytes at hand is one range request, for a little more than was asked for.

What reads such files (a zip's directory, a parquet's footer, then column by column) asks for a few bytes at a time, first
near the end, and a request takes as long for 1 KB as for 1 MB.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from typing import Any


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

"""Several buffers as the body of one request, without joining them in memory: a shard is 64 MiB."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from mdsmix.storage.location import Bytes


class Joined(io.RawIOBase):
    """Reads like a file of `size` bytes; it may be read again from the beginning, as a request that is sent again is."""

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

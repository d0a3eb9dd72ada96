"""Shard files that stay open while samples are read from them.

Streaming opens a shard's file for each sample. Here a file is opened once, and the offsets of its
samples are read once. Samples are read by `os.pread`, which takes 0.7 us, and not through a memory
map: a file that is truncated while it is mapped, or a disk that fails, would kill the process
(SIGBUS), while pread returns fewer bytes or raises OSError.

A file that was deleted needs its disk space as long as a process has it open. So files that
Streaming evicts, in this process or another one, are closed, and at the end of a pass all are.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass, field

from mdsmix.load.stored_rows import ShardSource, StoredRow

MOST_OPEN = 128
"The most files that a process keeps open, of the 1,024 that Linux allows it by default."
MOST_OFFSET_BYTES = 64 << 20
"""64 MiB: the most bytes of offsets that are kept, 4 for each sample. A shard of 64 MiB has 2.4 MB
of them if its samples have 100 bytes, and 64 KB if they have 4 KB.
"""
SECONDS_BETWEEN_CHECKS = 0.1
"How often the open files are checked. A check takes 0.5 us for each file."
_BEGIN_AND_END = struct.Struct("<II")


class OpenShard:
    """The decompressed file of a shard, open for reading."""

    def __init__(self, source: ShardSource) -> None:
        """Open the file, and read the offsets of its samples.

        Raises FileNotFoundError if the file is missing, ValueError if it is cut off.
        """
        self.source = source
        self.descriptor = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        self.modified = os.fstat(self.descriptor).st_mtime_ns
        count = len(source.shard)
        # The file begins with the number of samples, and then has `count + 1` offsets (uint32).
        self.offsets = os.pread(self.descriptor, 4 * (count + 1), 4)
        if len(self.offsets) < 4 * (count + 1):
            raise ValueError(f"{source.path} ends within its table of samples")

    def __del__(self) -> None:
        # Closed when the last reference is gone, so that a thread can drop a file that another one
        # is reading. There is no descriptor if the file could not be opened.
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def read(self, position: int) -> StoredRow:
        """Read a sample. Raises ValueError if the file has fewer bytes than its offsets state.

        Args:
            position: the number of the sample in the shard.
        """
        begin, end = _BEGIN_AND_END.unpack_from(self.offsets, 4 * position)
        data = os.pread(self.descriptor, end - begin, begin)
        if len(data) != end - begin or not data:
            raise ValueError(
                f"{self.source.path} has {len(data)} bytes for it at {begin:,}, but its table "
                f"states that it ends at {end:,}"
            )
        return StoredRow(data, self.source, position)

    @property
    def is_current(self) -> bool:
        """Whether the file is still in its folder, and was not written since it was opened."""
        stat = os.fstat(self.descriptor)
        return stat.st_nlink > 0 and stat.st_mtime_ns == self.modified


@dataclass(slots=True)
class OpenShards:
    """The open files of a process. If there are too many, the one that was opened first is closed.

    The thread that prepares shards closes files while the training loop reads from others.
    """

    files: dict[int, OpenShard] = field(default_factory=dict)
    "Number of a shard -> its file, in the order in which they were opened."
    next_check: float = 0.0
    "When `close_replaced` checks the files again, by time.monotonic."

    def open(self, shard_id: int, source: ShardSource) -> OpenShard:
        """Open the file of a shard, and close others if there are too many.

        Raises FileNotFoundError if it is missing, ValueError if it is cut off.
        """
        file = OpenShard(source)
        self.files[shard_id] = file
        while len(self.files) > MOST_OPEN or self._offset_bytes > MOST_OFFSET_BYTES:
            oldest = next(iter(self.files))
            if oldest == shard_id:
                break
            self.close(oldest)
        return file

    def close(self, shard_id: int) -> None:
        """Close the file of a shard, if it is open."""
        self.files.pop(shard_id, None)

    def close_all(self) -> None:
        """Close all files."""
        self.files.clear()

    def close_replaced(self) -> None:
        """Close the files that were deleted or written since they were opened. This is done only
        every SECONDS_BETWEEN_CHECKS, so it may be called often.
        """
        now = time.monotonic()
        if now < self.next_check:
            return
        self.next_check = now + SECONDS_BETWEEN_CHECKS
        for shard_id, file in list(self.files.items()):
            if not file.is_current:
                self.close(shard_id)

    @property
    def _offset_bytes(self) -> int:
        return sum(len(file.offsets) for file in list(self.files.values()))

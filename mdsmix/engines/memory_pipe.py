"""Passes objects between two processes of this machine in shared memory.

An object is pickled into a file in memory that has no name, and only the file's descriptor goes
through a socket. So the sender never waits until the receiver has read the object, and the system
frees the memory even if both processes are killed.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from typing import Any

import numpy as np  # at once: workers are forked later, and then share it


@cache
def can_create_memory_files() -> bool:
    """Return whether the system has files in memory, and allows this process to create them: Linux
    has them, macOS has not, and a sandbox may refuse them.
    """
    try:
        os.close(os.memfd_create("mdsmix"))
    except (AttributeError, OSError):
        return False
    return True


class NotPassed(Exception):
    """An object cannot be passed on: it cannot be pickled or unpickled, or memory is not
    sufficient. A record of 600 nested lists is such an object. The connection remains usable.
    """


class MemoryPipe:
    """One of the two ends of a connection."""

    def __init__(self, descriptor: int) -> None:
        """Take over one end of a pair of stream sockets."""
        self.end = socket.socket(fileno=descriptor)

    def send(self, message: Any) -> None:
        """Send an object.

        Raises NotPassed if the object cannot be pickled; then nothing is sent.
        Raises OSError if the other end is closed.
        """
        arrays = list[pickle.PickleBuffer]()
        try:
            pickled = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
        except Exception as error:  # objects of any class may be sent, and each may raise its own
            raise NotPassed from error
        parts = [memoryview(pickled), *(array.raw() for array in arrays)]
        # The file begins with the number of the parts and the length of each.
        head = np.array([len(parts), *map(len, parts)], np.int64)
        file = os.memfd_create("mdsmix")
        try:
            _access_all(os.pwritev, file, [head.data.cast("B"), *parts])
            socket.send_fds(self.end, [b"\0"], [file])
        finally:
            os.close(file)

    def receive(self) -> Any:
        """Wait for an object and return it.

        Raises NotPassed if the object cannot be unpickled.
        Raises EOFError if the other end is closed.
        """
        try:
            mark, files, *_ = socket.recv_fds(self.end, 1, 1)
        except ConnectionError:
            mark = b""
        if not mark or not files:  # the system drops files that exceed the limit of a process
            raise EOFError
        (file,) = files
        try:
            count = int.from_bytes(os.pread(file, 8, 0), "little")
            lengths = np.empty(1 + count, np.int64)
            # Each array gets memory of its own, so none keeps the memory of another one.
            parts = list[memoryview]()
            _access_all(os.preadv, file, [lengths.data.cast("B")])
            for length in lengths[1:].tolist():
                parts.append(np.empty(length, np.uint8).data)
            _access_all(os.preadv, file, parts, lengths.nbytes)
            return pickle.loads(parts[0], buffers=parts[1:])
        except Exception as error:  # as in `send`
            raise NotPassed from error
        finally:
            os.close(file)

    def poll(self, seconds: float = 0) -> bool:
        """Wait up to so many seconds, and return whether `receive` would return or raise now."""
        return bool(wait([self.end], seconds))

    def close(self) -> None:
        """Close this end. The other end can still receive what was sent before."""
        self.end.close()


def _access_all(
    access: Callable[[int, list[memoryview], int], int],
    file: int,
    parts: list[memoryview],
    position: int = 0,
) -> None:
    """Write all parts to a file, one after the other, or fill all parts with its bytes.

    Args:
        access: `os.pwritev` or `os.preadv`.
        file: the descriptor of the file.
        parts: one-dimensional bytes.
        position: where the first part begins in the file.
    """
    for part in parts:
        while part:
            done = access(file, [part], position)
            part = part[done:]
            position += done

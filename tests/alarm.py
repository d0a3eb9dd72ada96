"""An end for what would hang."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Fails a test that hangs: Streaming does when a worker loses a shard, a reader does on an endless file. `seconds`: much more than
    it takes on an idle machine; a busy one has five times as many, since it is no hang that is slow."""
    seconds *= 5

    def stop(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

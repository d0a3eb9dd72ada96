"""Time limits, so that a test that hangs fails."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

WAIT_SECONDS = 600
"""A wait that takes longer hangs, even on a busy machine: nothing that tests wait for takes a
hundredth of it on an idle one.
"""


@contextlib.contextmanager
def fail_after(seconds: int) -> Iterator[None]:
    """Fail a test that hangs, as Streaming does when a worker loses a shard, and a reader on an
    endless file.

    Args:
        seconds: processor time, much more than the block takes anywhere. Waiting has WAIT_SECONDS
        of its own, since a slow machine is not a hang.
    """
    seconds *= 5

    def stop(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(
            f"no answer within {seconds} s of work and {WAIT_SECONDS} s of waiting"
        )

    alarm_handler = signal.signal(signal.SIGALRM, stop)
    profile_handler = signal.signal(signal.SIGPROF, stop)
    signal.alarm(WAIT_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGALRM, alarm_handler)
        signal.signal(signal.SIGPROF, profile_handler)

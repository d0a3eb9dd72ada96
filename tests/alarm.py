"""An end for what would hang."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

WAIT_SECONDS = 600
"""What is waited for longer hangs, on however busy a machine: nothing that tests wait for takes a
hundredth of it on an idle one.
"""


@contextlib.contextmanager
def fail_after(seconds: int) -> Iterator[None]:
    """Fails a test that hangs: Streaming does when a worker loses a shard, a reader does on an
    endless file. `seconds`: of the processor, much more than it takes on any; what waits has
    WAIT_SECONDS, since it is no hang that is slow.
    """
    seconds *= 5

    def stop(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(
            f"no answer within {seconds} s of work and {WAIT_SECONDS} s of waiting"
        )

    before = [signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.alarm(WAIT_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])

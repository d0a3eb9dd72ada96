"""When a worker is taken for hung: its process lives, but its task will never end.

Either of two rules is enough. It has sent no message and used no processor time for SILENT_SECONDS: it was stopped, or waits for
a mount or a pipe that does not answer. Or it has had the same records in work for SILENT_SECONDS and for as long as the slowest
tokenizer takes over their bytes: an endless loop uses processor time too. While it has no records in work, processor time
is always a sign of life: hashing a compressed file of 500 GB takes half an hour without a message.

Time in which the worker waits for memory does not count, nor time in which this process itself stood still (Ctrl-Z, a laptop that
slept). Processor time is read from /proc; where there is none, only the second rule holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SILENT_SECONDS = 300.0
"Longer than the 123 s after which a store that does not answer is given up, which ends in a message or an error."
SLOWEST = 100_000
"""Bytes a second. The reference took 1.0 to 3.7 MB/s of processor time over MBs without a space, in base64, in one letter, in
Chinese, on a busy machine; a record of 256 MB comes to 4 minutes, and 48 are waited."""
LOOK_SECONDS = 1.0
"Seconds between two looks. Whatever time has passed, a look counts for twice that at most."


@dataclass(slots=True)
class Pulse:
    """How long one worker has shown no sign of life, and how long it has sent no message."""

    silent: float = 0.0
    unheard: float = 0.0
    "Seconds since its last message."
    _used: int = 0
    _looked: float = field(default_factory=lambda: time.monotonic())

    def beat(self) -> None:
        """It has sent a message."""
        self.silent = self.unheard = 0.0

    def look(self, used: Callable[[], int], size: int | None, waits: bool) -> str | None:
        """Why the worker is hung, None where it is not. `used`: gives the processor time that it has used, in ticks, -1 where that
        cannot be told; `size`: bytes of the records that it is over."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < LOOK_SECONDS:
            return None
        self._looked, passed = now, min(passed, 2 * LOOK_SECONDS)
        if waits:
            self.beat()
        before, self._used = self._used, used()
        self.unheard += passed
        self.silent = self.silent + passed if 0 <= self._used == before else 0.0
        if self.silent > SILENT_SECONDS:
            return f"no sign of life for {self.silent:.0f} s: it was stopped, or waits for a mount, and uses no processor time"
        if size is not None and self.unheard > SILENT_SECONDS + size / SLOWEST:
            return f"not done with {size:,} bytes after {self.unheard:.0f} s"
        return None


def used_by(pid: int) -> int:
    """The processor time of all threads of a process in ticks; -1 where it cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])

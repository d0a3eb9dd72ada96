"""Decides when a worker counts as hung: its process lives, but its task will never end.

A worker counts as hung by either of two rules:
- It has sent no message and used no processor time for SILENT_SECONDS: it was stopped, or one of
  its threads waits for a mount or pipe that does not answer. This rule needs threads that use no
  processor time while they wait for another one.
- It has active records (those that it is converting), and has sent no message for SILENT_SECONDS
  plus the time that the slowest tokenizer takes for their bytes. This rule ignores processor time,
  because an endless loop uses it too. It does not apply without active records: hashing a
  compressed file of 500 GB takes half an hour without a message.

Two times do not count: while the worker waits for memory, and while the engine's own process was
stopped (Ctrl-Z, a laptop that slept). Processor time is read from /proc; on a system without it
only the second rule applies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SILENT_SECONDS = 300.0
"""Longer than 123 s: after that time a request to a store that does not answer fails, and the
worker sends a message or an error.
"""
SLOWEST = 100_000
"""Bytes a second. A worker that tokenizes more slowly than this counts as hung. On a busy machine
the reference tokenizer reached 1.0 to 3.7 MB/s on texts of several MB without a space (base64, one
letter, Chinese). So it needs up to 4 minutes for a record of 256 MB, and a worker gets 48 minutes.
"""
CHECK_SECONDS = 1.0
"""The least seconds between two checks. A check adds at most 2 s to the counts: if more time has
passed, the engine itself was stopped, and the worker is not to blame.
"""


@dataclass(slots=True)
class HangDetector:
    """Decides whether one worker hangs. It counts how long the worker has shown no sign of life,
    and how long it has sent no message.
    """

    silent: float = 0.0
    "Seconds since the worker last sent a message or used processor time."
    unheard: float = 0.0
    "Seconds since the worker's last message."
    _ticks: int = 0
    "The worker's processor time at the last check, in ticks."
    _checked: float = field(default_factory=lambda: time.monotonic())
    "When the last check was, by `time.monotonic()`."

    def reset(self) -> None:
        """Set both counts to zero, after a message from the worker or a new task for it."""
        self.silent = 0.0
        self.unheard = 0.0

    def check(self, read_ticks: Callable[[], int], size: int | None, waits: bool) -> str | None:
        """Return why the worker counts as hung, as a phrase for a message; None if it does not.

        Args:
            read_ticks: returns the processor time of the worker, in ticks; -1 if it is unknown.
            size: bytes of the records that the worker is converting; None if it converts none.
            waits: whether the worker waits for memory.
        """
        # Count the time since the last check.
        current_time = time.monotonic()
        passed = current_time - self._checked
        if passed < CHECK_SECONDS:
            return None
        self._checked = current_time
        # If more time has passed, the engine's own process was stopped.
        passed = min(passed, 2 * CHECK_SECONDS)
        if waits:
            self.reset()
        last_ticks = self._ticks
        self._ticks = read_ticks()
        self.unheard += passed
        # A worker whose processor time is unknown (-1) never counts as idle.
        is_idle = self._ticks >= 0 and self._ticks == last_ticks
        self.silent = self.silent + passed if is_idle else 0.0
        # The first rule: no message and no processor time. The second rule: no message for longer
        # than the slowest tokenizer takes for the records that the worker is converting.
        if self.silent > SILENT_SECONDS:
            return (
                f"no sign of life for {self.silent:.0f} s: it was stopped, or waits for a mount, "
                "and uses no processor time"
            )
        if size is not None and self.unheard > SILENT_SECONDS + size / SLOWEST:
            return f"not done with {size:,} bytes after {self.unheard:.0f} s"
        return None


def read_cpu_ticks(pid: int) -> int:
    """Return the processor time of all threads of a process, in ticks; -1 if /proc does not show
    the process.
    """
    # The file has `PID (NAME) STATE ...`. The name may contain spaces, so the fields after the last
    # bracket are split: they begin with the third.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    user_ticks, system_ticks = fields[11:13]  # the 14th and 15th field of the file
    return int(user_ticks) + int(system_ticks)

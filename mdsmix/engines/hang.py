"""When a worker is taken for hung: it lives, and nothing will come of it.

A worker is hung when for SILENT_SECONDS it has told nothing and used no processor time (a process that was stopped, a mount
or a pipe that does not answer), or when it has been over the same records for SILENT_SECONDS and for as long as the slowest
tokenizer takes over their bytes, whatever it uses (an endless loop looks like work). Outside of records processor time is
always a sign of life: hashing 500 GB of one compressed file tells nothing for half an hour.

A worker that waits because the run has no room for it is not hung, and while the run itself stood still (Ctrl-Z, a laptop that
slept) nobody has waited. Processor time is read from /proc; where there is none, only the second rule holds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

SILENT_SECONDS = 300.0
"A silent store is given up after 123 s, and then something is done: another try, or an error."
SLOWEST = 100_000
"""Bytes a second. The reference took 1.0 to 3.7 MB/s of processor time over MBs without a space, in base64, in one letter, in
Chinese, on a busy machine; a record of 256 MB comes to 4 minutes, and 48 are waited."""
LOOK_SECONDS = 1.0
"Between two looks; a look counts for twice that at most."
_STATES = {
    "T": "it was stopped by a signal",
    "t": "it was stopped by a debugger",
    "D": "it waits for a disk or a mount that does not answer",
}


@dataclass(slots=True)
class Pulse:
    """Of one worker: how long it has shown no sign of life, and how long it has been over the same records."""

    silent: float = 0.0
    told: float = 0.0
    "Since its last message."
    _used: int = 0
    _looked: float = field(default_factory=lambda: time.monotonic())

    def beat(self) -> None:
        """It has told something."""
        self.silent = self.told = 0.0

    def look(self, pid: int, size: int | None, waits: bool) -> str | None:
        """Why the worker is hung, None where it is not; `size`: bytes of the records that it is over."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < LOOK_SECONDS:
            return None
        self._looked, passed = now, min(passed, 2 * LOOK_SECONDS)
        state, used = _process(pid)
        if waits:
            self.beat()
        self.told += passed
        self.silent = 0.0 if used != self._used or state in " R" else self.silent + passed
        self._used = used
        return self._why(state, size)

    def _why(self, state: str, size: int | None) -> str | None:
        if self.silent > SILENT_SECONDS:
            why = _STATES.get(state, "it waits and uses no processor time")
            return f"no sign of life for {self.silent:.0f} s: {why}"
        if size is not None and self.told > SILENT_SECONDS + size / SLOWEST:
            return f"not done with {size:,} bytes after {self.told:.0f} s"
        return None


def _process(pid: int) -> tuple[str, int]:
    """The state of a process, and the processor time of all its threads in ticks; a blank where it cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return " ", 0
    return fields[0], int(fields[11]) + int(fields[12])

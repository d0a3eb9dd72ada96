"""A replacement for the module `time` in a module under test: `monkeypatch.setattr(module, "time",
Clock())`.
"""

from __future__ import annotations

import time
from typing import Any


class Clock:
    """A clock that only `sleep` advances, without waiting. So a machine that is busy for longer
    than a test waits changes nothing.
    """

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

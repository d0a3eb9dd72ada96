"""`mdsmix convert` in a process group of its own, to be killed as a machine that fails would end
it: workers included.

Forked, because starting Python and importing boto3 takes longer than these conversions. Every write
is told in a file, a line each, so that a test knows how far the run is; and the run may kill its
own group at a write that is named.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mdsmix.cli.main import run
from mdsmix.storage.local import LocalPath
from mdsmix.storage.s3 import S3Path
from tests.alarm import SECONDS
from tests.converting import windows

ENDINGS = (".mds", ".bad", ".index", ".replaced", "mdsmix.manifest", "index.json", ".jsonl.zst")
KINDS = {".unit": "record"} | {ending: ending for ending in ENDINGS}
"""How the name of a file ends -> what is written. A record is the last file of a work unit: with it
the unit is finished.
"""


@dataclass(frozen=True)
class Write:
    """A moment: before or after so many writes of this kind by the main process or a worker.
    `stall`: no kill, but this write and the later ones are not done; so a run that is to be ended
    from outside is never done before.
    """

    who: str
    what: str
    side: str
    count: int = 1


class Run:
    """A conversion that is under way."""

    def __init__(self, arguments: list[str], window: int, log: Path, end: Write | None) -> None:
        log.write_text("")
        self._log, self._said = log, log.with_suffix(".said")
        process: Any = multiprocessing.get_context("fork").Process
        self._process = process(target=self._convert, args=(arguments, window, end))
        self._process.start()

    def await_write(self, write: str = "", count: int = 1) -> float:
        """Waits until so many writes of this kind, or any, have begun, and says when it was."""
        while self._log.read_text().count(f"{write}\n") < count and self._process.is_alive():
            time.sleep(0.002)
        return time.monotonic()

    def kill(self) -> None:
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)

    def terminated(self, group: bool) -> tuple[int, str]:
        """Tells the main process, or all of its group, that the machine goes away; the exit code
        and what was said.
        """
        (os.killpg if group else os.kill)(self._process.pid, signal.SIGTERM)
        self._process.join(SECONDS)
        return self._process.exitcode, self._said.read_text()

    def left(self) -> list[int]:
        """Its group, while processes of it run."""
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return []
        return [self._process.pid]

    def was_killed(self) -> bool:
        """Waits for the end. A run that was not killed has done its work."""
        self._process.join(SECONDS)
        code = self._process.exitcode
        assert code in (0, -signal.SIGKILL), f"exit code {code}: {self._said.read_text()}"
        return code != 0

    def _convert(self, arguments: list[str], window: int, end: Write | None) -> None:
        """As a shell starts it, in a group of its own; with small work units."""
        os.setsid()
        with self._said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        for kind in (LocalPath, S3Path):
            _watch(kind, self._log, end)
        windows(pytest.MonkeyPatch(), window)
        sys.argv = ["mdsmix", "convert", *arguments]
        run()


def _watch(kind: Any, log: Path, end: Write | None) -> None:
    times = multiprocessing.Value("i", 0)
    for name in ("write", "create", "replace"):
        setattr(kind, name, _watched(getattr(kind, name), log, end, times))


def _watched(write: Any, log: Path, end: Write | None, times: Any) -> Any:
    main_process = os.getpid()

    def writing(self: Any, *given: Any) -> Any:
        if self.name == "lease":
            return write(self, *given)
        who = "main" if os.getpid() == main_process else "worker"
        what = next((kind for end, kind in KINDS.items() if self.name.endswith(end)), "other")
        number = 0
        with log.open("a") as file:
            file.write(f"{who} {what}\n")
        if end and (who, what) == (end.who, end.what):
            with times.get_lock():
                times.value += 1
                number = times.value
            if end.side == "stall" and number >= end.count:
                time.sleep(SECONDS)
        is_last = end and number == end.count
        if is_last and end.side == "before":
            os.killpg(0, signal.SIGKILL)
        answer = write(self, *given)
        if is_last:
            os.killpg(0, signal.SIGKILL)
        return answer

    return writing

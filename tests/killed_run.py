"""`mdsmix convert` in a process group of its own, which a test kills as a failing machine would:
workers included.

The run is forked, because starting Python and importing boto3 takes longer than these conversions.
It logs every write to a file, a line each, so that a test knows how far it is. It can also kill its
own group at a given write.
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
from mdsmix.storage import import_stores
from mdsmix.storage.local import LocalPath
from tests.alarm import WAIT_SECONDS
from tests.converting import set_window_size

ENDINGS = (".mds", ".bad", ".index", ".replaced", "mdsmix.manifest", "index.json", ".jsonl.zst")
KINDS = {".unit": "record"} | {ending: ending for ending in ENDINGS}
"""The end of a file's name -> the kind of the write. A record is the last file of a work unit: once
it is written, the unit is finished.
"""


@dataclass(frozen=True)
class Write:
    """A moment of a run: before or after the `count`-th write of this kind by the main process or
    by a worker.
    """

    process: str
    "`main` or `worker`."
    kind: str
    "A value of KINDS."
    side: str
    """`before` or `after`, to kill the run then; or `stall`, to kill nothing and hang this write
    and the later ones, so that the run cannot end before the test ends it.
    """
    count: int = 1


class Run:
    """A running conversion."""

    def __init__(self, arguments: list[str], window: int, log: Path, end: Write | None) -> None:
        log.write_text("")
        self._log = log
        self._output = log.with_suffix(".output")
        process: Any = multiprocessing.get_context("fork").Process
        self._process = process(target=self._convert, args=(arguments, window, end))
        self._process.start()

    def await_write(self, write: str = "", count: int = 1) -> float:
        """Wait until so many writes have begun, and return the time.

        Args:
            write: process and kind, such as `worker record`; empty: any.
        """
        while self._log.read_text().count(f"{write}\n") < count and self._process.is_alive():
            time.sleep(0.002)
        return time.monotonic()

    def kill(self) -> None:
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)

    def terminate(self, group: bool) -> tuple[int, str]:
        """Send SIGTERM to the main process, or to all of its group. Return exit code and output."""
        send = os.killpg if group else os.kill
        send(self._process.pid, signal.SIGTERM)
        self._process.join(WAIT_SECONDS)
        return self._process.exitcode, self._output.read_text()

    def has_processes(self) -> bool:
        """Return whether a process of its group still runs."""
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def was_killed(self) -> bool:
        """Wait for the end. A run that was not killed must have succeeded."""
        code = self.await_end()
        assert code in (0, -signal.SIGKILL), f"exit code {code}: {self._output.read_text()}"
        return code != 0

    def await_end(self) -> int:
        """Wait for the end, and return the exit code."""
        self._process.join(WAIT_SECONDS)
        return int(self._process.exitcode)

    def _convert(self, arguments: list[str], window: int, end: Write | None) -> None:
        """Run the command in a process group of its own, as a shell does, with small work units."""
        os.setsid()
        with self._output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        for location_type in (LocalPath, *import_stores()):
            _patch_writes(location_type, self._log, end)
        set_window_size(pytest.MonkeyPatch(), window)
        sys.argv = ["mdsmix", "convert", *arguments]
        run()


def _patch_writes(location_type: Any, log: Path, end: Write | None) -> None:
    counter = multiprocessing.Value("i", 0)
    for name in ("write", "create", "replace"):
        write = getattr(location_type, name)
        setattr(location_type, name, _wrap_write(write, log, end, counter))


def _wrap_write(write: Any, log: Path, end: Write | None, counter: Any) -> Any:
    main_process = os.getpid()

    def logged_write(self: Any, *arguments: Any) -> Any:
        if self.name == "lease":
            return write(self, *arguments)
        process = "main" if os.getpid() == main_process else "worker"
        matching = (kind for ending, kind in KINDS.items() if self.name.endswith(ending))
        kind = next(matching, "other")
        with log.open("a") as file:
            file.write(f"{process} {kind}\n")
        number = 0
        if end and (process, kind) == (end.process, end.kind):
            with counter.get_lock():
                counter.value += 1
                number = counter.value
            if end.side == "stall" and number >= end.count:
                time.sleep(WAIT_SECONDS)
        is_last = end and number == end.count
        if is_last and end.side == "before":
            os.killpg(0, signal.SIGKILL)
        result = write(self, *arguments)
        if is_last:
            os.killpg(0, signal.SIGKILL)
        return result

    return logged_write

"""`mdsmix convert` in a process group of its own, to be killed as a machine that fails would end it: workers included.

Forked, because starting Python and importing boto3 takes longer than these conversions. Every write is told in a file, a
line each, so that a test knows how far the run is; and the run may kill its own group at a write that is named.
"""

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdsmix import sources
from mdsmix.cli.main import run
from mdsmix.storage.local import LocalPath
from mdsmix.storage.s3 import S3Path
from tests import here
from tests.alarm import SECONDS

RECORD = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.unit")
"The last file that a work unit writes: with it the unit is finished."
ENDINGS = (".mds", ".bad", ".index", ".replaced", "mdsmix.manifest", "index.json", ".jsonl.zst")


@dataclass(frozen=True)
class Write:
    """A moment: before or after so many writes of this kind by the main process or a worker. `stall`: no kill, but this write
    and the later ones are not done; so a run that is to be ended from outside is never done before."""

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
        """Tells the main process, or all of its group, that the machine goes away; the exit code and what was said."""
        (os.killpg if group else os.kill)(self._process.pid, signal.SIGTERM)
        self._process.join(SECONDS)
        return self._process.exitcode, self._said.read_text()

    def left(self) -> list[int]:
        """Processes of its group that still run."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._has(pid)]

    def _has(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) == self._process.pid
        except ProcessLookupError:
            return False

    def was_killed(self) -> bool:
        """Waits for the end. A run that was not killed has done its work."""
        self._process.join(SECONDS)
        code = self._process.exitcode
        assert code in (0, -signal.SIGKILL), f"exit code {code}: {self._said.read_text()}"
        return code != 0

    def _convert(self, arguments: list[str], window: int, end: Write | None) -> None:
        own_group(self._said)
        for kind in (LocalPath, S3Path):
            _watch(kind, self._log, end)
        command(("convert", *arguments), window)


def own_group(said: Path) -> None:
    """Makes this process one like those that a shell starts, which prints into this file."""
    os.setsid()
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")


def command(arguments: Sequence[object], window: int) -> None:
    """The command with small work units, by workers however few are asked for."""
    sources.plan = lambda files, **settings: _plan(files, **settings | {"window_bytes": window})
    sys.argv = ["mdsmix", *map(str, arguments)]
    here.wants_processes = True
    run()


_plan = sources.plan


def kind_of(name: str) -> str:
    """What is written under this name."""
    if RECORD.fullmatch(name):
        return "record"
    return next((ending for ending in ENDINGS if name.endswith(ending)), "other")


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
        what, is_last = kind_of(self.name), False
        with log.open("a") as file:
            file.write(f"{who} {what}\n")
        if end and (who, what) == (end.who, end.what):
            with times.get_lock():
                times.value += 1
                number = times.value
            if end.side == "stall" and number >= end.count:
                time.sleep(SECONDS)
            is_last = number == end.count
        if is_last and end and end.side == "before":
            os.killpg(0, signal.SIGKILL)
        answer = write(self, *given)
        if is_last:
            os.killpg(0, signal.SIGKILL)
        return answer

    return writing

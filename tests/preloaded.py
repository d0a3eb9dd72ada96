"""Python programs without the seconds that their imports take: a process that has done these stands
by, and each program is a fork of it.

Run as `python -m tests.preloaded "import this; import that"`. A line of JSON on stdin is a program:
`place` is a folder with its standard input `in`, where `out` and `err` are written, beside its
arguments, folder and environment; its pid comes back. Or it is the pid of one that is waited for;
its exit code comes back.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SECONDS = 300
"""A program that is waited for longer hangs: it is ended by a signal, which its exit code says, and
its test fails.
"""


class Standing:
    """The process that has done these imports in an environment with such variables, started by the
    first program.
    """

    def __init__(
        self,
        imports: str,
        environment: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        self._command = [python, "-m", "tests.preloaded", imports]
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._process: Any = None

    def start(
        self, program: str, *arguments: object, given: str = "", **environment: str
    ) -> Program:
        """As `python -c program arguments` with `given` on its standard input."""
        place = TemporaryDirectory()
        (Path(place.name) / "in").write_text(given)
        order = {
            "program": program,
            "arguments": [*map(str, arguments)],
            "place": place.name,
            "cwd": os.getcwd(),
            "environment": dict(os.environ) | self._environment | environment,
        }
        return Program(self, self.ask(order), place)

    def ask(self, order: dict[str, Any] | int) -> int:
        with self._lock:
            if not self._process:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=Path(__file__).parents[1],
                    env=os.environ | self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            print(json.dumps(order), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())

    def close(self) -> None:
        if self._process:
            self._process.communicate()


@dataclass
class Program:
    """One that was started."""

    standing: Standing
    pid: int
    place: TemporaryDirectory[str]

    def said(self, stream: str) -> str:
        """What it has printed on `out` or `err`."""
        return (Path(self.place.name) / stream).read_text()

    def wait(self) -> subprocess.CompletedProcess[str]:
        hung = threading.Timer(SECONDS, os.kill, (self.pid, signal.SIGALRM))
        hung.daemon = True
        hung.start()
        with self.place:
            code = self.standing.ask(self.pid)
            hung.cancel()
            return subprocess.CompletedProcess([], code, self.said("out"), self.said("err"))


def _become(order: dict[str, Any]) -> None:
    """What a fresh process finds: its own standard streams, arguments, folder and environment."""
    place = Path(order["place"])
    for name, mode, standard in (("in", "r", 0), ("out", "w", 1), ("err", "w", 2)):
        with (place / name).open(mode) as file:
            os.dup2(file.fileno(), standard)
    sys.stdin = os.fdopen(0)
    sys.argv = ["-c", *order["arguments"]]
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    exec(compile(order["program"], "<string>", "exec"), {"__name__": "__main__"})


def main() -> None:
    exec(sys.argv[1])
    gc.freeze()
    orders = os.fdopen(os.dup(0))
    for order in map(json.loads, orders):
        if isinstance(order, int):
            print(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            _become(order)
            return
    os._exit(0)  # what was imported has nothing to say at its end


if __name__ == "__main__":
    main()

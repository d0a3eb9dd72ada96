"""Python programs that start without the seconds of their imports: one process imports the
libraries, and each program is a fork of it.

The process runs `python -m tests.preloaded "import this; import that"`. A line of JSON on its stdin
is either a program to start, or the pid of one to wait for. A program names a folder with its
standard input `in`, where `out` and `err` are written; the answer is its pid. The answer to a pid
is its exit code.
"""

from __future__ import annotations

import atexit
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
"""A program that runs longer hangs. It is ended by a signal, which its exit code shows, and its
test fails.
"""


class PreloadedPython:
    """A process that has done these imports in an environment with these variables. It is started
    by the first program.
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
        self, program: str, *arguments: object, stdin: str = "", **environment: str
    ) -> Program:
        """Start a program as by `python -c program arguments`."""
        folder = TemporaryDirectory()
        (Path(folder.name) / "in").write_text(stdin)
        order = {
            "program": program,
            "arguments": [*map(str, arguments)],
            "folder": folder.name,
            "cwd": os.getcwd(),
            "environment": dict(os.environ) | self._environment | environment,
        }
        return Program(self, self.send(order), folder)

    def send(self, order: dict[str, Any] | int) -> int:
        """Send a line to the process, and return its answer."""
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
    """A program that was started."""

    python: PreloadedPython
    pid: int
    folder: TemporaryDirectory[str]

    def read(self, stream: str) -> str:
        """Return the text that it has printed on `out` or `err`."""
        return (Path(self.folder.name) / stream).read_text()

    def wait(self) -> subprocess.CompletedProcess[str]:
        alarm = threading.Timer(SECONDS, os.kill, (self.pid, signal.SIGALRM))
        alarm.daemon = True
        alarm.start()
        with self.folder:
            code = self.python.send(self.pid)
            alarm.cancel()
            return subprocess.CompletedProcess([], code, self.read("out"), self.read("err"))


def _run(order: dict[str, Any]) -> None:
    """Run a program in this fork, with its own standard streams, arguments, folder and
    environment.
    """
    folder = Path(order["folder"])
    for name, mode, descriptor in (("in", "r", 0), ("out", "w", 1), ("err", "w", 2)):
        with (folder / name).open(mode) as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdin = os.fdopen(0)
    sys.argv = ["-c", *order["arguments"]]
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    try:
        exec(compile(order["program"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):  # a message, which Python prints
            raise
        code = end.code or 0
    _end(code)


def _end(code: int) -> None:
    """End this fork as Python does, up to its last step: with torch imported, it takes 0.4 s of
    processor time to free the objects of all modules, one by one.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    exec(sys.argv[1])
    gc.freeze()
    orders = os.fdopen(os.dup(0))
    for order in map(json.loads, orders):
        if isinstance(order, int):
            _, status = os.waitpid(order, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if not pid:
            _run(order)
        print(pid, flush=True)
    os._exit(0)  # without the exit handlers of the imported libraries


if __name__ == "__main__":
    main()

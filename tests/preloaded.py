"""Python programs that start without the seconds of their imports: one process imports the
libraries, and each program is a fork of it.

The process runs `python -m tests.preloaded "import this; import that"`. A line of JSON on its stdin
is a program to start, the pid of one to wait for, or a list of pids. A program names a folder with
its standard input `in`, where `out` and `err` are written; the answer is its pid. The answer to a
pid is its exit code. The answer to a list is the pid of the program that ends first.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SECONDS = 300
"""A program that runs longer hangs. It is ended by a signal, which its exit code shows, and its
test fails. It prints first where its threads are.
"""
SECONDS_TOGETHER = 60
"""Programs that wait for each other and do not end by then, of which none has failed, hang. They
take 2 s.
"""
SECONDS_AFTER_A_FAILURE = 5
"How long the others may still run when one of them has failed: they may fail by themselves."


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

    def send(self, order: dict[str, Any] | int | list[int]) -> int:
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
        with self.folder, end_after(SECONDS, [self]):
            code = self.python.send(self.pid)
            return subprocess.CompletedProcess([], code, self.read("out"), self.read("err"))


@contextmanager
def end_after(seconds: float, programs: Sequence[Program]) -> Iterator[None]:
    """End programs by a signal if the `with` block takes longer. None of them has been waited for
    before, so their pids are theirs.
    """

    def end() -> None:
        for program in programs:
            os.kill(program.pid, signal.SIGALRM)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def wait_together(
    programs: Sequence[Program], seconds: float = SECONDS_TOGETHER
) -> list[subprocess.CompletedProcess[str]]:
    """Wait for programs of one PreloadedPython that wait for each other, such as the ranks of a
    training run. If one fails, the others are ended after SECONDS_AFTER_A_FAILURE.

    Raises AssertionError with the end of the stderr of the program that failed first.

    Args:
        seconds: after which those that still run hang, although none has failed.
    """
    python = programs[0].python
    running = list(programs)
    results = dict[int, subprocess.CompletedProcess[str]]()
    failure = ""
    while running:
        with end_after(SECONDS_AFTER_A_FAILURE if failure else seconds, running):
            pid = python.send([program.pid for program in running])
        (ended,) = (program for program in running if program.pid == pid)
        running.remove(ended)
        result = results[pid] = ended.wait()
        if result.returncode and not failure:
            number = programs.index(ended)
            failure = f"program {number} ended with {result.returncode}: {result.stderr[-3000:]}"
    assert not failure, failure
    return [results[program.pid] for program in programs]


def _run(order: dict[str, Any]) -> None:
    """Run a program in this fork, with its own standard streams, arguments, folder and
    environment.
    """
    folder = Path(order["folder"])
    for name, mode, descriptor in (("in", "r", 0), ("out", "w", 1), ("err", "w", 2)):
        with (folder / name).open(mode) as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdin = os.fdopen(0)
    faulthandler.register(signal.SIGALRM, chain=True)
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


def _find_ended(pids: Sequence[int]) -> int:
    """Wait until one of these forks ends. Return its pid; its exit code can still be asked for."""
    while True:
        for pid in pids:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                return pid
        time.sleep(0.02)


def main() -> None:
    exec(sys.argv[1])
    gc.freeze()
    orders = os.fdopen(os.dup(0))
    for order in map(json.loads, orders):
        if isinstance(order, list):
            print(_find_ended(order), flush=True)
            continue
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

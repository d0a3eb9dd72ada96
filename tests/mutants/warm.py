"""A process that has imported what tests import, all but mdsmix, and forks one run of pytest for every line on stdin.

Of the 5 s of a run with torch 4 are its import. What runs in a fork is loaded after the fork: the mutant, and the tests.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TextIO

import pytest


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            _run(asked["arguments"], asked["output"], asked["notes"])
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class _Notes:
    """Which test begins and which failed, a line each and at once: a run that hangs names its test."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(f"began {nodeid}", file=self._lines)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"failed {report.nodeid}", file=self._lines)


def _run(arguments: list[str], output: str, notes: str) -> None:
    """In a session of its own, so that all that it starts can be ended with it."""
    os.setsid()
    to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, to), (2, to)):
        os.dup2(source, descriptor)
    code = 3
    try:
        with Path(notes).open("w", buffering=1) as lines:
            code = int(pytest.main(arguments, plugins=[_Notes(lines)]))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()

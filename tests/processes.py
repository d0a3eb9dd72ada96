"""Runs a command as a user starts it, and measures the memory of it and of all processes that it
starts. It reads /proc, so it works on Linux only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PROGRESS = re.compile(r"\S+: \d+%, ")
"A line of progress, if stderr is not a terminal."
MDSMIX = (sys.executable, "-c", "from mdsmix.cli.main import run; run()")
SET_UNIT_SIZE = (
    "from mdsmix import sources; plan = sources.plan_units; sources.plan_units = "
    "lambda files, **settings: plan(files, **settings | {{'window_bytes': {}}})"
)
"A beginning of a program that sets the bytes of a work unit."


def run_and_measure(*arguments: object, seconds: float, window: int = 96 << 20) -> tuple[str, int]:
    """Run `mdsmix` with these arguments. It has to succeed, and to print nothing but progress to
    stderr. Return its output and its peak memory in bytes.

    Args:
        seconds: after so many it is killed, and fails.
        window: bytes of a work unit.
    """
    python, option, program = MDSMIX
    command = [python, option, f"{SET_UNIT_SIZE.format(window)}; {program}", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = 0
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        peak = max(peak, measure_tree(process.pid))
        time.sleep(0.02)
    process.kill()
    printed, errors = process.communicate()
    complaints = [line for line in errors.splitlines() if not PROGRESS.match(line)]
    assert (process.returncode, complaints) == (0, [])
    return printed, peak


def measure_tree(pid: int) -> int:
    """Return the memory of a process and its descendants in bytes; a page that several share counts
    once. 0 if it has ended.
    """
    return sum(map(read_pss, _list_tree(pid)))


def _list_tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return
    for child in children:
        yield from _list_tree(int(child))


def read_pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))

"""A command as a user starts it, and what it and all that it starts take of memory: /proc, so on
Linux only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PROGRESS = re.compile(r"\S+: \d+%, ")
"A line every ten seconds, where stderr is no terminal."
MDSMIX = (sys.executable, "-c", "from mdsmix.cli.main import run; run()")
SET_UNIT_SIZE = (
    "from mdsmix import sources; plan = sources.plan_units; "
    "sources.plan_units = lambda files, **settings: plan(files, **settings | {{'window_bytes': {}}})"
)
"What comes before, for work units of so many bytes."


def run_and_measure(*arguments: object, seconds: float, window: int = 96 << 20) -> tuple[str, int]:
    """Runs `mdsmix` with these arguments to its good end, without a complaint; returns what it
    printed and its most memory in bytes. `window`: bytes of a work unit.
    """
    python, option, program = MDSMIX
    command = [python, option, f"{SET_UNIT_SIZE.format(window)}; {program}", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak, deadline = 0, time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        peak = max(peak, measure_tree(process.pid))
        time.sleep(0.02)
    process.kill()
    printed, said = process.communicate()
    complaints = [line for line in said.splitlines() if not PROGRESS.match(line)]
    assert (process.returncode, complaints) == (0, [])
    return printed, peak


def measure_tree(pid: int) -> int:
    """Bytes that the tree of processes holds, a page that several share counted once; 0 where it is
    gone.
    """
    return sum(map(_held, _tree(pid)))


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return
    for child in children:
        yield from _tree(int(child))


def _held(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))

"""What a process and all that it started take of memory, seen from outside: /proc, so on Linux only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def memory_of(pid: int) -> int:
    """Bytes that the tree of processes holds, a page that several share counted once; 0 where it is gone."""
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

"""One command, measured from outside as a whole process tree: wall and CPU seconds, peak memory,
who disturbed it.

Linux only. Memory is the sum of PSS over the tree, sampled thirty times a second, which costs up to
a third of a core; so it is taken on a run whose time does not count. CPU seconds hardly depend on
what else runs, wall seconds do: the CPU seconds of other processes during the run are recorded
beside them.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PERIOD = 0.03
"""Seconds. Workers swing by 40 MB with every batch: at 0.1 s a run of one second looked 20 MB
smaller than it was.
"""
CORES = len(os.sched_getaffinity(0))
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one command cost."""

    wall: float
    "Seconds until its first process ended."
    cpu: float
    "User and system seconds of all its processes."
    peak: int
    "Bytes of PSS, 0 where it was not sampled."
    others: float
    "Share of the machine's CPU that other processes took meanwhile."


def measure(
    command: Sequence[str | Path], env: Mapping[str, str], log: Path, memory: bool = False
) -> Run:
    """Runs the command, its output in `log`; RuntimeError with the log's end where it fails."""
    _adopt_orphans()
    os.sync()
    beside = set(_children(os.getpid()))
    sampler = _Sampler(beside) if memory else None
    busy, own, tree = _busy(), time.process_time(), _children_cpu()
    began = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        code = process.wait()
        wall = time.perf_counter() - began
        _reap(beside)
    others = _busy() - busy - (time.process_time() - own) - (_children_cpu() - tree)
    peak = sampler.stop() if sampler else 0
    if code:
        tail = log.read_text("utf-8", "replace")[-2000:]
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {code}:\n{tail}")
    cpu = _children_cpu() - tree
    return Run(wall=wall, cpu=cpu, peak=peak, others=max(0.0, others / wall / CORES))


class _Sampler:
    """The largest sum of PSS over this process's descendants, but for those who ran `beside`
    before.
    """

    def __init__(self, beside: set[int]) -> None:
        self._peak, self._beside = 0, beside
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._done.wait(PERIOD):
            ours = (child for child in _children(os.getpid()) if child not in self._beside)
            tree = (pid for child in ours for pid in (child, *descendants(child)))
            self._peak = max(self._peak, sum(map(_pss, tree)))


def descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from descendants(child)


def _children(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, children.read_text().split())
        except OSError:  # the process ended just now
            continue


def _pss(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # the process ended just now
        return 0
    sizes = [line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")]
    return int(sizes[0]) * 1024 if sizes else 0


def _adopt_orphans() -> None:
    """A process whose parent ended becomes our child, so that its memory and CPU seconds count."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _reap(beside: set[int]) -> None:
    """Waits for what the command left behind: servers of multiprocessing end by themselves. A store
    that runs `beside` does not.
    """
    while left := set(_children(os.getpid())) - beside:
        os.waitpid(left.pop(), 0)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _busy() -> float:
    """CPU seconds of the whole machine that were not idle, stolen ones included."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

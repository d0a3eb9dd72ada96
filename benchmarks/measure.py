"""Measures a command from outside, with its whole process tree: wall and CPU seconds, peak memory,
and the load of other processes.

Linux only. Memory is the sum of PSS over the tree, sampled thirty times a second. This costs up to
a third of a core, so memory is measured in a run whose time does not count. Other work on the
machine hardly affects CPU seconds, but it affects wall seconds. So the CPU seconds of other
processes during the run are recorded too.
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
"""Seconds. The memory of workers varies by 40 MB with every batch: with 0.1 s, a run of one second
looked 20 MB smaller than it was.
"""
CORES = len(os.sched_getaffinity(0))
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The cost of one command."""

    wall: float
    "Seconds until its first process ended."
    cpu: float
    "User and system seconds of all its processes."
    peak: int
    "Bytes of PSS, 0 if it was not sampled."
    foreign_share: float
    "Share of the machine's CPU that other processes took during the run."


def measure(
    command: Sequence[str | Path], env: Mapping[str, str], log: Path, memory: bool = False
) -> Run:
    """Run the command with its output in `log`.

    Raises RuntimeError with the end of the log if the command fails.
    """
    _adopt_orphans()
    os.sync()
    unrelated = set(_children(os.getpid()))
    sampler = _Sampler(unrelated) if memory else None
    busy, own, tree = _busy(), time.process_time(), _children_cpu()
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        code = process.wait()
        wall = time.perf_counter() - began
        _reap(unrelated)
    foreign = _busy() - busy - (time.process_time() - own) - (_children_cpu() - tree)
    peak = sampler.stop() if sampler else 0
    if code:
        tail = log.read_text("utf-8", "replace")[-2000:]
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {code}:\n{tail}")
    cpu = _children_cpu() - tree
    foreign_share = max(0.0, foreign / wall / CORES)
    return Run(wall=wall, cpu=cpu, peak=peak, foreign_share=foreign_share)


class _Sampler:
    """Samples the sum of PSS over this process's descendants and keeps the largest. The `unrelated`
    ones ran before and do not count.
    """

    def __init__(self, unrelated: set[int]) -> None:
        self._peak = 0
        self._unrelated = unrelated
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._done.wait(PERIOD):
            ours = (child for child in _children(os.getpid()) if child not in self._unrelated)
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
        except OSError:  # the process has just ended
            continue


def _pss(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # the process has just ended
        return 0
    sizes = [line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")]
    return int(sizes[0]) * 1024 if sizes else 0


def _adopt_orphans() -> None:
    """Make a process whose parent ended our child, so that its memory and CPU seconds count."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _reap(unrelated: set[int]) -> None:
    """Wait for the processes that the command left: servers of multiprocessing, which end by
    themselves. The `unrelated` ones, such as a store, do not end.
    """
    while processes := set(_children(os.getpid())) - unrelated:
        os.waitpid(processes.pop(), 0)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _busy() -> float:
    """Return the CPU seconds in which the whole machine was not idle, stolen ones included."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

"""Test whether one parent process keeps many workers busy, and measure the cost of each worker.

The tasks sleep, so that two cores are enough.

python -m benchmarks.cores [--workers N] [--tasks N] [--seconds S]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from timeit import timeit

from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.memory import MemoryBudget
from mdsmix.engines.tasks import Attempt, Reporter

BATCHES = 20
"Progress messages of a task; a work unit sends one after each batch."


@dataclass(frozen=True, slots=True)
class Sleep:
    """A task that sleeps for some seconds and needs no processor."""

    number: int
    seconds: float

    @property
    def name(self) -> str:
        return f"task {self.number}"

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], tuple[float, float]]:
        began = time.monotonic()
        for _ in range(BATCHES):
            time.sleep(self.seconds / BATCHES)
            reporter.on_progress(1, 1)
        ended = time.monotonic()
        return lambda: (began, ended)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cores", description=__doc__)
    parser.add_argument("--workers", type=int, default=128)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    tasks = [Sleep(number, arguments.seconds) for number in range(arguments.tasks)]
    engine = LocalEngine(PoolSettings(workers=arguments.workers, memory=1 << 40))
    used, began = time.process_time(), time.monotonic()
    spans = [span for _, span in engine.run(tasks, lambda *_: None, print)]
    wall, cpu = time.monotonic() - began, time.process_time() - used
    engine.close()
    slept = sum(end - start for start, end in spans)
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    messages = arguments.tasks * (BATCHES + 1)
    workers = arguments.workers
    print(f"{workers} workers, {arguments.tasks} tasks of {arguments.seconds} s: {wall:.1f} s")
    busy = slept / workers / (last - first)
    print(f"busy: {busy:.0%} of the time from the first start to the last end")
    print(
        f"the parent: {cpu:.1f} CPU s, {cpu / wall:.0%} of a processor, "
        f"{1e6 * cpu / messages:.0f} us per message"
    )
    fork_ms = 1000 * timeit(_fork, number=50) / 50
    memory_ms = 1000 * _measure_memory(workers)
    print(f"a fork: {fork_ms:.1f} ms; measuring memory: {memory_ms:.1f} ms")


def _fork() -> None:
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)


def _measure_memory(workers: int) -> float:
    """Return the seconds it takes to measure the memory of this many processes."""
    pids = []
    for _ in range(workers):
        if not (pid := os.fork()):
            time.sleep(600)
            os._exit(0)
        pids.append(pid)
    try:
        return timeit(lambda: MemoryBudget(1 << 40).update(pids, at_once=True), number=5) / 5
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

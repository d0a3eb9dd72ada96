"""Whether one parent keeps many workers busy, and what each of them costs it: tasks that sleep, so
that two cores are enough.

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
"What a task says while it is at work, as a unit says it after each batch."


@dataclass(frozen=True, slots=True)
class Sleep:
    """A task that takes so many seconds and no processor."""

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
    given = parser.parse_args()
    tasks = [Sleep(number, given.seconds) for number in range(given.tasks)]
    engine = LocalEngine(PoolSettings(workers=given.workers, memory=1 << 40))
    used, began = time.process_time(), time.monotonic()
    spans = [span for _, span in engine.run(tasks, lambda *_: None, print)]
    wall, cpu = time.monotonic() - began, time.process_time() - used
    engine.close()
    slept = sum(end - start for start, end in spans)
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    messages = given.tasks * (BATCHES + 1)
    print(f"{given.workers} workers, {given.tasks} tasks of {given.seconds} s: {wall:.1f} s")
    print(f"at work: {slept / given.workers / (last - first):.0%} of the time between both ends")
    print(
        f"the parent: {cpu:.1f} CPU s, {cpu / wall:.0%} of a processor, {1e6 * cpu / messages:.0f} us a message"
    )
    print(
        f"a fork: {1000 * timeit(_fork, number=50) / 50:.1f} ms; a look at memory: {1000 * _look(given.workers):.1f} ms"
    )


def _fork() -> None:
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)


def _look(workers: int) -> float:
    """Seconds of a look at the memory of so many processes."""
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

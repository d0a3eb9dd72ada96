"""The parent's side of a local worker process: starting it, talking to it, ending it.

On Linux a worker is forked in 10 ms and shares what its parent has loaded; elsewhere it is spawned and loads it itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from mdsmix.engines.attempts import Attempt, Place
from mdsmix.engines.base import Task
from mdsmix.engines.channel import STOP_SIGNALS, work
from mdsmix.engines.hang import Pulse, sign_of
from mdsmix.engines.memory import LIFE_BYTES, MemoryBudget, resident

GRACE_SECONDS = 5
"A worker that is stopped has so long to remove what it has half written; then it is killed."


@dataclass(slots=True, eq=False)
class Worker:
    """One process, and what it has in work."""

    process: Any
    pipe: Connection
    pool_size: int
    "How many workers it was started to share the processors with."
    share: int
    "Bytes that it may hold."
    at_first: int
    "Bytes that it held when it started: those of its parent."
    number: int = 0
    "Of the task in work."
    task: Any = None
    attempt: Attempt = field(default_factory=Attempt)
    place: Place | None = None
    "Of the records in work."
    waits: bool = False
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def is_worn(self) -> bool:
        """Whether it has grown so much that a new one should take its place."""
        held = resident(self.pid)
        return held > self.share or held - self.at_first > LIFE_BYTES

    def give(self, number: int, attempt: Attempt, task: Task[Any]) -> None:
        self.number, self.attempt, self.task, self.place = number, attempt, task, None
        self.pulse.beat()
        with suppress(ConnectionError):  # it has died, and `receive` will say so
            self.pipe.send((task, attempt))

    def receive(self) -> tuple[Any, ...]:
        """The next message, ("died",) where none will come."""
        self.pulse.beat()
        try:
            return tuple(self.pipe.recv())
        except (EOFError, ConnectionError):
            return ("died",)

    def pause(self, waits: bool) -> None:
        """Makes it wait before its next records, or go on."""
        if waits != self.waits:
            self.waits = waits
            with suppress(ConnectionError):
                self.pipe.send(waits)

    def hangs(self) -> str | None:
        """Why it is taken for hung, None where it is not."""
        size = self.place.size if self.place else None
        return self.pulse.look(partial(sign_of, self.pid), size, self.waits)

    def dismiss(self) -> None:
        """Lets it end by itself and does not wait: freeing much memory takes it 30 ms."""
        with suppress(ConnectionError):
            self.pipe.send(None)
        self.pipe.close()

    def end(self) -> str:
        """Returns when the process has ended, killed if need be, with how it ended."""
        self.process.join(GRACE_SECONDS)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        self.process.close()
        if code >= 0:
            return f"exit code {code}"
        cause = ", most likely for lack of memory" if code == -signal.SIGKILL else ""
        return f"signal {signal.Signals(-code).name}{cause}"


def stop_all(workers: Sequence[Worker]) -> None:
    """Stops workers that are at work; all of them together have GRACE_SECONDS."""
    for worker in workers:
        worker.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.process.join(max(0, deadline - time.monotonic()))
        worker.process.kill()


def start_method() -> str:
    """macOS can fork too, but its own libraries may crash in a forked process, so Python spawns there by default."""
    return "fork" if sys.platform.startswith("linux") else "spawn"


def start_worker(pool_size: int, budget: MemoryBudget) -> Worker:
    context: Any = multiprocessing.get_context(start_method())
    ours, its = context.Pipe()
    share = budget.share(budget.allowed_workers(pool_size))
    arguments = (its, pool_size, os.getpid(), budget.cap, share)
    process = context.Process(target=work, args=arguments, daemon=True)
    with _signals_blocked():
        process.start()
    its.close()
    return Worker(process, ours, pool_size, share, resident(os.getpid()))


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A forked worker must not run its parent's handlers, which clean up after the parent. It unblocks the signals when it
    has handlers of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""The engine of this machine: a pool of worker processes. It hands out tasks, replaces workers that
die or hang, and passes on a sentence of several workers once.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from typing import Any

from mdsmix.engines.memory import LEAST_BYTES, PERIOD, MemoryBudget, measure_rss
from mdsmix.engines.tasks import (
    NO_ACTIVE_RECORDS,
    Attempt,
    OnProgress,
    R,
    Task,
    TaskResults,
    WorkerEnd,
    plan_next_attempt,
)
from mdsmix.engines.workers import QueuedTask, Worker, start_worker, stop_workers
from mdsmix.messages import Say


@dataclass(frozen=True, kw_only=True)
class SideProcess:
    """A process that all workers ask and that is not a worker itself: it counts the tokens of
    images. It can be pickled.
    """

    memory: int
    "Bytes that it takes."
    start: Callable[[], AbstractContextManager[None]]
    "Starts the process, and ends it with the block."
    pids: Callable[[], Sequence[int]]
    "Gives the ids of the processes that were started."


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """How many workers may work, and within how much memory."""

    workers: int
    memory: int
    "Bytes that this process and its workers may use together."
    side: SideProcess | None = None
    "Part of `memory` is kept free for this process."
    set_aside: bool = False
    """A record that kills or hangs its worker is set aside (--quarantine-crashes). False: the first
    one ends the run.
    """


class LocalEngine:
    """Worker processes of this machine. `begin` opens a run, `step` continues it, `stop` ends it.
    Workers that have finished a task wait in `idle`, also between two runs.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.budget = MemoryBudget(settings.memory)
        if settings.side:
            self.budget = MemoryBudget(
                settings.memory, reserved=settings.side.memory, side_pids=settings.side.pids
            )
        self.workers: list[Worker] = []
        "Workers that have a task: they do it, or store it."
        self.idle: list[Worker] = []
        "Workers without a task."
        self.queue = deque[QueuedTask]()
        "Waiting tasks. A task whose worker died is put before all others."
        self._size = 0
        "Workers of the current run."
        self._warn_above = settings.memory
        "Bytes above which the next warning of too little memory is due."

    @property
    def peak(self) -> int:
        return self.budget.peak

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        self.begin(on_progress, say, max_workers=len(tasks))
        for number, task in enumerate(tasks):
            self.add(number, task)
        try:
            while self.queue or self.workers:
                yield from self.step()
        finally:
            self.stop()

    def begin(self, on_progress: OnProgress, say: Say, max_workers: int = sys.maxsize) -> None:
        """Open a run. Idle workers are reused if they are all alive and this run has as many
        workers as the last one, since that number set their threads; otherwise new ones are
        started.

        Args:
            max_workers: how many workers have something to do.
        """
        size = min(self.settings.workers, max_workers)
        if size != self._size or not all(worker.process.is_alive() for worker in self.idle):
            self.close()
        self._on_progress = on_progress
        self._say = say
        self._say_once = cache(say)
        self._size = size
        self.queue.clear()

    def add(self, number: int, task: Task[Any]) -> None:
        """Put a task at the end of the queue."""
        self.queue.append(QueuedTask(number, Attempt(), task))

    def step(self) -> Iterator[tuple[int, Any]]:
        """Give tasks to workers, and yield (number, result) of tasks that have ended. Return after
        PERIOD if nothing happens.
        """
        self._assign_tasks()
        ready = wait([worker.pipe for worker in self.workers], PERIOD)
        for worker in [worker for worker in self.workers if worker.pipe in ready]:
            yield from self._handle_message(worker)
        self.budget.update(self._pids)
        self._replace_hung()

    def stop(self) -> None:
        """Stop the workers that have a task, and return when their processes have ended."""
        self.budget.update(self._pids, at_once=True)
        stopped = self.workers
        self.workers = []
        stop_workers(stopped)

    def close(self) -> None:
        """End the idle workers; the next run starts new ones."""
        idle = self.idle
        self.idle = []
        stop_workers(idle)

    def _assign_tasks(self) -> None:
        """Give tasks to as many workers as memory allows. Workers beyond that number wait before
        their next records.
        """
        allowed = self.budget.allowed_workers(self._size)
        for worker in self.workers[:allowed]:
            if self.queue and not worker.current and not worker.needs_restart:
                worker.assign(self.queue.popleft())
        while self.queue and len(self.workers) < allowed:
            worker = self.idle.pop() if self.idle else start_worker(self._size, self.budget)
            worker.assign(self.queue.popleft())
            self.workers.append(worker)
        for position, worker in enumerate(self.workers):
            worker.pause(position >= allowed)

    def _handle_message(self, worker: Worker) -> Iterator[tuple[int, Any]]:
        """Receive one message of a worker, and yield the task's number and result if the task has
        ended.
        """
        match worker.receive():
            case "progress", size, tokens:
                self._on_progress(size, tokens)
            case "say", sentence:
                self._say_once(sentence)
            case "records", records:
                worker.records = records
            case "failed", error:
                raise error
            case ("storing",):
                worker.storing = worker.current
                worker.current = None
            case "done", result:
                number = worker.finish_storing()
                self._after_task(worker)
                yield number, result
            case _:
                self._replace(worker, WorkerEnd(how=worker.join()))

    def _after_task(self, worker: Worker) -> None:
        """Make a worker without another task idle, or, if it has grown too much (`needs_restart`),
        end it, which takes 30 ms. Warn if the run used more memory than the cap.
        """
        self.budget.on_finished_unit(self._pids, worker.needs_restart)
        if not worker.current:
            self.workers.remove(worker)
            if worker.needs_restart:
                stop_workers([worker])
            else:
                # A pause makes a large worker return freed memory, since the end of a run takes
                # some itself. A small one keeps it for the next stream: 4 ms a stream.
                worker.pause(measure_rss(worker.pid) > LEAST_BYTES)
                self.idle.append(worker)
        if self.budget.peak > self._warn_above:
            self._warn_above = self.budget.sufficient_cap
            self._say(
                f"WARNING: the run used {self.budget.peak / 1e6:,.0f} MB of memory, more than "
                f"--memory allows ({self.budget.cap / 1e6:,.0f} MB): one worker needs that much "
                f"for one record and the rows of its unit; pass --memory "
                f"{self._warn_above >> 20}MiB, or split the largest records"
            )

    def _replace_hung(self) -> None:
        for worker in list(self.workers):
            reason = worker.find_hang()
            if reason:
                worker.process.kill()
                worker.join()
                self._say(
                    f"a worker process hung ({reason}) on the work unit "
                    f"{worker.tasks[0].task.name}, {worker.records or NO_ACTIVE_RECORDS}; "
                    "it was ended, and another one does the unit"
                )
                self._replace(worker, WorkerEnd(how=reason, hung=True))

    def _replace(self, worker: Worker, end: WorkerEnd) -> None:
        """Put the tasks of a dead worker first in the queue. The one that it did, or otherwise the
        one that it stored, gets its next attempt.

        Raises MdsmixError if the unit is given up.
        """
        self.workers.remove(worker)
        blamed, *innocent = worker.tasks
        attempt = plan_next_attempt(
            blamed.attempt, worker.records, end, self.settings.set_aside, blamed.task.name
        )
        self.queue.extendleft([*innocent, blamed._replace(attempt=attempt)])

    @property
    def _pids(self) -> list[int]:
        return [worker.pid for worker in [*self.workers, *self.idle]]

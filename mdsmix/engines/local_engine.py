"""The engine of this machine: a pool of worker processes. It hands out tasks, replaces workers that
die or hang, and passes on a sentence of several workers once.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
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
class PoolSettings:
    """How many workers may work, and within how much memory."""

    workers: int
    memory: int
    "Bytes that this process and its workers may hold together."
    aside: int = 0
    "Bytes of `memory` that are kept free for a process that counts the tokens of images."
    set_aside: bool = False
    """A record that kills or hangs its worker is set aside (--quarantine-crashes). False: the first
    one ends the run.
    """


class LocalEngine:
    """Worker processes of this machine. `begin` opens a run, `step` goes on with it, `stop` ends
    it. Workers that have finished a task wait in `idle`, also between two runs.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.budget = MemoryBudget(settings.memory, settings.aside)
        self.workers: list[Worker] = []
        "Workers that have a task, in work or being stored."
        self.idle: list[Worker] = []
        "Workers without a task."
        self.queue = deque[QueuedTask]()
        "Waiting tasks. A task whose worker died is put before all others."
        self._size, self._told = 0, settings.memory

    @property
    def peak(self) -> int:
        return self.budget.peak

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        self.begin(on_progress, say, most=len(tasks))
        for number, task in enumerate(tasks):
            self.add(number, task)
        try:
            while self.queue or self.workers:
                yield from self.step()
        finally:
            self.stop()

    def begin(self, on_progress: OnProgress, say: Say, most: int = sys.maxsize) -> None:
        """Opens a run. `most`: how many workers have something to do. Idle workers are used again
        where this run has as many workers as the last one, since that number set their threads, and
        all of them live; else new ones are started.
        """
        size = min(self.settings.workers, most)
        if size != self._size or not all(worker.process.is_alive() for worker in self.idle):
            self.close()
        self._on_progress, self._say, self._say_once = on_progress, say, cache(say)
        self._size = size
        self.queue.clear()

    def add(self, number: int, task: Task[Any]) -> None:
        self.queue.append(QueuedTask(number, Attempt(), task))

    def step(self) -> Iterator[tuple[int, Any]]:
        """Gives workers tasks, and yields (number, result) of tasks that have ended. Returns after
        PERIOD where nothing happens.
        """
        self._fill()
        ready = wait([worker.pipe for worker in self.workers], PERIOD)
        for worker in [worker for worker in self.workers if worker.pipe in ready]:
            yield from self._heed(worker)
        self.budget.look(self._pids)
        self._end_hung()

    def stop(self) -> None:
        """Stops the workers that have a task, and returns when their processes have ended."""
        self.budget.look(self._pids, at_once=True)
        stopped, self.workers = self.workers, []
        stop_workers(stopped)

    def close(self) -> None:
        """Ends the idle workers; the next run starts new ones."""
        idle, self.idle = self.idle, []
        stop_workers(idle)

    def _fill(self) -> None:
        """Gives tasks to as many workers as memory allows. Workers beyond that number wait before
        their next records.
        """
        allowed = self.budget.allowed_workers(self._size)
        for worker in self.workers[:allowed]:
            if self.queue and not worker.in_work and not worker.is_worn:
                worker.give(self.queue.popleft())
        while self.queue and len(self.workers) < allowed:
            worker = self.idle.pop() if self.idle else start_worker(self._size, self.budget)
            worker.give(self.queue.popleft())
            self.workers.append(worker)
        for position, worker in enumerate(self.workers):
            worker.pause(position >= allowed)

    def _heed(self, worker: Worker) -> Iterator[tuple[int, Any]]:
        """Takes one message of a worker; yields the task's number and result where the task has
        ended.
        """
        match worker.receive():
            case "progress", size, tokens:
                self._on_progress(size, tokens)
            case "say", sentence:
                self._say_once(sentence)
            case "records", place:
                worker.place = place
            case "failed", error:
                raise error
            case ("storing",):
                worker.storing, worker.in_work = worker.in_work, None
            case "done", result:
                number = worker.stored()
                self._go_on(worker)
                yield number, result
            case _:
                self._replace(worker, WorkerEnd(how=worker.end()))

    def _go_on(self, worker: Worker) -> None:
        """After a task: a worker without another one becomes idle, or, where it has grown too much
        (`is_worn`), ends, which takes 30 ms. Warns where the run held more memory than the cap.
        """
        self.budget.on_finished_unit(self._pids, worker.is_worn)
        if not worker.in_work:
            self.workers.remove(worker)
            if worker.is_worn:
                stop_workers([worker])
            else:
                # A large one is told to wait: it returns freed memory, since the end of a run takes
                # some itself. A small one keeps it for the next stream: 4 ms a stream.
                worker.pause(measure_rss(worker.pid) > LEAST_BYTES)
                self.idle.append(worker)
        if self.budget.peak > self._told:
            self._told = self.budget.holding
            self._say(
                f"WARNING: {self.budget.peak / 1e6:,.0f} MB of memory were held, more than --memory allows "
                f"({self.budget.cap / 1e6:,.0f} MB): one worker at one record and the rows of its unit takes so much; pass --memory "
                f"{self._told >> 20}MiB, or split the largest records"
            )

    def _end_hung(self) -> None:
        for worker in list(self.workers):
            if why := worker.hangs():
                worker.process.kill()
                worker.end()
                self._say(
                    f"a worker process hung ({why}) over the work unit {worker.tasks[0].task.name}, "
                    f"{worker.place or NO_ACTIVE_RECORDS}; it was ended, and another one does the unit"
                )
                self._replace(worker, WorkerEnd(how=why, hung=True))

    def _replace(self, worker: Worker, end: WorkerEnd) -> None:
        """Puts the tasks of a dead worker first in the queue. The one in work, or else the one
        being stored, gets its next attempt; MdsmixError where it is given up (`after_death`).
        """
        self.workers.remove(worker)
        blamed, *others = worker.tasks
        set_aside, name = self.settings.set_aside, blamed.task.name
        again = plan_next_attempt(blamed.attempt, worker.place, end, set_aside, name)
        self.queue.extendleft([*others, blamed._replace(attempt=again)])

    @property
    def _pids(self) -> list[int]:
        return [worker.pid for worker in [*self.workers, *self.idle]]

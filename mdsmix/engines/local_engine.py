"""The engine of this machine: a pool of worker processes. It hands out tasks, and replaces workers
that die or hang. A sentence that several workers send to the user is shown once.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from multiprocessing.connection import wait
from typing import Any

from mdsmix.engines.assistants import (
    LEAST_NEW_SHARE,
    LEAST_SHARE,
    MOST_UNTAKEN,
    count_sharers,
    find_shared_bytes,
)
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
from mdsmix.frozen import frozen
from mdsmix.interrupts import delay_signals
from mdsmix.messages import Say


@frozen(kw_only=True)
class SideProcess:
    """Describes an extra process of a run, which counts the tokens of images for all workers. It
    does no work units itself. The description can be pickled.
    """

    memory: int
    "Bytes of memory that the process takes."
    start: Callable[[], AbstractContextManager[None]]
    "Returns a context manager: the process runs inside of its `with` block."
    pids: Callable[[], Sequence[int]]
    "Returns the ids of the processes that run."


@frozen(kw_only=True)
class PoolSettings:
    """The number of workers, and the memory that they may use."""

    workers: int
    memory: int
    "Bytes that this process and its workers may use together."
    side: SideProcess | None = None
    "A process that serves all workers. A part of `memory` is kept free for it."
    set_aside: bool = False
    """True: a record that kills or hangs its worker is put into quarantine (--quarantine-crashes).
    False: the first such record ends the run.
    """


class LocalEngine:
    """Worker processes of this machine. `begin` starts a run, `step` continues it, `stop` ends it.
    Workers without a task wait in `idle`, even between two runs.
    """

    def __init__(self, settings: PoolSettings) -> None:
        """Store the settings. No worker is started yet."""
        self.settings = settings
        self.budget = MemoryBudget(settings.memory)
        if settings.side:
            self.budget = MemoryBudget(
                settings.memory, reserved=settings.side.memory, side_pids=settings.side.pids
            )
        self.workers: list[Worker] = []
        "Workers that have a task: they do it, or store its output."
        self.assistants: list[Worker] = []
        "Workers that do parts of the tasks of others."
        self.idle: list[Worker] = []
        "Workers without a task, which assist no other."
        self._ending: list[Worker] = []
        "Workers that `begin_close` has told to end."
        self.queue = deque[QueuedTask]()
        "Waiting tasks. A task whose worker died is put before all others."
        self._size = 0
        "The most workers of the current run."
        self._warn_above = settings.memory
        "If the run uses more bytes than this, it warns that the cap on memory was exceeded."

    @property
    def peak(self) -> int:
        """The most bytes that all processes of the run have used together so far."""
        return self.budget.peak

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        """Do the tasks, and yield (position, result) of each when it ends (see `Engine.run`)."""
        self.begin(on_progress, say, max_workers=self.count_useful_workers(tasks))
        for number, task in enumerate(tasks):
            self.add(number, task)
        try:
            while self.queue or self.workers:
                yield from self.step()
        finally:
            self.stop()

    def count_useful_workers(self, tasks: Sequence[Task[Any]]) -> int:
        """Return how many workers can do these tasks at once. There are more than tasks if large
        tasks can be shared, and if memory suffices for so many workers already.
        """
        if len(tasks) >= self.settings.workers:
            return len(tasks)
        sharers = sum(count_sharers(find_shared_bytes(task), LEAST_NEW_SHARE) for task in tasks)
        allowed = self.budget.allowed_workers(min(self.settings.workers, sharers))
        return max(len(tasks), allowed)

    def begin(self, on_progress: OnProgress, say: Say, max_workers: int = sys.maxsize) -> None:
        """Begin a run: store its settings, and end the idle workers of the last run if this run
        cannot use them. Workers are started only in `step`, when there are tasks.

        Idle workers cannot be used if one of them has died, or if this run has another number of
        workers: a worker is started with as many threads as the number of workers leaves for it.

        Args:
            on_progress: called with the bytes and tokens of each progress message.
            say: called with each sentence for the user.
            max_workers: the most workers that can have a task or assist another worker.
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
        """Put a task at the end of the queue.

        Args:
            number: identifies the task in the results of `step`.
            task: the work to be done.
        """
        self.queue.append(QueuedTask(number, Attempt(), task))

    def step(self) -> Iterator[tuple[int, Any]]:
        """Give tasks to workers, wait up to PERIOD seconds for messages of workers, and yield
        (number, result) of each task that has ended.
        """
        self._assign_tasks()
        at_work = [*self.workers, *self.assistants]
        ready = wait([worker.pipe for worker in at_work], PERIOD)
        for worker in at_work:
            if worker.pipe not in ready:
                continue
            yield from self._handle_message(worker)
        self.budget.update(self._pids)
        self._replace_hung()

    def stop(self) -> None:
        """Stop the workers that have a task, and return when their processes have ended. Idle
        workers stay for the next run.

        Assistants do parts of other workers' tasks. If a task was interrupted, they are stopped
        too. Otherwise nobody waits for their parts, so the assistants become idle and stay.
        """
        if self.workers:  # the run was interrupted
            self.budget.update(self._pids, at_once=True)
        with delay_signals():
            stopped = self.workers
            self.workers = []
            if stopped:
                stopped += self.assistants
            else:
                # The last one gets the next task: not one that is still in a part.
                self.idle[:0] = self.assistants
            self.assistants = []
            stop_workers(stopped)

    def begin_close(self) -> None:
        """Let the idle workers end, and do not wait for it: their memory takes 15 ms to free. A run
        that follows starts new ones.
        """
        with delay_signals():
            for worker in self.idle:
                worker.process.terminate()
            self._ending += self.idle
            self.idle = []

    def close(self) -> None:
        """End all workers; the next run starts new ones. May be called again, for example if Ctrl-C
        came before its first line was done.
        """
        with delay_signals():
            ended = [*self.workers, *self.assistants, *self.idle, *self._ending]
            self.workers = []
            self.assistants = []
            self.idle = []
            self._ending = []
            stop_workers(ended)

    def _assign_tasks(self) -> None:
        """Give waiting tasks to workers, to as many as the memory budget allows now, and start
        workers if there are too few. All other workers are paused: they wait before they convert
        their next records. If no task waits, workers without one become assistants.
        """
        allowed = self.budget.allowed_workers(self._size)
        # A worker that stores the output of its last task does the next one meanwhile.
        for worker in self.workers[:allowed]:
            if self.queue and not worker.current and not worker.needs_restart:
                worker.assign(self.queue.popleft())
        # Add workers, then assistants.
        while self.queue and self._count_at_work() < allowed:
            worker = self._add_worker(self.workers)
            worker.assign(self.queue.popleft())
        while not self.queue and self._count_at_work() < allowed:
            busiest = self._find_busiest()
            if busiest is None:
                break
            self._add_worker(self.assistants).assist(busiest)
        # Pause those that are too many. An assistant that is paused ends its assistance; it does so
        # too if a task waits for it.
        for position, worker in enumerate(self.workers):
            worker.pause(position >= allowed)
        keep = min(allowed - len(self.workers), len(self.assistants) - len(self.queue))
        for position, worker in enumerate(self.assistants):
            worker.pause(position >= keep)

    def _count_at_work(self) -> int:
        return len(self.workers) + len(self.assistants)

    def _add_worker(self, to: list[Worker]) -> Worker:
        """Move an idle worker to a list, or start one if none is idle. Return it."""
        # A worker is in a list at any time, so that an interrupted run can stop it.
        with delay_signals():
            worker = self.idle.pop() if self.idle else start_worker(self._size, self.budget)
            to.append(worker)
        return worker

    def _find_busiest(self) -> Worker | None:
        """Return the worker that needs another assistant most: the one whose share of its task is
        the largest if all that share it do equal parts. Return None if no task has work for
        another one (`count_sharers`).
        """
        least_share = LEAST_SHARE if self.idle else LEAST_NEW_SHARE
        assistants_of = Counter(worker.assists for worker in self.assistants)
        best = None
        largest_share = 0
        for worker in self.workers:
            sharers = assistants_of[worker] + 2  # the worker itself, its assistants, and a new one
            has_work = sharers <= count_sharers(worker.shared_bytes, least_share)
            takes_one = worker.current and worker.untaken_assistants < MOST_UNTAKEN
            share = worker.shared_bytes // sharers
            if has_work and takes_one and share >= largest_share:
                best = worker
                largest_share = share
        return best

    def _handle_message(self, worker: Worker) -> Iterator[tuple[int, Any]]:
        """Receive one message from a worker (workers.py lists them). If the message ends a task,
        yield (number, result) of the task.

        Raises the error of a task that has failed.
        """
        match worker.receive():
            case "progress", size, tokens:
                worker.shared_bytes = max(0, worker.shared_bytes - size)
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
                # After the last task all of its rows are in memory, and nobody waits for this.
                if not self.queue and not any(peer.current for peer in self.workers):
                    self.budget.update(self._pids, exactly=True)
            case "done", result:
                number = worker.finish_storing()
                self._after_task(worker)
                yield number, result
            case ("took_assistant",):
                worker.untaken_assistants -= 1
            case "assisted", number:
                # A worker that was an assistant when the last run ended sends the number of that
                # assistance in this run.
                if worker in self.assistants and number == worker.assistances:
                    worker.check_size()
                    with delay_signals():
                        self._retire(worker)
            case _:  # ("died",): the worker's end of the pipe is closed
                with delay_signals():
                    how = self._remove_dead(worker)
                self._replace(worker, WorkerEnd(how=how))

    def _after_task(self, worker: Worker) -> None:
        """Decide what happens to a worker that has stored the output of a task. If it does another
        task already, nothing. Otherwise it becomes idle; if it has grown too much
        (`needs_restart`), its process is ended, which takes 30 ms.

        Also warn the user if the run has used more memory than `--memory` allows.
        """
        self.budget.on_finished_unit(self._pids, worker.needs_restart)
        if not worker.current:
            with delay_signals():
                self._retire(worker)
        if self.budget.peak > self._warn_above:
            self._warn_above = self.budget.sufficient_cap
            self._say(
                f"WARNING: the run used {self.budget.peak / 1e6:,.0f} MB of memory, more than "
                f"--memory allows ({self.budget.cap / 1e6:,.0f} MB), because one worker needed so "
                "much for a single record and the rows of its work unit. Pass --memory "
                f"{self._warn_above >> 20}MiB, or split the largest records of the source"
            )

    def _retire(self, worker: Worker) -> None:
        """Move a worker without a task to the idle ones, or end it if it needs a restart."""
        self._remove(worker)
        if worker.needs_restart:
            stop_workers([worker])
        else:
            # A worker returns freed memory to the system when it is paused. Large workers must do
            # so, since the end of a run needs memory too. A small worker keeps its memory, which
            # saves 4 ms in the next stream.
            is_large = measure_rss(worker.pid) > LEAST_BYTES
            worker.pause(is_large)
            self.idle.append(worker)

    def _replace_hung(self) -> None:
        """Kill each worker that hangs, tell the user, and put its tasks back into the queue."""
        for worker in [*self.workers, *self.assistants]:
            reason = worker.find_hang()
            if reason:
                where = "on"
                successor = "another worker process does this work unit"
                if worker in self.assistants:
                    where = "while it assisted with"
                    successor = "the worker process of this work unit converts these records"
                name = worker.name_unit()
                with delay_signals():
                    worker.process.kill()
                    self._remove_dead(worker)
                # If the work unit is given up, its error says the same.
                self._replace(worker, WorkerEnd(how=reason, hung=True))
                self._say(
                    f"a worker process hung ({reason}) {where} the work unit "
                    f"{name}, {worker.records or NO_ACTIVE_RECORDS}; "
                    f"the process was ended, and {successor}"
                )

    def _remove_dead(self, worker: Worker) -> str:
        """Wait for the end of a worker that died, and return how it ended."""
        how = worker.join()
        self._remove(worker)
        return how

    def _remove(self, worker: Worker) -> None:
        """Remove a worker from the list of those that have a task, or from the assistants."""
        (self.assistants if worker in self.assistants else self.workers).remove(worker)

    def _replace(self, worker: Worker, end: WorkerEnd) -> None:
        """Put the tasks of a dead worker at the front of the queue.

        One task is blamed for the death, and is tried in another way (`plan_next_attempt`). It is
        the task that the worker was doing; if it was doing none, the task that it was storing.

        A dead assistant has no task. The worker that it assisted does its parts, and gets no other
        assistant for this task.

        Args:
            worker: the dead worker.
            end: how the worker died or hung.

        Raises MdsmixError if the task has failed too often.
        """
        if not worker.tasks:
            assert worker.assists, "a worker at work has a task or assists one that has"
            worker.assists.shared_bytes = 0
            return
        blamed, *innocent = worker.tasks
        attempt = plan_next_attempt(
            blamed.attempt, worker.records, end, self.settings.set_aside, blamed.task.name
        )
        # `extendleft` reverses the order, so the blamed task comes first.
        self.queue.extendleft([*innocent, blamed._replace(attempt=attempt)])

    @property
    def _pids(self) -> list[int]:
        return [worker.pid for worker in [*self.workers, *self.assistants, *self.idle]]

"""The tasks of one run on a Ray cluster: what is sent, whose answer is taken, and what is tried again and how.

Ray itself retries nothing, since it cannot tell a node that was lost, which is nobody's fault, from a record that kills whoever
touches it. A task whose node is lost is sent again as it was; one whose worker died goes by the rules of attempts.py; where Ray
ended a worker for want of memory, all that are sent from then on ask for twice as much, so that fewer are at work at once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mdsmix.engines.attempts import ELSEWHERE, MOST_DEATHS, End
from mdsmix.engines.base import OnProgress, Say, Task
from mdsmix.engines.memory import own
from mdsmix.engines.ray_execution import Execution
from mdsmix.engines.ray_worker import News
from mdsmix.engines.tasks import TaskQueue
from mdsmix.engines.telling import said_once
from mdsmix.engines.worker import GRACE_SECONDS
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.words import plural

if TYPE_CHECKING:
    from mdsmix.engines.ray_engine import RayEngine

PERIOD = 0.2
"Seconds between two reads of the board."
BOARD_SECONDS = 2.0
"Longest wait for what the board has to say; it is asked again next time."
AHEAD = 2
"Tasks that are sent for each processor of the cluster: one in work, one that waits beside it."
TIMES_ASKED = 4
"How often a worker is asked to stop before it is ended: a cancellation that meets it while it begins may be lost."


class RayRun:
    """The tasks of one run, from the first to the last."""

    def __init__(
        self, engine: RayEngine, tasks: Sequence[Task[Any]], on_progress: OnProgress, say: Say
    ) -> None:
        self._engine, self._on_progress, self._say = engine, on_progress, say
        self.queue = TaskQueue(tasks, engine.settings.set_aside)
        self.running: dict[str, Execution] = {}
        self._losses: dict[int, int] = {}
        "How often a task's node was lost."
        self._is_waiting = False
        self._say_once = said_once(say)

    def send(self) -> None:
        """Sends as many tasks as are to be on their way."""
        found = self._engine.current_nodes()
        if not found.slots and not self._is_waiting:
            self._is_waiting = True
            self._say("no node of the cluster has a processor to offer yet; waiting for one")
        most = self._engine.settings.workers or max(1, AHEAD * found.slots)
        while self.queue and len(self.running) < most:
            number, attempt, task = self.queue.take()
            name = secrets.token_hex(8)
            ref = self._engine.send(task, attempt, name)
            self.running[name] = Execution(ref, number, attempt, self._engine.losses)

    def ended(self) -> list[Execution]:
        """Tries that have come to an end; none, after a moment without one."""
        import ray

        by_ref = {execution.ref: execution for execution in self.running.values()}
        if not by_ref:
            return []
        ready, _ = ray.wait(list(by_ref), num_returns=1, timeout=PERIOD)
        return [by_ref[ref] for ref in ready]

    def heed(self, execution: Execution) -> Iterator[tuple[int, Any]]:
        """Takes the answer of a try; yields the task's number and result where it is done."""
        import ray

        try:
            said, value, news = ray.get(execution.ref)
        except ray.exceptions.RayTaskError as error:
            raise MdsmixError(
                f"a task could not be begun on the cluster: {_last_line(error)}"
            ) from error
        except ray.exceptions.RayError as error:
            self.hear()
            self._drop(execution)
            self._try_again(execution, error)
            return
        self._drop(execution)
        if said == "refused":
            raise Unreachable(value)
        self._pass_on(execution.rest(news))
        if said == "failed":
            raise value
        yield execution.number, value

    def hear(self) -> None:
        """Reads the board. What a try says that was given up is nobody's progress."""
        import ray

        told: list[News] = []
        with suppress(ray.exceptions.RayError):
            told = ray.get(self._engine.board.take.remote(), timeout=BOARD_SECONDS)
        for news in told:
            if execution := self.running.get(news.execution):
                execution.hear(news)
                self._pass_on(news)

    def _pass_on(self, news: News) -> None:
        if news.size or news.tokens:
            self._on_progress(news.size, news.tokens)
        for sentence in news.said:
            self._say_once(f"on the node {self._engine.nodes.names.get(news.node)}: ", sentence)

    def watch(self) -> None:
        """Adds up the memory of all, and finds tries that hang, or whose node is gone: Ray waits for those as long as their
        worker answers, and a worker outlives its node by minutes."""
        import ray

        for execution in list(self.running.values()):
            if self._is_gone(execution):
                self._drop(execution)
                self._send_again(execution)
            elif execution.news is None and execution.losses < self._engine.losses:
                ray.cancel(execution.ref, recursive=False)  # it may wait at the lost node, for ever
                self._drop(execution)
                self.queue.give_back(execution.number, execution.attempt)
        held = sum(execution.news.held for execution in self.running.values() if execution.news)
        self._engine.peak = max(self._engine.peak, held + own(os.getpid()))
        for execution in list(self.running.values()):
            if why := execution.hangs():
                place = execution.news.place if execution.news else None
                ray.cancel(execution.ref, force=True, recursive=False)
                self._drop(execution)
                self._say(
                    f"a worker {self._where(execution)} hung ({why}) over the work unit {self.queue.name(execution.number)}, "
                    f"{place or ELSEWHERE}; it is given up, and another one does the unit"
                )
                self._put_back(execution, End(how=why, hung=True))

    def end(self) -> None:
        """Stops whoever is at work, and returns when all have ended."""
        import ray

        left = [execution.ref for execution in self.running.values()]
        asked = [(False, GRACE_SECONDS / TIMES_ASKED)] * TIMES_ASKED
        for force, seconds in (*asked, (True, 1)):
            for ref in left:
                with suppress(ray.exceptions.RayError, ValueError):
                    ray.cancel(ref, force=force, recursive=False)
            if left:
                _, left = ray.wait(left, num_returns=len(left), timeout=seconds)

    def _drop(self, execution: Execution) -> None:
        name = next(name for name, other in self.running.items() if other is execution)
        del self.running[name]

    def _try_again(self, execution: Execution, error: Exception) -> None:
        """By the reason that Ray gives."""
        import ray

        lost = (
            ray.exceptions.NodeDiedError,
            ray.exceptions.ObjectLostError,
            ray.exceptions.LocalRayletDiedError,
        )
        if isinstance(error, lost) or self._is_gone(execution):
            self._send_again(execution)
        elif isinstance(error, ray.exceptions.OutOfMemoryError):
            share = self._engine.ask_for_more()
            self._say(
                f"Ray ended a worker {self._where(execution)} because its node ran out of memory, over the work unit "
                f"{self.queue.name(execution.number)}; from now on a unit asks for {share >> 20:,} MiB, so that fewer are done at once"
            )
            self._put_back(execution, End(how="ended by Ray for lack of memory"))
        elif isinstance(error, ray.exceptions.WorkerCrashedError):
            self._put_back(
                execution, End(how=f"it ended without an answer {self._where(execution)}")
            )
        else:
            raise MdsmixError(
                f"Ray could not do the work unit {self.queue.name(execution.number)} ({_last_line(error)}); finished units are "
                "kept: mend that and run the same command again."
            ) from error

    def _is_gone(self, execution: Execution) -> bool:
        """Whether the node on which the try was in work is known to be lost."""
        if execution.news is None:
            return False
        return execution.news.node not in self._engine.current_nodes().cpus

    def _send_again(self, execution: Execution) -> None:
        number = execution.number
        self._losses[number] = self._losses.get(number, 0) + 1
        if self._losses[number] > MOST_DEATHS:
            raise MdsmixError(
                f"{plural(MOST_DEATHS, 'node')} were lost one after the other over one work unit, {self.queue.name(number)}; finished "
                "units are kept: give the nodes more memory, and run the same command again."
            )
        self._say(
            f"a node was lost {self._where(execution)}; the work unit {self.queue.name(number)} is done again elsewhere"
        )
        self.queue.give_back(number, execution.attempt)

    def _put_back(self, execution: Execution, end: End) -> None:
        place = execution.news.place if execution.news else None
        self.queue.put_back(execution.number, execution.attempt, place, end)

    def _where(self, execution: Execution) -> str:
        name = execution.news and self._engine.nodes.names.get(execution.news.node)
        return f"on {name}" if name else "before it said on which node"


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(".")[:300]

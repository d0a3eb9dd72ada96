"""The engine of a Ray cluster: each task is a plain Ray task on some node, and this driver decides what is tried again.

Ray itself retries nothing, since it cannot tell a node that was lost, which is nobody's fault, from a record that kills whoever
touches it. A task whose node is lost is sent again as it was; one whose worker died goes by the rules of attempts.py; where Ray
ended a worker for want of memory, all that are sent from then on ask for twice as much, so that fewer are at work at once.

A worker whose node was given up may go on writing for minutes. It writes what any other writes of the unit, under names of
its content, and its answer is not taken any more; what is published is published by the driver alone.
"""

from __future__ import annotations

import os
import pickle
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mdsmix import __version__
from mdsmix.engines.attempts import ELSEWHERE, MOST_DEATHS, Attempt, End
from mdsmix.engines.base import OnProgress, R, Say, Task
from mdsmix.engines.hang import Pulse
from mdsmix.engines.memory import own
from mdsmix.engines.ray_cluster import Nodes, connected, nodes, refuse_unshared, terminable_later
from mdsmix.engines.ray_worker import Board, News, Sent
from mdsmix.engines.tasks import TaskQueue
from mdsmix.engines.worker import GRACE_SECONDS
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.storage import Location
from mdsmix.words import plural

PERIOD = 0.2
"Seconds between two looks at the board."
BOARD_SECONDS = 2.0
"Longest wait for what the board has to say; it is asked again at the next look."
NODES_SECONDS = 2.0
"Between two looks at the cluster's nodes."
AHEAD = 2
"Tasks that are sent for each processor of the cluster: one in work, one that waits beside it."
TIMES_ASKED = 4
"How often a worker is asked to stop before it is ended: a cancellation that meets it while it begins may be lost."
LIFE_TASKS = 16
"A worker ends after so many tasks, since its memory of words grows; a new one takes some seconds."
PLACES = (
    "S3_ENDPOINT_URL",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)
"Variables that say where a store is; a node that has them keeps its own. Credentials are each node's own, or the job's."


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Which cluster, and how much of it."""

    address: str = ""
    "Blank: a cluster of this machine, which is started with the first task and stopped with the engine."
    workers: int | None = None
    "Tasks that are in work or wait at a node at once; None: AHEAD for each processor."
    memory: int | None = None
    "Bytes that the run may hold on each node; None: what the node offers, and no more than a worker as a rule takes."
    set_aside: bool = False
    "Records that workers die of or hang at are set aside; else the first one ends the run."
    local: Sequence[str] = ()
    "Paths that tasks read and write and that are this machine's alone."
    meeting: Location | None = None
    "A folder that all tasks write below."


@dataclass(slots=True, eq=False)
class Execution:
    """One try of a task, on its way or in work."""

    ref: Any
    number: int
    attempt: Attempt
    losses: int
    "How often the cluster had lost a node when it was sent."
    news: News | None = None
    "None: it has not begun, as far as is known."
    pulse: Pulse = field(default_factory=Pulse)
    size: int = 0
    tokens: int = 0
    "What is known to be done."

    def rest(self, whole: News) -> News:
        """What of all that the try did was not heard yet."""
        return replace(whole, size=whole.size - self.size, tokens=whole.tokens - self.tokens)

    def hear(self, news: News) -> None:
        is_first = self.news is None
        if self.news is None or news.size or news.place != self.news.place:
            self.pulse.beat()
        self.news = news
        self.size, self.tokens = self.size + news.size, self.tokens + news.tokens
        if is_first:
            self.pulse = Pulse()

    def hangs(self) -> str | None:
        """Why it is taken for hung; a task that waits for its turn is not."""
        if (news := self.news) is None:
            return None
        return self.pulse.look(
            lambda: ("S", news.used), news.place.size if news.place else None, False
        )


class RayEngine:
    """Nodes of a Ray cluster."""

    def __init__(self, settings: RaySettings) -> None:
        self.settings = settings
        self.peak = 0
        self.share = 0
        "Bytes that a task asks for."
        self.losses = 0
        "How often a node was found to be gone."
        self.nodes = Nodes(here="", cpus={}, memory={}, names={})
        self._ends = ExitStack()
        self._looked = 0.0
        self._is_connected = False
        self.board: Any = None
        self.function: Any = None
        self.sent: Any = None

    def run(
        self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say
    ) -> Generator[tuple[int, R], None, None]:
        if not tasks:
            return
        with terminable_later():
            self._connect()
        errand = Errand(self, tasks, on_progress, say)
        try:
            while errand.queue or errand.running:
                with terminable_later():
                    errand.send()
                    found = [each for run in errand.ended() for each in errand.heed(run)]
                    errand.hear()
                    errand.look()
                yield from found
        finally:
            with terminable_later():
                errand.end()

    def refresh(self) -> None:
        """Workers of a cluster share nothing of this process."""

    def warnings(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        with terminable_later():
            self._ends.close()

    def look(self) -> Nodes:
        """The nodes as they are, or were a moment ago."""
        if time.monotonic() - self._looked > NODES_SECONDS:
            before, self.nodes, self._looked = self.nodes, nodes(), time.monotonic()
            self.losses += bool(before.cpus.keys() - self.nodes.cpus.keys())
        return self.nodes

    def ask_for_more(self) -> int:
        """Twice the memory for each task from now on, up to all that a node has."""
        most = max(self.nodes.memory.values(), default=0)
        self.share = max(self.share, min(2 * self.share, most))
        return self.share

    def _connect(self) -> None:
        """With the first task, since most runs have nothing to do and a cluster takes seconds to start."""
        if self._is_connected:
            return
        import ray

        settings = self.settings
        self._ends.enter_context(connected(settings.address, settings.workers))
        refuse_unshared(self.look(), settings.local)
        self.share = self.nodes.share(settings.memory)
        self.board = _board(self.nodes.here)
        self._ends.callback(ray.kill, self.board)
        self.function = ray.remote(
            num_cpus=1, max_retries=0, max_calls=LIFE_TASKS, scheduling_strategy="SPREAD"
        )(_shim())
        self._meet()
        self._is_connected = True

    def _meet(self) -> None:
        """Leaves a file where all write, by which a worker knows that it writes there too."""
        run, meeting = secrets.token_hex(8), None
        if self.settings.meeting:
            meeting = self.settings.meeting / f"run-{run}"
            meeting.write(run.encode())
            self._ends.callback(_forget, meeting)
        settings = {name: os.environ[name] for name in PLACES if os.environ.get(name)}
        many = bool(self.nodes.others)
        self.sent = Sent(memory=self.share, settings=settings, meeting=meeting, of=run, many=many)

    def send(self, task: Task[Any], attempt: Attempt, name: str) -> Any:
        """Gives a task to the cluster; the reference by which its answer is known.

        After each loss of a node tasks ask for another byte of memory: for tasks that ask for the same, Ray waits for the
        worker that it has asked a node for, also where that node stands still and will never give one.
        """
        sent = replace(self.sent, memory=self.share)
        packed = pickle.dumps((task, attempt))
        return self.function.options(memory=self.share + self.losses, name="mdsmix").remote(
            __version__, packed, name, pickle.dumps(sent), self.board
        )


class Errand:
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
        self._told: set[str] = set()
        "What workers had to say, once for all that say the same."

    def send(self) -> None:
        """Sends as many tasks as are to be on their way."""
        found = self._engine.look()
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
            if sentence not in self._told:
                self._told.add(sentence)
                self._say(f"on the node {self._engine.nodes.names.get(news.node)}: {sentence}")

    def look(self) -> None:
        """Adds up the memory of all, and looks for tries that hang, or whose node is gone: Ray waits for those as long as their
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
        return execution.news.node not in self._engine.look().cpus

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


def _board(here: str) -> Any:
    """The actor that workers tell, on the driver's node, so that it lives as long as the driver may."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(here, soft=False)
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=strategy)(Board)
    return actor.remote()


def _shim() -> Any:
    """What Ray carries to a node by its code, since a node may have no mdsmix, or another: it says so, and else does the task."""

    def mdsmix_task(version: str, packed: bytes, name: str, sent: bytes, board: Any) -> Any:
        import pickle
        import socket

        try:
            from mdsmix import __version__ as found
            from mdsmix.engines import ray_worker
        except ImportError:
            found = ""
        if found != version:
            has = f"has mdsmix {found}" if found else "has no mdsmix with Ray's engine"
            return (
                "refused",
                f"the node {socket.gethostname()} {has}, and this run is of mdsmix {version}: install the same one on every node, or "
                f'send it along: ray job submit --runtime-env-json \'{{"pip": ["mdsmix=={version}"]}}\'.',
                None,
            )
        return ray_worker.do(packed, name, pickle.loads(sent), board)

    return mdsmix_task


def _forget(meeting: Location) -> None:
    with suppress(Unreachable):
        meeting.delete()


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(".")[:300]

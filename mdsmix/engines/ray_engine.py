"""The engine of a Ray cluster: each task is a plain Ray task on some node.

This is the connection: the cluster and its nodes, what they are told once, and how a task is handed over. ray_run.py has what
becomes of the tasks of a run.

A worker whose node was given up may go on writing for minutes. It writes what any other writes of the unit, under names of
its content, and its answer is not taken any more; what is published is published by the driver alone.
"""

from __future__ import annotations

import os
import pickle
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from mdsmix import __version__
from mdsmix.engines.attempts import Attempt
from mdsmix.engines.base import OnProgress, R, Say, Task
from mdsmix.engines.ray_cluster import connected, head_answers, terminable_later
from mdsmix.engines.ray_nodes import Nodes, nodes, refuse_unshared
from mdsmix.engines.ray_run import RayRun
from mdsmix.engines.ray_worker import Sent, board_at, shim
from mdsmix.errors import Unreachable
from mdsmix.storage import Location

NODES_SECONDS = 2.0
"Between two looks at the cluster's nodes."
HEADLESS_SECONDS = 40.0
"After so long without a head the run is ended in order. Ray ends it after 60 with a line of its own."
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
    "Tasks that are in work or wait at a node at once; None: two for each processor."
    memory: int | None = None
    "Bytes that the run may hold on each node; None: what the node offers, and no more than a worker as a rule takes."
    set_aside: bool = False
    "Records that workers die of or hang at are set aside; else the first one ends the run."
    local: Sequence[str] = ()
    "Paths that tasks read and write and that are this machine's alone."
    meeting: Location | None = None
    "A folder that all tasks write below."


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
        self._looked = self._headed = 0.0
        "When the nodes were looked at, and when the head was there."
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
        run = RayRun(self, tasks, on_progress, say)
        try:
            while run.queue or run.running:
                with terminable_later():
                    run.send()
                    found = [each for done in run.ended() for each in run.heed(done)]
                    run.hear()
                    run.watch()
                yield from found
        finally:
            with terminable_later():
                run.end()

    def warnings(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        with terminable_later():
            self._ends.close()

    def current_nodes(self) -> Nodes:
        """The nodes as they are, or were a moment ago."""
        if time.monotonic() - self._looked > NODES_SECONDS and self._has_head():
            before, self.nodes, self._looked = self.nodes, nodes(), time.monotonic()
            self.losses += bool(before.cpus.keys() - self.nodes.cpus.keys())
        return self.nodes

    def _has_head(self) -> bool:
        """Whether it is there now; Unreachable after some time without it."""
        now = time.monotonic()
        if not self._is_connected or head_answers():
            self._headed = now
        elif now - self._headed > HEADLESS_SECONDS:
            raise Unreachable(
                f"the head of the Ray cluster has not answered for {now - self._headed:.0f} s; finished units are kept: start the "
                "cluster again and run the same command."
            )
        return self._headed == now

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
        refuse_unshared(self.current_nodes(), settings.local)
        self.share = self.nodes.share(settings.memory)
        self.board = board_at(self.nodes.here)
        self._ends.callback(ray.kill, self.board)
        self.function = ray.remote(
            num_cpus=1, max_retries=0, max_calls=LIFE_TASKS, scheduling_strategy="SPREAD"
        )(shim())
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


def _forget(meeting: Location) -> None:
    with suppress(Unreachable):
        meeting.delete()

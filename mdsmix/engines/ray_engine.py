"""The engine of a Ray cluster: a supervisor on each node does units with the local engine, and the driver hands them out.

A supervisor gets a unit for each of its workers and one more, so a node that ends first takes the next. A supervisor that is gone, with its
node or without, loses nothing: its units go to others. Its workers may write on for a moment. What they write is named by its
content, their answers are not taken any more, and only the driver publishes.
"""

from __future__ import annotations

import os
import pickle
import secrets
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mdsmix import __version__
from mdsmix.engines.hang import SILENT_SECONDS
from mdsmix.engines.local_engine import PoolSettings, said_once
from mdsmix.engines.memory import own
from mdsmix.engines.ray_cluster import (
    HEADLESS,
    NODELESS,
    connected,
    head_answers,
    terminable_later,
)
from mdsmix.engines.ray_node import (
    STOP,
    STORES,
    Beat,
    NodeSettings,
    actor,
    named_by,
    refuse_another,
    refuse_unshared,
)
from mdsmix.engines.tasks import OnProgress, R, Say, Task
from mdsmix.engines.workers import GRACE_SECONDS
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.storage import Location

PERIOD = 0.2
"Seconds between two looks at what nodes have sent."
NODES_SECONDS = 2.0
"Between two looks at the cluster's nodes."
HEADLESS_SECONDS = 40.0
"After so long without a head the run is ended in order. Ray ends it after 60 with a line of its own."
MOST_LOSSES = 5
"Nodes that may be lost over one unit, and supervisors that may end on one node before their first beat."


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Which cluster, and how much of it."""

    address: str = ""
    "Blank: a cluster of this machine, which is started with the first unit and stopped with the engine."
    pool: PoolSettings = field(default_factory=lambda: PoolSettings(workers=0, memory=0))
    "Of each node; 0 workers: one for each processor; 0 bytes: half of what the node has. What is kept `aside` is for a process that counts tokens of images."
    local: Sequence[str] = ()
    "Paths that units read and write and that are this machine's alone."
    meeting: Location | None = None
    "A folder that all units write below."


@dataclass(slots=True, eq=False)
class Node:
    """A node of the cluster and its supervisor."""

    id: str
    name: str
    workers: int
    actor: Any
    answer: Any
    "The reference of its next answer."
    units: set[int] = field(default_factory=set)
    "Positions of the units that it has."
    beat: Beat | None = None
    "Its last one; None until it works."
    heard: float = field(default_factory=time.monotonic)

    @property
    def room(self) -> int:
        return self.workers + 1 - len(self.units) if self.beat else 0


class RayEngine:
    """Nodes of a Ray cluster, and the units of the run that is on: which wait, which node has which, and what was lost."""

    def __init__(self, settings: RaySettings) -> None:
        self.settings = settings
        self.nodes: dict[str, Node] = {}
        "By the ids that Ray gives them."
        self._ends = ExitStack()
        self._looked = self._headed = 0.0
        "When the nodes were looked at, and when the head was there."
        self._peak = 0
        self._meeting: Location | None = None
        self._tasks: Sequence[Task[Any]] = ()
        self._waiting: list[int] = []
        self._losses = Counter[int | str]()
        "How often the node of a unit was lost, and a supervisor of a node before its first beat."

    @property
    def peak(self) -> int:
        """Of this process and of all nodes that are there, each at its most."""
        beats = [node.beat.peak for node in self.nodes.values() if node.beat]
        self._peak = max(self._peak, own(os.getpid()) + sum(beats))
        return self._peak

    def run(
        self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say
    ) -> Generator[tuple[int, R], None, None]:
        if not tasks:
            return
        self._tasks, self._waiting = tasks, list(range(len(tasks)))[::-1]
        self._on_progress, self._say, self._say_once = on_progress, say, said_once(say)
        self._losses.clear()
        try:
            with terminable_later():
                self._connect()
            while self._waiting or any(node.units for node in self.nodes.values()):
                with terminable_later():
                    self._look()
                    found = list(self._exchange())
                yield from found
        except BaseException:
            with terminable_later():
                self._stop()
            raise

    def warnings(self) -> Sequence[str]:
        return [
            f"on the node {node.name}: {warning}"
            for node in self.nodes.values()
            for warning in (node.beat.warnings if node.beat else ())
        ]

    def close(self) -> None:
        with terminable_later():
            self._stop()
            self._ends.close()

    def _connect(self) -> None:
        """With the first unit, since most runs have nothing to do and a cluster takes seconds to start."""
        if self._headed:
            return
        settings = self.settings
        self._ends.enter_context(connected(settings.address, settings.pool.workers))
        self._headed = time.monotonic()
        if settings.meeting:
            self._meeting = settings.meeting / f"run-{secrets.token_hex(8)}"
            self._meeting.write(b"")
            self._ends.callback(_forget, self._meeting)

    def current_nodes(self) -> dict[str, dict[str, Any]] | None:
        """By their ids, the nodes with a processor that Ray knows; None where it was asked a moment ago. Unreachable without a head,
        and where Ray's node of this machine has ended: this process can then start nothing."""
        import ray

        now = time.monotonic()
        if now - self._looked < NODES_SECONDS:
            return None
        if not head_answers():
            if now - self._headed > HEADLESS_SECONDS:
                raise Unreachable(HEADLESS.format(seconds=now - self._headed))
            return None
        self._looked = self._headed = now
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        if ray.get_runtime_context().get_node_id() not in alive:
            raise Unreachable(NODELESS)
        return {id: node for id, node in alive.items() if node["Resources"].get("CPU", 0) >= 1}

    def _look(self) -> None:
        """Starts supervisors on nodes that have none, and gives up those whose node is gone: Ray answers for them as long as they live,
        and they outlive their node by minutes. And those that stand still."""
        found = self.current_nodes()
        if found:
            refuse_unshared(found, self.settings.local)
        for each in list(self.nodes.values()):
            if found is not None and each.id not in found:
                self._lose(each, "was lost")
            elif each.beat and time.monotonic() - each.heard > SILENT_SECONDS:
                self._lose(each, f"has not answered for {SILENT_SECONDS:.0f} s")
        for id, node in (found or {}).items():
            if id not in self.nodes:
                self._start(id, node)
        if found == {}:
            self._say_once(
                "", "no node of the cluster has a processor to offer yet; waiting for one"
            )

    def _start(self, id: str, node: dict[str, Any]) -> None:
        """Puts a supervisor on a node. It asks for the processors that its workers keep busy, so it waits for those of other jobs."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pool, processors = self.settings.pool, int(node["Resources"]["CPU"])
        workers = pool.workers or processors
        settings = NodeSettings(
            pool=replace(pool, workers=workers),
            environment={name: os.environ[name] for name in STORES if os.environ.get(name)},
            meeting=self._meeting,
        )
        remote = ray.remote(
            num_cpus=min(workers, processors),
            scheduling_strategy=NodeAffinitySchedulingStrategy(id, soft=False),
        )(actor())
        placed: Any = remote.remote()
        answer = placed.begin.remote(__version__, pickle.dumps(settings))
        self.nodes[id] = Node(id, node["NodeManagerHostname"], workers, placed, answer)

    def _exchange(self) -> Iterator[tuple[int, Any]]:
        """Heeds nodes that have answered, and gives each as many units as it has room for."""
        import ray

        answers = {node.answer: node for node in self.nodes.values()}
        if not answers:
            time.sleep(PERIOD)
            return
        ready, _ = ray.wait(list(answers), num_returns=1, timeout=PERIOD)
        for node in map(answers.__getitem__, ready):
            try:
                answer = ray.get(node.answer)
            except ray.exceptions.RayError as error:
                said = (str(error).strip() or type(error).__name__).splitlines()[-1]
                self._lose(node, f"was lost ({said.rstrip('.')[:300]})")
                continue
            yield from self._heed(node, answer)

    def _heed(self, node: Node, answer: str | tuple[list[bytes], str]) -> Iterator[tuple[int, Any]]:
        node.heard = time.monotonic()
        if isinstance(answer, str):
            refuse_another(node.name, answer)
            answer = [], ""
        messages, ended = answer
        for message in map(pickle.loads, messages):
            yield from self._take(node, *message)
        if ended:
            self._lose(node, f"does no more ({ended})")
            return
        given = [self._waiting.pop() for _ in range(min(node.room, len(self._waiting)))]
        node.units |= set(given)
        packed = [pickle.dumps((number, self._tasks[number])) for number in given]
        node.answer = node.actor.exchange.remote(packed, 1.0)

    def _take(self, node: Node, what: str, *said: Any) -> Iterator[tuple[int, Any]]:
        """One message of a node."""
        if what == "failed":
            raise named_by(said[0], node.name) if len(self.nodes) > 1 else said[0]
        if what == "say":
            self._say_once(f"on the node {node.name}: ", said[0])
        elif what == "beat":
            node.beat = said[0]
            self._on_progress(said[0].size, said[0].tokens)
        elif said[0] in node.units:
            node.units.remove(said[0])
            yield said

    def _lose(self, node: Node, why: str) -> None:
        """The node's units are done elsewhere. MdsmixError where units, or supervisors of this node, were lost too often."""
        self._drop(node)
        lost: list[int | str] = [*sorted(node.units, reverse=True)] if node.beat else [node.id]
        self._losses.update(lost)
        self._waiting += sorted(node.units, reverse=True)
        often = [each for each in lost if self._losses[each] > MOST_LOSSES]
        if often:
            over = f" over the work unit {self._tasks[often[0]].name}" if node.beat else ""  # type: ignore[index]
            raise MdsmixError(
                f"{MOST_LOSSES + 1} nodes were lost one after the other{over}, the last one {node.name}, which {why}; finished "
                "units are kept: give the nodes more memory, or mend that, and run the same command again."
            )
        if node.units:
            self._say(
                f"the node {node.name} {why}; its work units ({len(node.units)}) are done again"
            )

    def _drop(self, node: Node) -> None:
        """Gives a supervisor up, whether it is there or not."""
        import ray

        del self.nodes[node.id]
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(node.actor)

    def _stop(self) -> None:
        """Ends all supervisors; their workers have GRACE_SECONDS to take back what is half written."""
        if not self.nodes:
            return
        import ray

        ends = [n.actor.end.remote(STOP, GRACE_SECONDS) for n in self.nodes.values() if n.beat]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=GRACE_SECONDS + 1)
        for node in list(self.nodes.values()):
            self._drop(node)


def _forget(meeting: Location) -> None:
    with suppress(Unreachable):
        meeting.delete()

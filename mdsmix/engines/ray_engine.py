"""The engine of a Ray cluster: a supervisor on each node does units with the local engine, and the driver hands them out.

A supervisor gets a unit for each of its workers and one more, so a node that ends first takes the next. A supervisor that is gone, with its
node or without, loses nothing: its units go to others. Its workers may write on for a moment. What they write is named by its
content, their answers are not taken any more, and only the driver publishes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from mdsmix import __version__
from mdsmix.engines.local_engine import PoolSettings
from mdsmix.engines.ray_cluster import Supervisor, connected, terminable_later
from mdsmix.engines.tasks import OnProgress, R, Say, Task
from mdsmix.engines.workers import GRACE_SECONDS
from mdsmix.errors import Denied, MdsmixError, RecipeError, Unreachable
from mdsmix.words import listed

ANSWER_SECONDS = 1.0
"Within which a node answers, also where it has no result to tell."
PERIOD = 0.2
"Seconds between two looks at what nodes have sent."
NODES_SECONDS = 2.0
"Between two looks at the cluster's nodes."
MOST_LOSSES = 5
"Supervisors that may be lost over one unit, or before they work while no unit is done."
NO_UNIT = -1
STORES = (
    "S3_ENDPOINT_URL",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)
"Variables that say where a store is. Credentials are each node's own, or the job's."
NODELESS = (
    "Ray's node on this machine has ended, and without it this run can reach no other: finished units are kept; start the node again "
    "(ray start --address HEAD) and run the same command."
)


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
    works: bool = False
    "It has answered: until then it may wait for processors of other jobs."


class RayEngine:
    """Nodes of a Ray cluster, and the units of the run that is on: which wait, which node has which, and what was lost."""

    peak = 0
    "What nodes hold is theirs to limit, and is not added up."

    def __init__(self, address: str, pool: PoolSettings, local: Sequence[str] = ()) -> None:
        """`address`: of the cluster; blank: one of this machine, which is started with the first unit and stopped with the engine; `pool`: of
        each node; 0 workers: one for each processor; 0 bytes: half of what the node has; `local`: paths that units read and write and
        that are this machine's alone."""
        self._address, self._pool, self._local = address, pool, local
        self.nodes: dict[str, Node] = {}
        "By the ids that Ray gives them."
        self._ends, self._looked = ExitStack(), 0.0
        self._tasks: Sequence[Task[Any]] = ()
        self._waiting: list[int] = []
        self._losses = Counter[int]()
        "How often the node of a unit was lost."

    def run(
        self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say
    ) -> Generator[tuple[int, R], None, None]:
        if not tasks:  # most runs have nothing to do, and a cluster takes seconds to start
            return
        self._tasks, self._waiting = tasks, list(range(len(tasks)))[::-1]
        self._on_progress, self._say, self._say_once = on_progress, say, cache(say)
        self._losses.clear()
        try:
            with terminable_later():
                self._ends.enter_context(connected(self._address, self._pool.workers))
            while self._waiting or any(node.units for node in self.nodes.values()):
                with terminable_later():
                    self._look()
                    found = list(self._exchange())
                yield from found
        except BaseException:
            with terminable_later():
                self._stop()
            raise

    def close(self) -> None:
        with terminable_later():
            self._stop()
            self._ends.close()

    def _look(self) -> None:
        """Starts supervisors on nodes that have none, and gives up those whose node is gone: Ray answers for them as long as they live,
        and they outlive their node by minutes."""
        if time.monotonic() - self._looked < NODES_SECONDS:
            return
        self._looked, found = time.monotonic(), self._current_nodes()
        for id in self.nodes.keys() - found:
            self._lose(self.nodes[id], "was lost")
        for id in found.keys() - self.nodes:
            self._start(id, found[id])
        if not found:
            self._say_once("no node of the cluster has a processor to offer yet; waiting for one")

    def _current_nodes(self) -> dict[str, dict[str, Any]]:
        """By their ids, the nodes with a processor that Ray knows. Unreachable where Ray's node of this machine has ended: this process
        can then start nothing. RecipeError where units would look for folders of this machine on other nodes."""
        import ray

        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        here = ray.get_runtime_context().get_node_id()
        if here not in alive:
            raise Unreachable(NODELESS)
        found = {id: node for id, node in alive.items() if node["Resources"].get("CPU", 0) >= 1}
        others = sorted(node["NodeManagerHostname"] for id, node in found.items() if id != here)
        if others and self._local:
            raise RecipeError(
                f"the cluster has nodes beside this one ({listed(others)}), and {listed(self._local)} is of this machine alone: publish to and "
                "read from s3://, or, where every node mounts the same folders under the same names, say shared: true in the recipe."
            )
        return found

    def _start(self, id: str, said: dict[str, Any]) -> None:
        """Puts a supervisor on a node. It asks for the processors that its workers keep busy, so it waits for those of other jobs."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        processors = int(said["Resources"]["CPU"])
        pool = replace(self._pool, workers=self._pool.workers or processors)
        actor: Any = ray.remote(
            num_cpus=min(pool.workers, processors),
            scheduling_strategy=NodeAffinitySchedulingStrategy(id, soft=False),
        )(Supervisor)
        environment = {name: os.environ[name] for name in STORES if os.environ.get(name)}
        actor = actor.remote(__version__, pool, environment)
        answer = actor.exchange.remote([], 0.0)
        self.nodes[id] = Node(id, said["NodeManagerHostname"], pool.workers, actor, answer)

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
                messages = ray.get(node.answer)
            except ray.exceptions.RayError as error:
                said = (str(error).strip() or type(error).__name__).splitlines()[-1]
                self._lose(node, f"was lost ({said.rstrip('.')[:300]})")
                continue
            for message in messages:
                yield from self._take(node, *message)
            self._give(node)

    def _take(self, node: Node, what: str, *said: Any) -> Iterator[tuple[int, Any]]:
        """One message of a node. What could not be reached there may be there elsewhere, so the node is named."""
        if what == "failed":
            (error,) = said
            if len(self.nodes) > 1 and type(error) in (Unreachable, Denied):
                error = type(error)(f"on the node {node.name}: {error}")
            raise error
        if what == "say":
            self._say_once(*said)
        elif what == "progress":
            self._on_progress(*said)
        elif said[0] in node.units:
            node.units.remove(said[0])
            self._losses.pop(NO_UNIT, None)
            yield said[0], said[1]

    def _give(self, node: Node) -> None:
        """Gives a node that has answered as many units as it has room for, and asks for its next answer."""
        node.works = True
        room = min(node.workers + 1 - len(node.units), len(self._waiting))
        given = [self._waiting.pop() for _ in range(room)]
        node.units |= set(given)
        units = [(number, self._tasks[number]) for number in given]
        node.answer = node.actor.exchange.remote(units, ANSWER_SECONDS)

    def _lose(self, node: Node, why: str) -> None:
        """The node's units are done elsewhere. MdsmixError where supervisors were lost too often over one of them, or before
        they worked. One that had nothing to do is started again."""
        self._drop(node)
        units = sorted(node.units, reverse=True)
        self._waiting += units
        self._losses.update(lost := units if node.works else [NO_UNIT])
        if often := [each for each in lost if self._losses[each] > MOST_LOSSES]:
            over = f" over the work unit {self._tasks[often[0]].name}" if units else ""
            raise MdsmixError(
                f"{MOST_LOSSES + 1} nodes were lost one after the other{over}, the last one {node.name}, which {why}; finished "
                "units are kept: give the nodes more memory, or mend that, and run the same command again."
            )
        if units:
            self._say(f"the node {node.name} {why}; its work units ({len(units)}) are done again")

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

        if ends := [node.actor.end.remote() for node in self.nodes.values() if node.works]:
            ray.wait(ends, num_returns=len(ends), timeout=GRACE_SECONDS + 1)
        for node in list(self.nodes.values()):
            self._drop(node)

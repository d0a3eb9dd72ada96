"""The engine of a Ray cluster: the driver hands out units, and a supervisor on each node does them
with the local engine.

A supervisor has a unit for each of its workers, for an eighth of them a second one, since a worker
stores a unit beside the next one for a tenth of its time, and one more, so a faster node takes more
units. A supervisor that is lost, with its node or without, loses nothing: its units go to other
supervisors. Its workers may write on for a moment, which does no harm: files are named by their
content, late answers are not taken, and only the driver publishes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from mdsmix import __version__
from mdsmix.engines.local_engine import PoolSettings
from mdsmix.engines.ray_cluster import Supervisor, connect_to_cluster, delay_sigterm, error_line
from mdsmix.engines.tasks import OnProgress, R, Task, TaskResults
from mdsmix.engines.workers import GRACE_SECONDS
from mdsmix.errors import Denied, MdsmixError, RecipeError, Unreachable
from mdsmix.messages import Say, join_names

ANSWER_SECONDS = 1.0
"A supervisor answers within this time, also where it has no result."
PERIOD = 0.2
"Seconds that a look at the supervisors' answers waits for one."
NODES_SECONDS = 2.0
"Seconds between two looks at the cluster's nodes."
MOST_LOSSES = 5
"""How many supervisors may be lost over one unit, and how many before they have answered, until a
unit is done. One more ends the run.
"""
NO_UNIT = -1
"In place of a unit's position, for supervisors lost before they have answered."
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
    "Ray's reference to the supervisor's next answer."
    units: set[int] = field(default_factory=set)
    "Positions of the units that the supervisor has."
    works: bool = False
    "The supervisor has answered. Until then it may wait for processors that other jobs use."


class RayEngine:
    """Supervisors on the nodes of a Ray cluster. During a run it knows the waiting units, the units
    of each node, and the losses.
    """

    peak = 0
    "The memory of nodes is not added up: each node limits its own."

    def __init__(
        self,
        address: str,
        pool: PoolSettings,
        environment: Mapping[str, str],
        local: Sequence[str] = (),
    ) -> None:
        """Store the settings. Nothing is connected yet.

        Args:
            address: of the cluster; blank: one on this machine, started with the first run that has
            units and stopped by `close`.
            pool: the settings of each node; 0 workers: one for each processor; 0 bytes: half of the
            node's memory.
            environment: variables for each node, without credentials: those are each node's own, or
            the job's.
            local: paths that units read or write and that only this machine has.
        """
        self._address = address
        self._pool = pool
        self._environment = environment
        self._local = local
        self.nodes: dict[str, Node] = {}
        "Ray's id of a node -> the node."
        self._ends, self._looked = ExitStack(), 0.0
        self._tasks: Sequence[Task[Any]] = ()
        self._waiting: list[int] = []
        self._losses = Counter[int]()
        "Position of a unit, or NO_UNIT -> how many supervisors were lost over it."

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        if not tasks:  # most runs have nothing to do, and a cluster takes seconds to start
            return
        self._tasks, self._waiting = tasks, list(range(len(tasks)))[::-1]
        self._on_progress, self._say, self._say_once = on_progress, say, cache(say)
        self._losses.clear()
        try:
            with delay_sigterm():
                self._ends.enter_context(connect_to_cluster(self._address, self._pool.workers))
            while self._waiting or any(node.units for node in self.nodes.values()):
                with delay_sigterm():
                    self._look()
                    found = list(self._exchange())
                yield from found
        except BaseException:
            with delay_sigterm():
                self._stop()
            raise

    def close(self) -> None:
        with delay_sigterm():
            self._stop()
            self._ends.close()

    def _look(self) -> None:
        """Starts supervisors on nodes that have none, and gives up supervisors whose node is gone:
        they may live, and answer, for minutes longer than their node.
        """
        if time.monotonic() - self._looked < NODES_SECONDS:
            return
        self._looked, found = time.monotonic(), self._current_nodes()
        for id in [id for id in self.nodes if id not in found]:
            self._lose(self.nodes[id], "was lost")
        for id in [id for id in found if id not in self.nodes]:
            self._start(id, found[id])
        if not found:
            self._say_once("no node of the cluster has a processor to offer yet; waiting for one")

    def _current_nodes(self) -> dict[str, dict[str, Any]]:
        """Id -> Ray's description of each living node that has a processor. Unreachable where Ray's
        node of this machine has ended, without which this process can start nothing. RecipeError
        where units on other nodes would need folders of this machine.
        """
        import ray

        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        here = ray.get_runtime_context().get_node_id()
        if here not in alive:
            raise Unreachable(NODELESS)
        found = {id: node for id, node in alive.items() if node["Resources"].get("CPU", 0) >= 1}
        others = sorted(node["NodeManagerHostname"] for id, node in found.items() if id != here)
        if others and self._local:
            raise RecipeError(
                f"the cluster has nodes beside this one ({join_names(others)}), and {join_names(self._local)} is of this machine alone: publish to and "
                "read from s3://, or, where every node mounts the same folders under the same names, say shared: true in the recipe."
            )
        return found

    def _start(self, id: str, said: dict[str, Any]) -> None:
        """Starts a supervisor on a node. It asks Ray for a processor for each of its workers, so it
        may wait until other jobs free them.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        processors = int(said["Resources"]["CPU"])
        pool = replace(self._pool, workers=self._pool.workers or processors)
        actor: Any = ray.remote(
            num_cpus=min(pool.workers, processors),
            scheduling_strategy=NodeAffinitySchedulingStrategy(id, soft=False),
        )(Supervisor)
        actor = actor.remote(__version__, pool, self._environment)
        self.nodes[id] = Node(
            id, said["NodeManagerHostname"], pool.workers, actor, actor.exchange.remote([], 0.0)
        )

    def _exchange(self) -> Iterator[tuple[int, Any]]:
        """Takes the answers of nodes, yields (position, result) of ended units, and gives each node
        as many units as it has room for.
        """
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
                self._lose(node, f"was lost ({error_line(error, -1)})")
                continue
            for message in messages:
                yield from self._take(node, *message)
            self._give(node)

    def _take(self, node: Node, what: str, *said: Any) -> Iterator[tuple[int, Any]]:
        """Takes one message of a node. Its name is added to an Unreachable or Denied, since other
        nodes may reach the same place.
        """
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
        """Gives a node that has answered as many units as it has room for, and asks for its next
        answer.
        """
        node.works = True
        room = min(node.workers * 9 // 8 + 1 - len(node.units), len(self._waiting))
        given = [self._waiting.pop() for _ in range(room)]
        node.units |= set(given)
        units = [(number, self._tasks[number]) for number in given]
        node.answer = node.actor.exchange.remote(units, ANSWER_SECONDS)

    def _lose(self, node: Node, why: str) -> None:
        """Gives up a lost node: its units wait for other nodes, and a node that lives gets a new
        supervisor at the next look. MdsmixError after more than MOST_LOSSES losses over one unit,
        or of supervisors that had not answered.
        """
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
        """Forgets a node and kills its supervisor, which may be gone already."""
        import ray

        del self.nodes[node.id]
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(node.actor)

    def _stop(self) -> None:
        """Ends all supervisors. Their workers have GRACE_SECONDS to remove half-written files."""
        if not self.nodes:
            return
        import ray

        if ends := [node.actor.end.remote() for node in self.nodes.values() if node.works]:
            ray.wait(ends, num_returns=len(ends), timeout=GRACE_SECONDS + 1)
        for node in list(self.nodes.values()):
            self._drop(node)

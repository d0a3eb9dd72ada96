"""The engine of a Ray cluster: the driver hands out work units, and a supervisor on each node does
them with the local engine.

A supervisor with n workers has n + n/8 + 1 units. Each worker does one. For a tenth of its time a
worker also stores its last unit, hence n/8 more. One more unit waits, so that a node asks for more
units as soon as it has room: a faster node gets more of them.

If a supervisor is lost, alone or with its node, its units are given to other supervisors. Its
workers may continue to write for a moment. This does no harm: files are named by their content,
late answers are ignored, and only the driver publishes.
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
from mdsmix.engines.ray_cluster import (
    Message,
    Supervisor,
    connect_to_cluster,
    delay_sigterm,
    format_error_line,
)
from mdsmix.engines.tasks import OnProgress, R, Task, TaskResults
from mdsmix.engines.workers import GRACE_SECONDS
from mdsmix.errors import Denied, MdsmixError, RecipeError, Unreachable
from mdsmix.messages import Say, join_names

ANSWER_SECONDS = 1.0
"A supervisor answers within this time, even if it has no result."
PERIOD = 0.2
"Seconds to wait for an answer of any supervisor."
NODES_SECONDS = 2.0
"Seconds between two checks of the cluster's nodes."
MOST_LOSSES = 5
"""How many supervisors may be lost while they have the same unit. As many may be lost before they
have answered for the first time; this second count restarts when any unit is done. One more loss
ends the run.
"""
NO_UNIT = -1
"The key in `_losses` for supervisors that were lost before they had answered."
DRIVER_NODE_ENDED = (
    "the Ray node on this machine has ended, and this run can reach the other nodes only through "
    "it. Finished units are kept: start the node again (ray start --address HEAD), then run the "
    "same command again."
)


@dataclass(slots=True, eq=False)
class Node:
    """A node of the Ray cluster, and the supervisor that converts units on it."""

    id: str
    "Ray's id of the node."
    name: str
    "The host name, for messages."
    workers: int
    actor: Any
    "Ray's handle of the supervisor."
    answer: Any
    "Ray's reference to the supervisor's next answer."
    units: set[int] = field(default_factory=set)
    "Positions, in the run's tasks, of the units that the supervisor has."
    has_answered: bool = False
    "False: the supervisor may still wait for processors that other jobs use."


class RayEngine:
    """Does work units on the nodes of a Ray cluster, by a supervisor on each node. During a run it
    knows the units that wait, the units of each node, and how many supervisors were lost.
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
            address: the address of the cluster. If it is blank, a cluster is started on this
                machine with the first run that has units, and `close` stops it.
            pool: the settings of each node. 0 workers means one for each processor, and 0 bytes of
                memory means half of the node's memory.
            environment: variables to set on each node. They contain no credentials: the node itself
                or the Ray job has these.
            local: the folders that units read or write and that are on this machine only.
        """
        self._address = address
        self._pool = pool
        self._environment = environment
        self._local = local
        self.nodes: dict[str, Node] = {}
        "Ray's id of a node -> the node."
        self._exits = ExitStack()
        self._nodes_checked = 0.0
        "When the cluster's nodes were checked last."
        self._tasks: Sequence[Task[Any]] = ()
        self._waiting: list[int] = []
        "Positions of units that no node has, the next one last."
        self._losses = Counter[int]()
        "Position of a unit, or NO_UNIT -> how many supervisors were lost over it."

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        """Do the tasks on the nodes, and yield (position, result) of each when it ends (see
        `Engine.run`).
        """
        if not tasks:  # most runs have nothing to do, and a cluster takes seconds to start
            return
        self._tasks = tasks
        self._waiting = list(reversed(range(len(tasks))))
        self._on_progress = on_progress
        self._say = say
        self._say_once = cache(say)
        self._losses.clear()
        try:
            with delay_sigterm():
                self._exits.enter_context(connect_to_cluster(self._address, self._pool.workers))
            while self._waiting or any(node.units for node in self.nodes.values()):
                with delay_sigterm():
                    self._update_nodes()
                    results = list(self._exchange())
                yield from results
        except BaseException:
            with delay_sigterm():
                self._stop()
            raise

    def begin_close(self) -> None:
        """Do nothing: the workers are on other machines, and `close` ends them."""

    def close(self) -> None:
        """End all supervisors, and leave the cluster."""
        with delay_sigterm():
            self._stop()
            self._exits.close()

    def _update_nodes(self) -> None:
        """Start supervisors on nodes that have none. Give up supervisors whose node is gone, since
        a supervisor may live and answer for minutes after Ray's node has ended.
        """
        if time.monotonic() - self._nodes_checked < NODES_SECONDS:
            return
        self._nodes_checked = time.monotonic()
        current = self._list_current_nodes()
        for id in [id for id in self.nodes if id not in current]:
            self._give_up_node(self.nodes[id], "was lost")
        for id in [id for id in current if id not in self.nodes]:
            self._start(id, current[id])
        if not current:
            self._say_once(
                "no node of the Ray cluster offers a CPU to Ray yet (--num-cpus of ray start); the "
                "run waits until a node does"
            )

    def _list_current_nodes(self) -> dict[str, dict[str, Any]]:
        """Return id -> Ray's description of each living node that has a processor.

        Raises Unreachable if Ray's node on this machine has ended: without that node, this process
        cannot start anything on other nodes.
        Raises RecipeError if units on other nodes would need folders that only this machine has.
        """
        import ray

        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        own_id = ray.get_runtime_context().get_node_id()
        if own_id not in alive:
            raise Unreachable(DRIVER_NODE_ENDED)
        nodes = {id: node for id, node in alive.items() if node["Resources"].get("CPU", 0) >= 1}
        names = sorted(node["NodeManagerHostname"] for id, node in nodes.items() if id != own_id)
        if names and self._local:
            raise RecipeError(
                f"the Ray cluster has other nodes ({join_names(names)}), and only this machine has "
                f"{join_names(self._local)}: read from and publish to a bucket instead. If every "
                "node mounts these folders under the same names, write `shared: true` in the "
                "recipe."
            )
        return nodes

    def _start(self, id: str, description: dict[str, Any]) -> None:
        """Start a supervisor on a node. Ray starts the supervisor when the node has a free
        processor for each of its workers, so it may wait for other jobs to end.

        Args:
            id: Ray's id of the node.
            description: Ray's description of the node.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        processors = int(description["Resources"]["CPU"])
        pool = replace(self._pool, workers=self._pool.workers or processors)
        actor_class: Any = ray.remote(
            num_cpus=min(pool.workers, processors),
            scheduling_strategy=NodeAffinitySchedulingStrategy(id, soft=False),
        )(Supervisor)
        actor = actor_class.remote(__version__, pool, self._environment)
        self.nodes[id] = Node(
            id=id,
            name=description["NodeManagerHostname"],
            workers=pool.workers,
            actor=actor,
            answer=actor.exchange.remote([], 0.0),
        )

    def _exchange(self) -> Iterator[tuple[int, Any]]:
        """Receive the answers that supervisors have sent, yield (position, result) of each unit
        that has ended, and give new units to the nodes that have answered.
        """
        import ray

        # Wait for an answer of any node.
        nodes = {node.answer: node for node in self.nodes.values()}
        if not nodes:
            time.sleep(PERIOD)
            return
        ready, _ = ray.wait(list(nodes), num_returns=1, timeout=PERIOD)
        # Handle the answers, and give these nodes new units.
        for answer in ready:
            node = nodes[answer]
            try:
                messages = ray.get(answer)
            except ray.exceptions.RayError as error:
                self._give_up_node(node, f"was lost ({format_error_line(error, number=-1)})")
                continue
            for message in messages:
                yield from self._handle_message(node, message)
            self._assign_units(node)

    def _handle_message(self, node: Node, message: Message) -> Iterator[tuple[int, Any]]:
        """Handle one message of a node, and yield (position, result) if a unit has ended.

        Raises the error of a unit that has failed. The node's name is added to an Unreachable or
        Denied, since perhaps only this node fails to reach the location.

        Args:
            node: the node whose supervisor has sent the message.
            message: the message.
        """
        match message:
            case "failed", error:
                if len(self.nodes) > 1 and type(error) in (Unreachable, Denied):
                    error = type(error)(f"on the node {node.name}: {error}")
                raise error
            case "say", sentence:
                self._say_once(sentence)
            case "progress", size, tokens:
                self._on_progress(size, tokens)
            case "done", unit, result if unit in node.units:  # other answers are late, and ignored
                node.units.remove(unit)
                # A unit that is done restarts the count of supervisors that never answered.
                self._losses.pop(NO_UNIT, None)
                yield unit, result

    def _assign_units(self, node: Node) -> None:
        """Give new units to a node that has answered, as many as it has room for, and ask for its
        next answer.
        """
        node.has_answered = True
        # Each worker does a unit, n/8 units are being stored, and one more unit waits.
        most_units = node.workers + node.workers // 8 + 1
        count = min(most_units - len(node.units), len(self._waiting))
        positions = [self._waiting.pop() for _ in range(count)]
        node.units |= set(positions)
        units = [(position, self._tasks[position]) for position in positions]
        node.answer = node.actor.exchange.remote(units, ANSWER_SECONDS)

    def _give_up_node(self, node: Node, reason: str) -> None:
        """Give up a node whose supervisor was lost. Its units wait for other nodes. If the node
        itself lives, it gets a new supervisor at the next check.

        Raises MdsmixError if more than MOST_LOSSES supervisors were lost while they had the same
        unit, or before they had answered.

        Args:
            node: the node.
            reason: continues a sentence about the node: `was lost`.
        """
        self._drop(node)
        # Put its units back. The last unit of `_waiting` is the next one to be done.
        units = sorted(node.units, reverse=True)
        self._waiting += units
        # A supervisor that never answered is counted as a loss without a unit.
        lost = units if node.has_answered else [NO_UNIT]
        self._losses.update(lost)
        too_often = [unit for unit in lost if self._losses[unit] > MOST_LOSSES]
        if too_often:
            unit_name = ""
            if units:
                unit_name = f" while they had the work unit {self._tasks[too_often[0]].name}"
            raise MdsmixError(
                f"{MOST_LOSSES + 1} nodes were lost one after the other{unit_name}. The last one, "
                f"the node {node.name}, {reason}. Finished units are kept: give the nodes more "
                "memory, or fix the cause, then run the same command again."
            )
        if units:
            self._say(
                f"the node {node.name} {reason}; its work units ({len(units)}) are done again"
            )

    def _drop(self, node: Node) -> None:
        """Forget a node and kill its supervisor, which may be gone already."""
        import ray

        del self.nodes[node.id]
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(node.actor)

    def _stop(self) -> None:
        """End all supervisors. Their workers have GRACE_SECONDS to remove half-written files."""
        if not self.nodes:
            return
        import ray

        # A supervisor that has not answered may not run yet, and has no workers to end.
        ends = [node.actor.end.remote() for node in self.nodes.values() if node.has_answered]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=GRACE_SECONDS + 1)
        for node in list(self.nodes.values()):
            self._drop(node)

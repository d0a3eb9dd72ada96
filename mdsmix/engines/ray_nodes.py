"""The nodes of a Ray cluster: how many tasks they take, of which size, and whether tasks find there what they are to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdsmix.engines.limits import LEAST_BYTES
from mdsmix.engines.memory import AMPLE_BYTES, HEADROOM
from mdsmix.errors import RecipeError
from mdsmix.words import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a cluster that are alive, as it told last."""

    here: str
    "The id of the driver's."
    cpus: dict[str, float]
    "Of those that have some, by their ids."
    memory: dict[str, int]
    "Bytes that tasks may ask for, of the same."
    names: dict[str, str]
    "Host names, of all that there ever were."

    @property
    def slots(self) -> int:
        return int(sum(self.cpus.values()))

    @property
    def others(self) -> list[str]:
        """Names of those where tasks run, and the driver does not."""
        return sorted(self.names[node] for node in self.cpus if node != self.here)

    def share(self, cap: int | None) -> int:
        """Bytes that a task may hold: of every node, what it or `cap` allows over its processors."""
        memory = {node: min(has, cap or has) for node, has in self.memory.items()}
        shares = [int(memory[node] * HEADROOM / cpus) for node, cpus in self.cpus.items()]
        least = min(shares, default=AMPLE_BYTES)
        return max(LEAST_BYTES, least if cap else min(AMPLE_BYTES, least))


def nodes() -> Nodes:
    """Asks the cluster, which takes a millisecond."""
    import ray

    found = ray.nodes()
    working = [node for node in found if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    return Nodes(
        here=str(ray.get_runtime_context().get_node_id()),
        cpus={node["NodeID"]: node["Resources"]["CPU"] for node in working},
        memory={node["NodeID"]: int(node["Resources"].get("memory", 0)) for node in working},
        names={node["NodeID"]: node["NodeManagerHostname"] for node in found},
    )


def refuse_unshared(found: Nodes, local: Sequence[str]) -> None:
    """RecipeError where tasks would look for folders of this machine on others."""
    if found.others and local:
        raise RecipeError(
            f"the cluster has nodes beside this one ({listed(found.others)}), and {listed(local)} {'is a path' if len(local) == 1 else 'are paths'} "
            "of this machine: publish to and read from s3://, or, where every node mounts the same folders under the same names, "
            "say shared: true in the recipe."
        )

"""The machines of a run, and what each of them draws of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from mdsmix.errors import RecipeError
from mdsmix.words import plural

OLD_SHUFFLES = ("py1s", "py2s")
"Streaming gives these 64 canonical nodes a node where nobody says how many; the others get one."
LARGEST_BATCH = 1 << 40
"No data set fills it; above it, sums of floats would not hold."


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Nodes and devices; RecipeError where Streaming or LLM-Foundry would refuse them.

    A YAML that names none is counted for one device, which draws the whole batch.
    """

    batch: int
    "Rows of a step, of all devices together."
    nodes: int = 1
    gpus: int = 1
    "Devices of a node."
    workers: int = 0
    "Processes that read for each device; 0: it reads itself."
    replication: int = 1
    "Neighbouring devices that draw the same samples."
    packing: float = 1.0
    "Samples that are drawn for each row; an Estimate where the ratio is found when training begins."
    num_canonical_nodes: int = 0
    "0: not set."
    algo: str = "py1e"
    "shuffle_algo; `none` where nothing is shuffled."

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus < 1:
            raise RecipeError(
                f"--nodes {self.nodes} --gpus {self.gpus}: a run needs at least one node with one device."
            )
        if not 1 <= self.batch <= LARGEST_BATCH:
            raise RecipeError(
                f"a batch of {self.batch:,} rows: a step needs one at least, and no data fills more than {LARGEST_BATCH:,}."
            )
        if self.replication < 1 or self.nodes * self.gpus % self.replication:
            raise RecipeError(
                f"replication is {self.replication}, which does not divide {plural(self.nodes * self.gpus, 'device')}; Streaming refuses "
                "it: set --nodes and --gpus to those of the run, or another replication."
            )
        if self.batch % self.ranks:
            raise RecipeError(
                f"a batch of {self.batch:,} rows cannot be divided among {plural(self.ranks, 'device')}, and LLM-Foundry refuses such a "
                f"run: take a multiple of {self.ranks:,}, or set --nodes and --gpus to those of the run."
            )
        count, nodes = self.canonical, self.layout_nodes
        if count % nodes and nodes % count:
            raise RecipeError(
                f"num_canonical_nodes is {count}, and Streaming refuses to spread it over {plural(nodes, 'node')}: one of the two must be "
                "a multiple of the other, or every node would read nearly every shard."
            )

    @property
    def ranks(self) -> int:
        """Devices that draw samples of their own."""
        return self.nodes * self.gpus // self.replication

    @property
    def layout_nodes(self) -> int:
        """Nodes as Streaming lays an epoch out for them, which takes devices that draw the same for one."""
        return self.ranks // self.gpus if self.ranks % self.gpus == 0 else 1

    @property
    def layout_ranks(self) -> int:
        """Devices of such a node."""
        return self.ranks // self.layout_nodes

    @property
    def rows(self) -> int:
        """Rows of a step, of one device."""
        return self.batch // self.ranks

    @property
    def drawn(self) -> int:
        """Samples that a device draws for a step, as LLM-Foundry rounds it."""
        return int(self.rows * self.packing)

    @property
    def drawn_together(self) -> int:
        return self.drawn * self.ranks

    @property
    def canonical(self) -> int:
        default = self.layout_nodes * (64 if self.algo in OLD_SHUFFLES else 1)
        return self.num_canonical_nodes or default


def batch_of(given: int | None, named: int | None) -> int:
    """Rows of a step: those of --batch, else those that the YAML names."""
    batch = given if given is not None else named
    if batch is None:
        raise RecipeError(
            "nothing says how large a batch is: give --batch, the rows of a step of all devices together "
            "(global_train_batch_size of a training YAML)."
        )
    return batch

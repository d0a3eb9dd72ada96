"""The machines and the batch that a run is planned for, and what LLM-Foundry would refuse of them."""

from __future__ import annotations

from dataclasses import dataclass

from mdsmix.errors import RecipeError
from mdsmix.mix.delivered import Devices
from mdsmix.mix.streams import Loader
from mdsmix.mix.weights import LARGEST_BATCH
from mdsmix.training.keys import is_number, whole

OLD_SHUFFLES = ("py1s", "py2s")
"Streaming gives these 64 canonical nodes a node where nobody says how many; the others get one."
AUTO_FILL = 0.9
"""What `packing_ratio: auto` is taken to fill of a row: it stops at the last ratio that leaves no row over, and first fit fills 88 % of
the rows of the demo's documents so (docs/one-loader.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Who trains, and what of the batch each draws."""

    nodes: int
    gpus: int
    "Devices a node."
    batch: int
    "Rows of a step, of all devices together."
    ranks: int
    "Devices of a node that draw samples of their own: fewer than it has where `replication` lets several draw the same."
    packing: float
    "Samples drawn for each row."
    is_packing_guessed: bool
    canonical: int
    algo: str
    "shuffle_algo; none where nothing is shuffled."

    @property
    def device_batch(self) -> int:
        return self.batch // (self.nodes * self.ranks)

    @property
    def drawn(self) -> int:
        """Samples that one device draws at a time, as LLM-Foundry rounds it."""
        return int(self.device_batch * self.packing)

    @property
    def devices(self) -> Devices:
        return Devices(
            batch=self.drawn,
            nodes=self.nodes,
            ranks=self.ranks,
            canonical_nodes=self.canonical,
            is_shuffled=self.algo != "none",
        )


def machines(
    loader: Loader, nodes: int, gpus: int, batch: int | None, mean: float | None
) -> Machines:
    """RecipeError where Streaming or LLM-Foundry would refuse them. `mean`: tokens of a mean sample, for `packing_ratio: auto`."""
    if nodes < 1 or gpus < 1:
        raise RecipeError(
            f"--nodes {nodes} --gpus {gpus}: a run needs at least one node with one device."
        )
    if batch is None:
        raise RecipeError(
            "nothing says how large a batch is: give --batch, the rows of a step of all devices together "
            "(global_train_batch_size of a training YAML)."
        )
    if not 1 <= batch <= LARGEST_BATCH:
        raise RecipeError(
            f"a batch of {batch:,} rows: a step needs one at least, and no data fills more than {LARGEST_BATCH:,}."
        )
    dataset = loader.dataset
    replication = whole(dataset.get("replication")) or 1
    ranks = gpus // replication
    if replication < 1 or ranks * replication != gpus:
        raise RecipeError(
            f"replication is {replication}, and {gpus} devices a node are no multiple of it, so they cannot draw in groups."
        )
    if batch % (nodes * ranks):
        near = batch - batch % (nodes * ranks) or nodes * ranks
        raise RecipeError(
            f"a batch of {batch:,} rows cannot be divided among {nodes * ranks:,} devices, and LLM-Foundry refuses such a run: take "
            f"{near:,} or {near + nodes * ranks:,}."
        )
    packing, is_guessed = _packing(loader, mean)
    algo = str(dataset.get("shuffle_algo") or "py1e") if dataset.get("shuffle") else "none"
    return Machines(
        nodes=nodes,
        gpus=gpus,
        batch=batch,
        ranks=ranks,
        packing=packing,
        is_packing_guessed=is_guessed,
        canonical=_canonical(loader, nodes, algo),
        algo=algo,
    )


def _packing(loader: Loader, mean: float | None) -> tuple[float, bool]:
    given = loader.dataset.get("packing_ratio") or 1
    if given == "auto":
        best = AUTO_FILL * (loader.max_seq_len or 1) / mean if mean else 1.0
        return (max(1.0, round(best, 1)), True) if (loader.max_seq_len or 0) > 100 else (1.0, False)
    if not is_number(given) or given < 1:
        raise RecipeError(
            f"packing_ratio is {given!r}; it must be auto, or a number of at least 1."
        )
    return float(given), False


def _canonical(loader: Loader, nodes: int, algo: str) -> int:
    given = whole(loader.dataset.get("num_canonical_nodes")) or 0
    count = given if given > 0 else nodes * (64 if algo in OLD_SHUFFLES else 1)
    if count % nodes and nodes % count:
        raise RecipeError(
            f"num_canonical_nodes is {count}, and Streaming refuses to spread it over {nodes} nodes: one of the two must be a multiple of "
            "the other, or every node would read nearly every shard."
        )
    return count

"""The machines of a run, the samples that an epoch draws from each stream by its weight, and the
part of these samples that a batching method delivers. All are computed as Streaming does.

Sources: Stream.apply_weights in streaming/base/stream.py and streaming/base/batching/, 0.12 and
0.13 alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import COUNT_UNITS, as_whole_number, is_number, parse_quantity
from mdsmix.foundry_yaml.training_yaml import Settings
from mdsmix.mix.streams.mix import Loader, Mix
from mdsmix.words import plural

OLD_SHUFFLES = ("py1s", "py2s")
"""Shuffles for which Streaming sets 64 canonical nodes for each node by default; other shuffles get
1.
"""


@dataclass(frozen=True, kw_only=True)
class World:
    """Nodes and devices; RecipeError where Streaming or LLM-Foundry would refuse them.

    By default one device draws the whole batch.
    """

    batch: int
    "Rows of a step, of all devices together."
    nodes: int = 1
    gpus: int = 1
    "Devices of a node."
    workers: int = 0
    "Processes that read for each device; 0: the device's own process reads."
    replication: int = 1
    "Neighbouring devices that draw the same samples."
    packing: float = 1.0
    """Samples that are drawn for each row; an Estimate where training works the ratio out when it
    begins.
    """
    num_canonical_nodes: int = 0
    "0: not set."
    algo: str = "py1e"
    "shuffle_algo; `none` where nothing is shuffled."

    def __post_init__(self) -> None:
        if self.nodes * self.gpus % self.replication:
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
        """Nodes as Streaming counts them when it lays an epoch out: devices that draw the same
        samples count as one device.
        """
        return self.ranks // self.gpus if self.ranks % self.gpus == 0 else 1

    @property
    def layout_ranks(self) -> int:
        """Devices of each of the `layout_nodes`."""
        return self.ranks // self.layout_nodes

    @property
    def rows(self) -> int:
        """Rows of one device in a step."""
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


Weights = Sequence[Settings]
"For each stream, its given weights among repeat, proportion and choose, such as `repeat: 2`."
METHODS = ("stratified", "per_stream", "device_per_stream")
"The batching methods that drop samples."
SHUFFLE_SEED = 9176
"""Streaming's default shuffle_seed. The seed decides which streams get the samples that rounding
leaves over.
"""


def count_delivered(
    method: str, drawn: Sequence[int], parts: Sequence[float], world: World
) -> list[int]:
    """Samples of each stream that an epoch delivers. Where a number is 0, Streaming gives no epoch
    at all.

    Args:
        drawn: samples that the weights draw from each stream.
        parts: the streams' parts of a batch, which sum to 1.
    """
    if method not in METHODS:
        return list(drawn)
    # Only py1e fails on a stream of fewer samples than canonical nodes.
    least = world.canonical if world.algo == "py1e" else 0
    drawn = [n if n >= least else 0 for n in drawn]
    if method == "stratified":
        return _stratified(drawn, split_batch(parts, world.drawn_together), world)
    if method == "per_stream":
        return [count_per_device(n, world) // world.drawn * world.drawn_together for n in drawn]
    # A node has whole canonical nodes: none where there are fewer of these than nodes.
    of_a_node, whole_nodes = world.canonical // world.layout_nodes, world.drawn * world.layout_nodes
    sizes = [_up(-(-n // world.canonical), world.layout_ranks) * of_a_node for n in drawn]
    return [size // world.drawn * whole_nodes for size in sizes]


def split_batch(parts: Sequence[float], batch: int) -> list[int]:
    """Samples of each stream in a stratified batch: rounded down, then one more each for the
    largest remainders.
    """
    exact = batch * np.array(parts, np.float64)
    whole = exact.astype(np.int64)
    # The same numpy call as in Streaming, since it decides between equal remainders.
    whole[np.flip(np.argsort(exact - whole))[: batch - int(whole.sum())]] += 1
    return [int(n) for n in whole]


def _stratified(drawn: Sequence[int], shares: Sequence[int], world: World) -> list[int]:
    """Samples of each stream in as many batches as the scarcest stream can fill its part of."""
    if min(shares) < 1 or not all(drawn):
        return [n if share >= 1 else 0 for share, n in zip(shares, drawn, strict=True)]
    padded = (_up(_up(n, world.canonical), world.layout_ranks) for n in drawn)
    batches = min(n // share for n, share in zip(padded, shares, strict=True))
    return [batches * share for share in shares]


def count_per_device(samples: int, world: World) -> int:
    """Samples of a stream that each device gets; some samples come twice, so that all devices get
    equally many.
    """
    a_canonical_node = -(-samples // world.canonical)
    if world.canonical < world.layout_nodes:
        a_canonical_node = _up(a_canonical_node, world.layout_nodes // world.canonical)
    return -(-(a_canonical_node * world.canonical // world.layout_nodes) // world.layout_ranks)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def count_draws(
    weights: Weights,
    samples: Sequence[int],
    epoch_size: int | None,
    seed: int = SHUFFLE_SEED,
) -> list[int]:
    """Samples that an epoch draws from each stream; ValueError where Streaming refuses the
    weights.
    """
    keys = [key for weight in weights for key in weight]
    numbers = [number for weight in weights for number in weight.values()]
    is_shared = "proportion" in keys
    if (
        not all(is_number(number) and number >= 0 for number in numbers)
        or any(len(weight) > 1 for weight in weights)
        or (is_shared and keys != ["proportion"] * len(weights))
        or (epoch_size and keys and not is_shared)
    ):
        raise ValueError("Streaming refuses these weights")
    if not is_shared and not epoch_size:
        return [*map(int, _asked(weights, samples, epoch_size))]
    shares = np.array(batch_shares(weights, samples, epoch_size))
    if not shares.any():
        raise ValueError("the proportions sum to 0")
    # Rounded down; the samples left over go to streams drawn at random, one each.
    total = epoch_size or sum(samples)
    chosen = (total * shares).astype(np.int64)
    chosen[np.random.default_rng(seed).choice(len(shares), int(total - chosen.sum()), False)] += 1
    return [int(n) for n in chosen]


def batch_shares(weights: Weights, samples: Sequence[int], epoch_size: int | None) -> list[float]:
    """The streams' parts of an epoch or of a stratified batch, unrounded, with sum 1. Streaming
    must accept the weights.
    """
    asked = np.array(_asked(weights, samples, epoch_size), np.float64)
    return [float(part) for part in asked / max(1e-300, asked.sum())]


def _asked(weights: Weights, samples: Sequence[int], epoch_size: int | None) -> Sequence[float]:
    """The streams' proportions, or the samples that each stream is asked for."""
    if epoch_size and not any(weights):
        return samples
    return [
        float(w["proportion"])
        if "proportion" in w
        else int(w["repeat"] * n)
        if "repeat" in w
        else int(w.get("choose", n))
        for w, n in zip(weights, samples, strict=True)
    ]


def count_loader_draws(loader: Loader) -> list[int] | None:
    """Return the samples that an epoch draws from each stream. None if Streaming refuses the
    weights (checks say why), or if a stream could not be opened.
    """
    if loader.unopened:
        return None
    seed = loader.dataset.get("shuffle_seed", SHUFFLE_SEED)
    if not isinstance(seed, int) or seed < 0:
        return None
    with suppress(ValueError):
        return count_draws(*_weighted(loader), seed)
    return None


def _weighted(loader: Loader) -> tuple[Weights, list[int], int | None]:
    """The streams' weights, their samples, and the epoch size; a size of 0 or null counts
    as None.
    """
    streams, size = loader.streams, loader.dataset.get("epoch_size") or None
    given = size and parse_quantity(size, COUNT_UNITS)
    return [s.weight for s in streams], [s.index.samples for s in streams], given


def get_batching_method(loader: Loader) -> str:
    return str(loader.dataset.get("batching_method") or "random")


def make_run_world(
    mix: Mix, nodes: int, gpus: int, batch: int | None, workers: int | None = None
) -> World:
    """The machines of a run; batch and workers come from the YAML where they are None. RecipeError
    where nothing says the batch.
    """
    batch = batch or mix.yaml.batch_size
    if not batch or batch < 1:
        raise RecipeError(
            "nothing says how large a batch is: give --batch, the rows of a step of all devices together "
            "(global_train_batch_size of a training YAML)."
        )
    loader = mix.train
    return make_world(
        loader,
        batch=batch,
        nodes=nodes,
        gpus=gpus,
        workers=as_whole_number(loader.section.get("num_workers")) or 0
        if workers is None
        else workers,
        replication=as_whole_number(loader.dataset.get("replication")) or 1,
    )


def make_world(loader: Loader, **given: Any) -> World:
    """The machines in `given`, with the loader's settings of canonical nodes and shuffling."""
    dataset = loader.dataset
    return World(
        num_canonical_nodes=max(0, as_whole_number(dataset.get("num_canonical_nodes")) or 0),
        algo=str(dataset.get("shuffle_algo") or "py1e") if dataset.get("shuffle") else "none",
        **given,
    )


def count_delivered_on(loader: Loader, drawn: Sequence[int], world: World) -> list[int]:
    """Samples of each stream that an epoch delivers on these machines. Where a stream's number is
    0, Streaming cannot build batches and the epoch fails.
    """
    return count_delivered(
        get_batching_method(loader), drawn, batch_shares(*_weighted(loader)), world
    )


def count_loader_delivered(loader: Loader, batch: int | None) -> list[int] | None:
    """Samples of each stream that an epoch delivers in batches of `batch` rows, for one device that
    draws whole batches.

    None where Streaming refuses the weights, or where the batch or the packing ratio is not known.
    """
    drawn, ratio = count_loader_draws(loader), loader.dataset.get("packing_ratio") or 1
    if not drawn or get_batching_method(loader) not in METHODS:
        return drawn
    if not sum(drawn) or not batch or batch < 1 or not is_number(ratio) or ratio < 1:
        return None
    return count_delivered_on(loader, drawn, make_world(loader, batch=batch, packing=float(ratio)))

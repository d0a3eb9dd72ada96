"""What a node fetches and keeps, from which shards it reads in one epoch and over the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mdsmix.mix.plan.facts import Facts
from mdsmix.mix.plan.figures import Basis, Figure, NodePlan
from mdsmix.mix.plan.machines import OLD_SHUFFLES, Machines
from mdsmix.mix.plan.nodes import Order, is_drawn_anew, readers
from mdsmix.mix.streams import Loader
from mdsmix.mix.weights import SHUFFLE_SEED, batching
from mdsmix.training.keys import BYTE_UNITS, in_units, whole

MOST_DRAWS = 20_000_000
"Shards times epochs that are drawn, a second or two: what later epochs add of streams that are drawn in part is left out, and said."

Read = NDArray[np.bool_]


def order_of(loader: Loader, machines: Machines) -> Order:
    method, seed = batching(loader), loader.dataset.get("shuffle_seed")
    # A stratified batch is cut into the nodes' parts behind the order, so that every node reads of every part.
    algo = "naive" if method == "stratified" and machines.nodes > 1 else machines.algo
    return Order(
        nodes=machines.nodes,
        canonical=machines.canonical,
        seed=seed if isinstance(seed, int) else SHUFFLE_SEED,
        algo=algo,
        is_fixed=machines.algo == "none" or loader.dataset.get("sampling_method") == "fixed",
        by_stream=method in ("per_stream", "device_per_stream"),
    )


def block_of(loader: Loader, machines: Machines) -> int:
    """shuffle_block_size in effect: what is set, or Streaming's default."""
    return whole(loader.dataset.get("shuffle_block_size")) or max(
        4_000_000 // machines.canonical, 1 << 18
    )


def node_plan(
    facts: Sequence[Facts],
    came: Sequence[int],
    loader: Loader,
    machines: Machines,
    epochs: float,
) -> tuple[NodePlan, int]:
    """The plan, and how many epochs were drawn for it."""
    order = order_of(loader, machines)
    samples = [each.shards.samples for each in facts]
    is_anew = is_drawn_anew(samples, came, order)
    first = readers(samples, came, order, 0)
    most = max(1, MOST_DRAWS // max(1, first.shape[1]))
    count = min(math.ceil(epochs), most) if is_anew else 1
    run = first.copy()
    for epoch in range(1, count):
        run |= readers(samples, came, order, epoch)
    reach = _reach(sum(came), loader, machines, epochs)
    basis = _basis(facts, loader, machines, order, is_anew, reach)
    return _node(facts, first, run, loader, machines, epochs, reach, basis, sum(came)), count


def _node(
    facts: Sequence[Facts],
    first: Read,
    run: Read,
    loader: Loader,
    machines: Machines,
    epochs: float,
    reach: float,
    basis: Basis,
    drawn: int,
) -> NodePlan:
    is_remote = np.concatenate([np.full(len(f.shards.samples), f.shards.is_remote) for f in facts])
    stored, kept, at_most, samples = (
        np.concatenate([getattr(f.shards, what) for f in facts])
        for what in ("stored", "kept", "at_most", "samples")
    )
    fetched, on_disk = stored * is_remote, kept * is_remote
    run_bytes, kept_bytes = run @ fetched, run @ on_disk
    epoch_bytes = first @ fetched
    node = int(np.argmax(kept_bytes)) if is_remote.any() else int(np.argmax(run.sum(axis=1)))
    indexes = sum(f.index_bytes for f in facts if f.shards.is_remote)
    largest = int(at_most.max(initial=0))
    keeps = reach * float(kept_bytes[node]) + indexes
    once = Figure(reach * float(run_bytes[node]) + indexes, basis)
    limit = in_units(loader.dataset.get("cache_limit"), BYTE_UNITS)
    is_short = bool(limit) and limit is not None and limit < keeps + largest
    again = Figure(max(1.0, epochs) * reach * float(epoch_bytes[node]), "estimated")
    window = _window(loader, machines, drawn)
    mean = float(at_most.sum()) / max(1, int(samples.sum()))
    set_size = machines.devices.canonical // machines.nodes or 1
    working = min(keeps, set_size * (window * mean + 2 * largest))
    counted: Basis = "estimated" if any(f.survey for f in facts) else "exact"
    return NodePlan(
        remote_streams=sum(f.shards.is_remote for f in facts),
        epoch_shards=Figure(round(reach * int(first[node].sum())), basis),
        epoch_bytes=Figure(reach * float(epoch_bytes[node]), basis),
        run_shards=Figure(round(reach * int(run[node].sum())), basis),
        run_bytes=once,
        kept_bytes=Figure(keeps, basis),
        mean_kept_bytes=Figure(reach * float(kept_bytes.mean()) + indexes, basis),
        refetched_bytes=again if is_short and again.known > once.known else once,
        largest_shard=Figure(largest, counted),
        working_set=Figure(working, "estimated"),
    )


def _reach(drawn: int, loader: Loader, machines: Machines, epochs: float) -> float:
    """The share of a node's shards that a run shorter than an epoch comes to: those up to where it ends, and those that were shuffled in."""
    if epochs >= 1:
        return 1.0
    part = max(1.0, drawn / machines.canonical)
    return min(1.0, epochs + _window(loader, machines, drawn) / 2 / part)


def _window(loader: Loader, machines: Machines, drawn: int) -> float:
    """Samples of a canonical node among which the next one may lie."""
    part = drawn / machines.canonical
    if machines.algo == "naive":
        return part
    if machines.algo in ("none", *OLD_SHUFFLES):  # one shard after the other
        return 0.0
    return min(part, 1.25 * block_of(loader, machines))


def _basis(
    facts: Sequence[Facts],
    loader: Loader,
    machines: Machines,
    order: Order,
    is_anew: bool,
    reach: float,
) -> Basis:
    """Exact where each of Streaming's decisions is repeated here, and no draw stands for another."""
    if is_anew or reach < 1 or any(each.survey for each in facts) or batching(loader) != "random":
        return "estimated"
    is_cut = order.algo != "naive" and machines.canonical >= machines.nodes
    return "exact" if is_cut or machines.nodes == 1 else "estimated"

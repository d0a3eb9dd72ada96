"""What a node fetches and keeps, as an expectation in closed form, and the settings that decide speed and disk.

Streaming draws from each shard, puts the pieces in an order that the seed decides, and cuts it into as many parts of equal samples as
there are canonical nodes; node p reads parts p, p + nodes, and so on (streaming/base/shuffle, partition/orig.py, 0.12 and 0.13). So a
piece is in one part, and in one more for each of the cuts that falls into it. Where an epoch takes a part of a stream, other epochs take
other parts: a node reads more and more of its shards over the run. That is put up to a quarter too high: orders of unlike epochs have
something in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsmix.mix.draws import OLD_SHUFFLES, World, batching
from mdsmix.mix.foundry_config import NUM_WORKERS
from mdsmix.mix.plan.figures import NodePlan, Setting
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.table import about, size_of
from mdsmix.training.loader_keys import BYTE_UNITS, in_units, whole
from mdsmix.words import does, listed, plural

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of one stream, in order; float64 [n] all of them."""

    samples: Floats
    stored: Floats
    "Bytes that are fetched."
    kept: Floats
    "Bytes on the node's disk, once read."
    sizes: Floats
    "Packed and unpacked together."
    is_remote: bool
    "The shards are fetched; else they lie on the node's disk, and there they stay."


def shards_of(stream: StreamInMix, loader: Loader) -> Shards:
    keep = stream.settings.get("keep_zip")
    is_remote = bool(stream.settings.get("remote")) and not stream.is_only_copy
    keeps_packed = not is_remote or bool(loader.dataset.get("keep_zip") if keep is None else keep)
    counts = [
        (s.samples, s.raw_data.bytes, s.zip_data.bytes if s.zip_data else 0) for s in stream.shards
    ]
    samples, raw, packed = np.array(counts, np.float64).reshape(-1, 3).T
    kept = raw + packed * keeps_packed
    return Shards(samples, np.where(packed > 0, packed, raw), kept, raw + packed, is_remote)


def chances(
    samples: Sequence[Floats], choose: Sequence[int], loader: Loader, world: World, epochs: float
) -> tuple[Floats, Floats]:
    """float64 [shards], the streams' shards one behind the other: how likely a node reads each in the first epoch, and in the run.

    Args:
        samples: for each stream, the samples of each of its shards.
        choose: samples that an epoch draws of each stream.
    """
    method = batching(loader)
    # A stratified batch is cut into the nodes' parts behind the order, so that every node reads of every part.
    is_anywhere = world.algo == "naive" or method == "stratified"
    is_by_stream = method in ("per_stream", "device_per_stream")
    counts = [max(1, int(each.sum())) for each in samples]
    parts = [n % count / count for n, count in zip(choose, counts, strict=True)]
    # Of the pass that is not whole: whether it draws anything of a shard.
    hits = [1 - (1 - part) ** each for part, each in zip(parts, samples, strict=True)]
    is_fixed = loader.dataset.get("sampling_method") == "fixed" or world.algo == "none"
    epochs = 1.0 if is_fixed else max(1.0, epochs)
    # The seed and the number of pieces decide their order, and that number varies by the shards that are left out.
    variance = sum(float((hit * (1 - hit)).sum()) for hit in hits)
    many = max(1.0, 2 * math.sqrt(math.pi * variance))
    orders = epochs if is_anywhere else many * (1 - (1 - 1 / many) ** epochs)
    found: tuple[list[Floats], list[Floats]] = ([], [])
    for each, n, count, part, hit in zip(samples, choose, counts, parts, hits, strict=True):
        of_all = max(2, n if is_by_stream else sum(choose))
        whole_pass = _read(each, of_all, world, is_anywhere)
        drawn = np.maximum(1, each * part / np.maximum(hit, 1e-12))
        partial = _read(drawn, of_all, world, is_anywhere)
        missed = (1 - whole_pass) ** float(n // count)
        in_order = 1 - (1 - hit) ** (epochs / orders)
        found[0].append(1.0 - missed * (1 - hit * partial))
        found[1].append(1.0 - (missed * (1 - in_order * partial)) ** orders)
    return np.concatenate(found[0]), np.concatenate(found[1])


def _read(size: Floats, of_all: int, world: World, is_anywhere: bool) -> Floats:
    """How likely a node reads a piece of so many samples."""
    if is_anywhere:
        return 1 - (1 - 1 / world.layout_nodes) ** size
    parts = 1 + (world.canonical - 1) * (size - 1) / (of_all - 1)
    return np.minimum(1.0, parts / min(world.canonical, world.layout_nodes))


def node_plan(drawn: Sequence[int], loader: Loader, world: World, epochs: float) -> NodePlan:
    """`drawn`: samples that an epoch draws of each stream."""
    of = [shards_of(stream, loader) for stream in loader.streams]
    first, run = chances([s.samples for s in of], drawn, loader, world, float(epochs))
    reach = _reach(sum(drawn), loader, world, float(epochs))
    first, run = reach * first, reach * run
    fetched, kept = (
        np.concatenate([getattr(s, what) * s.is_remote for s in of]) for what in ("stored", "kept")
    )
    indexes = sum(
        len(stream.index.content)
        for stream, s in zip(loader.streams, of, strict=True)
        if s.is_remote
    )
    is_sure = not any(stream.survey for stream in loader.streams)
    is_exact = is_sure and bool(((run == 1) | (run == 0)).all())
    largest = max(float(s.sizes.max(initial=0)) for s in of)
    keeps = float(run @ kept) + indexes
    limit = in_units(loader.dataset.get("cache_limit"), BYTE_UNITS)
    is_short = bool(limit) and limit is not None and limit < keeps + largest
    times = max(1.0, float(epochs)) if is_short else 1.0
    once = float((first if is_short else run) @ fetched)
    return NodePlan(
        remote_streams=sum(s.is_remote for s in of),
        epoch_shards=about(round(float(first.sum())), is_exact),
        epoch_bytes=about(float(first @ fetched), is_exact),
        run_shards=about(round(float(run.sum())), is_exact),
        run_bytes=about(times * once + indexes, is_exact and not is_short),
        kept_bytes=about(keeps, is_exact),
        largest_shard=about(largest, is_sure),
        working_set=about(min(keeps, _working_set(of, sum(drawn), loader, world, largest)), False),
    )


def _working_set(
    of: Sequence[Shards], drawn: int, loader: Loader, world: World, largest: float
) -> float:
    """Bytes among which a node shuffles at a time: the window of each of its canonical nodes, and the shards at both its ends."""
    size, samples = (sum(float(getattr(s, w).sum()) for s in of) for w in ("sizes", "samples"))
    parts = world.canonical // world.layout_nodes or 1
    return parts * (_window(loader, world, drawn) * size / max(1.0, samples) + 2 * largest)


def _reach(drawn: int, loader: Loader, world: World, epochs: float) -> float:
    """The share of a node's shards that a run shorter than an epoch comes to: those up to where it ends, and those that were shuffled in."""
    if epochs >= 1:
        return 1.0
    part = max(1.0, drawn / world.canonical)
    return min(1.0, epochs + _window(loader, world, drawn) / 2 / part)


def _window(loader: Loader, world: World, drawn: int) -> float:
    """Samples of a canonical node among which the next one may lie."""
    part = drawn / world.canonical
    if world.algo == "naive":
        return part
    if world.algo in ("none", *OLD_SHUFFLES):  # one shard after the other
        return 0.0
    return min(part, 1.25 * block_of(loader, world))


def block_of(loader: Loader, world: World) -> int:
    """shuffle_block_size in effect: what is set, or Streaming's default."""
    return whole(loader.dataset.get("shuffle_block_size")) or max(
        4_000_000 // world.canonical, 1 << 18
    )


BATCHES_AHEAD = 8
"Streaming's default of predownload, in batches."
SHARDS_A_BLOCK = 4
"A block of fewer of the largest shards mixes little."
ROOM = 0.9
"Of a disk: the rest is for what else is written there."
Advice = tuple[str | None, str]
"What to write, and why."


def settings_for(
    loader: Loader, node: NodePlan, world: World, disk: int | None
) -> tuple[Setting, ...]:
    """The keys that decide speed and disk. None changes which samples an epoch holds; the first two change their order.

    `disk`: bytes that a node has for its cache; None where nobody said.
    """
    workers = whole(loader.section.get("num_workers")) or NUM_WORKERS
    found: dict[str, Advice] = {
        "num_canonical_nodes": (
            str(world.canonical),
            "it decides the order of samples: written down, a run that starts again on another number of nodes keeps it",
        ),
        "shuffle_block_size": _block(loader, world),
        "predownload": _predownload(loader, world),
        "cache_limit": _cache_limit(loader, node, disk),
        "num_workers": (
            str(workers),
            f"{workers * world.gpus} processes a node, no more than it has processors; `mdsmix bench` measures what is fastest",
        ),
    }
    given = {**loader.dataset, "num_workers": loader.section.get("num_workers")}
    return tuple(
        Setting(key=key, now=None if given.get(key) is None else str(given[key]), use=use, why=why)
        for key, (use, why) in found.items()
    )


def _block(loader: Loader, world: World) -> Advice:
    if world.algo not in ("py1e", "py1br"):
        return None, f"shuffle_algo {world.algo} has no blocks"
    largest = max((shard.samples for s in loader.streams for shard in s.shards), default=0)
    why = f"the samples among which one is shuffled: at least {SHARDS_A_BLOCK} of the largest shard, of {largest:,} samples"
    return str(max(block_of(loader, world), SHARDS_A_BLOCK * largest)), why


def _predownload(loader: Loader, world: World) -> Advice:
    given = whole(loader.dataset.get("predownload")) or 0
    use = given if given >= world.drawn else BATCHES_AHEAD * world.drawn
    why = f"samples that each worker fetches ahead: less than the {plural(world.drawn, 'sample')} of a device's batch makes batches wait"
    return str(use), why


def _cache_limit(loader: Loader, node: NodePlan, disk: int | None) -> Advice:
    if local := [s.name for s in loader.streams if not shards_of(s, loader).is_remote]:
        lie = f"{listed(local)} {does(local, 'lies', 'lie')} on the nodes' own disks alone"
        return None, f"{lie}, and under a limit Streaming would delete the only copy"
    indexes = sum(len(stream.index.content) for stream in loader.streams)
    keeps = node.kept_bytes + node.largest_shard
    least = max(4 * node.largest_shard + indexes, node.working_set)
    why = (
        f"a node keeps {size_of(keeps)} over the run; below {size_of(least)}, 4 of the largest shard and all that is shuffled at a time, "
        "shards are fetched again within an epoch"
    )
    if (in_units(loader.dataset.get("cache_limit"), BYTE_UNITS) or 0) >= least:
        return str(loader.dataset["cache_limit"]), why
    if disk is None or keeps <= ROOM * disk:
        return None, why
    if least > ROOM * disk:
        return None, f"{why}: {size_of(disk)} are too few; take more nodes or a larger disk"
    return f"{int(ROOM * disk) >> 20}mb", f"{why}; {size_of(disk)} hold less, so shards are evicted"


def unheld(settings: Sequence[Setting]) -> Iterator[str]:
    """The settings that a config holds otherwise."""
    for each in settings:
        if each.now is not None and each.use is not None and each.now != each.use:
            yield each.key

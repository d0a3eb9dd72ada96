"""What a node fetches and keeps, as an expectation in closed form, and the settings that decide speed and disk.

Streaming draws from each shard, puts the pieces in an order that the seed decides, and cuts it into as many parts of equal samples as
there are canonical nodes; node p reads parts p, p + nodes, and so on (streaming/base/shuffle, partition/orig.py, 0.12 and 0.13). So a
piece is in one part, and in one more for each of the cuts that falls into it. Where an epoch takes a part of a stream, other epochs are
taken to be in an order of their own: a node reads more and more of its shards over the run. That is put up to a half too high: orders
of unlike epochs have something in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mdsmix.mix.draws import World, batching
from mdsmix.mix.plan.figures import NodePlan, Setting
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.table import about, size_of
from mdsmix.training.loader_keys import BYTE_UNITS, in_units, whole
from mdsmix.words import does, listed, plural

Floats = NDArray[np.float64]


def is_fetched(stream: StreamInMix) -> bool:
    """Else its shards lie on the node's disk, and there they stay."""
    return bool(stream.settings.get("remote")) and not stream.is_only_copy


def chances(
    samples: Sequence[Floats], choose: Sequence[int], loader: Loader, world: World
) -> Floats:
    """float64 [shards], the streams' shards one behind the other: how likely a node reads each in an epoch.

    Args:
        samples: for each stream, the samples of each of its shards.
        choose: samples that an epoch draws of each stream.
    """
    method, found = batching(loader), list[Floats]()
    for each, n in zip(samples, choose, strict=True):
        passes, part = divmod(n / max(1.0, each.sum()), 1)
        hit = 1 - (1 - part) ** each  # whether the pass that is not whole draws anything of a shard
        size = np.maximum(1, each * (passes + part) / np.maximum(passes + hit, 1e-12))
        # A stratified batch is cut into the nodes' parts behind the order, so that every node reads of every part.
        if world.algo == "naive" or method == "stratified":
            read = 1 - (1 - 1 / world.layout_nodes) ** size
        else:
            of_all = max(2, n if method in ("per_stream", "device_per_stream") else sum(choose))
            parts = 1 + (world.canonical - 1) * (size - 1) / (of_all - 1)
            read = np.minimum(1, parts / min(world.canonical, world.layout_nodes))
        found.append(1 - (1 - read) ** passes * (1 - hit * read))
    return np.concatenate(found)


def node_plan(drawn: Sequence[int], loader: Loader, world: World, epochs: float) -> NodePlan:
    """`drawn`: samples that an epoch draws of each stream."""
    streams = loader.streams
    of_streams = [_shards(stream, loader) for stream in streams]
    samples, fetched, kept, sizes = np.concatenate(of_streams, axis=1)
    times, largest = max(1.0, float(epochs)), float(sizes.max(initial=0))
    # A run shorter than an epoch reads as many shards as it is long.
    first = chances([of[0] for of in of_streams], drawn, loader, world) * min(1.0, float(epochs))
    is_fixed = loader.dataset.get("sampling_method") == "fixed" or world.algo == "none"
    is_whole = not any(n % (of.index.samples or 1) for n, of in zip(drawn, streams, strict=True))
    run = first if is_fixed or is_whole else 1 - (1 - first) ** times
    indexes = sum(len(stream.index.content) for stream in streams if is_fetched(stream))
    is_sure = not any(stream.survey for stream in streams)
    is_exact = is_sure and bool(((run == 1) | (run == 0)).all())
    keeps = float(run @ kept) + indexes
    is_short = 0 < (in_units(loader.dataset.get("cache_limit"), BYTE_UNITS) or 0) < keeps + largest
    fetches = times * float(first @ fetched) if is_short else float(run @ fetched)
    # Of each of its canonical nodes the samples that are shuffled, and the shards at both ends.
    window = min(sum(drawn) / world.canonical, block_of(loader, world) or 0)
    shuffled = window * float(sizes.sum()) / max(1.0, float(samples.sum())) + 2 * largest
    return NodePlan(
        remote_streams=sum(map(is_fetched, streams)),
        run_bytes=about(fetches + indexes, is_exact and not is_short),
        kept_bytes=about(keeps, is_exact),
        largest_shard=about(largest, is_sure),
        working_set=about(min(keeps, (world.canonical // world.layout_nodes or 1) * shuffled)),
    )


def _shards(stream: StreamInMix, loader: Loader) -> Floats:
    """float64 [4, shards]: samples, bytes that are fetched, those that are kept on the node's disk, and both packed and unpacked bytes."""
    keep = stream.settings.get("keep_zip")
    keeps_packed = bool(loader.dataset.get("keep_zip") if keep is None else keep)
    counts = [
        (s.samples, s.raw_data.bytes, s.zip_data.bytes if s.zip_data else 0) for s in stream.shards
    ]
    samples, raw, packed = np.array(counts, np.float64).reshape(-1, 3).T
    read = np.stack([np.where(packed > 0, packed, raw), raw + packed * keeps_packed])
    return np.stack([samples, *(read * is_fetched(stream)), raw + packed])


def block_of(loader: Loader, world: World) -> int | None:
    """The samples among which one is shuffled: shuffle_block_size, as it is set or Streaming's default; None where shuffle_algo has none."""
    if world.algo not in ("py1e", "py1br"):
        return None
    default = max(4_000_000 // world.canonical, 1 << 18)
    return whole(loader.dataset.get("shuffle_block_size")) or default


BATCHES_AHEAD = 8
"Streaming's default of predownload, in batches."
SHARDS_A_BLOCK = 4
"A block of fewer of the largest shards mixes little."
ROOM = 0.9
"Of a disk: the rest is for what else is written there."


def settings_for(
    loader: Loader, node: NodePlan, world: World, disk: int | None
) -> tuple[Setting, ...]:
    """The keys that decide speed and disk. None changes which samples an epoch holds; the first two change their order.

    `disk`: bytes that a node has for its cache; None where nobody said.
    """
    largest = max((shard.samples for s in loader.streams for shard in s.shards), default=0)
    block, given = block_of(loader, world), loader.dataset
    ahead = whole(given.get("predownload")) or 0
    limit, why = _cache_limit(loader, node, disk)
    advice: dict[str, tuple[object, str]] = {
        "num_canonical_nodes": (
            world.canonical,
            "it decides the order of samples: written down, a run that starts again on another number of nodes keeps it",
        ),
        "shuffle_block_size": (
            block and max(block, SHARDS_A_BLOCK * largest),
            f"the samples among which one is shuffled: at least {SHARDS_A_BLOCK} of the largest shard, of {largest:,} samples"
            if block
            else f"shuffle_algo {world.algo} has no blocks",
        ),
        "predownload": (
            ahead if ahead >= world.drawn else BATCHES_AHEAD * world.drawn,
            f"samples that each worker fetches ahead: less than the {plural(world.drawn, 'sample')} of a device's batch makes batches wait",
        ),
        "cache_limit": (limit, why),
    }
    return tuple(
        Setting(key=key, now=_said(given.get(key)), use=_said(use), why=why)
        for key, (use, why) in advice.items()
    )


def _said(value: object) -> str | None:
    return None if value is None else str(value)


def _cache_limit(loader: Loader, node: NodePlan, disk: int | None) -> tuple[str | None, str]:
    """What to write, and why."""
    if local := [stream.name for stream in loader.streams if not is_fetched(stream)]:
        return None, (
            f"{listed(local)} {does(local, 'lies', 'lie')} on the nodes' own disks alone, and under a limit Streaming would delete the "
            "only copy"
        )
    keeps, given = node.kept_bytes + node.largest_shard, loader.dataset.get("cache_limit")
    least = max(4 * node.largest_shard + loader.index_bytes, node.working_set)
    why = (
        f"a node keeps {size_of(keeps)} over the run; below {size_of(least)}, 4 of the largest shard and all that is shuffled at a time, "
        "shards are fetched again within an epoch"
    )
    if (in_units(given, BYTE_UNITS) or 0) >= least:
        return str(given), why
    if disk is None or keeps <= ROOM * disk:
        return None, why
    if least > ROOM * disk:
        return None, f"{why}: {size_of(disk)} are too few; take more nodes or a larger disk"
    return f"{int(ROOM * disk) >> 20}mb", f"{why}; {size_of(disk)} hold less, so shards are evicted"

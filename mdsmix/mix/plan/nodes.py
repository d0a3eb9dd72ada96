"""What a node fetches and keeps, as an expectation in closed form, and the settings that decide speed and disk.

Streaming draws from each shard, puts the pieces in an order that the seed decides, and cuts it into as many parts of equal samples as
there are canonical nodes; node p reads parts p, p + nodes, and so on (streaming/base/shuffle, partition/orig.py, 0.12 and 0.13). So a
piece is in one part, and in one more for each of the cuts that falls into it. The shards of a stream are taken to be equal. Where an
epoch takes a part of a stream, other epochs are taken to be in an order of their own: a node reads more and more of its shards over the
run. That is put up to a half too high: orders of unlike epochs have something in common.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdsmix.mix.draws import World, batching
from mdsmix.mix.plan.figures import NodePlan, Setting
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.table import about, size_of
from mdsmix.training.loader_keys import BYTE_UNITS, in_units
from mdsmix.words import does, listed


def is_fetched(stream: StreamInMix) -> bool:
    """Else its shards lie on the node's disk, and there they stay."""
    return bool(stream.settings.get("remote"))


def chance(shard: float, passes: float, epoch: int, method: str, world: World) -> float:
    """How likely a node reads a shard in an epoch.

    Args:
        shard: its samples.
        passes: how often an epoch takes each sample of its stream.
        epoch: samples that are put in one order: of all streams, or of the shard's own.
        method: the batching method.
    """
    full, part = divmod(passes, 1)
    hit = 1 - (1 - part) ** shard  # whether the pass that is not whole draws anything of it
    piece = max(1.0, shard * passes / max(full + hit, 1e-12))
    # A stratified batch is cut into the nodes' parts behind the order, so that every node reads of every part.
    if world.algo == "naive" or method == "stratified":
        read = 1 - (1 - 1 / world.layout_nodes) ** piece
    else:
        parts = 1 + (world.canonical - 1) * (piece - 1) / max(1, epoch - 1)
        read = min(1.0, parts / min(world.canonical, world.layout_nodes))
    return float(1 - (1 - read) ** full * (1 - hit * read))


def node_plan(drawn: Sequence[int], loader: Loader, world: World, epochs: float) -> NodePlan:
    """`drawn`: samples that an epoch draws of each stream."""
    method, keep_zip = batching(loader), loader.dataset.get("keep_zip")
    is_fixed = loader.dataset.get("sampling_method") == "fixed" or world.algo == "none"
    is_whole = not any(
        n % (of.index.samples or 1) for n, of in zip(drawn, loader.streams, strict=True)
    )
    fetched = kept = largest = 0.0
    is_exact = not any(stream.survey for stream in loader.streams)
    for stream, n in zip(loader.streams, drawn, strict=True):
        shards, samples = stream.index.shards, max(1, stream.index.samples)
        sizes = [(s.raw_data.bytes, s.zip_data.bytes if s.zip_data else 0) for s in shards]
        largest = max([largest, *map(sum, sizes)])
        if not is_fetched(stream):
            continue
        raw, packed = sum(size for size, _ in sizes), sum(size for _, size in sizes)
        order = n if "per_stream" in method else sum(drawn)
        # A run shorter than an epoch reads as many shards as it is long.
        first = min(1.0, float(epochs)) * chance(
            samples / max(1, len(shards)), n / samples, order, method, world
        )
        run = first if is_fixed or is_whole else 1 - (1 - first) ** max(1.0, float(epochs))
        index = len(stream.index.content)
        keeps_packed = stream.settings.get("keep_zip", keep_zip)
        fetched += run * stream.index.bytes + index
        kept += run * (raw + packed * bool(keeps_packed)) + index
        is_exact &= run in (0, 1)
    return NodePlan(
        remote_streams=sum(map(is_fetched, loader.streams)),
        run_bytes=about(fetched, is_exact),
        kept_bytes=about(kept, is_exact),
        largest_shard=largest,
    )


ROOM = 0.9
"Of a disk: the rest is for what else is written there."


def settings_for(
    loader: Loader, node: NodePlan, world: World, disk: int | None
) -> tuple[Setting, ...]:
    """The keys whose defaults depend on the machines, or fit none. None changes which samples an epoch holds.

    `disk`: bytes that a node has for its cache; None where nobody said.
    """
    limit, why = _cache_limit(loader, node, disk)
    return (
        Setting(
            key="num_canonical_nodes",
            use=str(world.canonical),
            why="it decides the order of samples: written down, a run that starts again on another number of nodes keeps it",
        ),
        Setting(key="cache_limit", use=limit, why=why),
    )


def _cache_limit(loader: Loader, node: NodePlan, disk: int | None) -> tuple[str | None, str]:
    """What to write, and why."""
    if local := [stream.name for stream in loader.streams if not is_fetched(stream)]:
        return None, (
            f"{listed(local)} {does(local, 'lies', 'lie')} on the nodes' own disks alone, and under a limit Streaming would delete the "
            "only copy"
        )
    keeps, given = node.kept_bytes + node.largest_shard, loader.dataset.get("cache_limit")
    least = 4 * node.largest_shard + loader.index_bytes
    why = (
        f"a node keeps {size_of(keeps)} over the run; below {size_of(least)}, 4 of the largest shard, shards are fetched again and again "
        "within an epoch"
    )
    if (in_units(given, BYTE_UNITS) or 0) >= least:
        return str(given), why
    if disk is None or keeps <= ROOM * disk:
        return None, why
    if least > ROOM * disk:
        return None, f"{why}: {size_of(disk)} are too few; take more nodes or a larger disk"
    return f"{int(ROOM * disk) >> 20}mb", f"{why}; {size_of(disk)} hold less, so shards are evicted"

"""The bytes that a node is expected to fetch and keep, in closed form, and the settings that decide
speed and use of the disk.

Streaming draws a piece of each shard, orders the pieces by the seed, and cuts the order into one
part for each canonical node, with equal samples. Node p reads parts p, p + nodes, and so on
(streaming/base/shuffle, partition/orig.py, 0.12 and 0.13). So a piece lies in one part, and in one
more for each cut within it. The shards of a stream are taken to be equal. Where an epoch takes a
part of a stream, the orders of epochs are taken to be independent: a node reads more and more of
its shards over the run. The figure is then up to a half too high, since orders of different epochs
have something in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdsmix.foundry_yaml.loader_keys import BYTE_UNITS, parse_quantity
from mdsmix.messages import choose_verb, join_names
from mdsmix.mix.epoch.cache_window import compute_loader_need
from mdsmix.mix.epoch.draws import Machines, get_batching_method
from mdsmix.mix.streams.mix import Loader, StreamInMix
from mdsmix.table import format_size, mark_estimate


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """The bytes that a node fetches and keeps, on average."""

    remote_streams: int
    "Streams that are fetched. All others lie on the node's own disk."
    run_bytes: float
    "Bytes fetched over the run, if the disk has room for `kept_bytes`."
    kept_bytes: float
    """Bytes on the node's disk at the end of the run: shards unpacked, and packed ones too under
    keep_zip.
    """
    largest_shard: float
    "Bytes of the largest shard, packed and unpacked together."


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A key of train_loader that decides speed or use of the disk, and never the samples that are
    trained on.
    """

    key: str
    use: str | None
    "The value to write; None: leave the key out."
    why: str


def is_fetched(stream: StreamInMix) -> bool:
    """Whether the stream has a remote. The shards of other streams lie on the node's disk and stay
    there.
    """
    return bool(stream.settings.get("remote"))


def chance_of_fetch(shard: float, passes: float, epoch: int, method: str, world: Machines) -> float:
    """The probability, 0 to 1, that a node reads a shard in an epoch.

    Args:
        shard: samples of the shard.
        passes: how often an epoch takes each sample of the shard's stream.
        epoch: samples that are ordered together: of all streams, or of the shard's stream alone.
        method: the batching method.
    """
    full, part = divmod(passes, 1)
    # The probability that the last, partial pass draws from the shard.
    hit = 1 - (1 - part) ** shard
    piece = max(1.0, shard * passes / max(full + hit, 1e-12))
    # A stratified batch is divided among nodes after the ordering, so every node reads from every
    # part.
    if world.algo == "naive" or method == "stratified":
        read = 1 - (1 - 1 / world.layout_nodes) ** piece
    else:
        parts = 1 + (world.canonical - 1) * (piece - 1) / max(1, epoch - 1)
        read = min(1.0, parts / min(world.canonical, world.layout_nodes))
    return float(1 - (1 - read) ** full * (1 - hit * read))


def plan_node(drawn: Sequence[int], loader: Loader, world: Machines, epochs: float) -> NodePlan:
    """The bytes that a node fetches and keeps over `epochs` epochs. `drawn`: samples that an epoch
    draws from each stream.
    """
    method, keep_zip = get_batching_method(loader), loader.dataset.get("keep_zip")
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
        # A run of half an epoch reads half of the shards.
        first = min(1.0, float(epochs)) * chance_of_fetch(
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
        run_bytes=mark_estimate(fetched, is_exact),
        kept_bytes=mark_estimate(kept, is_exact),
        largest_shard=largest,
    )


ROOM = 0.9
"The share of a disk that shards may take. The rest is for other files."


def advise_settings(
    loader: Loader, node: NodePlan, world: Machines, disk: int | None
) -> tuple[Setting, ...]:
    """Settings whose defaults depend on the machines or fit none of them. They do not change which
    samples an epoch holds.

    `disk`: bytes that a node has for its cache; None where not given.
    """
    limit, why = _cache_limit(loader, node, world, disk)
    return (
        Setting(
            key="num_canonical_nodes",
            use=str(world.canonical),
            why="it decides the order of samples: written down, a run that starts again on another number of nodes keeps it",
        ),
        Setting(key="cache_limit", use=limit, why=why),
    )


def _cache_limit(
    loader: Loader, node: NodePlan, world: Machines, disk: int | None
) -> tuple[str | None, str]:
    """The cache_limit to write (None: leave it out), and the reason."""
    if local := [stream.name for stream in loader.streams if not is_fetched(stream)]:
        return None, (
            f"{join_names(local)} {choose_verb(local, 'lies', 'lie')} on the nodes' own disks alone, and under a limit Streaming would delete the "
            "only copy"
        )
    keeps, given = node.kept_bytes + node.largest_shard, loader.dataset.get("cache_limit")
    need = compute_loader_need(loader, world)
    why = (
        f"a node keeps {format_size(keeps)} over the run; below {format_size(need.bytes)}, the {need.shards:,} shards in which the samples that its "
        "workers prepare ahead and read can lie, Streaming evicts shards that a worker waits for, and may wait for ever"
    )
    if (parse_quantity(given, BYTE_UNITS) or 0) >= need.bytes:
        return str(given), why
    if disk is None or keeps <= ROOM * disk:
        return None, why
    limit = int(ROOM * disk) >> 20
    if limit << 20 < need.bytes:
        return None, (
            f"{why}: {format_size(disk)} are too few; take a larger disk, more nodes, a smaller predownload or fewer num_workers"
        )
    return f"{limit}mb", f"{why}; {format_size(disk)} hold less, so shards are evicted"

"""The bytes that a node is expected to fetch and keep, and the settings that decide how fast it
loads and how much of its disk it uses.

The samples that Streaming draws from one shard are called a piece here. Streaming shuffles the
pieces, and cuts the resulting order into equal sections, one for each canonical node. Node p reads
sections p, p + nodes, and so on (streaming/base/shuffle, partition/orig.py, 0.12 and 0.13). So a
piece is in one section, and in one more for each cut through it.

The formulas assume that the shards of a stream are equal. If an epoch draws only some samples of a
stream, they also assume that the orders of epochs are independent, so that a node reads further
shards in each epoch. The bytes are then up to a half too high, because the orders of different
epochs are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mdsmix.foundry_yaml.loader_keys import BYTE_UNITS, parse_quantity
from mdsmix.frozen import frozen
from mdsmix.messages import choose_verb, join_names
from mdsmix.mix.epoch.cache_window import compute_loader_need
from mdsmix.mix.epoch.draws import Machines, get_batching_method
from mdsmix.mix.streams.mix import Loader, StreamInMix
from mdsmix.table import format_size, mark_estimate


@frozen(kw_only=True)
class NodePlan:
    """The bytes that a node of a run fetches and keeps, on average. `plan_node` computes them."""

    remote_streams: int
    "Number of streams that are fetched. The others are on the node's own disk."
    run_bytes: float
    "Bytes fetched over the run, if the disk has room for `kept_bytes`."
    kept_bytes: float
    """Bytes on the node's disk at the end of the run: decompressed shards, and compressed ones too
    with keep_zip.
    """
    largest_shard: float
    "Bytes of the largest shard, compressed and decompressed together."


@frozen(kw_only=True)
class Setting:
    """A key of train_loader whose best value depends on the machines. It does not change which
    samples are used for training.
    """

    key: str
    use: str | None
    "The value to write. None if the key should be left out."
    why: str


def is_fetched(stream: StreamInMix) -> bool:
    """Check whether nodes fetch the stream from a remote. Otherwise its shards are already on the
    node's disk.
    """
    return bool(stream.settings.get("remote"))


def compute_chance_of_fetch(
    shard: float, passes: float, epoch: int, method: str, machines: Machines
) -> float:
    """Return the probability, 0 to 1, that a node reads a shard in an epoch. A node that reads a
    shard must fetch it.

    Args:
        shard: number of samples in the shard.
        passes: how often an epoch draws each sample of the shard's stream, such as 1.5.
        epoch: number of samples that are shuffled together: all samples that the epoch draws or, if
            the batching method shuffles each stream by itself, those of the shard's stream.
        method: the batching method.
        machines: the nodes and devices of the run.
    """
    full_passes, last_pass = divmod(passes, 1)
    # The probability that the last, partial pass draws from the shard.
    is_drawn = 1 - (1 - last_pass) ** shard
    # Samples of the shard that a pass draws, on average over the passes that draw from it.
    piece = max(1.0, shard * passes / max(full_passes + is_drawn, 1e-12))
    # A stratified batch is divided among nodes after the shuffle, so every node reads from every
    # section.
    if machines.shuffle == "naive" or method == "stratified":
        # Each sample of the piece is read by a random node.
        is_read = 1 - (1 - 1 / machines.layout_nodes) ** piece
    else:
        # A piece stays together, and is cut only where a section ends: one section more for each
        # of the `canonical - 1` cuts that falls into one of its `piece - 1` gaps.
        sections = 1 + (machines.canonical - 1) * (piece - 1) / max(1, epoch - 1)
        is_read = min(1.0, sections / min(machines.canonical, machines.layout_nodes))
    # `is_read` is the probability that the node reads the shard in one pass that draws from it.
    is_never_read = (1 - is_read) ** full_passes * (1 - is_drawn * is_read)
    return float(1 - is_never_read)


def plan_node(drawn: Sequence[int], loader: Loader, machines: Machines, epochs: float) -> NodePlan:
    """Compute the bytes that a node of a run fetches and keeps.

    Args:
        drawn: samples that an epoch draws from each stream of the loader.
        loader: the train_loader.
        machines: the nodes and devices of the run.
        epochs: the length of the run in epochs, such as 2.5.
    """
    dataset = loader.dataset
    # Every epoch reads the same shards if it draws the same samples, or all samples.
    draws_the_same = dataset.get("sampling_method") == "fixed" or machines.shuffle == "none"
    draws_all = True
    for stream, draws in zip(loader.streams, drawn, strict=True):
        if draws % (stream.index.samples or 1):
            draws_all = False

    # Sum up what the node fetches and keeps of each stream.
    fetched_bytes = 0.0
    kept_bytes = 0.0
    largest_shard = 0.0
    is_exact = not any(stream.survey for stream in loader.streams)
    for stream, draws in zip(loader.streams, drawn, strict=True):
        sizes = _sum_shards(stream)
        largest_shard = max(largest_shard, sizes.largest)
        if not is_fetched(stream):
            continue

        # The share of the stream's shards that the node reads. If epochs draw different samples, it
        # reads further shards in each of them.
        share = _compute_share_in_epoch(stream, draws, drawn, loader, machines, epochs)
        if not (draws_the_same or draws_all):
            share = 1 - (1 - share) ** max(1.0, float(epochs))

        # The index is always read whole.
        index = len(stream.index.content)
        bytes_on_disk = sizes.raw
        if stream.settings.get("keep_zip", dataset.get("keep_zip")):
            bytes_on_disk += sizes.packed
        fetched_bytes += share * stream.index.bytes + index
        kept_bytes += share * bytes_on_disk + index
        # A node that reads all shards, or none, is certain; any other share is an expectation.
        is_exact &= share in (0, 1)
    return NodePlan(
        remote_streams=sum(map(is_fetched, loader.streams)),
        run_bytes=mark_estimate(fetched_bytes, is_exact=is_exact),
        kept_bytes=mark_estimate(kept_bytes, is_exact=is_exact),
        largest_shard=largest_shard,
    )


class _ShardBytes(NamedTuple):
    """The bytes of a stream's shards."""

    raw: int
    "Of all shards, decompressed."
    packed: int
    "Of all shards, compressed; 0 if they are not compressed."
    largest: int
    "Of the largest shard, compressed and decompressed together."


def _sum_shards(stream: StreamInMix) -> _ShardBytes:
    """Return the bytes of a stream's shards."""
    raw = 0
    packed = 0
    largest = 0
    for shard in stream.index.shards:
        # A shard that is not compressed has no zip_data.
        zip_bytes = shard.zip_data.bytes if shard.zip_data else 0
        raw += shard.raw_data.bytes
        packed += zip_bytes
        largest = max(largest, shard.raw_data.bytes + zip_bytes)
    return _ShardBytes(raw, packed, largest)


def _compute_share_in_epoch(
    stream: StreamInMix,
    draws: int,
    drawn: Sequence[int],
    loader: Loader,
    machines: Machines,
    epochs: float,
) -> float:
    """Return the share of a stream's shards, 0 to 1, that a node reads in one epoch. A run that is
    shorter than an epoch reads proportionally fewer.

    Args:
        draws: samples that an epoch draws from this stream.
        drawn: samples that an epoch draws from each stream of the loader.
        epochs: the length of the run in epochs, such as 2.5.
    """
    method = get_batching_method(loader)
    samples = max(1, stream.index.samples)
    samples_per_shard = samples / max(1, len(stream.index.shards))
    shuffled_together = draws if "per_stream" in method else sum(drawn)
    chance = compute_chance_of_fetch(
        samples_per_shard, draws / samples, shuffled_together, method, machines
    )
    return min(1.0, float(epochs)) * chance


ROOM = 0.9
"The share of a disk that shards may use; the rest is for other files."


def advise_settings(
    loader: Loader, node: NodePlan, machines: Machines, disk: int | None
) -> tuple[Setting, ...]:
    """Return the settings of train_loader that should be set to fit the machines:
    num_canonical_nodes and cache_limit. They do not change which samples an epoch has.

    Args:
        node: the bytes that a node fetches and keeps.
        disk: bytes that a node has for its cache; None if unknown.
    """
    return (
        Setting(
            key="num_canonical_nodes",
            use=str(machines.canonical),
            why=(
                "fixes the sample order; set it so that a resume on another node count sees the "
                "same data"
            ),
        ),
        _advise_cache_limit(loader, node, machines, disk),
    )


def _advise_cache_limit(
    loader: Loader, node: NodePlan, machines: Machines, disk: int | None
) -> Setting:
    """Return the cache_limit to set, such as `51200mb`, or None to set none, with the reason.

    Args:
        node: the bytes that a node fetches and keeps.
        disk: bytes that a node has for its cache; None if unknown.
    """
    local = [stream.name for stream in loader.streams if not is_fetched(stream)]
    if local:
        why = (
            f"{join_names(local)} {choose_verb(local, 'is', 'are')} only on the nodes' own disks, "
            "and with a limit Streaming would delete the only copy"
        )
        return Setting(key="cache_limit", use=None, why=why)
    cache_bytes = node.kept_bytes + node.largest_shard
    needed = compute_loader_need(loader, machines)
    why = (
        f"a node keeps {format_size(cache_bytes)} over the run. Its workers read from up to "
        f"{needed.shards:,} shards at once, {format_size(needed.bytes)}; with a lower limit "
        "Streaming evicts shards that a worker waits for, and may hang"
    )
    # Keep a limit that is large enough.
    setting = loader.dataset.get("cache_limit")
    if (parse_quantity(setting, BYTE_UNITS) or 0) >= needed.bytes:
        return Setting(key="cache_limit", use=str(setting), why=why)
    # If the disk has room for everything, or is unknown, no limit is needed.
    if disk is None or cache_bytes <= ROOM * disk:
        return Setting(key="cache_limit", use=None, why=why)
    # Otherwise use as much of the disk as shards may use, if that is enough for the workers.
    limit_in_mib = int(ROOM * disk) >> 20
    if limit_in_mib << 20 < needed.bytes:
        why += (
            f". {format_size(disk)} are too few: use a larger disk, more nodes, a smaller "
            "predownload or fewer num_workers"
        )
        return Setting(key="cache_limit", use=None, why=why)
    why += f". {format_size(disk)} are less, so shards are evicted"
    return Setting(key="cache_limit", use=f"{limit_in_mib}mb", why=why)

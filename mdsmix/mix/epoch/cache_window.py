"""The size that a node's cache needs, so that no shard is evicted while a worker still waits for it
or reads it. The samples whose shards must be cached at the same time are called the window.

The rule follows Streaming 0.12 and 0.13 (StreamingDataset._prepare_thread, _ready_thread and
prepare_shard). Let p be the `predownload` (8 device batches by default). A worker that reads sample
i prepares the shards of samples i to i + p. To make room Streaming evicts the shard that was used
longest ago, even if the shard is still needed. After a sample's shard is prepared and before the
sample is read, its worker reads p other samples and prepares p more. So the shard survives only if
the cache has room for the shards of 2p + 1 samples of the worker. The node's other workers read in
that time too, and each is at most `prefetch_factor` batches and a step ahead or late. A thread that
waits for an evicted shard may wait for ever.

The number of samples in the window is known. Which shards they are in depends on the order, so the
bytes of these shards are an upper bound: the window has at most one shard for each sample, and
these are assumed to be the largest shards. If batches are drawn at random from shuffled blocks, the
window also has no more shards than the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mdsmix.foundry_yaml.loader_keys import LOADER_DEFAULTS, as_whole_number
from mdsmix.frozen import frozen
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.mix.epoch.draws import (
    Machines,
    choose_block_size,
    count_loader_draws,
    get_batching_method,
)
from mdsmix.mix.streams.mix import Loader, StreamInMix

LEAST_SHARDS = 4
"""A cache_limit must have room for this many shards of the largest size: Streaming refuses smaller
limits (ValueError).
"""
BATCHES_AHEAD = 8
"Device batches of Streaming's default `predownload`."
BLOCKS = {"none": 0.0, "py1e": 2.5, "py1br": 2.5}
"""shuffle_algo -> how far the shuffle may move a sample from its position in the order of shards,
in blocks of the shuffle, both directions together. The size of a block varies by a quarter. Other
shuffles may move a sample any distance.
"""
SIGMAS = 6
"""The number of samples that an epoch draws from a shard is assumed to be at most so many standard
deviations below the mean. This is wrong for one shard in 10^9.
"""


@frozen(kw_only=True)
class CachedStream:
    """The shards of one stream in a node's cache. Each array has one entry for each shard."""

    samples: NDArray[np.int64]
    "Samples of the shard."
    raw: NDArray[np.int64]
    "Bytes of the decompressed file."
    packed: NDArray[np.int64]
    "Bytes of the compressed file; 0 if the stream is not compressed."
    drawn: int
    "Samples that an epoch draws from the stream."
    keeps_packed: bool = False
    "keep_zip: the compressed file is kept in addition to the decompressed one."


@frozen(kw_only=True)
class Window:
    """The loader settings that decide how far the workers of a node read ahead. The samples that a
    node reads or has prepared at one time are called its window; their shards must be in its cache.
    """

    machines: Machines
    predownload: int | None = None
    "Samples that a worker prepares ahead; None: Streaming's default."
    prefetch_factor: int = 2
    method: str = "random"
    "batching_method."
    partition: str = "orig"
    "partition_algo."
    block_size: int | None = None
    "shuffle_block_size; None: Streaming's default."
    granularity: int = 1
    "sampling_granularity."

    @property
    def ahead(self) -> int:
        """How many samples a worker prepares beyond the sample that it reads (predownload). To
        prepare a sample is to fetch its shard into the cache.
        """
        if self.predownload is None:
            return BATCHES_AHEAD * self.machines.drawn
        return max(0, self.predownload)

    @property
    def workers(self) -> int:
        """How many processes of a node read different samples. Devices that draw the same samples
        (replication) count as one. A device without workers reads by itself and counts as one
        process.
        """
        return self.machines.layout_ranks * max(1, self.machines.workers)

    @property
    def span(self) -> int:
        """The number of consecutive samples of one worker whose shards must be in the cache at the
        same time: those that it prepares ahead, those that it has just read, and those that
        other workers, which may be faster or slower, read at that moment.
        """
        apart = 0
        if self.workers > 1:
            prefetched = self.prefetch_factor if self.machines.workers else 0
            # Workers may be apart by the prefetched batches and 3 more: a batch that is begun, one
            # between workers and one between devices. They may be ahead or late by this much.
            apart = 2 * (prefetched + 3) * self.machines.drawn
        return 2 * self.ahead + 1 + apart

    @property
    def samples(self) -> int:
        """The number of samples, of all workers of a node together, whose shards must be in the
        cache at the same time.
        """
        return self.workers * self.span

    @property
    def regions(self) -> int:
        """In how many places of the epoch's order of samples a node reads at the same time.
        Streaming divides the order into one section for each canonical node, and a node reads its
        sections in parallel.
        """
        return max(1, self.machines.canonical // self.machines.layout_nodes)

    @property
    def positions(self) -> float:
        """An upper bound on how many positions, in the order of shards (an epoch's order before its
        samples are shuffled), the samples of a node's window come from. Each shard is one piece of
        that order, so few positions mean few shards. Infinite if the shuffle may move a sample any
        distance.
        """
        shuffle = self.machines.shuffle
        if self.method != "random" or self.partition != "orig" or shuffle not in BLOCKS:
            return math.inf
        canonical = self.machines.canonical
        # The windows of workers begin anywhere in a batch, so together they extend over one more
        # batch on either side.
        positions_read = self.workers * (self.span + 2 * self.machines.drawn)
        # With fewer canonical nodes than nodes, several nodes take the samples of one section in
        # turn, so the samples of one node extend over those of the others.
        positions_read *= max(1, self.machines.layout_nodes // canonical)
        block = choose_block_size(self.block_size, canonical)
        # In each region: its part of these positions, which may begin and end within a position,
        # and the positions from which the shuffle may have moved a sample into that part.
        moved = BLOCKS[shuffle] * block
        return self.regions * (positions_read / self.regions + 2 + moved)


@frozen(kw_only=True)
class CacheNeed:
    """The smallest cache_limit, in bytes, with which Streaming evicts no shard that a worker of the
    node still needs, and the numbers of shards and samples that it follows from.
    """

    bytes: int
    shards: int
    "The most shards that the window contains."
    samples: int
    "Samples that the workers of a node prepare ahead or have just read."

    def describe_lack(self, written: object, limit: int, prefix: str = "") -> str:
        """Return a sentence, without its full stop, on a cache_limit that is too small.

        Args:
            written: the limit as it is written in the YAML.
            limit: the limit in bytes.
            prefix: words before the needed bytes, such as "at least ".
        """
        return (
            f"cache_limit is {written} ({limit:,} bytes), and the shards that the workers of a "
            f"node read and prepare ahead need {prefix}{self.bytes:,} bytes: {self.samples:,} "
            f"samples in up to {self.shards:,} shards, and the indexes; with less, Streaming "
            "evicts shards that a worker still waits for, and may wait for ever"
        )


def compute_loader_need(loader: Loader, machines: Machines) -> CacheNeed:
    """Compute the smallest sufficient cache_limit, in bytes, of a training YAML's loader on a node
    of these machines.
    """
    draws = count_loader_draws(loader)
    if not draws:
        # Streaming refuses the weights, so assume that an epoch draws every sample once.
        draws = [stream.index.samples for stream in loader.streams]
    streams = [
        _describe_stream(stream, loader, drawn)
        for stream, drawn in zip(loader.streams, draws, strict=True)
    ]
    dataset = loader.dataset
    prefetched = as_whole_number(loader.section.get("prefetch_factor"))
    window = Window(
        machines=machines,
        predownload=as_whole_number(dataset.get("predownload")),
        prefetch_factor=prefetched or LOADER_DEFAULTS["prefetch_factor"],
        method=get_batching_method(loader),
        partition=str(dataset.get("partition_algo") or "orig"),
        block_size=as_whole_number(dataset.get("shuffle_block_size")),
        granularity=as_whole_number(dataset.get("sampling_granularity")) or 1,
    )
    return compute_cache_need(streams, loader.index_bytes, window)


def _describe_stream(stream: StreamInMix, loader: Loader, drawn: int) -> CachedStream:
    """Return the samples and bytes of each shard of a stream, and how many samples an epoch draws
    from it. A stream's own keep_zip (whether compressed files are kept) precedes the loader's.
    """
    shards = stream.index.shards
    keeps_packed = stream.settings.get("keep_zip")
    if keeps_packed is None:
        keeps_packed = loader.dataset.get("keep_zip")
    packed = [shard.zip_data.bytes if shard.zip_data else 0 for shard in shards]
    return CachedStream(
        samples=np.array([shard.samples for shard in shards], np.int64),
        raw=np.array([shard.raw_data.bytes for shard in shards], np.int64),
        packed=np.array(packed, np.int64),
        drawn=drawn,
        keeps_packed=bool(keeps_packed),
    )


def compute_cache_need(
    streams: Sequence[CachedStream], index_bytes: int, window: Window
) -> CacheNeed:
    """Compute the smallest sufficient cache_limit of a node, in bytes.

    Args:
        streams: the shards of the loader's streams.
        index_bytes: bytes of the indexes of all streams.
        window: how far the workers of a node read ahead.
    """
    drawn = [stream for stream in streams if stream.drawn and stream.samples.sum()]
    # Two arrays with an entry for each shard that an epoch draws from: the shard's bytes in the
    # cache, and a lower bound on its samples that are adjacent in the order.
    sizes = _join([_measure_cached_shards(stream) for stream in drawn])
    fewest = _join([_count_fewest(stream, window.granularity) for stream in drawn])
    in_window = _find_shards_of_window(sizes[fewest > 0], fewest[fewest > 0], window)

    # Before Streaming fetches a shard and decompresses it, Streaming makes room for both files. So
    # the cache also needs room for the largest compressed file, unless these are kept anyway.
    largest_packed = 0
    for stream in drawn:
        if not stream.keeps_packed:
            largest_packed = max(largest_packed, int(stream.packed.max(initial=0)))

    # Streaming itself refuses a limit below these bytes.
    both_files = _join([stream.raw + stream.packed for stream in streams])
    least = max(LEAST_SHARDS * int(both_files.max(initial=0)), index_bytes + 1)
    return CacheNeed(
        bytes=max(least, index_bytes + in_window.bytes + largest_packed),
        shards=in_window.shards,
        samples=window.samples,
    )


class _ShardsOfWindow(NamedTuple):
    """The shards that a window contains at worst."""

    shards: int
    bytes: int


def _find_shards_of_window(
    sizes: NDArray[np.float64], fewest: NDArray[np.float64], window: Window
) -> _ShardsOfWindow:
    """Return the shards that a window contains at worst.

    Args:
        sizes: bytes of each shard in the cache.
        fewest: a lower bound, above 0, on the samples of each shard that are adjacent in the order.
        window: how far the workers of a node read ahead.
    """
    # At most one shard for each sample of the window, the largest ones.
    largest = np.sort(sizes)[::-1]
    window_bytes = int(largest[: window.samples].sum())
    count = min(len(largest), window.samples)
    if window.positions == math.inf:
        return _ShardsOfWindow(count, window_bytes)

    # No more shards than fit into the window's positions: at worst the shards with the most bytes
    # for each sample. `inner` is how many of these cover the positions.
    dense = np.argsort(-sizes / np.maximum(1, fewest), kind="stable")
    inner = int(np.searchsorted(fewest[dense].cumsum(), window.positions)) + 1
    # Each region has a shard at either end of the window, and two that the cuts between regions
    # divide.
    ends = 4 * window.regions
    local_bytes = int(sizes[dense][:inner].sum() + largest[:ends].sum())
    if local_bytes >= window_bytes:
        return _ShardsOfWindow(count, window_bytes)
    return _ShardsOfWindow(min(count, inner + ends), local_bytes)


def _measure_cached_shards(stream: CachedStream) -> NDArray[np.int64]:
    """Return how many bytes each shard takes in the cache: those of the decompressed file, and
    those of the compressed file too if the loader keeps it (keep_zip).
    """
    return stream.raw + stream.packed if stream.keeps_packed else stream.raw


def _count_fewest(stream: CachedStream, granularity: int) -> NDArray[np.float64]:
    """Return, for each shard, a lower bound on how many of its samples one pass draws. They are
    adjacent in the order of shards (an epoch's order before its samples are shuffled). 0 for a
    shard without samples.

    A full pass draws all samples of the shard. A part of a pass (0.3 of 2.3 passes) draws a random
    part of them: the bound is their mean number minus SIGMAS standard deviations.

    Args:
        granularity: how many neighbouring samples are drawn together (sampling_granularity).
    """
    samples = stream.samples.astype(np.float64)
    incomplete_pass = stream.drawn / float(samples.sum()) % 1  # 2.3 passes: 0.3
    if not incomplete_pass:
        return samples
    mean = incomplete_pass * samples
    deviation = np.sqrt(mean * granularity)  # samples are drawn in groups of `granularity`
    fewest = np.maximum(1, np.floor(mean - SIGMAS * deviation))
    return np.where(samples > 0, fewest, 0)


def _join(arrays: Sequence[NDArray[np.float64] | NDArray[np.int64]]) -> NDArray[np.float64]:
    """Return the arrays as one; empty if there are none."""
    return np.concatenate([np.zeros(0), *arrays]).astype(np.float64)

"""The parts of Streaming that its documentation does not promise, checked against
mosaicml-streaming 0.12.0 and 0.13.0.

| part of Streaming that is used or replaced | what goes wrong without that |
|---|---|
| `prepare_shard` and the states of shards | the error of a background thread only sets a flag:
without workers an epoch ends early, with workers it hangs |
| the same, once for a shard and not for each sample | without workers half of the time of a bare
epoch is a file lock (`benchmarks/loading.py`) |
| `generate_work` as `StreamingDataset` calls it | 26 s of CPU and 6 GB at each start with 100 M
samples |
| the connection of a stream that fetched its index | forked workers share it: two took 31 s for 24
rows from a MinIO, 1 s with a client each |
| locks, threads and connections of a dataset that was read in this process | it cannot be pickled
for workers that are spawned or forked by a server; in a forked worker filelock refuses the lock |
| the default of `shuffle_block_size`, which depends on the canonical nodes | a preview has another
order than the run's |
"""

from __future__ import annotations

import copy
import io
import logging
from contextlib import suppress
from importlib.metadata import version
from time import time_ns
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from streaming import Stream, StreamingDataset
from streaming.base import dataset as streaming_dataset
from streaming.base.batching import generate_work
from streaming.base.dataset import _ShardState
from streaming.base.storage.download import CloudDownloader
from streaming.base.world import World

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable

log = logging.getLogger(__name__)
Ids = NDArray[np.int64]
KEEP_ORDERS_FROM = 4_000_000
"The fewest samples of an epoch whose order is kept: the order of fewer takes less than a second."
MOST_KEPT_ORDERS = 4
"How many orders a node keeps, the last written ones: 400 MB each for 100 M samples."
ORDER_ATTRIBUTES = (
    "epoch_size",
    "batching_method",
    "sampling_method",
    "sampling_granularity",
    "epoch_seed_change",
    "partition_algo",
    "num_canonical_nodes",
    "initial_physical_nodes",
    "batch_size",
    "shuffle",
    "shuffle_algo",
    "shuffle_seed",
    "shuffle_block_size",
)
"Attributes of a StreamingDataset that its batching methods read, in addition to the streams."
PROCESS_ATTRIBUTES = ("_iterator", "_executor", "_event", "_cache_filelock")
"""Attributes of a StreamingDataset that it sets when it is first read: threads, and locks for them.
Each worker must make its own.
"""


class ShardKeeper(StreamingDataset):  # type: ignore[misc]
    """A StreamingDataset that raises the error of a failing shard in the training loop.

    If a background thread fails, the shard is marked as present, so that nobody waits for it. A
    worker that needs a row of the shard prepares the shard again itself, and raises if this fails
    too. So all rows before the failing shard are still delivered, but a lost shard is requested
    twice.
    """

    def __init__(self, **settings: Any):
        """Open the dataset with the keywords of StreamingDataset."""
        super().__init__(**settings)
        # Torch shares the tensor with the workers, so that each shard is read once per rank and not
        # once per worker.
        is_present = torch.from_numpy(self._shard_states.numpy() == _ShardState.LOCAL)
        self.unchecked = is_present.share_memory_()  # type: ignore[no-untyped-call]
        "bool [shards]: whether the shard was present before this run and is not checked yet."
        self.ready: set[int] = set()
        "Shards that this process has seen checked and decompressed."

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Make a shard ready. Only Streaming's background threads call it without blocking."""
        is_present = self._shard_states[shard_id] == _ShardState.LOCAL
        if not blocking and is_present and shard_id in self.ready:
            # Count the shard as used, as Streaming does under its lock.
            self._shard_access_times[shard_id] = time_ns()
            return
        try:
            if self.unchecked[shard_id]:
                stream = self.streams[self.stream_per_shard[shard_id]]
                if not stream.is_leftover_whole(self.shards[shard_id]):
                    self.evict_shard(shard_id)
                self.unchecked[shard_id] = False
            super().prepare_shard(shard_id, blocking)
        except Exception:
            # Streaming makes room in the cache under a lock, which it keeps if that fails.
            lock = getattr(self, "_cache_filelock", None)
            if lock and lock.is_locked:
                lock.release(force=True)
            self._shard_states[shard_id] = _ShardState.LOCAL
            if blocking:
                raise
        else:
            if self._shard_states[shard_id] == _ShardState.LOCAL:
                self.ready.add(shard_id)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a worker that is not forked from this process."""
        state = {key: value for key, value in vars(self).items() if key not in PROCESS_ATTRIBUTES}
        state["_shared_barrier"] = copy.copy(self._shared_barrier)
        state["_shared_barrier"].__dict__.pop("lock", None)
        return state

    def leave_to_workers(self) -> None:
        """End the threads and connections of this process, which a forked worker would inherit and
        cannot use.
        """
        self.end()
        for key in PROCESS_ATTRIBUTES:
            self.__dict__.pop(key, None)
        # A lock of this process; filelock refuses it in a forked worker, which makes its own.
        self._shared_barrier.__dict__.pop("lock", None)
        for stream in self.streams:
            drop_connection(stream)

    def end(self) -> None:
        """End the background threads of an epoch that is not read further, so that its folders can
        be used again.
        """
        if hasattr(self, "_iterator"):
            self._iterator.exit()
            self._executor.shutdown()


def draw_order(method: str, dataset: StreamingDataset, world: World, epoch: int, start: int) -> Ids:
    """Return the order of an epoch from sample `start` on, as Streaming's `generate_work` does.

    Streaming draws, divides and shuffles all samples of an epoch at every start, in the first
    worker of a node. Here the order of a large epoch is kept, in a file named by a hash of
    everything that decides the order. The file is a zip file, whose checksum shows damage.

    Returns:
        int64 [nodes, ranks, workers, batches, batch size]: sample ids, -1 for none.
    """
    if not isinstance(dataset, ShardKeeper) or dataset.epoch_size < KEEP_ORDERS_FROM:
        whole_order: Ids = generate_work(method, dataset, world, epoch, start)
        return whole_order
    # Use the order that an earlier start has written, if its file is there and undamaged.
    path = cache_folder() / "orders" / _name_order(dataset, world, epoch, start)
    with suppress(Exception), np.load(path) as kept_order:  # damage may raise any error
        ids: Ids = kept_order["ids"].astype(np.int64)
        return ids

    # Draw the order, and write it: as int32, half the size, if all ids have room.
    ids = generate_work(method, dataset, world, epoch, start)
    stored_ids = ids
    if ids.max() <= np.iinfo(np.int32).max:
        stored_ids = ids.astype(np.int32)
    content = io.BytesIO()
    np.savez(content, ids=stored_ids)
    try:
        keep_in_cache(path, content.getvalue())
        orders = sorted(path.parent.iterdir(), key=lambda order: order.stat().st_mtime)
        for old_order in orders[:-MOST_KEPT_ORDERS]:
            old_order.unlink(missing_ok=True)  # also half-written orders of killed starts
    except (OSError, Unreachable) as error:
        log.warning("The order of this epoch is not kept for the next start: %s", error)
    return ids


streaming_dataset.generate_work = draw_order


def _name_order(dataset: Any, world: World, epoch: int, start: int) -> str:
    """Return the name of the file that stores the order of an epoch's samples: a hash of everything
    that decides the order, and `.npz`.
    """
    decides = (
        (version("mosaicml-streaming"), np.__version__),
        [getattr(dataset, name) for name in ORDER_ATTRIBUTES],
        [(stream.choose, stream.repeat, stream.proportion) for stream in dataset.streams],
        dataset.shards_per_stream.tolist(),
        dataset.samples_per_shard.tobytes(),
        (world.num_nodes, world.ranks_per_node, world.workers_per_rank, epoch, start),
    )
    return f"{xxhash.xxh128_hexdigest(repr(decides))}.npz"


def fill_shuffle_block_size(dataset: StreamingDataset, world: World) -> None:
    """Set the dataset's shuffle_block_size to Streaming's default if it is not set."""
    dataset._set_shuffle_block_size(world)


def drop_connection(stream: Stream) -> None:
    """Close the client that fetched the index, so that each forked worker opens its own."""
    stream._downloader.clean_up()


def state_without_connection(stream: Stream) -> dict[str, Any]:
    """Return the attributes of a stream for a worker that is not forked from this process: clients
    of stores cannot be pickled.
    """
    return {**vars(stream), "_downloader": CloudDownloader.get(stream.remote)}

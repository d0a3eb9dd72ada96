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
| `_prepare_thread`, `_ready_thread` and `_each_sample_id`, which do as Streaming's do for many
samples at once, and in blocks | both threads look at each sample by itself, and the shard's file is
opened for each (`benchmarks/loading.py`) |
| the barrier of a node's processes | they wait for ever for one that has failed
(`node_barrier.py`) |
| the connection of a stream that fetched its index | forked workers share it: two took 31 s for 24
rows from a MinIO, 1 s with a client each |
| locks, threads and connections of a dataset that was read in this process | it cannot be pickled
for workers that are spawned or forked by a server; in a forked worker filelock refuses the lock |
| the process group that StreamingDataset opens if the training loop has none, and closes again |
the next one of a fast rank finds the closed one of a slow rank: one rank fails, and the others wait
for half an hour |
| the default of `shuffle_block_size`, which depends on the canonical nodes | a preview has another
order than the run's |
"""

from __future__ import annotations

import copy
import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from time import sleep, time_ns
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from streaming import Stream, StreamingDataset
from streaming.base import dataset as streaming_dataset
from streaming.base.batching import generate_work
from streaming.base.constant import TICK
from streaming.base.dataset import _Iterator, _ShardState
from streaming.base.distributed import get_rank, get_world_size
from streaming.base.storage.download import CloudDownloader
from streaming.base.world import World
from torch import distributed as dist

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.load.node_barrier import NodeBarrier
from mdsmix.load.open_shards import OpenShards
from mdsmix.load.stored_rows import ShardSource, StoredRow, find_id_columns_of

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
PROCESS_ATTRIBUTES = ("_iterator", "_executor", "_event", "_cache_filelock", "open_shards")
"""Attributes of a dataset that are set when it is first read: threads, locks for them, and open
files. Each worker must make its own.
"""
MOST_AHEAD = 256
"The most samples whose shards are looked up in one step, which takes 20 us."
NO_SAMPLE = -1
"Streaming's mark of a position in an epoch that no sample fills."
NO_SHARD = -1
"The shard of NO_SAMPLE."


class SampleBlock(NamedTuple):
    """The places of samples that follow each other in a pass."""

    shards: list[int]
    "The number of each sample's shard."
    positions: list[int]
    "The number of each sample in its shard."


class ShardKeeper(StreamingDataset):  # type: ignore[misc]
    """A StreamingDataset that raises the error of a failing shard in the training loop.

    If a background thread fails, the shard is marked as present, so that nobody waits for it. A
    worker that needs a row of the shard prepares the shard again itself, and raises if this fails
    too. So all rows before the failing shard are still delivered, but a lost shard is requested
    twice.
    """

    _shared_barrier: Any
    "Streaming's own attribute; here a NodeBarrier."

    def __init__(self, **settings: Any):
        """Open the dataset with the keywords of StreamingDataset."""
        with open_process_group():
            super().__init__(**settings)
        self._shared_barrier = NodeBarrier(self._shared_barrier)
        # Torch shares the tensor with the workers, so that each shard is read once per rank and not
        # once per worker.
        is_present = torch.from_numpy(self._shard_states.numpy() == _ShardState.LOCAL)
        self.unchecked = is_present.share_memory_()  # type: ignore[no-untyped-call]
        "bool [shards]: whether the shard was present before this run and is not checked yet."
        self.ready = np.zeros(len(self.shards), bool)
        "bool [shards]: whether this process has seen the shard checked and decompressed."

    @cached_property
    def open_shards(self) -> OpenShards:
        """The shards of the current pass whose files this process has open."""
        return OpenShards()

    def __iter__(self) -> Iterator[Any]:
        """Yield what `__getitem__` returns for each SampleBlock of the next epoch."""
        # Made here, before the background threads use it.
        open_shards = self.open_shards
        try:
            yield from super().__iter__()
        finally:
            open_shards.close_all()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Make a shard ready. Only Streaming's background threads call it without blocking."""
        is_present = self._shard_states[shard_id] == _ShardState.LOCAL
        if not blocking and is_present and self.ready[shard_id]:
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
                self.ready[shard_id] = True

    def _evict_shard(self, shard_id: int) -> None:
        """Delete the files of a shard. Streaming calls this under its lock."""
        self.open_shards.close(shard_id)
        # The copy that is fetched next is another file, which Streaming checks.
        self.open_shards.versions.pop(shard_id, None)
        super()._evict_shard(shard_id)

    def _find_shards(self, ids: Ids) -> Ids:
        """Return the number of each sample's shard."""
        # The last shard that begins at the sample or before it. NO_SAMPLE gets NO_SHARD.
        shards: Ids = np.searchsorted(self.sample_offset_per_shard, ids, "right") - 1
        return shards

    def _are_ready(self, shards: Ids) -> NDArray[np.bool_]:
        """Return whether each shard is present, and this process has seen it checked."""
        is_present = self._shard_states.numpy()[shards] == _ShardState.LOCAL
        are_ready: NDArray[np.bool_] = is_present & self.ready[shards]
        return are_ready

    def _mark_used(self, shards: Ids) -> None:
        """Count shards as used now, in this order; the one used longest ago is evicted first."""
        self._shard_access_times.numpy()[shards] = time_ns() + np.arange(len(shards))

    def _find_window(self, progress: _Iterator, index: int) -> Ids:
        """Return the samples that a thread may look at next: those from `index` on, or from the one
        that is read next, up to `predownload` after that.
        """
        end = progress.total
        if self.predownload is not None:
            end = min(end, progress.yield_index + self.predownload + 1)
        ids: Ids = progress.sample_ids[index : min(end, index + MOST_AHEAD)]
        return ids

    def _goes_on(self, progress: _Iterator) -> bool:
        """Return whether a pass is neither ended nor broken off by the error of a thread."""
        return not progress.should_exit() and not self._event.is_set()

    def _prepare_thread(self, progress: _Iterator) -> None:
        """Prepare the shards of the samples that are read next. Streaming runs this in a background
        thread.
        """
        while self._goes_on(progress):
            self.open_shards.close_replaced()
            # The loop over the samples overtakes this thread if their shards are ready.
            progress.prepare_index = max(progress.prepare_index, progress.yield_index)
            if progress.total in (progress.prepare_index, progress.ready_index):
                progress.prepare_index = progress.total
                break
            ids = self._find_window(progress, progress.prepare_index)
            if not len(ids):
                sleep(TICK)
                continue
            # Mark the shards of the samples up to the first whose shard is not ready.
            shards = self._find_shards(ids)
            is_sample = ids != NO_SAMPLE
            unready = np.flatnonzero(is_sample & ~self._are_ready(shards))
            count = int(unready[0]) if len(unready) else len(ids)
            self._mark_used(shards[:count][is_sample[:count]])
            if len(unready):
                self.prepare_shard(int(shards[count]), False)
                count += 1
            progress.prepare_index += count
        # All shards are prepared; another process may evict them until the pass ends.
        while self._goes_on(progress) and progress.yield_index < progress.total:
            self.open_shards.close_replaced()
            sleep(TICK)
        progress.on_exit()

    def _ready_thread(self, progress: _Iterator) -> None:
        """Find the samples whose shards are present. Streaming runs this in a background thread."""
        while self._goes_on(progress):
            progress.ready_index = max(progress.ready_index, progress.yield_index)
            if progress.ready_index == progress.total:
                break
            ids = self._find_window(progress, progress.ready_index)
            shards = self._find_shards(ids)
            states = self._shard_states.numpy()[shards]
            absent = np.flatnonzero((ids != NO_SAMPLE) & (states != _ShardState.LOCAL))
            count = int(absent[0]) if len(absent) else len(ids)
            progress.ready_index += count
            # A shard that was prepared may have been evicted since then: fetch it again.
            if len(absent) and states[count] == _ShardState.REMOTE:
                self.prepare_shard(int(shards[count]), False)
            elif count < MOST_AHEAD:
                sleep(TICK)
        progress.on_exit()

    def _each_sample_id(self, progress: _Iterator) -> Iterator[SampleBlock]:
        """Yield the samples of a pass in blocks of at most a batch, each when its shards are ready.

        Streaming passes each block to `__getitem__`.
        """
        try:
            yield from self._find_blocks(progress)
            progress.on_exit()
        finally:
            # End the threads, also if the training loop has left the pass.
            progress.non_blocking_exit()

    def _find_blocks(self, progress: _Iterator) -> Iterator[SampleBlock]:
        """Yield the blocks of a pass."""
        size = int(self.batch_size or 1)
        places = SampleBlock([], [])
        begin = 0  # of the next block in `places`
        while self._goes_on(progress) and progress.yield_index < progress.total:
            if begin == len(places.shards):
                places = self._locate(
                    progress.sample_ids[progress.yield_index :][: max(size, MOST_AHEAD)]
                )
                begin = 0
            end = begin + size
            if not self._are_readable(places.shards[begin:end]):
                end = begin + min(size, progress.ready_index - progress.yield_index)
                if end <= begin:
                    sleep(TICK)
                    continue
            block = SampleBlock(places.shards[begin:end], places.positions[begin:end])
            count = len(block.shards)
            if NO_SHARD in block.shards:
                block = _leave_gaps_out(block)
            yield block
            # After the block was read, so that no shard that it needs is evicted before.
            begin += count
            progress.yield_index += count

    def _locate(self, ids: Ids) -> SampleBlock:
        """Return the places of samples; the shard of NO_SAMPLE is NO_SHARD."""
        shards = self._find_shards(ids)
        positions = ids - self.sample_offset_per_shard[shards]
        return SampleBlock(shards.tolist(), positions.tolist())

    def _are_readable(self, shards: list[int]) -> bool:
        """Return whether samples of these shards can be read without waiting for a thread, which
        looks only every 7 ms.
        """
        unopened = set(shards).difference(self.open_shards.files, (NO_SHARD,))
        return not unopened or bool(self._are_ready(np.array([*unopened])).all())

    def read_block(self, block: SampleBlock) -> Iterator[StoredRow]:
        """Return the samples of a block, which are all read at once. If one cannot be read, the
        samples before it are yielded, and then the error of `read_sample` is raised.
        """
        rows = list[StoredRow]()
        files = self.open_shards.files
        try:
            for shard_id, position in zip(block.shards, block.positions, strict=True):
                file = files.get(shard_id)
                if file is None:
                    rows.append(self.read_sample(shard_id, position, is_kept_open=True))
                else:
                    rows.append(file.read(position))
        except Unreachable as error:
            return _yield_and_raise(rows, error)
        if self.cache_limit:
            self._mark_used(np.array(block.shards, np.int64))
        return iter(rows)

    def read_sample(
        self, shard_id: int, position: int, retry: int = 7, is_kept_open: bool = False
    ) -> StoredRow:
        """Read a sample of a shard that is not open. Raises Unreachable if the shard is lost or
        damaged.

        Args:
            position: the number of the sample in the shard.
            retry: how many times the shard is fetched if it is evicted before it is read.
            is_kept_open: whether the shard's file stays open to the end of the pass.
        """
        stream_number = int(self.stream_per_shard[shard_id])
        stream = self.streams[stream_number]
        shard = self.shards[shard_id]
        source = ShardSource(
            stream=stream,
            shard=shard,
            path=os.path.join(stream.local, stream.split, shard.file_pairs[0][0].basename),
            stream_number=stream_number,
            first=int(self.sample_offset_per_shard[shard_id]),
            columns=find_id_columns_of(shard),
        )
        try:
            if not self.ready[shard_id]:
                # Wait for a worker that has fetched the shard and not yet checked it.
                self.prepare_shard(shard_id)
            for attempt in range(1 + retry):
                try:
                    return self.open_shards.open(shard_id, source, is_kept_open).read(position)
                except FileNotFoundError:
                    # It was evicted, and may be evicted again before it is opened.
                    if attempt == retry:
                        raise
                    self.prepare_shard(shard_id)
        except Unreachable:
            raise
        except Exception as error:
            raise stream.make_row_error(shard, position, error) from error
        raise AssertionError("the last attempt to read a row neither returned nor raised")

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a worker that is not forked from this process."""
        state = {key: value for key, value in vars(self).items() if key not in PROCESS_ATTRIBUTES}
        state["_shared_barrier"] = copy.copy(self._shared_barrier)
        state["_shared_barrier"].__dict__.pop("lock", None)
        return state

    @contextmanager
    def released_if_refused(self) -> Iterator[None]:
        """Release the streams' folders if the `with` block raises an error.

        The error refers to the dataset, and a notebook keeps the last error: the next loader of
        these folders, with other settings, would be refused too.
        """
        try:
            yield
        except BaseException:
            self.__del__()
            raise

    def leave_to_workers(self) -> None:
        """End the threads and connections of this process, which a forked worker would inherit and
        cannot use. Called before new workers start, when no worker of this rank is left.
        """
        self.end()
        for key in PROCESS_ATTRIBUTES:
            self.__dict__.pop(key, None)
        # A lock of this process; filelock refuses it in a forked worker, which makes its own.
        self._shared_barrier.__dict__.pop("lock", None)
        for stream in self.streams:
            drop_connection(stream)
        # Workers of other ranks may be waiting.
        if self._unique_rank_world.ranks_per_node == 1:
            self._shared_barrier.reset()

    def end(self) -> None:
        """End the background threads of an epoch that is not read further, so that its folders can
        be used again.
        """
        if hasattr(self, "_iterator"):
            self._iterator.exit()
            self._executor.shutdown()
            # The next pass starts threads of its own.
            del self._iterator, self._executor


def _yield_and_raise(rows: list[StoredRow], error: Unreachable) -> Iterator[StoredRow]:
    """Yield rows, then raise an error."""
    yield from rows
    raise error


def _leave_gaps_out(block: SampleBlock) -> SampleBlock:
    """Return the places of a block that samples fill."""
    places = zip(block.shards, block.positions, strict=True)
    filled = [(shard, position) for shard, position in places if shard != NO_SHARD]
    return SampleBlock([shard for shard, _ in filled], [position for _, position in filled])


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

    ids = generate_work(method, dataset, world, epoch, start)
    try:
        _keep_order(path, ids)
    except (OSError, Unreachable) as error:
        log.warning("The order of this epoch is not kept for the next start: %s", error)
    return ids


def _keep_order(path: Path, ids: Ids) -> None:
    """Write the order of an epoch for the next start, and delete old ones. Raises OSError or
    Unreachable if a file cannot be written.

    Args:
        path: the file of the order.
    """
    # As int32, half the size, if all ids have room.
    stored_ids = ids
    if ids.max() <= np.iinfo(np.int32).max:
        stored_ids = ids.astype(np.int32)
    content = io.BytesIO()
    np.savez(content, ids=stored_ids)
    keep_in_cache(path, content.getvalue())
    orders = sorted(path.parent.iterdir(), key=lambda order: order.stat().st_mtime)
    for old_order in orders[:-MOST_KEPT_ORDERS]:
        old_order.unlink(missing_ok=True)  # also half-written orders of killed starts


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


_stores: list[Any] = []
"""The stores in which ranks found each other, one for each process group that was opened here. They
are kept to the end of the process: the first rank may be the server of all others.
"""


@contextmanager
def open_process_group() -> Iterator[None]:
    """Give a `with` block a process group of all ranks if the run has several and the training loop
    has not opened one yet.

    StreamingDataset opens one itself, under the same name for each dataset. If two datasets are
    opened one after the other, a rank that is ahead reads from the store, under this name, the
    address of a rank that is closing its first group. Here each group has a name of its own.
    """
    if get_world_size() == 1 or not dist.is_available() or dist.is_initialized():
        yield
        return
    rank = get_rank()
    size = get_world_size()
    store, _, _ = next(dist.rendezvous("env://", rank, size))  # type: ignore[attr-defined]
    _stores.append(store)
    name = f"mdsmix/{len(_stores)}"
    own_store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=own_store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def drop_connection(stream: Stream) -> None:
    """Close the client that fetched the index, so that each forked worker opens its own."""
    stream._downloader.clean_up()


def copy_without_connection(stream: Stream) -> dict[str, Any]:
    """Return the attributes of a stream for a worker that is not forked from this process: clients
    of stores cannot be pickled.
    """
    return {**vars(stream), "_downloader": CloudDownloader.get(stream.remote)}

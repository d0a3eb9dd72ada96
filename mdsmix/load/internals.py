"""The parts of Streaming that its documentation does not promise, read against mosaicml-streaming 0.12.0 and 0.13.0.

| what is reached into | without it |
|---|---|
| `prepare_shard` and the states of shards | the error of a background thread only sets a flag: without workers an epoch ends early, with workers it hangs |
| the same, per shard and not per sample | half of a bare epoch without workers is a file lock (`benchmarks/loading.py`) |
| `generate_work` as `StreamingDataset` calls it | 26 s of CPU and 6 GB at each start with 100 M samples |
| the connection of a stream that fetched its index | forked workers talk on one: two took 31 s for 24 rows from a MinIO, 1 s with a client each |
| the notes of folders in shared memory | after SIGKILL the next run is refused with "Reused local directory" |

`tests/with_torch/test_load_internals.py` says which of them a release lacks.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from time import time, time_ns
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from streaming import Stream, StreamingDataset
from streaming.base import dataset as streaming_dataset
from streaming.base.batching import generate_work
from streaming.base.constant import LOCALS, SHM_TO_CLEAN
from streaming.base.dataset import _ShardState
from streaming.base.shared.prefix import _unpack_locals
from streaming.base.world import World

from mdsmix.encode.pretrained import cache_folder

log = logging.getLogger(__name__)
KEPT_FROM = 4_000_000
"Samples of an epoch: the order of fewer takes less than a second."
KEPT = 4
"Orders of this node's runs, the last used ones: 400 MB each for 100 M samples."
ABANDONED = 3600
"Seconds since the last byte of a file that nobody writes any more."
DECIDE = (
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
"Attributes of a StreamingDataset that its batching methods read, but for the streams."
MEMORY = Path("/dev/shm")


class ShardKeeper(StreamingDataset):  # type: ignore[misc]
    """A StreamingDataset in which a shard that fails reaches the training loop.

    A background failure is settled: the shard is marked as present, nobody waits for it, and the worker that comes to one of its
    rows prepares it again itself and raises. All rows before it are still delivered; the price is that a lost shard is asked for twice.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        # Torch shares it with the workers, so that each shard is read once per rank and not once per worker.
        present = self._shard_states.numpy() == _ShardState.LOCAL
        self.unchecked = torch.from_numpy(present.astype(np.uint8)).share_memory_()  # type: ignore[no-untyped-call]
        "Of each shard, whether it lay there before this run and nobody has looked at it."
        self._unpacked: set[int] = set()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Makes a shard ready. Streaming's background threads are the callers that do not block."""
        if not blocking and self._is_ready(shard_id):
            return
        try:
            super().prepare_shard(shard_id, blocking)
            self._unpacked.add(shard_id)
        except Exception:
            self._settle(shard_id)
            if blocking:
                raise

    def _is_ready(self, shard_id: int) -> bool:
        """Whether this process has seen the shard unpacked and nobody has evicted it; it then counts as used, as under the lock."""
        if shard_id not in self._unpacked or self._shard_states[shard_id] != _ShardState.LOCAL:
            return False
        self._shard_access_times[shard_id] = time_ns()
        return True

    def _settle(self, shard_id: int) -> None:
        # Making room in the cache fails while its lock is held; the other steps fail without it.
        if self._cache_filelock.is_locked:
            self._cache_filelock.release(force=True)
        self._shard_states[shard_id] = _ShardState.LOCAL

    def end(self) -> None:
        """Ends the background threads of an epoch that nobody reads on, so that its folders can be used again."""
        if hasattr(self, "_iterator"):
            self._iterator.exit()
            self._executor.shutdown()


def _work(
    method: str, dataset: StreamingDataset, world: World, epoch: int, start: int
) -> NDArray[np.int64]:
    """The order of an epoch, in the first worker of a node; that of a large one is kept from start to start."""
    if isinstance(dataset, ShardKeeper) and dataset.epoch_size >= KEPT_FROM:
        return order_of(dataset, world, epoch, start)
    work: NDArray[np.int64] = generate_work(method, dataset, world, epoch, start)
    return work


streaming_dataset.generate_work = _work


def order_of(dataset: StreamingDataset, world: World, epoch: int, start: int) -> NDArray[np.int64]:
    """int64 [nodes, ranks, workers, batches, batch size]: sample ids of the epoch from sample `start` on, -1 for none.

    Streaming draws, divides and shuffles all samples of an epoch at every start. The file that keeps the order is named by a hash of all
    that decides it, and a zip file holds a checksum, so that a damaged one is no order at all. It only saves work and may be deleted.
    """
    path = cache_folder() / "orders" / _key(dataset, world, epoch, start)
    if (ids := _read(path)) is None:
        ids = generate_work(dataset.batching_method, dataset, world, epoch, start)
        try:
            _keep(path, ids)
        except OSError as error:
            log.warning("The order of this epoch is not kept for the next start: %s", error)
    return ids


def _key(dataset: Any, world: World, epoch: int, start: int) -> str:
    decides = (
        (version("mosaicml-streaming"), np.__version__),
        [getattr(dataset, name) for name in DECIDE],
        [(s.choose, s.repeat, s.proportion) for s in dataset.streams],
        dataset.shards_per_stream.tolist(),
        dataset.samples_per_shard.tobytes(),
        (world.num_nodes, world.ranks_per_node, world.workers_per_rank, epoch, start),
    )
    return f"{xxhash.xxh128_hexdigest(repr(decides))}.npz"


def _read(path: Path) -> NDArray[np.int64] | None:
    """The ids in the file; None where there is none, or a damaged one."""
    try:
        with np.load(path) as kept:
            ids = kept["ids"]
    except Exception:  # whatever a zip file makes of damaged bytes
        return None
    with suppress(OSError):  # of another user, or where nothing may be written
        path.touch()
    whole: NDArray[np.int64] = ids.astype(np.int64)
    return whole


def _keep(path: Path, ids: NDArray[np.int64]) -> None:
    """Writes it by a rename, and deletes those that have not been used for longest, and what killed starts had begun to write."""
    is_small = ids.size and ids.max() < 1 << 31
    small = ids.astype(np.int32) if is_small else ids
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < 2 * small.nbytes:
        raise OSError(f"{path.parent} has no room for {small.nbytes:,} bytes")
    # Nodes that share the folder may have processes of one number.
    temporary = path.with_suffix(f".{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, ids=small)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # another start does the same
        partly = set(path.parent.glob("*.tmp"))
        by_use = sorted(set(path.parent.iterdir()) - partly, key=lambda p: p.stat().st_mtime)
        killed = [p for p in partly if p.stat().st_mtime < time() - ABANDONED]
        for old in (*by_use[:-KEPT], *killed):
            old.unlink(missing_ok=True)


def drop_connection(stream: Stream) -> None:
    """Closes the client that fetched the stream's index, so that each forked worker opens its own."""
    stream._downloader.clean_up()


def drop_stale_memory(folders: Iterable[str]) -> int:
    """Removes the shared memory of dead runs that name one of these (absolute) cache folders; returns how many runs that were.

    Streaming's own remedy, clean_stale_shared_memory, removes the memory of every run on the machine, living ones included. Here only
    memory goes that no process maps any more, which can be told on Linux alone, and only of processes that share this machine's /proc.
    """
    ours = set(folders)
    stale = [m for m in MEMORY.glob(f"*_{LOCALS}") if ours & _noted(m) and not _is_mapped(m)]
    for memory in stale:
        prefix = memory.name.removesuffix(LOCALS)
        # The note goes last: other ranks look for it to see whether the way is free.
        for name in sorted(SHM_TO_CLEAN, key=lambda name: name == LOCALS):
            (MEMORY / f"{prefix}{name}").unlink(missing_ok=True)
    return len(stale)


def _noted(memory: Path) -> set[str]:
    """The folders that a run noted."""
    try:
        return set(_unpack_locals(memory.read_bytes())[0])
    except (OSError, ValueError, IndexError):
        return set()


def _is_mapped(memory: Path) -> bool:
    """Whether a process has it in its address space. Those of other users cannot be read, nor can they map ours."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(memory) in maps.read_text(errors="replace"):
                return True
    return False

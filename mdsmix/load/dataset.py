"""A StreamingDataset that gives rows, and in which a shard that fails reaches the training loop.

Streaming (0.12 and 0.13) prepares shards in two background threads of each worker. An exception there only sets a flag:
without workers the epoch ends early; with workers the shard stays marked as being prepared, for which the others wait
for ever. Here a background failure is settled instead: the shard is marked as present, nobody waits for it, and the
worker that comes to one of its rows prepares it again itself and raises. All rows before it are still delivered; the
price is that a lost shard is asked for twice.

Those threads also take the lock of the cache once a sample, through the file system, and half of a bare epoch goes there
(`benchmarks/loading.py`). Here they take it once a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from time import time_ns
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base.constant import EPOCH_DATA, EPOCH_SHAPE
from streaming.base.dataset import _ShardState
from streaming.base.format import Reader
from streaming.base.shared import SharedMemory, _get_path

from mdsmix.errors import MixRefused, Unreachable
from mdsmix.load import order
from mdsmix.load.lock import KEY, judge, lock_of, must_be_state
from mdsmix.load.stream import CheckedStream, reason
from mdsmix.load.training_rows import Row, RowRules, row_of
from mdsmix.shards.turns import IMAGES, PACKED
from mdsmix.training.lock import LoaderLock


class MixDataset(StreamingDataset):  # type: ignore[misc]
    """Streams in, rows out; any keyword of StreamingDataset."""

    streams: list[CheckedStream]

    def __init__(
        self,
        *,
        streams: list[CheckedStream],
        rules: RowRules,
        bins: int | None = None,
        locked: Mapping[str, Any] | None = None,
        accept_changed: bool = False,
        **settings: Any,
    ):
        """
        Args:
            bins: packed rows that a batch of samples becomes; None without packing.
            locked: settings that a state is locked to, beside the streams (mdsmix.training.lock).
            accept_changed: goes on from a state of other data, and says what differs.
        """
        super().__init__(streams=streams, **settings)
        self.rules, self.bins = rules, bins
        self.locked, self.accept_changed = dict(locked or {}), accept_changed
        # Shards that lay there before this run and that nobody has looked at. Torch shares it with the workers, so
        # that each is read once per rank and not once per worker.
        found = self._shard_states.numpy() == _ShardState.LOCAL
        self._unchecked = torch.from_numpy(found.astype(np.uint8)).share_memory_()  # type: ignore[no-untyped-call]
        # What this process need not ask again: shards that it has looked at, and shards that it has seen unpacked.
        self._checked: set[int] = set()
        self._unpacked: set[int] = set()

    @cached_property
    def lock(self) -> LoaderLock:
        """What the epochs are drawn from; worked out where a state is first asked for or given."""
        return lock_of(self)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Streaming's state and the lock of the data, for rank 0.

        Args:
            num_samples: with `from_beginning`, as Composer counts them: rows that all devices were given in this epoch.
                Else as MixLoader does: samples that were drawn since this run's start of it.
        """
        if from_beginning:
            num_samples = self._drawn(num_samples)
        state: dict[str, Any] = super().state_dict(num_samples, from_beginning)
        # Composer counts from 0 again when an epoch has ended; Streaming would then begin that epoch once more.
        if from_beginning and not num_samples and state["epoch"] == self.next_epoch - 1 >= 0:
            state["epoch"] += 1
        return state | {KEY: self.lock.to_text()}

    def _drawn(self, rows: int) -> int:
        """Samples behind the rows of whole batches; devices that share samples are counted once."""
        rows //= self.replication or 1
        return rows if self.bins is None else rows // self.bins * int(self.batch_size or 0)

    def load_state_dict(self, obj: Mapping[str, Any]) -> None:
        """Makes the next pass go on from a state; MixRefused where it was counted on other data, RecipeError where it is none."""
        # Streaming has room for 4,096 bytes.
        state = {key: value for key, value in obj.items() if key != KEY}
        must_be_state(state)
        judge(self, obj.get(KEY), state)
        super().load_state_dict(state)

    @property
    def has_packed_rows(self) -> bool:
        """Whether rows of some stream hold several documents."""
        return any(set(PACKED) <= set(shard.column_names) for shard in self.shards)

    @property
    def has_images(self) -> bool:
        """Whether some stream is one of images."""
        return any(set(IMAGES) <= set(shard.column_names) for shard in self.shards)

    def end(self) -> None:
        """Ends the background threads of an epoch that nobody reads on, so that its folders can be used again."""
        if hasattr(self, "_iterator"):
            self._iterator.exit()
            self._executor.shutdown()

    def _get_work(self, epoch: int, sample_in_epoch: int) -> NDArray[np.int64]:
        """This worker's samples. The node's first worker has the order, and hands it to the others as Streaming does; but the order
        of a large epoch is kept from start to start, where Streaming works it out anew."""
        replicated = self.replication is not None and self.replication > 1
        if replicated or self.epoch_size < order.KEPT_FROM or not isinstance(self.batch_size, int):
            work: NDArray[np.int64] = super()._get_work(epoch, sample_in_epoch)
            return work
        us, there = self._unique_worker_world, self._parallel_worker_world
        if us.is_local_leader:
            ids = order.order_of(self, there, epoch, sample_in_epoch)
            shared = self._share_work(ids)
            self._shared_barrier(us.workers_per_node)
        else:
            self._shared_barrier(us.workers_per_node)
            ids, *shared = self._attach_work()
        own: NDArray[np.int64] = np.array(
            ids[there.node, there.rank_of_node, there.worker_of_rank], np.int64
        ).flatten()
        self._shared_barrier(us.workers_per_node)
        for memory in filter(None, shared):
            memory.cleanup()
        return own

    def _share_work(self, sample_ids: NDArray[Any]) -> tuple[SharedMemory, SharedMemory | None]:
        """As Streaming's, without the copy of all ids that it makes on the way: 0.8 GB of 100 M samples."""
        shape = self._shared(EPOCH_SHAPE, np.array(sample_ids.shape))
        return shape, self._shared(EPOCH_DATA, sample_ids) if sample_ids.size else None

    def _shared(self, name: str, values: NDArray[Any]) -> SharedMemory:
        path = _get_path(self._shm_prefix_int, name)
        memory = SharedMemory(name=path, create=True, size=8 * values.size, auto_cleanup=False)
        np.ndarray(values.shape, np.int64, memory.buf)[...] = values
        return memory

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
        """Whether the shard lies there unpacked, told without the lock; it then counts as used, as under the lock."""
        if shard_id not in self._unpacked or self._shard_states[shard_id] != _ShardState.LOCAL:
            return False
        self._shard_access_times[shard_id] = time_ns()
        return True

    def _settle(self, shard_id: int) -> None:
        # Making room in the cache fails while its lock is held; the other steps fail without it.
        if self._cache_filelock.is_locked:
            self._cache_filelock.release(force=True)
        self._shard_states[shard_id] = _ShardState.LOCAL

    def get_item(self, sample_id: int, retry: int = 7) -> Row:
        """The row of a sample; Unreachable names the shard that is lost or damaged, MixRefused the row that does not fit."""
        shard_id, position = self.spanner[sample_id]
        try:
            if shard_id not in self._checked:
                if self._unchecked[shard_id]:
                    self._check_found(shard_id)
                self._checked.add(shard_id)
            row = row_of(super().get_item(sample_id, retry), self.rules)
            if row.pictures:  # they are decoded later
                pictures = replace(row.pictures, where=self._where(shard_id, position))
                row = row._replace(pictures=pictures)
            return row
        except Unreachable:
            raise
        except MixRefused as refusal:
            raise MixRefused(f"{self._where(shard_id, position)}: {refusal}") from refusal
        except Exception as error:
            stream, shard = self._place(shard_id)
            raise stream.failure(shard, f"row {position}: {reason(error)}") from error

    def _where(self, shard_id: int, position: int) -> str:
        stream, shard = self._place(shard_id)
        return f"Stream {stream.name}, shard {shard.file_pairs[0][0].basename}, row {position}"

    def _check_found(self, shard_id: int) -> None:
        """Checks a shard that was there before the run. A damaged copy is dropped, to be fetched again by the caller."""
        stream, shard = self._place(shard_id)
        try:
            stream.check(shard)
        except FileNotFoundError:
            pass  # Only its compressed form is there, or it was evicted: it is checked when it is prepared.
        except ValueError as damage:
            if not stream.is_cached:
                raise stream.failure(shard, reason(damage)) from damage
            self.evict_shard(shard_id)
        self._unchecked[shard_id] = 0

    def _place(self, shard_id: int) -> tuple[CheckedStream, Reader]:
        return self.streams[self.stream_per_shard[shard_id]], self.shards[shard_id]

"""Streams in, rows out: a StreamingDataset that checks shards, names the one that fails, and knows what its state is locked to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from streaming.base.format import Reader

from mdsmix.errors import MixRefused, Unreachable
from mdsmix.load.internals import ShardKeeper
from mdsmix.load.state_lock import KEY, judge, lock_of, must_be_state, tell_unlocked
from mdsmix.load.stream import CheckedStream, reason
from mdsmix.load.training_rows import Row, RowRules, row_of
from mdsmix.shards.token_ids import IMAGES, PACKED
from mdsmix.training.lock import LoaderLock


class MixDataset(ShardKeeper):
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
        self._checked: set[int] = set()
        "Shards that this process has looked at."

    @cached_property
    def lock(self) -> LoaderLock:
        """What the epochs are drawn from; worked out where a state is first asked for or given."""
        return lock_of(self, self.locked)

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
        if (text := obj.get(KEY)) is None:
            tell_unlocked()
        else:
            judge(self.lock, str(text), state, self.accept_changed)
        super().load_state_dict(state)

    @property
    def has_packed_rows(self) -> bool:
        """Whether rows of some stream hold several documents."""
        return any(set(PACKED) <= set(shard.column_names) for shard in self.shards)

    @property
    def has_images(self) -> bool:
        """Whether some stream is one of images."""
        return any(set(IMAGES) <= set(shard.column_names) for shard in self.shards)

    def get_item(self, sample_id: int, retry: int = 7) -> Row:
        """The row of a sample; Unreachable names the shard that is lost or damaged, MixRefused the row that does not fit."""
        shard_id, position = self.spanner[sample_id]
        try:
            if shard_id not in self._checked:
                if self.unchecked[shard_id]:
                    self._check_found(shard_id)
                self.prepare_shard(shard_id)  # waits for who fetches it and has not checked it yet
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
        self.unchecked[shard_id] = 0

    def _place(self, shard_id: int) -> tuple[CheckedStream, Reader]:
        return self.streams[self.stream_per_shard[shard_id]], self.shards[shard_id]

"""Streams in, rows out: a StreamingDataset whose state is locked to the data.

Streaming's state is a number of samples, which is right only for the data that it was counted on.
So the state also contains a lock: a description of that data. A resume on other data is refused.
With `accept_changed` it is allowed, with a warning that lists the differences. The lock is one
string, because torch.distributed.checkpoint reads a checkpoint into a state with the same keys.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from types import FrameType
from typing import Any

import numpy as np
import torch
from streaming.base.constant import TICK
from streaming.base.format import Reader
from streaming.base.world import World
from torch.utils.data import get_worker_info

from mdsmix.errors import MixRefused, RecipeError, Unreachable
from mdsmix.foundry_yaml.lock import (
    LoaderLock,
    LockedShard,
    find_differences,
    lock_stream,
    parse_lock,
)
from mdsmix.load import training_rows
from mdsmix.load.checked_stream import CheckedStream, describe_error
from mdsmix.load.internals import SampleBlock, ShardKeeper
from mdsmix.load.preference_batch import make_preference_row
from mdsmix.load.stored_rows import StoredRow
from mdsmix.load.training_rows import RowRules, make_named_row
from mdsmix.messages import flatten_error, plural
from mdsmix.shards.shard_samples import Sample
from mdsmix.tokenizer.transformers_five import is_five

log = logging.getLogger(__name__)
LOCK_KEY = "mdsmix_lock"
"The key of a state with the lock, as one line of JSON."
ACCEPT_HINT = (
    "to resume although the data or the devices changed, set accept_changed: true in the "
    "train_loader (name: mdsmix), or pass accept_changed=True to build_loader"
)
EXACT_METHOD = "random"
"""The batching method under which a resume in the middle of an epoch is exact on other devices, if
all of them together have the same batch.
"""
DEVICES_SETTING = "devices"
"The key of a lock's settings under which it names the devices, if the method is not EXACT_METHOD."
LEAST_OF_STATE = {"epoch": -1, "sample_in_epoch": 0, "num_canonical_nodes": 1, "shuffle_seed": 0}
"Keys of a state -> their least values."
SETTINGS_FILLED_IN = ("num_canonical_nodes", "shuffle_seed", "shuffle_block_size")
"Settings that Streaming fills in when an epoch begins."
SKIPPED_TWICE = (
    "This loader has loaded a state, which skips the batches that were already trained on. Now "
    "another loader, such as Trainer's own, reads this loader's dataset, so these "
    "batches would be skipped twice. Set TrainingArguments(ignore_data_skip=True), and read "
    "batches only from the loader that build_loader returned."
)
EPOCH_UNKNOWN = (
    "Another loader reads this loader's dataset before set_epoch was called, so the first epoch "
    "would be read again. Trainer of transformers 5 does this when it skips batches. "
    "Save this loader's state by a callback and set TrainingArguments(ignore_data_skip=True), as "
    "docs/loading.md shows, or call set_epoch first."
)
SECONDS_OF_A_STATE = 10.0
"How long a state in shared memory may be incomplete, because another rank writes it."


def _has_trainer_five() -> bool:
    """Check whether this process has imported Trainer of transformers 5 or later."""
    transformers = sys.modules.get("transformers")
    if transformers is None or "transformers.trainer" not in sys.modules:
        return False
    return is_five()


def _is_skipped_by_trainer() -> bool:
    """Check whether Trainer of transformers 5 or later reads this pass only to skip its batches.
    Callers have checked that this Trainer is imported.

    Trainer of transformers 5 skips batches with a loader of accelerate, and calls set_epoch on that
    loader only afterwards. Trainer of transformers 4 calls set_epoch first.
    """
    # A worker's frames do not show who reads its batches, so assume that Trainer does.
    if get_worker_info() is not None:
        return True
    # Look for accelerate's loader among the callers.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            return True
        frame = frame.f_back
    return False


class MixDataset(ShardKeeper):
    """The streams of a loader as one dataset, which gives rows to train on. Its constructor takes
    any keyword of StreamingDataset.
    """

    streams: list[CheckedStream]
    other_row: Callable[[Sample, int], Any] | None = None
    """`ExtraLoader.row` with its rules, if a kind of stream has a loader of its own. It turns a
    sample and its number into a row. The whole ExtraLoader could not be pickled for a spawned
    worker.
    """
    gives_preferences = False
    "Whether the streams are preferences with images, whose rows are PreferenceRows."
    bins: int | None = None
    "Packed rows that are made from a batch of samples; None without packing."
    locked: Mapping[str, Any] = {}
    """Settings that a state is locked to, in addition to the streams
    (mdsmix.foundry_yaml.lock.list_locked_settings).
    """
    accept_changed = False
    "Whether to resume from a state that was saved on other data, and log the differences."
    starts = 0
    "How many times the starting position of the next pass was set."
    is_resumed = False
    "Whether a state was loaded."
    came_from_trainer = False
    """Whether the process that pickled this dataset for a worker had imported Trainer of
    transformers 5. A spawned worker has not.
    """
    numbers_streams = False
    "Whether each row has the number of its stream."
    gives_stored_rows = False
    """Whether a pass of MixLoader yields StoredRows, which the collator turns into a batch at once.
    Any other pass yields TrainingRows.
    """
    _is_pass_stored = False
    "Whether the current pass yields StoredRows."
    is_epoch_set = False
    """Whether set_epoch was called. Trainers call it before they read an epoch, except Trainer of
    transformers 5.
    """

    def __init__(self, rules: RowRules, **settings: Any):
        """Open the streams.

        Args:
            rules: the rules for making rows from samples.
            settings: the keywords of StreamingDataset.
        """
        super().__init__(**settings)
        self.rules = rules
        # `_begin_at` restores them, since Streaming fills them in when an epoch begins.
        self._settings_before_epochs = {key: getattr(self, key) for key in SETTINGS_FILLED_IN}
        is_read = torch.zeros(1, dtype=torch.bool)
        self.is_read_by_loader = is_read.share_memory_()  # type: ignore[no-untyped-call]
        """bool [1]: True if a MixLoader reads the dataset, False if another loader does. Shared
        with the workers of this rank.
        """

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "last_warned": training_rows.last_warned,
            "came_from_trainer": self.came_from_trainer or _has_trainer_five(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        training_rows.last_warned = state.pop("last_warned")
        self.__dict__.update(state)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows of the next epoch.

        Raises RecipeError if a loader other than MixLoader reads the dataset, and would skip or
        repeat samples.
        """
        if not self.is_read_by_loader[0]:
            # Another loader counts the batches to skip from the beginning of the epoch, and does
            # not know that a loaded state skips them too.
            if self.is_resumed:
                raise RecipeError(SKIPPED_TWICE)
            has_trainer = self.came_from_trainer or _has_trainer_five()
            if not self.is_epoch_set and has_trainer and _is_skipped_by_trainer():
                raise RecipeError(EPOCH_UNKNOWN)
        self._is_pass_stored = self.gives_stored_rows and bool(self.is_read_by_loader[0])
        rows: Iterator[Any] = chain.from_iterable(super().__iter__())
        return rows

    @cached_property
    def lock(self) -> LoaderLock:
        """The lock: a description of the data that epochs are drawn from. It is computed when a
        state is first saved or loaded.
        """
        shards = map(_describe_shard, self.shards)
        # The iterator has the shards of all streams, one stream after the other: each stream takes
        # the next `count` of them.
        streams = [
            lock_stream(stream.name, int(stream.choose), islice(shards, count))
            for stream, count in zip(self.streams, self.shards_per_stream, strict=True)
        ]
        distinct_ranks = World.detect().num_ranks // (self.replication or 1)
        batch_size = self.batch_size or 0
        settings = {**self.locked, "batch": batch_size * distinct_ranks}
        if self.batching_method != EXACT_METHOD:
            settings[DEVICES_SETTING] = self.devices
        return LoaderLock(streams=streams, settings=settings)

    @property
    def devices(self) -> str:
        """The devices that divide an epoch: `2 nodes of 8 devices with batches of 4 samples`."""
        world = self._parallel_rank_world
        nodes = plural(world.num_nodes, "node")
        devices = plural(world.ranks_per_node, "device")
        samples = plural(self.batch_size or 0, "sample")
        return f"{nodes} of {devices} with batches of {samples}"

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return Streaming's state (the position in the epoch) and the lock (a description of the
        data), for the process with rank 0 to save.

        Args:
            num_samples: rows of this epoch that all devices together have received, if
                `from_beginning`. Otherwise samples that were drawn since this run began the epoch.
            from_beginning: True if Composer calls, False if MixLoader calls.
        """
        if from_beginning:
            # Devices that share samples are counted once.
            num_samples //= self.replication or 1
            # With packing, rows were counted: `bins` rows were made of `batch_size` samples.
            if self.bins:
                num_samples = num_samples // self.bins * int(self.batch_size or 0)
        state: dict[str, Any] = super().state_dict(num_samples, from_beginning)
        # Composer counts from 0 again after an epoch has ended; Streaming would then repeat that
        # epoch.
        last_begun = self.next_epoch - 1
        is_last_begun = last_begun >= 0 and state["epoch"] == last_begun
        if from_beginning and not num_samples and is_last_begun:
            state["epoch"] += 1
        return state | {LOCK_KEY: self.lock.to_text()}

    def load_state_dict(self, obj: Mapping[str, Any], drop_last: bool | None = None) -> None:
        """Make the next pass resume from a state.

        Raises RecipeError if `obj` is not a state, or its lock cannot be read; MixRefused if the
        data is not the data of the state, and `accept_changed` is not set, or if Composer loads a
        state after `last_place`.

        Args:
            drop_last: whether the loader leaves out a last batch with fewer samples than others.
                None: Composer calls, which does not call the loader.
        """
        # Check the values here: Streaming would fail on a wrong one later, in its workers. Other
        # keys are left out, since Streaming has room for only 4,096 bytes.
        state: dict[str, Any] = {"initial_physical_nodes": obj.get("initial_physical_nodes")}
        for key, least in LEAST_OF_STATE.items():
            state[key] = value = obj.get(key)
            if not isinstance(value, int) or value < least:
                raise RecipeError(
                    f"The argument of load_state_dict is not a state of a loader: {key} is "
                    f"{value!r}, and must be a whole number of at least {least}; pass a dict that "
                    "state_dict() of a loader returned and the checkpoint contains."
                )

        # Before the first batch of a run Streaming saves the epoch -1. The next one is 0.
        state["epoch"] = max(state["epoch"], 0)

        # Compare the state's data and devices with the data and devices of this run.
        saved_lock = None
        if obj.get(LOCK_KEY) is None:
            log.warning(
                "The checkpoint contains no lock of its data, perhaps because another loader wrote "
                "it. So mdsmix cannot compare the data of the checkpoint with the data of this run."
            )
        else:
            saved_lock = self._compare_lock(str(obj[LOCK_KEY]), state["num_canonical_nodes"])
        if self.batching_method != EXACT_METHOD and state["sample_in_epoch"]:
            saved_devices = saved_lock.settings.get(DEVICES_SETTING) if saved_lock else None
            self._compare_devices(saved_devices, state.get("initial_physical_nodes"))

        if state["sample_in_epoch"] > self.last_place:
            self._skip_late_samples(state, drop_last)
        self.is_resumed = True
        self._begin_at(state)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass read `epoch` from its first sample, unless it would already read that
        epoch or a later one.
        """
        self.is_epoch_set = True
        if epoch > self.next_epoch:
            self._begin_at(self._get_state() | {"epoch": epoch, "sample_in_epoch": 0})

    def begin_next_epoch(self) -> None:
        """Make the next iteration over the dataset read the epoch after the one that was read last,
        in the order of the run's seed and number of nodes.
        """
        self._begin_at(self._get_state() | {"epoch": self.next_epoch, "sample_in_epoch": 0})

    @property
    def last_place(self) -> float:
        """The last position in an epoch from which Streaming can start: the epoch's size, rounded
        down to a multiple of the ranks, plus one sample for each rank. With 10 samples and 4 ranks
        it is 12. Infinite for all batching methods but `random`: from a position after their last
        batch Streaming gives no batch.

        A saved position may be after this one, since Streaming repeats samples until all canonical
        nodes (its sections of an epoch) have the same number.
        """
        if self.batching_method != "random":
            return math.inf
        ranks: int = self._parallel_rank_world.num_ranks
        return int(self.epoch_size) // ranks * ranks + ranks

    def _skip_late_samples(self, state: dict[str, Any], drop_last: bool | None) -> None:
        """Move a state after `last_place` to the beginning of the next epoch. Warn of the samples
        that this skips, unless the state is at its epoch's end.

        Raises MixRefused if Composer calls: it would count the samples of the next epoch as those
        of the state's.

        Args:
            drop_last: as of `load_state_dict`.
        """
        canonical: int = state["num_canonical_nodes"]
        drawn = -(-int(self.epoch_size) // canonical) * canonical
        epoch, position = state["epoch"], state["sample_in_epoch"]
        place = (
            f"The checkpoint is at sample {position:,} of epoch {epoch:,}, and Streaming cannot "
            f"begin after sample {int(self.last_place):,} of it."
        )
        why = (
            f"Each epoch draws {drawn:,} of {int(self.epoch_size):,} samples, since there are "
            f"{plural(canonical, 'canonical node')}; with num_canonical_nodes: 1 it draws each "
            "once, in another order."
        )
        if drop_last is None:
            raise MixRefused(
                f"{place} {why} Fix: resume from an earlier checkpoint, or from one of a later "
                "epoch."
            )
        left = drawn - position
        step = int(self.batch_size or 1) * self._parallel_rank_world.num_ranks
        if left >= (step if drop_last else 1) and World.detect().is_local_leader:
            log.warning(
                "%s So the next pass is epoch %s, and the last %s of epoch %s, some of which may "
                "be in no earlier batch, are skipped. %s",
                place,
                f"{epoch + 1:,}",
                plural(left, "sample"),
                f"{epoch:,}",
                why,
            )
        state |= {"epoch": epoch + 1, "sample_in_epoch": 0}

    def _resume(self, world: World, epoch: int) -> tuple[int, int]:
        """Return the epoch and the sample at which the next pass begins, from the state in shared
        memory if there is one.

        All ranks of a node write that state, and Streaming reads it without a lock. So it is empty
        or in parts while another rank makes it. Then it is read again until it is whole. Raises
        Unreachable if it is not whole after SECONDS_OF_A_STATE.
        """
        resume = partial(super()._resume, world, epoch)
        epoch_and_sample: tuple[int, int] = self._repeat_until_whole(resume)
        return epoch_and_sample

    def _repeat_until_whole(self, use_state: Callable[[], Any]) -> Any:
        """Call a function that uses the state in shared memory, and return its result. Call it
        again as long as the state is empty or in parts, because another rank makes it.

        Raises Unreachable if the state is not whole after SECONDS_OF_A_STATE.
        """
        end = time.monotonic() + SECONDS_OF_A_STATE
        while True:
            try:
                return use_state()
            # From json, or from mmap if the memory has no size yet.
            except ValueError as error:
                if time.monotonic() > end:
                    raise Unreachable(
                        "The position from which the ranks of this node resume could not be read "
                        f"from shared memory for {SECONDS_OF_A_STATE:.0f} s, perhaps because a "
                        f"rank was killed while it wrote it ({describe_error(error)}). Start all "
                        "ranks again."
                    ) from error
            time.sleep(TICK)

    def _get_state(self) -> dict[str, Any]:
        """Return Streaming's state at the beginning of an epoch."""
        state: dict[str, Any] = super().state_dict(0, True)
        return state

    def _begin_at(self, state: dict[str, Any]) -> None:
        """Make the next pass begin at the position of a state. This works even if the state's epoch
        was begun before; Streaming by itself would then ignore the state.
        """
        self.__dict__.update(self._settings_before_epochs, initial_physical_nodes=None)
        self._repeat_until_whole(partial(super().load_state_dict, state))
        self.next_epoch = state["epoch"]
        # Streaming sets these only in a process that reads this epoch or calls state_dict. So the
        # order of later epochs would depend on the workers, and on other nodes than those of the
        # state each node would have an order of its own if only rank 0 saved a state.
        self.num_canonical_nodes = state["num_canonical_nodes"]
        self.shuffle_seed = state["shuffle_seed"]
        self.initial_physical_nodes = state.get("initial_physical_nodes")
        self._set_shuffle_block_size(self._parallel_rank_world)
        self.starts += 1

    def _compare_devices(self, saved_devices: str | None, saved_nodes: int | None) -> None:
        """Compare the devices of a state in the middle of an epoch with the devices of this run.

        Raises MixRefused if they differ and `accept_changed` is not set.

        Args:
            saved_devices: the devices in the state's lock, such as "2 nodes of 8 devices with
                batches of 4 samples"; None if the lock does not name devices.
            saved_nodes: the number of nodes in the state.
        """
        devices = self.devices
        method = f"batching_method: {self.batching_method}"
        # Without saved devices only the nodes can be compared: "2 nodes".
        before = saved_devices or plural(saved_nodes or 0, "node")
        if not saved_devices and devices.startswith(f"{before} "):
            log.warning(
                "The checkpoint does not contain the number of devices on its nodes: under %s a "
                "resume is exact only on the same devices.",
                method,
            )
            return
        if before == devices:
            return
        change = f"was written on {before}, but this run has {devices}"
        if not self.accept_changed:
            raise MixRefused(
                f"The checkpoint {change}: under {method} the epoch is divided differently among "
                "these devices, so some samples would be repeated and others skipped (only "
                f"batching_method: {EXACT_METHOD} resumes exactly on other devices). Fix: resume "
                f"on the devices of the checkpoint; {ACCEPT_HINT}."
            )
        if World.detect().is_local_leader:
            log.warning("accept_changed: the checkpoint %s, under %s.", change, method)

    def _compare_lock(self, text: str, canonical_nodes: int) -> LoaderLock | None:
        """Compare the data that a state was saved on with the data of this run, by their locks
        (descriptions of data and settings). Return the state's lock.

        If `accept_changed` is set, differences are only logged, and None is returned for a lock
        that cannot be read. Otherwise raises RecipeError if the state's lock cannot be read,
        MixRefused if the data differs.

        Args:
            text: the lock of the state, one line of JSON.
            canonical_nodes: num_canonical_nodes of the state.
        """
        try:
            saved_lock = parse_lock(
                LoaderLock, text, "the lock in the checkpoint", "use the one that wrote it"
            )
        except RecipeError as error:
            if not self.accept_changed:
                raise RecipeError(f"{flatten_error(error)}; {ACCEPT_HINT}.") from None
            log.warning("%s", error)
            return None
        # Streaming chose the canonical nodes when the saved run started: they are compared only if
        # this run sets a number too. Devices are compared by themselves, since they are not data.
        settings = dict(saved_lock.settings)
        is_set = self.lock.settings.get("num_canonical_nodes") is not None
        settings["num_canonical_nodes"] = canonical_nodes if is_set else None
        settings.pop(DEVICES_SETTING, None)
        differences = find_differences(replace(saved_lock, settings=settings), self.lock)
        changes = "; ".join(difference.message for difference in differences)
        if changes and not self.accept_changed:
            raise MixRefused(
                f"The checkpoint was written on other data: {changes}. With the data of this run, "
                "some samples would be repeated and others skipped. Fix: resume with the data and "
                "the settings of the checkpoint (publish: versioned keeps both); "
                f"{ACCEPT_HINT}."
            )
        if changes and World.detect().is_local_leader:
            log.warning("accept_changed: the checkpoint was written on other data: %s.", changes)
        return saved_lock

    def has_columns(self, names: Collection[str], in_all: bool = False) -> bool:
        """Check whether some stream has all of these columns.

        Args:
            in_all: check whether all streams have them.
        """
        have_columns = [set(names) <= set(shard.column_names) for shard in self.shards]
        return all(have_columns) if in_all else any(have_columns)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return the row of a sample: a TrainingRow, a PreferenceRow if `gives_preferences` is set,
        or what `other_row` returns if it is set.

        Raises Unreachable if the sample's shard is lost or damaged, MixRefused if the sample does
        not fit the settings; both name the shard.

        Args:
            retry: how many times the shard is fetched if it is evicted before it is read.
        """
        shard_id, position = self.spanner[sample_id]
        row = self._make_row(self.read_sample(int(shard_id), position, retry))
        if self.cache_limit:
            self._mark_used(np.array([shard_id]))
        return row

    def __getitem__(self, index: Any) -> Any:
        """Return the row of a sample, a list of rows for a list or slice, or an iterator over the
        rows of a SampleBlock, which Streaming asks for during a pass.
        """
        if not isinstance(index, SampleBlock):
            return super().__getitem__(index)
        rows = self.read_block(index)
        return rows if self._is_pass_stored else map(self._make_row, rows)

    def _make_row(self, stored: StoredRow) -> Any:
        """Return the row of a sample. Raises the errors of `get_item`."""
        if self.gives_preferences:
            return make_preference_row(stored, self.rules)
        if self.other_row:
            make_row = self.other_row
            return stored.decode(lambda sample: make_row(sample, stored.number))
        return make_named_row(stored, self.rules, self.numbers_streams)


def _describe_shard(shard: Reader) -> LockedShard:
    """Describe a shard for a lock. The hashes are of the decompressed file, or of the compressed
    file if the index has only those.
    """
    raw, compressed = shard.file_pairs[0]
    hashes = raw.hashes or (compressed.hashes if compressed else {})
    return LockedShard(len(shard), raw.basename, raw.bytes, hashes)

"""Streams in, rows out: a StreamingDataset that checks shards, names the one that fails, and knows
what its state is locked to.

Streaming's state is a number of samples. It is right for the data that it was counted on alone, so
the lock of that data travels beside it, as one string: a checkpoint in shards
(torch.distributed.checkpoint) is read into a state of the same keys. A resume on other data is
refused, or goes on with a warning that says what differs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

import numpy as np
import torch
from streaming import Stream
from streaming.base.format import FileInfo, Reader
from streaming.base.hashing import get_hash
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
from mdsmix.load.internals import ShardKeeper, drop_connection, state_without_connection
from mdsmix.load.training_rows import RowRules, make_row
from mdsmix.messages import flatten_error, plural
from mdsmix.shards.shard_samples import Sample

log = logging.getLogger(__name__)
LOCK_KEY = "mdsmix_lock"
"The key of a state that holds the lock, as text."
ACCEPT_HINT = "accept_changed: true (train_loader of name: mdsmix; build_loader(..., accept_changed=True)) goes on all the same"
EXACT_METHOD = "random"
"""The batching method that goes on in the middle of an epoch exactly on other devices, if they have
the same batch together.
"""
DEVICES_SETTING = "devices"
"The setting of a lock that names the devices, under the other batching methods."
SETTINGS_FILLED_IN = ("num_canonical_nodes", "shuffle_seed", "shuffle_block_size")
SKIPPED_TWICE = (
    "A state was given to this loader, and another loader that was built around its dataset reads it, as Trainer does to skip the "
    "batches of an epoch: the state skips them too, so they would be skipped twice. Give TrainingArguments(ignore_data_skip=True), "
    "and read batches from what build_loader returned."
)
EPOCH_UNKNOWN = (
    "Another loader that was built around this loader's dataset reads it without a word on the "
    "epoch, as Trainer of transformers 5 does to skip batches: it would read the first epoch "
    "again. Keep the loader's state by a callback and give "
    "TrainingArguments(ignore_data_skip=True) (docs/loading.md), or call set_epoch before."
)
BEST_HASH = "best"
"""`validate_hash` when the YAML does not say: the fastest algorithm that every shard of the index
holds, else none.
"""

FASTEST_FIRST = ("xxh3_64", "xxh128", "xxh3_128", "xxh64", "sha1", "xxh32", "sha256", "md5")


def _has_trainer_five() -> bool:
    """Check whether this process has imported Trainer of transformers 5 or later."""
    transformers = sys.modules.get("transformers")
    if transformers is None or "transformers.trainer" not in sys.modules:
        return False
    return int(transformers.__version__.partition(".")[0]) >= 5


def _is_skipped_by_trainer() -> bool:
    """Check whether Trainer of transformers 5 or later, if it is here, reads a pass to skip its
    batches.

    It skips them by a loader of accelerate's, and only then calls set_epoch, on that loader.
    Trainer of transformers 4 calls set_epoch before.
    """
    if get_worker_info() is not None:
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            return True
        frame = frame.f_back
    return False


class CheckedStream(Stream):  # type: ignore[misc]
    """streaming.Stream with a name, a judged index and checked shards."""

    def __init__(self, *, name: str, **settings: Any):
        try:
            super().__init__(**settings)
        except ImportError as error:
            raise Unreachable(
                f"Stream {name}: Streaming reads {settings.get('remote')} by a package that is not installed here ({error}); install "
                "mosaicml-streaming with the extra for that store."
            ) from error
        self.name = name

    def __getstate__(self) -> dict[str, Any]:
        return state_without_connection(self)

    @property
    def url(self) -> str:
        """Where the stream was published."""
        return os.path.join(self.remote or self.local, self.split).rstrip("/")

    @property
    def is_cached(self) -> bool:
        """Whether `local` holds copies: what is damaged there may be deleted and fetched again."""
        real = os.path.realpath
        return bool(self.remote) and real(self.remote) != real(self.local)

    def get_shards(self, world: World, allow_unsafe_types: bool) -> list[Reader]:
        """The readers of index.json; Unreachable where there is none or it cannot be used."""
        try:
            shards: list[Reader] = super().get_shards(world, allow_unsafe_types)
            files = [info for shard in shards for pair in shard.file_pairs for info in pair if info]
            if not any(map(len, shards)):
                raise ValueError("it lists no samples")
            for path in (PurePosixPath(info.basename) for info in files):
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"it names the shard {path}, outside its own folder")
        except Exception as error:
            raise Unreachable(
                f"Stream {self.name}: index.json under {self.url} cannot be used ({describe_error(error)}), so none of its "
                "rows can be loaded; convert the stream, or correct its remote, local and split."
            ) from error
        drop_connection(self)
        self.validate_hash = self._settled_hash(files)
        self._refuse_to_empty(shards)
        return shards

    def _refuse_to_empty(self, shards: Sequence[Reader]) -> None:
        """Raise RecipeError if Streaming would delete the unpacked shards: it does so if their
        packed form is not there and must be kept.
        """
        if not self.remote or self.remote == self.local:
            folder = Path(self.local, self.split)
            pairs = [pair for shard in shards for pair in shard.file_pairs if pair[1]]
            unpacked = [raw for raw, packed in pairs if not (folder / packed.basename).exists()]
            count = sum((folder / raw.basename).exists() for raw in unpacked)
            if count:
                raise RecipeError(
                    f"Stream {self.name}: {folder} holds {count:,} of its {plural(len(shards), 'shard')} unpacked alone, as the cache of a "
                    "remote does, and its index.json lists packed ones. Without the remote Streaming deletes such shards as it opens the "
                    "stream, so nothing was opened or changed; give the stream the remote again that it was fetched from."
                )

    def _settled_hash(self, files: list[FileInfo]) -> str | None:
        """The algorithm to check with; RecipeError where one was asked for that a shard lacks."""
        held = set.intersection(*(set(info.hashes) for info in files))
        if self.validate_hash == BEST_HASH:
            return next(filter(held.__contains__, FASTEST_FIRST), None)
        if not self.validate_hash or self.validate_hash in held:
            return self.validate_hash
        raise RecipeError(
            f"Stream {self.name}: validate_hash is {self.validate_hash}, but the shards of its index.json hold "
            f"{', '.join(sorted(held)) or 'no hashes'}, and Streaming would give no rows at all; name one of those or "
            "leave validate_hash out."
        )

    def prepare_shard(self, shard: Reader) -> int:
        """Fetches and unpacks a shard and checks its size; returns the change in bytes of the
        cache.
        """
        try:
            change: int = super().prepare_shard(shard)
            self.check(shard, with_hash=False)
        except Exception as error:
            if self.is_cached:
                shard.evict()
            raise self.failure(shard, describe_error(error)) from error
        return change

    def check(self, shard: Reader, with_hash: bool = True) -> None:
        """Compares the files at hand with the index: ValueError on damage, FileNotFoundError when
        one is missing.
        """
        for raw, _ in shard.file_pairs:
            path, algorithm = Path(self.local, self.split, raw.basename), self.validate_hash
            if (size := path.stat().st_size) != raw.bytes:
                raise ValueError(f"{path} has {size} bytes, its index says {raw.bytes}")
            wanted = raw.hashes.get(algorithm) if with_hash else None
            if wanted and get_hash(algorithm, np.memmap(path, np.uint8, "r")) != wanted:
                raise ValueError(f"{path} does not have the {algorithm} that its index says")

    def is_leftover_whole(self, shard: Reader) -> bool:
        """Whether a shard that lay there before the run is whole, or not there; False for a damaged
        copy, Unreachable for a damaged original.
        """
        try:
            self.check(shard)
        except FileNotFoundError:
            # only its compressed form is there, or it was evicted: it is checked when it is
            # prepared
            pass
        except ValueError as damage:
            if not self.is_cached:
                raise self.failure(shard, describe_error(damage)) from damage
            return False
        return True

    def failure(self, shard: Reader, why: str) -> Unreachable:
        """The error that the training loop gets for a shard that cannot be used."""
        return Unreachable(
            f"Stream {self.name}: shard {shard.file_pairs[0][0].basename} under {self.url} is lost or damaged ({why}), "
            "and without it the epoch would lose rows; restore it there or convert the stream again."
        )


def describe_error(error: Exception) -> str:
    """An error of another library as a part of one of our sentences."""
    return flatten_error(error) or type(error).__name__


class MixDataset(ShardKeeper):
    """A StreamingDataset that gives rows to train on; takes any keyword of StreamingDataset."""

    streams: list[CheckedStream]
    other_row: Callable[[Sample, int], Any] | None = None
    """`ExtraLoader.row`, if a kind of stream has a loader of its own. Not the ExtraLoader itself:
    its keys have bounds, which cannot be pickled for a worker that is spawned.
    """
    bins: int | None = None
    "Packed rows that a batch of samples becomes; None without packing."
    locked: Mapping[str, Any] = {}
    "Settings that a state is locked to, beside the streams (mdsmix.foundry_yaml.lock)."
    accept_changed = False
    "Whether to go on from a state of other data, and log what differs."
    starts = 0
    "How many times a place to begin at was given."
    is_resumed = False
    "Whether a state was given."
    came_from_trainer = False
    """Whether the process that pickled this dataset for a worker had Trainer of transformers 5. A
    spawned worker has not imported it.
    """
    is_epoch_set = False
    "Whether set_epoch was called, as every other trainer does before it reads an epoch."

    def __init__(self, rules: RowRules, **settings: Any):
        super().__init__(**settings)
        self.rules = rules
        self._named = {key: getattr(self, key) for key in SETTINGS_FILLED_IN}
        "Settings that Streaming fills in as an epoch begins."
        self.is_read_by_loader = torch.zeros(1, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]
        "Shared with the workers of this rank."

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "last_warned": training_rows.last_warned,
            "came_from_trainer": self.came_from_trainer or _has_trainer_five(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        training_rows.last_warned = state.pop("last_warned")
        self.__dict__.update(state)

    def __iter__(self) -> Iterator[Any]:
        if not self.is_read_by_loader[0]:
            if self.is_resumed:
                raise RecipeError(SKIPPED_TWICE)
            has_trainer = self.came_from_trainer or _has_trainer_five()
            if not self.is_epoch_set and has_trainer and _is_skipped_by_trainer():
                raise RecipeError(EPOCH_UNKNOWN)
        rows: Iterator[Any] = super().__iter__()
        return rows

    @cached_property
    def lock(self) -> LoaderLock:
        """The lock of the data that epochs are drawn from. It is worked out when a state is first
        asked for or given.
        """
        ranks = World.detect().num_ranks // (self.replication or 1)
        shards = map(_locked_shard, self.shards)
        streams = [
            lock_stream(stream.name, int(stream.choose), islice(shards, count))
            for stream, count in zip(self.streams, self.shards_per_stream, strict=True)
        ]
        settings = {**self.locked, "batch": (self.batch_size or 0) * ranks}
        if self.batching_method != EXACT_METHOD:
            settings[DEVICES_SETTING] = self.devices
        return LoaderLock(streams=streams, settings=settings)

    @property
    def devices(self) -> str:
        """Name the devices that divide an epoch, as a part of a sentence."""
        world = self._parallel_rank_world
        nodes, devices = plural(world.num_nodes, "node"), plural(world.ranks_per_node, "device")
        return f"{nodes} of {devices} with batches of {plural(self.batch_size or 0, 'sample')}"

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Streaming's state and the lock of the data, for rank 0.

        Args:
            num_samples: with `from_beginning`, as Composer counts them: rows that all devices were
            given in this epoch.
                Else as MixLoader counts: samples that were drawn since this run began the epoch.
        """
        if from_beginning:  # devices that share samples are counted once
            num_samples //= self.replication or 1
            if self.bins:
                num_samples = num_samples // self.bins * int(self.batch_size or 0)
        state: dict[str, Any] = super().state_dict(num_samples, from_beginning)
        # Composer counts from 0 again when an epoch has ended; Streaming would then begin that
        # epoch once more.
        if from_beginning and not num_samples and state["epoch"] == self.next_epoch - 1 >= 0:
            state["epoch"] += 1
        return state | {LOCK_KEY: self.lock.to_text()}

    def load_state_dict(self, obj: Mapping[str, Any]) -> None:
        """Makes the next pass go on from a state.

        Raises:
            RecipeError: it is no state, or its lock cannot be read.
            MixRefused: the data is not what the state was counted on, and `accept_changed` is not
            set.
        """
        # Streaming has room for 4,096 bytes, which a lock may exceed.
        state = {key: value for key, value in obj.items() if key != LOCK_KEY}
        for key in ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed"):
            if not isinstance(
                state.get(key), int
            ):  # Streaming would fail on it later, in its workers
                raise RecipeError(
                    f"What load_state_dict was given is no state of a loader: {key} is {state.get(key)!r}, and must be a whole number; "
                    "give it what state_dict() of a loader returned, out of the checkpoint that holds it."
                )
        was = None
        if obj.get(LOCK_KEY) is None:
            log.warning(
                "The checkpoint holds no lock of its data, as one of another loader: whether its samples are those of this run is not known."
            )
        else:
            was = self._compare_lock(str(obj[LOCK_KEY]), state["num_canonical_nodes"])
        if self.batching_method != EXACT_METHOD and state["sample_in_epoch"]:
            recorded = was.settings.get(DEVICES_SETTING) if was else None
            self._compare_devices(recorded, state.get("initial_physical_nodes"))
        self.is_resumed = True
        self._begin_at(state)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`, from its first sample, if it would be an
        earlier one.
        """
        self.is_epoch_set = True
        if epoch > self.next_epoch:
            self._begin_at(self._place() | {"epoch": epoch, "sample_in_epoch": 0})

    def begin_next_epoch(self) -> None:
        """Make the next pass the epoch after the one that was read last, with the seed and nodes of
        its state.
        """
        self._begin_at(self._place() | {"epoch": self.next_epoch, "sample_in_epoch": 0})

    @property
    def last_place(self) -> int:
        """Give the last sample of an epoch that Streaming begins at. An epoch is longer if
        canonical nodes round it up, by repeats.
        """
        ranks: int = self._parallel_rank_world.num_ranks
        return int(self.epoch_size) // ranks * ranks + ranks

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = super().state_dict(0, True)
        return place

    def _begin_at(self, state: dict[str, Any]) -> None:
        """Give the next pass its place. Streaming alone takes a place of an epoch that was begun
        for an old one.
        """
        self.__dict__.update(self._named, initial_physical_nodes=None)
        super().load_state_dict(state)
        self.next_epoch = state["epoch"]
        self.starts += 1

    def _compare_devices(self, recorded: str | None, nodes: int | None) -> None:
        """Compare the devices of a state in the middle of an epoch with those of this run.
        `recorded`: those of its lock, which earlier commits did not write; `nodes`: those of the
        state.
        """
        now, method = self.devices, f"batching_method: {self.batching_method}"
        before = recorded or plural(nodes or 0, "node")
        if not recorded and now.startswith(f"{before} "):
            log.warning(
                "The checkpoint does not say on which devices of its nodes it was written: under %s only the same ones go on exactly.",
                method,
            )
            return
        if before == now:
            return
        change = f"was written on {before}, and this run has {now}"
        if not self.accept_changed:
            raise MixRefused(
                f"The checkpoint {change}: under {method} its epoch is divided in another way here, so samples would come twice and others never (only "
                f"batching_method: {EXACT_METHOD} goes on exactly on other devices). Fix: resume on the devices of the checkpoint; {ACCEPT_HINT}."
            )
        if World.detect().is_local_leader:
            log.warning("accept_changed: the checkpoint %s, under %s.", change, method)

    def _compare_lock(self, text: str, canonical_nodes: int) -> LoaderLock | None:
        """Compare the lock of a state, which is returned if it can be read, with that of this data.
        `canonical_nodes`: those of the state.
        """
        try:
            was = parse_lock(
                LoaderLock, text, "the lock in the checkpoint", "use the one that wrote it"
            )
        except RecipeError as error:
            if not self.accept_changed:
                raise RecipeError(f"{flatten_error(error)}; {ACCEPT_HINT}.") from None
            log.warning("%s", error)
            return None
        # Streaming found out the canonical nodes at the start: they are compared where this run
        # names a number too.
        is_named = self.lock.settings.get("num_canonical_nodes") is not None
        nodes = {"num_canonical_nodes": canonical_nodes if is_named else None}
        known = replace(was, settings={**was.settings, **nodes})
        known.settings.pop(DEVICES_SETTING, None)  # compared apart: they are no data
        changes = "; ".join(each.message for each in find_differences(known, self.lock))
        if changes and not self.accept_changed:
            raise MixRefused(
                f"The checkpoint was written on other data: {changes}. Resumed on this data, samples would come twice and "
                f"others never. Fix: go on with the data and the settings of the checkpoint (publish: versioned keeps both); {ACCEPT_HINT}."
            )
        if changes and World.detect().is_local_leader:
            log.warning("accept_changed: the checkpoint was written on other data: %s.", changes)
        return was

    def has_columns(self, names: Collection[str]) -> bool:
        """Whether rows of some stream have all of these columns."""
        return any(set(names) <= set(shard.column_names) for shard in self.shards)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """The row of a sample: a TrainingRow, unless another loader makes rows. Unreachable names
        the shard that is lost or damaged, MixRefused the row that does not fit.
        """
        shard_id, position = self.spanner[sample_id]
        stream, shard = self.streams[self.stream_per_shard[shard_id]], self.shards[shard_id]
        try:
            if shard_id not in self.ready:
                # Waits for a worker that has fetched the shard and not yet checked it.
                self.prepare_shard(shard_id)
            sample = super().get_item(sample_id, retry)
            if self.other_row:
                return self.other_row(sample, self.rules.max_seq_len)
            row = make_row(sample, self.rules)
            if row.pictures:  # they are decoded later
                row.pictures.where = _where(stream, shard, position)
            return row
        except Unreachable:
            raise
        except MixRefused as refusal:
            raise MixRefused(f"{_where(stream, shard, position)}: {refusal}") from refusal
        except Exception as error:
            raise stream.failure(shard, f"row {position}: {describe_error(error)}") from error


def _locked_shard(shard: Reader) -> LockedShard:
    raw, zipped = shard.file_pairs[0]
    hashes = raw.hashes or (zipped.hashes if zipped else {})
    return LockedShard(len(shard), raw.basename, raw.bytes, hashes)


def _where(stream: CheckedStream, shard: Reader, position: int) -> str:
    return f"Stream {stream.name}, shard {shard.file_pairs[0][0].basename}, row {position}"

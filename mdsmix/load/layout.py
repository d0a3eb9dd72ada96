"""Streaming's own layout of an epoch for the devices of another cluster: sample ids by step and
device.

Streaming lays an epoch out in the first process of each node, from the dataset's settings and a
World, and passes it to the others by shared memory. Here the same functions get the World of the
run that is previewed. Only the first steps of StreamingDataset's constructor are left out, since
they take the local folders of the YAML, shared memory and lock files: another run on this machine
may be using them.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from streaming import Stream, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.util import number_abbrev_to_int
from streaming.base.world import World

from mdsmix.errors import RecipeError
from mdsmix.load.checked_stream import describe_error
from mdsmix.load.internals import Ids, fill_shuffle_block_size
from mdsmix.load.loader_settings import LoaderSettings
from mdsmix.mix.epoch.draws import Machines
from mdsmix.mix.streams.mix import StreamInMix

MOST_SAMPLES = 200_000_000
"""The most samples of an epoch that is laid out. Each million takes at least 1.1 s and 100 MB, here
and on every node of the run.
"""
NO_SAMPLE = -1
"Streaming's mark of a position in a batch that no sample fills."


class SamplePlace(NamedTuple):
    """The place of a sample in the streams of a loader."""

    stream: int
    "The stream's number in the loader's list."
    shard: int
    "The shard's number in the stream's index."
    position: int
    "The sample's number in the shard."


class EpochLayout(StreamingDataset):  # type: ignore[misc]
    """The streams of one loader, laid out for a cluster by the installed Streaming. It reads no
    samples.
    """

    epoch_size: int
    batch_size: int
    shuffle_seed: int
    num_canonical_nodes: int

    def __init__(
        self,
        settings: LoaderSettings,
        streams: Sequence[StreamInMix],
        machines: Machines,
        samples_per_batch: int,
    ):
        """Set up the streams, and compute the number of samples in an epoch.

        Raises RecipeError if Streaming refuses the settings, or the epoch is too large to be laid
        out.

        Args:
            machines: the cluster for which the epoch is laid out.
            samples_per_batch: samples that a device draws for a batch: its rows, times the packing
                ratio.
        """
        # Set the attributes that StreamingDataset's constructor takes from its arguments.
        parameters = inspect.signature(StreamingDataset.__init__).parameters.values()
        for parameter in parameters:
            if parameter.default is not parameter.empty:
                setattr(self, parameter.name, parameter.default)
        self.__dict__.update(settings.streaming, batch_size=samples_per_batch)

        self.drop_last = settings.loader["drop_last"]
        self.names = [stream.name for stream in streams]
        devices = World(machines.nodes, machines.gpus, max(1, machines.workers), 0)
        self.world = devices.replicate(machines.replication)
        "The devices that draw samples of their own, and their workers."
        # Streaming then draws other samples in each epoch, with another seed.
        self.epoch_seed_change = self.shuffle and self.sampling_method == "balanced"
        with self._turn_into_recipe_errors():
            self.streams = [Stream(local=".", **stream.weight) for stream in streams]
            self.set_samples([[shard.samples for shard in stream.shards] for stream in streams])
            epoch_size = number_abbrev_to_int(self.epoch_size) if self.epoch_size else None
            self.epoch_size = Stream.apply_weights(
                self.streams, self.samples_per_stream, epoch_size, self.shuffle_seed
            )
        if not 0 < self.epoch_size <= MOST_SAMPLES:
            raise RecipeError(
                f"train_loader: the weights and epoch_size give an epoch of {self.epoch_size:,} "
                f"samples, but a preview can lay out only 1 to {MOST_SAMPLES:,} samples. Streaming "
                "needs 1.1 s for each million samples, on every node and at every start. Change "
                "repeat, choose or epoch_size in the recipe or training YAML."
            )

    def set_samples(self, sizes: Sequence[Sequence[int]]) -> None:
        """Set the attributes from which StreamingDataset computes the shard of a sample.

        Args:
            sizes: for each stream, the samples of its shards.
        """
        self.num_streams = len(sizes)
        self.shards_per_stream = np.array([*map(len, sizes)], np.int64)
        self.samples_per_shard = np.array([*chain(*sizes)], np.int64)
        self.samples_per_stream = np.array([*map(sum, sizes)], np.int64)
        self.shard_offset_per_stream = _count_before(self.shards_per_stream)
        self.sample_offset_per_stream = _count_before(self.samples_per_stream)
        self.sample_offset_per_shard = _count_before(self.samples_per_shard)

    @property
    def planned(self) -> NDArray[np.int64]:
        """int64 [streams]: samples that the weights draw from each stream for an epoch."""
        return np.array([stream.choose for stream in self.streams], np.int64)

    def apply_state(
        self,
        num_canonical_nodes: int | None = None,
        shuffle_seed: int | None = None,
        initial_physical_nodes: int | None = None,
    ) -> None:
        """Set the attributes that Streaming takes from a saved state when it resumes a run
        (StreamingDataset._resume), or sets to defaults when a run starts.

        Args:
            num_canonical_nodes: as in the state; None for a run that starts.
            shuffle_seed: as in the state; None for a run that starts.
            initial_physical_nodes: nodes of the run that wrote the state, or None.
        """
        # Streaming's default of num_canonical_nodes: 64 a machine for these two shuffles, else 1.
        nodes_per_node = 64 if self.shuffle_algo in ("py1s", "py2s") else 1
        default_nodes = nodes_per_node * self.world.num_nodes
        self.num_canonical_nodes = num_canonical_nodes or self.num_canonical_nodes or default_nodes
        if shuffle_seed is not None:
            self.shuffle_seed = shuffle_seed
        self.initial_physical_nodes = initial_physical_nodes
        fill_shuffle_block_size(self, self.world)

    def draw_steps(self, epoch: int, sample_in_epoch: int = 0) -> Ids:
        """Return int64 [steps, ranks, samples]: the ids that each device draws in each step, and
        NO_SAMPLE in a batch that is not full.

        Args:
            epoch: the number of the epoch, from 0.
            sample_in_epoch: samples that all devices together have drawn before the first step.
        """
        with self._turn_into_recipe_errors():
            ids = generate_work(self.batching_method, self, self.world, epoch, sample_in_epoch)
        return deliver_batches(ids, self.drop_last)

    def locate_samples(self, ids: Ids) -> list[SamplePlace]:
        """Return the place of each sample: its stream, its shard and its position in the shard."""
        # Offsets 0, 100, 250: samples 0 to 99 are in shard 0, samples 100 to 249 in shard 1.
        shards = np.searchsorted(self.sample_offset_per_shard, ids, "right") - 1
        streams = self.find_streams(ids)
        shards_in_streams = shards - self.shard_offset_per_stream[streams]
        rows = ids - self.sample_offset_per_shard[shards]
        return [
            SamplePlace(int(stream), int(shard), int(row))
            for stream, shard, row in zip(streams, shards_in_streams, rows, strict=True)
        ]

    def find_streams(self, ids: Ids) -> Ids:
        """Return the number of each sample's stream in the loader's list."""
        # The last stream that begins at the sample or before it.
        return np.searchsorted(self.sample_offset_per_stream, ids, "right") - 1

    @contextmanager
    def _turn_into_recipe_errors(self) -> Iterator[None]:
        """Turn Streaming's errors in a `with` block into RecipeError, and silence its warnings of
        dropped samples, which preview counts itself.
        """
        log = logging.getLogger("streaming")
        level_before = log.level
        log.setLevel(logging.CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
            raise RecipeError(
                "train_loader: Streaming cannot lay out an epoch for these devices: "
                f"{describe_error(error)}."
            ) from error
        finally:
            log.setLevel(level_before)


def deliver_batches(ids: Ids, drop_last: bool) -> Ids:
    """Turn Streaming's layout into the batches that torch's DataLoader gives each device, step by
    step.

    Each worker makes batches of its own samples, and its last batch may not be full. The loader
    takes one batch from each worker in turn.

    Args:
        ids: int64 [nodes, ranks of a node, workers, batches, samples].

    Returns:
        int64 [steps, ranks, samples].
    """
    # Close the gaps between each worker's samples.
    nodes, gpus, workers, _, size = ids.shape
    samples = ids.reshape(nodes * gpus, workers, -1)
    samples = _move_last(samples == NO_SAMPLE, samples, axis=2)

    # Order the batches of a device: batch 0 of each worker, then batch 1 of each, and so on.
    batches = samples.reshape(nodes * gpus, workers, -1, size).swapaxes(1, 2)
    batches = batches.reshape(nodes * gpus, -1, size)
    if drop_last:
        batches[(batches == NO_SAMPLE).any(axis=2)] = NO_SAMPLE

    # Move empty batches to the end, since the loader skips a worker that has no more batches.
    is_empty = (batches == NO_SAMPLE).all(axis=2, keepdims=True)
    steps = _move_last(is_empty, batches, axis=1).swapaxes(0, 1)
    drawn: Ids = steps[(steps != NO_SAMPLE).any(axis=(1, 2))]
    return drawn


def _move_last(is_moved: NDArray[np.bool_], values: Ids, axis: int) -> Ids:
    """Move the values where `is_moved` is true after the others, along an axis. The order of both
    is kept: 5, -1, 6, -1 -> 5, 6, -1, -1 if the two -1 are moved.
    """
    moved: Ids = np.take_along_axis(values, np.argsort(is_moved, axis, kind="stable"), axis)
    return moved


def _count_before(counts: Ids) -> Ids:
    """Return, for each entry, the sum of the entries before it: 3, 2, 4 -> 0, 3, 5."""
    return counts.cumsum() - counts

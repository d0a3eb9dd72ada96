"""Streaming's own layout of an epoch for devices that are not here: sample ids by step and device.

Streaming lays an epoch out in the first process of each node, from the dataset's settings and a
World, and hands it to the others by shared memory. Here the same functions are given the World of
the run. Only what StreamingDataset's constructor does first is left out: it takes the local folders
of the YAML, shared memory and lock files, which may be those of a run that is at work on this
machine.
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
from streaming.base.world import World as Devices

from mdsmix.errors import RecipeError
from mdsmix.load.dataset import describe_error
from mdsmix.load.internals import Ids, fill_shuffle_block_size
from mdsmix.load.loader_settings import LoaderSettings
from mdsmix.mix.epoch.draws import Machines
from mdsmix.mix.streams.mix import StreamInMix

MOST_SAMPLES = 200_000_000
"""Samples of an epoch: laying out takes 1.1 s and 100 MB a million and more, here and on every node
of the run.
"""
NO_SAMPLE = -1
"Streaming's mark of a place in a batch that no sample fills."


class SamplePlace(NamedTuple):
    """The place of a sample."""

    stream: int
    shard: int
    "The shard's number in the stream's index."
    position: int
    "The sample's number in the shard."


class EpochLayout(StreamingDataset):  # type: ignore[misc]
    """The streams of one loader, laid out for a cluster by the installed Streaming. It reads
    nothing.
    """

    epoch_size: int
    batch_size: int
    shuffle_seed: int
    num_canonical_nodes: int

    def __init__(
        self,
        settings: LoaderSettings,
        streams: Sequence[StreamInMix],
        world: Machines,
        samples_per_batch: int,
    ):
        """`samples_per_batch`: samples that a device draws for a batch: its rows, times the packing
        ratio.
        """
        signature = inspect.signature(StreamingDataset.__init__).parameters
        defaults = {n: p.default for n, p in signature.items() if p.default is not p.empty}
        self.__dict__.update(defaults | {**settings.streaming, "batch_size": samples_per_batch})
        self.drop_last = settings.loader["drop_last"]
        self.names = [stream.name for stream in streams]
        devices = Devices(world.nodes, world.gpus, max(1, world.workers), 0)
        self.world = devices.replicate(world.replication)
        "The devices that draw samples of their own, and their workers."
        self.epoch_seed_change = self.shuffle and self.sampling_method == "balanced"
        with self._refused():
            self.streams = [Stream(local=".", **stream.weight) for stream in streams]
            self.set_samples([[shard.samples for shard in stream.shards] for stream in streams])
            asked = number_abbrev_to_int(self.epoch_size) if self.epoch_size else None
            self.epoch_size = Stream.apply_weights(
                self.streams, self.samples_per_stream, asked, self.shuffle_seed
            )
        if not 0 < self.epoch_size <= MOST_SAMPLES:
            raise RecipeError(
                f"train_loader: its weights and epoch_size make an epoch of {self.epoch_size:,} samples, and a preview lays out 1 to "
                f"{MOST_SAMPLES:,} (Streaming itself takes 1.1 s a million, on every node and at every start); change repeat, choose or epoch_size."
            )

    def set_samples(self, sizes: Sequence[Sequence[int]]) -> None:
        """Sets the attributes by which StreamingDataset knows where samples lie."""
        self.num_streams = len(sizes)
        self.shards_per_stream = np.array([*map(len, sizes)], np.int64)
        self.samples_per_shard = np.array([*chain(*sizes)], np.int64)
        self.samples_per_stream = np.array([*map(sum, sizes)], np.int64)
        self.shard_offset_per_stream = _offsets(self.shards_per_stream)
        self.sample_offset_per_stream = _offsets(self.samples_per_stream)
        self.sample_offset_per_shard = _offsets(self.samples_per_shard)

    @property
    def planned(self) -> NDArray[np.int64]:
        """int64 [streams]: samples that the weights draw of each for an epoch."""
        return np.array([stream.choose for stream in self.streams], np.int64)

    def enter(
        self,
        num_canonical_nodes: int | None = None,
        shuffle_seed: int | None = None,
        initial_physical_nodes: int | None = None,
    ) -> None:
        """Takes over what a state decides, as Streaming does where a run starts or goes on
        (StreamingDataset._resume).
        """
        many = 64 if self.shuffle_algo in ("py1s", "py2s") else 1
        self.num_canonical_nodes = (
            num_canonical_nodes or self.num_canonical_nodes or many * self.world.num_nodes
        )
        if shuffle_seed is not None:
            self.shuffle_seed = shuffle_seed
        self.initial_physical_nodes = initial_physical_nodes
        fill_shuffle_block_size(self, self.world)

    def steps(self, epoch: int, sample_in_epoch: int = 0) -> Ids:
        """int64 [steps, ranks, drawn]: what each device draws in each step, NOBODY where a batch is
        not full.
        """
        with self._refused():
            ids = generate_work(self.batching_method, self, self.world, epoch, sample_in_epoch)
        return deliver_batches(ids, self.drop_last)

    def places(self, ids: Ids) -> list[SamplePlace]:
        """The places of these samples."""
        shards = np.searchsorted(self.sample_offset_per_shard, ids, "right") - 1
        streams = self.stream_of(ids)
        own = shards - self.shard_offset_per_stream[streams]
        rows = ids - self.sample_offset_per_shard[shards]
        return [SamplePlace(*map(int, place)) for place in zip(streams, own, rows, strict=True)]

    def stream_of(self, ids: Ids) -> Ids:
        """The number of each sample's stream."""
        return np.searchsorted(self.sample_offset_per_stream, ids, "right") - 1

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Turns Streaming's refusals into RecipeError, and silences its warnings: dropped samples
        are counted here.
        """
        log = logging.getLogger("streaming")
        before = log.level
        log.setLevel(logging.CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
            raise RecipeError(
                f"train_loader: Streaming refuses it on these devices: {describe_error(error)}."
            ) from error
        finally:
            log.setLevel(before)


def deliver_batches(ids: Ids, drop_last: bool) -> Ids:
    """Streaming's layout -> what torch's DataLoader hands to each device, step by step.

    Each worker puts its own samples into batches, the last of which may not be full; batches come
    from the workers in turn.

    Args:
        ids: int64 [nodes, ranks of a node, workers, batches, samples].

    Returns:
        int64 [steps, ranks, samples].
    """
    nodes, gpus, workers, _, size = ids.shape
    samples = ids.reshape(nodes * gpus, workers, -1)
    samples = _last(samples == NO_SAMPLE, samples, axis=2)
    # Batch 0 of each worker, batch 1 of each, and so on.
    batches = samples.reshape(nodes * gpus, workers, -1, size).swapaxes(1, 2)
    batches = batches.reshape(nodes * gpus, -1, size)
    if drop_last:
        batches[(batches == NO_SAMPLE).any(axis=2)] = NO_SAMPLE
    # A worker that has no more batches is passed over.
    is_empty = (batches == NO_SAMPLE).all(axis=2, keepdims=True)
    steps = _last(is_empty, batches, axis=1).swapaxes(0, 1)
    drawn: Ids = steps[(steps != NO_SAMPLE).any(axis=(1, 2))]
    return drawn


def _last(is_moved: NDArray[np.bool_], values: Ids, axis: int) -> Ids:
    """The values with some of them moved behind the others, which keep their order."""
    moved: Ids = np.take_along_axis(values, np.argsort(is_moved, axis, kind="stable"), axis)
    return moved


def _offsets(counts: Ids) -> Ids:
    return counts.cumsum() - counts

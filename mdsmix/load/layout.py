"""Streaming's own layout of an epoch for devices that are not here: sample ids by step and device.

Streaming lays an epoch out in the first process of each node, from the dataset's settings and a World, and hands it to the
others by shared memory. Here the same functions are given the World of the run. Only what StreamingDataset's constructor
does first is left out: it takes the local folders of the YAML, shared memory and lock files, which may be those of a run
that is at work on this machine.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from streaming import Stream, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.util import number_abbrev_to_int
from streaming.base.world import World

from mdsmix.errors import RecipeError
from mdsmix.load.dataset import reason

Ids = NDArray[np.int64]
LARGEST = 200_000_000
"Samples of an epoch: laying out takes 1.1 s and 100 MB a million and more, here and on every node of the run."
NOBODY = -1
"Streaming's mark of a place in a batch that no sample fills."


class SampleAt(NamedTuple):
    """The place of a sample."""

    stream: int
    shard: int
    "The shard's number in the stream's index."
    position: int
    "The sample's number in the shard."


class Layout(StreamingDataset):  # type: ignore[misc]
    """The streams of one loader, laid out for a cluster by the installed Streaming. It reads nothing."""

    epoch_size: int
    batch_size: int
    shuffle_seed: int
    num_canonical_nodes: int

    def __init__(
        self,
        weights: Mapping[str, Mapping[str, Any]],
        sizes: Sequence[Sequence[int]],
        settings: Mapping[str, Any],
        world: World,
        drawn: int,
        drop_last: bool = False,
    ):
        """
        Args:
            weights: stream -> its `proportion`, `repeat` or `choose`.
            sizes: of each stream, the samples of its shards.
            settings: further keywords of StreamingDataset, as `LoaderSettings.streaming`.
            world: devices that draw samples of their own, and their workers.
            drawn: samples that a device draws at a time: its rows, times the packing ratio.
        """
        signature = inspect.signature(StreamingDataset.__init__).parameters
        defaults = {n: p.default for n, p in signature.items() if p.default is not p.empty}
        self.__dict__.update(defaults | dict(settings) | {"batch_size": drawn})
        self.drop_last, self.names, self.world = drop_last, list(weights), world
        self.epoch_seed_change = self.shuffle and self.sampling_method == "balanced"
        with self._refused():
            self.streams = [Stream(local=".", **weight) for weight in weights.values()]
            self.set_samples(sizes)
            asked = number_abbrev_to_int(self.epoch_size) if self.epoch_size else None
            self.epoch_size = Stream.apply_weights(
                self.streams, self.samples_per_stream, asked, self.shuffle_seed
            )
        if not 0 < self.epoch_size <= LARGEST:
            raise RecipeError(
                f"train_loader: its weights and epoch_size make an epoch of {self.epoch_size:,} samples, and a preview lays out 1 to "
                f"{LARGEST:,} (Streaming itself takes 1.1 s a million, on every node and at every start); change repeat, choose or epoch_size."
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
        """Takes over what a state decides, as Streaming does where a run starts or goes on (StreamingDataset._resume)."""
        many = 64 if self.shuffle_algo in ("py1s", "py2s") else 1
        self.num_canonical_nodes = (
            num_canonical_nodes or self.num_canonical_nodes or many * self.world.num_nodes
        )
        if shuffle_seed is not None:
            self.shuffle_seed = shuffle_seed
        self.initial_physical_nodes = initial_physical_nodes
        self._set_shuffle_block_size(self.world)

    def steps(self, epoch: int, sample_in_epoch: int = 0) -> Ids:
        """int64 [steps, ranks, drawn]: what each device draws in each step, NOBODY where a batch is not full."""
        with self._refused():
            ids = generate_work(self.batching_method, self, self.world, epoch, sample_in_epoch)
        return delivered(ids, self.drop_last)

    def places(self, ids: Ids) -> list[SampleAt]:
        """The places of these samples."""
        shards = np.searchsorted(self.sample_offset_per_shard, ids, "right") - 1
        streams = self.stream_of(ids)
        own = shards - self.shard_offset_per_stream[streams]
        rows = ids - self.sample_offset_per_shard[shards]
        return [SampleAt(*map(int, place)) for place in zip(streams, own, rows, strict=True)]

    def stream_of(self, ids: Ids) -> Ids:
        """The number of each sample's stream."""
        return np.searchsorted(self.sample_offset_per_stream, ids, "right") - 1

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Turns Streaming's refusals into RecipeError, and silences its warnings: dropped samples are counted here."""
        log = logging.getLogger("streaming")
        before = log.level
        log.setLevel(logging.CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
            raise RecipeError(
                f"train_loader: Streaming refuses it on these devices: {reason(error)}."
            ) from error
        finally:
            log.setLevel(before)


def delivered(ids: NDArray[np.int64], drop_last: bool) -> Ids:
    """Streaming's layout -> what torch's DataLoader hands to each device, step by step.

    Each worker puts its own samples into batches, the last of which may not be full; batches come from the workers in turn.

    Args:
        ids: int64 [nodes, ranks of a node, workers, batches, samples].

    Returns:
        int64 [steps, ranks, samples].
    """
    nodes, gpus, workers, _, size = ids.shape
    ranks = list[Ids]()
    for rank in ids.reshape(nodes * gpus, workers, -1):
        batches = [_batches(own, size, drop_last) for own in rank]
        # Batch 0 of each worker, batch 1 of each, and so on; one that has no more is passed over.
        order = np.concatenate([np.arange(len(own)) for own in batches])
        ranks.append(np.concatenate(batches)[np.argsort(order, kind="stable")])
    found = np.full((max(map(len, ranks)), len(ranks), size), NOBODY, np.int64)
    for at, batch in enumerate(ranks):
        found[: len(batch), at] = batch
    return found


def _batches(own: Ids, size: int, drop_last: bool) -> Ids:
    """int64 [batches, size]: the batches of one worker's samples. A last one that is not full is dropped or filled with NOBODY."""
    own = own[own != NOBODY]
    if rest := len(own) % size:
        own = own[:-rest] if drop_last else np.append(own, np.full(size - rest, NOBODY))
    return own.reshape(-1, size)


def _offsets(counts: Ids) -> Ids:
    return counts.cumsum() - counts

"""Counts exactly how many of the samples that a phase draws were drawn by earlier phases too.

Streaming draws whole passes of a stream, and some samples once more: 23 draws from 10 samples are 2
passes and 3 samples. Which samples these are follows from the loader's settings and the epoch, so
it is computed here as Streaming does it, without reading a sample. In Streaming that
is get_sampling (streaming/base/sampling.py) and StreamingDataset.resample_streams
(streaming/base/dataset.py), which the methods of batching (streaming/base/batching) call; they are
the same in 0.12 and 0.13.

Streaming cannot draw unseen samples first: it draws those 3 samples from the whole stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.foundry_yaml.loader_keys import as_whole_number
from mdsmix.mix.epoch.draws import METHODS, count_loader_draws, get_batching_method
from mdsmix.mix.streams.mix import Loader, Mix
from mdsmix.recipe.phases import SHUFFLE_SEED
from mdsmix.table import Estimate

EXACT_SAMPLES = 1 << 25
"""The most samples of all streams together that are drawn here, 33 million: a phase takes 3 s and
650 MB then. With more, repeats are expected numbers.
"""
GRANULES_AT_ONCE = 1 << 20
"Granules (`sampling_granularity` samples of one shard) that are drawn at a time."
Copies = NDArray[np.int64]
"How often each sample of a stream is drawn: int64 [samples]."


class Repeats(NamedTuple):
    """What a phase draws of a stream."""

    drawn: int
    "Samples, counted as often as they are drawn."
    repeated: float
    "How many of them earlier phases have drawn. An Estimate for very large streams."


def count_repeated_draws(mixes: Sequence[Mix]) -> list[dict[str, Repeats]]:
    """Return for each phase what it draws of its streams, by their names.

    Args:
        mixes: the mixes of the first phases of a run, in their order.
    """
    samples = dict[str, int]()
    is_estimated = False
    for mix in mixes:
        for stream in mix.train.streams:
            samples[stream.name] = stream.index.samples
            if stream.survey:
                is_estimated = True
    if is_estimated or sum(samples.values()) > EXACT_SAMPLES:
        return _expect_repeats(mixes)
    # Name of a stream -> for each of its samples, whether a phase has drawn it.
    was_drawn = {name: np.zeros(count, bool) for name, count in samples.items()}
    counted = list[dict[str, Repeats]]()
    for number, mix in enumerate(mixes):
        phase = dict[str, Repeats]()
        for stream, copies in zip(mix.train.streams, draw_epoch(mix.train, number), strict=True):
            repeated = int(copies[was_drawn[stream.name]].sum())
            phase[stream.name] = Repeats(int(copies.sum()), repeated)
            was_drawn[stream.name] |= copies > 0
        counted.append(phase)
    return counted


def _expect_repeats(mixes: Sequence[Mix]) -> list[dict[str, Repeats]]:
    """Return the same as `count_repeated_draws`, with the expected numbers of repeats. The draws of
    an incomplete pass are equally likely to be any samples of the stream.
    """
    # Name of a stream -> the expected share of its samples, 0 to 1, that no phase has drawn.
    unseen_shares = dict[str, float]()
    counted = list[dict[str, Repeats]]()
    for mix in mixes:
        phase = dict[str, Repeats]()
        draws = count_loader_draws(mix.train) or []
        for stream, drawn in zip(mix.train.streams, draws, strict=False):
            unseen = unseen_shares.get(stream.name, 1.0)
            phase[stream.name] = Repeats(drawn, Estimate(drawn * (1 - unseen)))
            passes = drawn / max(1, stream.index.samples)
            unseen_shares[stream.name] = unseen * max(0.0, 1 - passes)
        counted.append(phase)
    return counted


def draw_epoch(loader: Loader, epoch: int) -> list[Copies]:
    """Return, for each stream of a loader, how often an epoch draws each of its samples.

    Args:
        epoch: the number of the epoch, from 0.
    """
    draws = count_loader_draws(loader)
    if not draws:  # Streaming refuses the weights, so nothing is drawn
        draws = [0 for _ in loader.streams]

    # The seeds, as Streaming derives them.
    dataset = loader.dataset
    seed = as_whole_number(dataset.get("shuffle_seed"))
    seed = SHUFFLE_SEED if seed is None else seed
    is_balanced = dataset.get("sampling_method", "balanced") == "balanced"
    row_seed = seed + epoch if is_balanced else seed
    shard_seed = row_seed if dataset.get("shuffle") else seed
    granularity = as_whole_number(dataset.get("sampling_granularity")) or 1
    # `batching_method: random` draws the rows of all streams with one generator, one stream after
    # the other. The other methods begin a new one for each stream.
    has_own_generators = get_batching_method(loader) in METHODS
    generator = np.random.default_rng(row_seed)
    copies = list[Copies]()
    for stream, drawn in zip(loader.streams, draws, strict=True):
        sizes = np.array([shard.samples for shard in stream.shards], np.int64)
        by_shard = _draw_from_shards(sizes, drawn, granularity, shard_seed)
        if has_own_generators:
            generator = np.random.default_rng(row_seed)
        copies.append(_draw_from_rows(sizes, by_shard, generator))
    return copies


def _draw_from_shards(sizes: Copies, drawn: int, granularity: int, seed: int) -> Copies:
    """Return how many samples are drawn from each shard: int64 [shards].

    Args:
        sizes: the samples of each shard.
        drawn: samples to draw from all shards together.
        granularity: how many samples of a shard are drawn together.
    """
    passes, remainder = divmod(drawn, max(1, int(sizes.sum())))
    counts = sizes * passes
    if not remainder:
        return counts
    # Shards consist of granules, the last of which may be smaller. All granules are shuffled, and
    # drawn until there are enough samples.
    granules = -(-sizes // granularity)
    ends = np.cumsum(granules)
    order = np.random.default_rng(seed).permutation(ends[-1])
    last_sizes = sizes - (granules - 1) * granularity
    # Not all granules at once, since a run has many millions of samples.
    for start in range(0, len(order), GRANULES_AT_ONCE):
        drawn_granules = order[start : start + GRANULES_AT_ONCE]
        shards = np.searchsorted(ends, drawn_granules, side="right")
        drawn_sizes = np.full(len(drawn_granules), granularity, np.int64)
        is_last = drawn_granules == ends[shards] - 1
        drawn_sizes[is_last] = last_sizes[shards[is_last]]
        # The granule that has more samples than are still to be drawn gives only these.
        before = np.cumsum(drawn_sizes) - drawn_sizes
        np.add.at(counts, shards, np.clip(remainder - before, 0, drawn_sizes))
        remainder -= int(drawn_sizes.sum())
        if remainder <= 0:
            break
    return counts


def _draw_from_rows(sizes: Copies, drawn: Copies, generator: np.random.Generator) -> Copies:
    """Return how often each sample is drawn, all shards one after the other.

    Args:
        sizes: the samples of each shard.
        drawn: the samples to draw from each shard.
        generator: draws the samples of incomplete passes.
    """
    copies = np.empty(int(sizes.sum()), np.int64)
    start = 0
    for size, count in zip(sizes.tolist(), drawn.tolist(), strict=True):
        if size:
            passes, once_more = divmod(count, size)
            copies[start : start + size] = passes
            if once_more:
                copies[start + generator.choice(size, once_more, False)] += 1
        start += size
    return copies

"""The samples that a phase draws and that earlier phases have drawn, counted exactly.

Streaming draws whole passes of a stream and a part of one more. Which samples are in the part
follows from the loader's settings and the epoch, so it is computed here as Streaming does it,
without reading a sample: get_sampling in streaming/base/sampling.py, and
StreamingDataset.resample_streams in streaming/base/dataset.py, which the methods of batching in
streaming/base/batching call; 0.12 and 0.13 alike.

Streaming cannot draw unseen samples first: a part is drawn from the whole stream.
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
PART = 1 << 20
"Granules that are drawn at a time."
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
    samples = {stream.name: stream.index.samples for mix in mixes for stream in mix.train.streams}
    surveyed = any(stream.survey for mix in mixes for stream in mix.train.streams)
    if surveyed or sum(samples.values()) > EXACT_SAMPLES:
        return _expect_repeats(mixes)
    seen = {name: np.zeros(count, bool) for name, count in samples.items()}
    counted = list[dict[str, Repeats]]()
    for number, mix in enumerate(mixes):
        phase = dict[str, Repeats]()
        for stream, copies in zip(mix.train.streams, draw_epoch(mix.train, number), strict=True):
            repeated = int(copies[seen[stream.name]].sum())
            phase[stream.name] = Repeats(int(copies.sum()), repeated)
            seen[stream.name] |= copies > 0
        counted.append(phase)
    return counted


def _expect_repeats(mixes: Sequence[Mix]) -> list[dict[str, Repeats]]:
    """Return the same as `count_repeated_draws`, with the expected numbers of repeats. A part of a
    pass is equally likely to draw any sample.
    """
    unseen = dict[str, float]()  # name of a stream -> the expected part that no phase has drawn
    counted = list[dict[str, Repeats]]()
    for mix in mixes:
        phase = dict[str, Repeats]()
        draws = count_loader_draws(mix.train) or []
        for stream, drawn in zip(mix.train.streams, draws, strict=False):
            part = unseen.get(stream.name, 1.0)
            phase[stream.name] = Repeats(drawn, Estimate(drawn * (1 - part)))
            passes = drawn / max(1, stream.index.samples)
            unseen[stream.name] = part * max(0.0, 1 - passes)
        counted.append(phase)
    return counted


def draw_epoch(loader: Loader, epoch: int) -> list[Copies]:
    """Return, for each stream of a loader, how often an epoch draws each of its samples.

    Args:
        epoch: the number of the epoch, from 0.
    """
    draws = count_loader_draws(loader) or [0] * len(loader.streams)
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
    left = remainder
    # In parts, since a run has many millions of samples.
    for start in range(0, len(order), PART):
        part = order[start : start + PART]
        shards = np.searchsorted(ends, part, side="right")
        drawn_sizes = np.full(len(part), granularity, np.int64)
        is_last = part == ends[shards] - 1
        drawn_sizes[is_last] = (sizes - (granules - 1) * granularity)[shards[is_last]]
        # The granule that has more samples than are left gives only these.
        before = np.cumsum(drawn_sizes) - drawn_sizes
        np.add.at(counts, shards, np.clip(left - before, 0, drawn_sizes))
        left -= int(drawn_sizes.sum())
        if left <= 0:
            break
    return counts


def _draw_from_rows(sizes: Copies, drawn: Copies, generator: np.random.Generator) -> Copies:
    """Return how often each sample is drawn, all shards one after the other.

    Args:
        sizes: the samples of each shard.
        drawn: the samples to draw from each shard.
        generator: draws the parts of shards.
    """
    copies = np.empty(int(sizes.sum()), np.int64)
    start = 0
    for size, count in zip(sizes.tolist(), drawn.tolist(), strict=True):
        passes, part = divmod(count, size) if size else (0, 0)
        copies[start : start + size] = passes
        if part:
            copies[start + generator.choice(size, part, False)] += 1
        start += size
    return copies

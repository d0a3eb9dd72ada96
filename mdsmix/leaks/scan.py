"""A training stream, shard by shard, held against the items of evaluations.

What is held does not grow with the stream: shards in flight, a count for each gram, and for each gram the first samples that it stands
in, no more than it may stand in before it counts as common. A gram that is common in a stream (a licence, an idiom of code, what a
chat template writes) says nothing about a leak there, and is left out of what is found in this stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import RecipeError
from mdsmix.leaks.evaluation_grams import Int, Items, rows_of
from mdsmix.shards.index import Shard
from mdsmix.shards.published import Stream
from mdsmix.shards.shard_samples import read_whole
from mdsmix.shards.token_ids import PACKED, layout_of, token_columns, tokens_of
from mdsmix.storage import Location

MOST_HELD = 10
"Samples in which a gram was found that are held, where none counts as common."


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """What was found in one stream."""

    samples: int
    tokens: int
    is_common: NDArray[np.bool_]
    "bool [grams]: whether it occurs in too many samples of the stream."
    grams: Int
    "int64 [finds]: the number of the gram."
    found_in: Int
    "int64 [finds]: the number of the sample in the stream."

    @property
    def common(self) -> int:
        return int(self.is_common.sum())


@dataclass(frozen=True, slots=True)
class _Found:
    size: int
    tokens: int
    grams: Int
    samples: Int


def scan(
    stream: Stream,
    items: Items,
    common: int,
    on_progress: Callable[[int, int], None],
) -> Scanned:
    """Reads all of the stream; Unreachable where a shard cannot be read."""
    firsts = list(accumulate((shard.samples for shard in stream.shards), initial=0))
    counts = np.zeros(len(items.hashes), np.int32)
    grams, samples, tokens = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    items.tables  # noqa: B018  made once, before threads ask for it
    with ThreadPoolExecutor(threads(stream)) as pool:
        looks = pool.map(lambda shard: _look(stream.folder, shard, items), stream.shards)
        for first, found in zip(firsts, looks, strict=False):
            before = counts[found.grams]
            counts += np.bincount(found.grams, minlength=len(counts)).astype(np.int32)
            held = counts[found.grams] <= common if common else before < MOST_HELD
            grams.append(found.grams[held])
            samples.append(found.samples[held] + first)
            tokens += found.tokens
            on_progress(found.size, found.tokens)
    is_common = counts > common if common else np.zeros(len(counts), bool)
    every = np.concatenate(grams)
    return Scanned(
        samples=stream.index.samples,
        tokens=tokens,
        is_common=is_common,
        grams=every[~is_common[every]],
        found_in=np.concatenate(samples)[~is_common[every]],
    )


def threads(stream: Stream) -> int:
    """As many as processors; with a store more, of which most wait for bytes. NumPy lets the others work meanwhile."""
    wanted = 8 if stream.folder.is_store else os.cpu_count() or 1
    return max(1, min(wanted, len(stream.shards)))


def _look(folder: Location, shard: Shard, items: Items) -> _Found:
    if not token_columns(shard):
        raise RecipeError(
            f"{folder / shard.stored.basename} holds no token ids of a stated dtype (columns {', '.join(sorted(shard.columns))}), so "
            "nothing can be looked for in it; leave that stream out, or convert it with `mdsmix convert`."
        )
    tokens = tokens_of(shard, read_whole(folder, shard))
    if tokens is None:
        return _Found(shard.stored.bytes, 0, np.empty(0, np.int64), np.empty(0, np.int64))
    grams, rows = items.find(rows_of(shard, tokens))
    if layout_of(shard.columns) == PACKED:
        rows = np.searchsorted(tokens.turns, rows, "right") - 1
        grams, rows = np.unique(np.stack([grams, rows]), axis=1)
    return _Found(shard.stored.bytes, len(tokens.ids.values), grams, rows)

"""Which shards each node reads: Streaming's own spread of shards over nodes, without laying out one sample.

Streaming draws from each shard, puts the pieces in an order that the seed alone decides, and cuts it into as many parts of equal
samples as there are canonical nodes; node p reads parts p, p + nodes, and so on. All shuffles but `naive` do so (streaming/base/shuffle,
partition/orig.py, 0.12 and 0.13), so where streams are taken whole the shards of a node are exact, and the same in each epoch.
A part of a stream is drawn anew each epoch: here the counts are drawn with the same distribution, not the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
LARGEST_DRAW = 1_000_000_000
"Above it numpy draws no hypergeometric counts; binomial ones differ by nothing that shows."


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What decides who reads what."""

    nodes: int
    canonical: int
    seed: int
    algo: str
    "A shuffle_algo; `none` where nothing is shuffled."
    is_fixed: bool = False
    "sampling_method: fixed, or no shuffling: the same part of a stream is drawn in each epoch."
    by_stream: bool = False
    "Each stream is spread over the nodes by itself: batching_method per_stream, device_per_stream."


def drawn_of(samples: Counts, choose: int, rng: np.random.Generator) -> Counts:
    """Samples drawn from each shard of a stream of which an epoch takes `choose`: whole passes, and a part of another one."""
    count = int(samples.sum())
    whole, rest = divmod(choose, count) if count else (0, 0)
    if not rest:
        return samples * whole
    if count < LARGEST_DRAW:
        more = rng.multivariate_hypergeometric(samples, rest, method="marginals")
    else:
        more = rng.binomial(samples, rest / count)
    return samples * whole + more


def is_drawn_anew(samples: Sequence[Counts], choose: Sequence[int], order: Order) -> bool:
    """Whether epochs differ in what they read."""
    parts = any(c % max(1, int(s.sum())) for s, c in zip(samples, choose, strict=True))
    return parts and not order.is_fixed


def readers(
    samples: Sequence[Counts], choose: Sequence[int], order: Order, epoch: int
) -> NDArray[np.bool_]:
    """bool [nodes, shards]: which node reads which shard, the streams' shards one behind the other.

    Args:
        samples: for each stream, the samples of each of its shards.
        choose: samples that an epoch draws of each stream.
    """
    rng = np.random.default_rng([order.seed, epoch])
    drawn = [drawn_of(s, c, rng) for s, c in zip(samples, choose, strict=True)]
    if not order.by_stream:
        return _spread(np.concatenate(samples), np.concatenate(drawn), order)
    return np.concatenate(
        [_spread(s, d, order) for s, d in zip(samples, drawn, strict=True)], axis=1
    )


def _spread(samples: Counts, drawn: Counts, order: Order) -> NDArray[np.bool_]:
    if order.algo == "naive":
        return _anywhere(drawn, order)
    units, owners = _units(samples, drawn)
    if order.algo != "none":
        at = _seeded(len(units), order.seed)
        units, owners = units[at], owners[at]
    ends = np.cumsum(units)
    count = int(ends[-1]) if len(ends) else 0
    edges = np.array([count * (part + 1) // order.canonical for part in range(order.canonical)])
    first = np.searchsorted(edges, ends - units, "right")
    last = np.searchsorted(edges, ends - 1, "right")
    # A piece that crosses an edge is in both parts.
    lengths = last - first + 1
    begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
    parts = np.repeat(first, lengths) + np.arange(len(begins)) - begins
    found = np.zeros((order.nodes, len(samples)), np.bool_)
    for node in _nodes_of(order, parts):
        found[node, np.repeat(owners, lengths)] = True
    return found


def _nodes_of(order: Order, parts: Counts) -> list[Counts]:
    """The nodes that read each part: one, or several where there are fewer parts than nodes, which then share its samples."""
    if order.canonical >= order.nodes:
        return [parts % order.nodes]
    return [parts + more for more in range(0, order.nodes, order.canonical)]


def _units(samples: Counts, drawn: Counts) -> tuple[Counts, Counts]:
    """The pieces that are shuffled: each whole pass over a shard is one, and what is drawn of another pass."""
    whole, rest = np.divmod(drawn, np.maximum(samples, 1))
    passes = whole + (rest > 0)
    owners = np.repeat(np.arange(len(samples)), passes)
    units = np.repeat(samples, passes)
    ends = np.cumsum(passes)
    partial = rest > 0
    units[ends[partial] - 1] = rest[partial]
    return units, owners


@lru_cache(maxsize=2)
def _seeded(count: int, seed: int) -> Counts:
    """The order in which Streaming puts so many pieces: it shuffles a list, and so does this."""
    order = list(range(count))
    np.random.default_rng(seed).shuffle(order)
    return np.array(order, np.int64)


def _anywhere(drawn: Counts, order: Order) -> NDArray[np.bool_]:
    """`naive` puts each sample anywhere: a shard is read by a node unless none of its samples falls to it."""
    missed = (1 - 1 / order.nodes) ** drawn
    rng = np.random.default_rng(order.seed)
    return rng.random((order.nodes, len(drawn))) >= missed

"""What of an epoch reaches the training loop: every batching method but `random` drops what fills no batch.

Streaming's length still counts what it drops. Here the whole batches of each stream are counted as Streaming 0.12 and 0.13
cut them (streaming/base/batching, partition/orig.py), without laying out one sample. A training YAML names the global batch
and not the devices, so one device is assumed where nobody says more; others change per_stream and stratified by a batch
at most, and device_per_stream then drops less, since a device's batch is what it fills.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mdsmix.mix.world import World

METHODS = ("stratified", "per_stream", "device_per_stream")
"The batching methods that drop."


def delivered(method: str, drawn: Sequence[int], parts: Sequence[float], world: World) -> list[int]:
    """Samples of each stream that an epoch delivers; where one is 0, Streaming gives no epoch at all.

    Args:
        drawn: samples that the weights draw of each stream.
        parts: the streams' parts of a batch, which sum to 1.
    """
    # Streaming shuffles a stream only where it has a sample for each canonical node.
    least = world.canonical if world.algo != "none" and method in METHODS else 0
    drawn = [n if n >= least else 0 for n in drawn]
    if method == "stratified":
        return _stratified(drawn, portions(parts, world.drawn_together), world)
    if method == "per_stream":
        batches = [per_device(n, world) // world.drawn for n in drawn]
        return [count * world.drawn_together for count in batches]
    if method == "device_per_stream":
        return [
            _per_node(n, world) // world.drawn * world.drawn * world.layout_nodes for n in drawn
        ]
    return drawn


def portions(parts: Sequence[float], batch: int) -> list[int]:
    """Samples of each stream in a stratified batch: rounded down, what is left over to the largest remainders."""
    exact = batch * np.array(parts, np.float64)
    whole = exact.astype(np.int64)
    left = batch - int(whole.sum())
    # By the call that Streaming makes, since equal remainders are told apart by it alone.
    whole[np.flip(np.argsort(exact - whole))[:left]] += 1
    return [int(n) for n in whole]


def _stratified(drawn: Sequence[int], shares: Sequence[int], world: World) -> list[int]:
    """As many batches as the scarcest stream fills its part of."""
    if min(shares) < 1 or not all(drawn):
        return [n if share >= 1 else 0 for share, n in zip(shares, drawn, strict=True)]
    padded = [_up(_up(n, world.canonical), world.layout_ranks) for n in drawn]
    batches = min(n // share for n, share in zip(padded, shares, strict=True))
    return [batches * share for share in shares]


def per_device(samples: int, world: World) -> int:
    """Samples of a stream that each device gets; some come twice, so that all get equally many."""
    a_canonical_node = -(-samples // world.canonical)
    if world.canonical < world.layout_nodes:
        a_canonical_node = _up(a_canonical_node, world.layout_nodes // world.canonical)
    a_node = a_canonical_node * world.canonical // world.layout_nodes
    return math.ceil(a_node / world.layout_ranks)


def _per_node(samples: int, world: World) -> int:
    """Samples of a stream that a node gets of its canonical nodes; none where it has none of its own."""
    a_canonical_node = _up(-(-samples // world.canonical), world.layout_ranks)
    return a_canonical_node * (world.canonical // world.layout_nodes)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step

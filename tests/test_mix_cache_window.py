"""The cache that a node needs, compared with figures computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mdsmix.mix.epoch.cache_window import CachedStream, Window, compute_cache_need
from mdsmix.mix.epoch.draws import Machines

INDEX_BYTES = 50


def make_stream(sizes: list[int], samples: int = 1, packed: int = 0, **fields: Any) -> CachedStream:
    """Return a stream of shards with these sizes in bytes.

    Args:
        samples: samples of each shard; all are drawn once unless `fields` sets `drawn`.
        packed: bytes of each compressed shard; 0 without compression.
        fields: other fields of the stream.
    """
    return CachedStream(
        samples=np.full(len(sizes), samples),
        raw=np.array(sizes),
        packed=np.full(len(sizes), packed),
        **{"drawn": len(sizes) * samples, **fields},
    )


HUNDRED = [100] * 1000
ANYWHERE: dict[str, Any] = {"method": "stratified"}
"Settings that put a sample at any position, whatever its shard is."
ALONE = Machines(batch=4, algo="none")
SIX = Machines(batch=8, gpus=2, workers=3, algo="none")
IN_BLOCKS = Machines(batch=4, algo="py1e")
REPLICATED = Machines(batch=4, gpus=2, workers=3, replication=2)
RELAXED = {"predownload": 10, "block_size": 400, "partition": "relaxed"}
CASES: list[tuple[CachedStream, Machines, dict[str, Any], int, int]] = [
    # Shards, machines, other settings -> shards that the cache must contain, and bytes without
    # those of the index.
    (make_stream(HUNDRED), ALONE, {"predownload": 10, **ANYWHERE}, 21, 2_100),
    # 8 batches of 4 ahead, as many that were read, and the sample that is read.
    (make_stream(HUNDRED), ALONE, ANYWHERE, 65, 6_500),
    (make_stream(HUNDRED[:30]), ALONE, ANYWHERE, 30, 3_000),
    # Two prefetched batches and three more on either side: 65 + 2 * 5 * 4 samples for each of 6
    # workers.
    (make_stream(HUNDRED), SIX, ANYWHERE, 630, 63_000),
    (make_stream(HUNDRED), SIX, {"prefetch_factor": 4, **ANYWHERE}, 726, 72_600),
    # Devices that draw the same samples count as one.
    (make_stream(HUNDRED), REPLICATED, ANYWHERE, 315, 31_500),
    # The largest shards count: 5 of 300 bytes and 16 of 100.
    (make_stream([*HUNDRED, *[300] * 5]), ALONE, {"predownload": 10, **ANYWHERE}, 21, 3_100),
    # One shard at a time is both packed and unpacked, unless both files are kept.
    (make_stream(HUNDRED, packed=40), ALONE, {"predownload": 10, **ANYWHERE}, 21, 2_140),
    (
        make_stream(HUNDRED, packed=40, keeps_packed=True),
        ALONE,
        {"predownload": 10, **ANYWHERE},
        21,
        2_940,
    ),
    # Streaming itself refuses room for less than 4 of the largest shard.
    (make_stream([100, 300]), ALONE, ANYWHERE, 2, 1_200 - INDEX_BYTES),
    (make_stream(HUNDRED, drawn=0), ALONE, ANYWHERE, 0, 400 - INDEX_BYTES),
    # In order: 21 samples are in one shard of 100, and in four more at the cuts.
    (make_stream(HUNDRED, samples=100), ALONE, {"predownload": 10}, 5, 500),
    # Blocks of 400 samples: 1,000 samples and the window's 31 are in 11 shards, and in four more.
    (
        make_stream(HUNDRED, samples=100),
        IN_BLOCKS,
        {"predownload": 10, "block_size": 400},
        15,
        1_500,
    ),
    # Half of each shard is drawn, so the same positions contain more than twice as many shards: at
    # least 50 - 6 * 50 ** 0.5, or 7, samples of each.
    (
        make_stream(HUNDRED, samples=100, drawn=50_000),
        IN_BLOCKS,
        {"predownload": 99, "block_size": 400},
        177,
        17_700,
    ),
    (make_stream(HUNDRED, samples=100), IN_BLOCKS, RELAXED, 21, 2_100),
]


@pytest.mark.parametrize(("stream", "machines", "settings", "shards", "size"), CASES)
def test_the_cache_has_room_for_the_shards_of_the_window(
    stream: CachedStream, machines: Machines, settings: dict[str, Any], shards: int, size: int
) -> None:
    need = compute_cache_need([stream], INDEX_BYTES, Window(machines=machines, **settings))
    assert (need.shards, need.bytes - INDEX_BYTES) == (shards, size)

"""The least cache_limit of a node, by figures worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mdsmix.mix.epoch.cache_window import CachedStream, Window, compute_cache_need
from mdsmix.mix.epoch.draws import Machines

INDEX = 50


def stream(sizes: list[int], samples: int = 1, packed: int = 0, **of: Any) -> CachedStream:
    """Shards of these bytes, all drawn once unless `of` says otherwise."""
    return CachedStream(
        samples=np.full(len(sizes), samples),
        raw=np.array(sizes),
        packed=np.full(len(sizes), packed),
        **{"drawn": len(sizes) * samples, **of},
    )


HUNDRED = [100] * 1000
ANYWHERE: dict[str, Any] = {"method": "stratified"}
ALONE = Machines(batch=4, algo="none")
SIX = Machines(batch=8, gpus=2, workers=3, algo="none")
BLOCKS = Machines(batch=4, algo="py1e")
CASES: list[tuple[CachedStream, Machines, dict[str, Any], int, int]] = [
    # Shards, machines, other settings -> shards that the limit must hold, and bytes without those
    # of the index.
    (stream(HUNDRED), ALONE, {"predownload": 10, **ANYWHERE}, 21, 2_100),
    # 8 batches of 4 ahead, as many behind, and the one that is read.
    (stream(HUNDRED), ALONE, ANYWHERE, 65, 6_500),
    (stream(HUNDRED[:30]), ALONE, ANYWHERE, 30, 3_000),
    # Two prefetched batches and three more on either side: 65 + 2 * 5 * 4 samples for each of 6
    # workers.
    (stream(HUNDRED), SIX, ANYWHERE, 630, 63_000),
    (stream(HUNDRED), SIX, {"prefetch_factor": 4, **ANYWHERE}, 726, 72_600),
    # Devices that draw the same samples are one.
    (stream(HUNDRED), Machines(batch=4, gpus=2, workers=3, replication=2), ANYWHERE, 315, 31_500),
    # The largest shards are taken: 5 of 300 and 16 of 100.
    (stream([*HUNDRED, *[300] * 5]), ALONE, {"predownload": 10, **ANYWHERE}, 21, 3_100),
    # One shard is packed and unpacked at a time, unless both files are kept.
    (stream(HUNDRED, packed=40), ALONE, {"predownload": 10, **ANYWHERE}, 21, 2_140),
    (stream(HUNDRED, packed=40, keeps_packed=True), ALONE, {"predownload": 10, **ANYWHERE}, 21, 2_940),
    # Streaming itself refuses less than 4 of the largest shard.
    (stream([100, 300]), ALONE, ANYWHERE, 2, 1_200 - INDEX),
    (stream(HUNDRED, drawn=0), ALONE, ANYWHERE, 0, 400 - INDEX),
    # In order: 21 samples lie in one shard of 100, and in four more where it is cut.
    (stream(HUNDRED, samples=100), ALONE, {"predownload": 10}, 5, 500),
    # Blocks of 400 samples: 1,000 samples and the window's 31 lie in 11 shards, and four more.
    (stream(HUNDRED, samples=100), BLOCKS, {"predownload": 10, "block_size": 400}, 15, 1_500),
    # Half of each shard is drawn, so that twice as many shards and more lie there: 50 - 6 * 50 **
    # 0.5 is 7.
    (stream(HUNDRED, samples=100, drawn=50_000), BLOCKS, {"predownload": 99, "block_size": 400}, 177, 17_700),
    (stream(HUNDRED, samples=100), BLOCKS, {"predownload": 10, "block_size": 400, "partition": "relaxed"}, 21, 2_100),
]  # fmt: skip


@pytest.mark.parametrize(("of", "world", "settings", "shards", "held"), CASES)
def test_the_limit_holds_the_shards_of_the_window(
    of: CachedStream, world: Machines, settings: dict[str, Any], shards: int, held: int
) -> None:
    need = compute_cache_need([of], INDEX, Window(machines=world, **settings))
    assert (need.shards, need.bytes - INDEX) == (shards, held)

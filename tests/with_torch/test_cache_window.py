"""Under the least cache_limit no shard is evicted before its samples are read; under smaller ones
that were once accepted, some are.

Streaming draws the orders. The workers' reading and the eviction are simulated here, so that
nothing waits for an evicted shard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World as Devices

from mdsmix.errors import RecipeError
from mdsmix.load import build_loader
from mdsmix.mix.epoch.cache_window import CachedStream, Window, compute_cache_need
from mdsmix.mix.epoch.draws import Machines
from tests.with_torch.load_streams import (
    IDS,
    PAIR,
    config,
    loaded,
    pair,
    write_stream,
    write_tokens,
)
from tests.with_torch.test_mix_plan import dataset_of

pytestmark = pytest.mark.usefixtures("_release_loaders")
Ids = Any
SIZES = (331, 120, 77)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    """Three streams of 528 samples in 60 shards."""
    return dataset_of(tmp_path_factory.mktemp("window"), SIZES, 300)


class Node:
    """A node whose workers prepare and read samples one by one, in an order drawn at random, and
    whose cache evicts as Streaming does.
    """

    def __init__(self, shards: list[list[int]], sizes: list[int], limit: int, window: Window):
        self.shards, self.sizes, self.limit, self.window = shards, sizes, limit, window
        self.used = dict[int, None]()
        "The shards of the cache, the one that was used last at the end."
        self.evicted_too_early = 0
        self.most = 0

    def use(self, shard: int) -> None:
        if shard in self.used:
            del self.used[shard]
        else:
            while (
                self.used and sum(self.sizes[s] for s in self.used) + self.sizes[shard] > self.limit
            ):
                del self.used[next(iter(self.used))]
        self.used[shard] = None

    def run(self, rng: np.random.Generator) -> Node:
        """Read all samples. A worker is at most `prefetch_factor` + 1 batches ahead of any
        other.
        """
        ends = [len(of) for of in self.shards]
        prepared, read = [0] * len(ends), [0] * len(ends)
        rows, apart = self.window.machines.drawn, self.window.prefetch_factor + 1
        while read != ends:
            reading = [w for w, end in enumerate(ends) if read[w] < end]
            slowest = min(read[w] // rows for w in reading)
            w = int(rng.choice(reading))
            for _ in range(int(rng.integers(1, 40))):
                if rng.integers(3) and prepared[w] < min(ends[w], read[w] + self.window.ahead + 1):
                    self.use(self.shards[w][prepared[w]])
                    prepared[w] += 1
                elif read[w] < prepared[w] and read[w] // rows <= slowest + apart:
                    self.evicted_too_early += self.shards[w][read[w]] not in self.used
                    self.use(self.shards[w][read[w]])
                    read[w] += 1
            ahead = (of[r:p] for of, r, p in zip(self.shards, read, prepared, strict=True))
            needed = {shard for each in ahead for shard in each}
            self.most = max(self.most, sum(self.sizes[shard] for shard in needed))
        return self


WORLDS = (
    # Nodes, devices, workers, canonical nodes, shuffle_algo, block size, predownload
    (1, 1, 1, 1, "none", 64, 6),
    (1, 1, 1, 1, "py1e", 64, 6),
    (1, 1, 1, 1, "py1br", 64, 12),
    (1, 2, 1, 4, "py1e", 16, 4),
    (2, 1, 2, 2, "py1e", 32, 2),
    (2, 1, 1, 1, "py1br", 32, 4),
    (1, 1, 1, 1, "naive", 64, 8),
    (1, 1, 2, 1, "py1s", 64, 2),
)


@pytest.mark.parametrize(
    ("nodes", "gpus", "workers", "canonical", "algo", "block", "ahead"), WORLDS
)
def test_no_shard_is_evicted_before_it_is_read(
    dataset: StreamingDataset,
    nodes: int,
    gpus: int,
    workers: int,
    canonical: int,
    algo: str,
    block: int,
    ahead: int,
) -> None:
    batch = 2
    world = Machines(
        batch=batch * nodes * gpus,
        nodes=nodes,
        gpus=gpus,
        workers=workers,
        num_canonical_nodes=canonical,
        algo=algo,
    )
    window = Window(machines=world, predownload=ahead, prefetch_factor=1, block_size=block)
    sizes = [shard.get_raw_size() for shard in dataset.shards]
    stream = CachedStream(
        samples=dataset.samples_per_shard,
        raw=np.array(sizes),
        packed=np.zeros(len(sizes), np.int64),
        drawn=dataset.num_samples,
    )
    need = compute_cache_need([stream], 0, window).bytes
    dataset.batch_size, dataset.num_canonical_nodes = batch, canonical
    dataset.shuffle, dataset.shuffle_block_size = algo != "none", block
    dataset.shuffle_algo = "py1e" if algo == "none" else algo
    ends = np.cumsum(dataset.samples_per_shard)
    for epoch in range(2):
        ids = generate_work("random", dataset, Devices(nodes, gpus, workers, 0), epoch, 0)
        for node in ids.reshape(nodes, gpus * workers, -1):
            shards = [np.searchsorted(ends, of[of >= 0], "right").tolist() for of in node]
            enough = Node(shards, sizes, need, window).run(np.random.default_rng(epoch))
            assert enough.evicted_too_early == 0
            assert enough.most <= need


def test_four_shards_and_even_one_window_are_not_enough(dataset: StreamingDataset) -> None:
    """The loader reads single samples of shards in turn, prepared 20 ahead."""
    sizes = [shard.get_raw_size() for shard in dataset.shards]
    order = [np.random.default_rng(0).permutation(len(sizes)).tolist() * 3]
    window = Window(machines=Machines(batch=2), predownload=20, method="stratified")
    stream = CachedStream(
        samples=dataset.samples_per_shard,
        raw=np.array(sizes),
        packed=np.zeros(len(sizes), np.int64),
        drawn=dataset.num_samples,
    )
    need = compute_cache_need([stream], 0, window).bytes
    assert len(sizes) > 41
    early = [
        Node(order, sizes, limit, window).run(np.random.default_rng(1)).evicted_too_early
        for limit in (4 * max(sizes), 21 * max(sizes), need)
    ]
    assert (min(early[:2]) > 0, early[2]) == (True, 0)


def test_a_loader_refuses_a_limit_below_its_window(tmp_path: Path) -> None:
    """One device of 2 rows, without workers: 2 * 16 + 1 samples, each in another shard of the
    largest size.
    """
    remote = write_tokens(tmp_path / "remote", 60, size_limit=1)
    size = max(file.stat().st_size for file in remote.glob("*.mds"))
    index = (remote / "index.json").stat().st_size
    streams = {"web": {"remote": str(remote), "local": str(tmp_path / "cache")}}
    keys = {"shuffle": True, "shuffle_seed": 1, "batching_method": "per_stream"}
    least = index + 33 * size
    with pytest.raises(RecipeError, match="33 samples in up to 33 shards") as told:
        loaded(streams, cache_limit=least - 1, **keys)
    assert f"cache_limit is {least - 1} ({least - 1:,} bytes)" in str(told.value)
    assert f"need {least:,}" in str(told.value)
    assert f"set cache_limit to {least} or more" in str(told.value)
    assert not [*(tmp_path / "cache").glob("*.mds")], "no shard was fetched"
    streams["web"]["local"] = str(tmp_path / "other")
    assert loaded(streams, cache_limit=least, **keys)


def test_a_limit_is_refused_before_a_packing_ratio_is_tried(tmp_path: Path) -> None:
    """A ratio is tried by one device that prepares a batch of 2 ahead: 5 samples."""
    rows = [pair(i) for i in range(60)]
    remote = write_stream(tmp_path / "remote", PAIR, rows, size_limit=1)
    index = (remote / "index.json").stat().st_size
    streams = {"web": {"remote": str(remote), "local": str(tmp_path / "cache")}}
    keys = {"shuffle": True, "packing_ratio": "auto", "batching_method": "per_stream"}
    settings = config(streams, cache_limit=index + 900, **keys) | {"max_seq_len": 400}
    with pytest.raises(RecipeError, match="5 samples in up to 5 shards"):
        build_loader(settings, 2, ids=IDS)
    assert not [*(tmp_path / "cache").glob("*.mds")], "no shard was fetched"

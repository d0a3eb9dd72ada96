"""What an epoch is said to deliver is what a real StreamingDataset delivers, for all methods, worlds and weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import Stream, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World
from torch.utils.data import DataLoader

from mdsmix.mix.draws import World as Machines
from mdsmix.mix.draws import delivered, draws, parts
from mdsmix.mix.epoch import epoch_of, epoch_table
from mdsmix.mix.resolve import mix_of
from tests.with_torch.load_streams import write_tokens

METHODS = ("random", "stratified", "per_stream", "device_per_stream")
SIZES = ((223, 101, 37), (64,), (150, 16, 5, 101), (37, 38))
CASES = 150


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams named by their samples, in shards of sixty or so."""
    home = tmp_path_factory.mktemp("sized")
    for n in {n for sizes in SIZES for n in sizes}:
        write_tokens(home / str(n), n, length=4, shard_bytes=1000)
    return home


@pytest.fixture(scope="module")
def datasets(home: Path) -> list[StreamingDataset]:
    """Of every set of sizes one: each holds a dozen descriptors until the process ends."""
    return [
        StreamingDataset(streams=[Stream(local=str(home / str(n))) for n in sizes], batch_size=1)
        for sizes in SIZES
    ]


def _weight(scheme: str, rng: np.random.Generator) -> dict[str, Any]:
    if scheme == "mixed":
        scheme = ("repeat", "choose", "none")[rng.integers(3)]
    if scheme == "none":
        return {}
    return {
        scheme: int(rng.integers(8, 300))
        if scheme == "choose"
        else round(rng.random() * 2 + 0.2, 3)
    }


def _theirs(dataset: StreamingDataset, world: World) -> list[int]:
    """Samples of each stream in the epoch that Streaming lays out, 0 everywhere where it refuses."""
    try:
        found = generate_work(dataset.batching_method, dataset, world, 0, 0).ravel()
    except ValueError:
        return [0] * len(dataset.streams)
    ends = [*dataset.sample_offset_per_stream[1:], dataset.num_samples]
    counts = np.histogram(found[found >= 0], bins=[0, *ends])[0]
    return [int(n) for n in counts]


@pytest.mark.parametrize("method", METHODS[1:])
def test_what_is_delivered_is_what_streaming_lays_out(
    method: str, datasets: list[StreamingDataset]
) -> None:
    rng = np.random.default_rng(METHODS.index(method))
    refused = 0
    for _ in range(CASES):
        at = int(rng.integers(len(SIZES)))
        scheme = ("proportion", "repeat", "choose", "none", "mixed")[rng.integers(5)]
        weights = [_weight(scheme, rng) for _ in SIZES[at]]
        ours, theirs = _both(method, datasets[at], SIZES[at], weights, rng)
        refused += 0 in ours
        assert theirs == ([0] * len(ours) if 0 in ours else ours), weights
    assert 0 < refused < CASES / 2, "both kinds of answer are compared"


def _both(
    method: str, dataset: StreamingDataset, sizes: tuple[int, ...], weights: list[Any], rng: Any
) -> tuple[list[int], list[int]]:
    nodes, ranks, workers = (int(rng.choice(of)) for of in ([1, 2, 4], [1, 2, 3], [1, 2, 3]))
    canonical = int(rng.choice([nodes, 2 * nodes, 8 * nodes, 1]))
    relative = "proportion" in weights[0] or not any(weights)
    epoch_size = int(rng.integers(100, 600)) if relative and rng.random() < 0.5 else None
    streams = [Stream(local="x", **weight) for weight in weights]
    Stream.apply_weights(streams, np.array(sizes), epoch_size, dataset.shuffle_seed)
    for own, weighted in zip(dataset.streams, streams, strict=True):
        own.proportion, own.choose = weighted.proportion, weighted.choose
    dataset.batching_method, dataset.num_canonical_nodes = method, canonical
    dataset.batch_size, dataset.shuffle = int(rng.integers(1, 9)), bool(rng.integers(2))
    dataset.shuffle_block_size = 1 << 18
    world = World(num_nodes=nodes, ranks_per_node=ranks, workers_per_rank=workers, worker=0)
    devices = Machines(
        batch=dataset.batch_size * nodes * ranks,
        nodes=nodes,
        gpus=ranks,
        num_canonical_nodes=canonical,
        algo="py1e" if dataset.shuffle else "none",
    )
    drawn, shares = draws(weights, sizes, epoch_size), parts(weights, sizes, epoch_size)
    return delivered(method, drawn, shares, devices), _theirs(dataset, world)


@pytest.mark.parametrize(("method", "workers"), [("random", 2), *((m, 0) for m in METHODS)])
def test_the_epoch_of_a_config_is_what_its_loader_yields(
    method: str, workers: int, tmp_path: Path
) -> None:
    """The issue's case: three streams that no batch divides; samples counted as they come out of the loader."""
    streams = {
        str(n): {"local": str(write_tokens(tmp_path / str(n), n, length=4))} for n in (223, 101, 37)
    }
    dataset = {"streams": streams, "batching_method": method, "max_seq_len": 4}
    config = {"train_loader": {"name": "text", "dataset": dataset}, "global_train_batch_size": 16}
    mix = mix_of(config, "x")
    real = StreamingDataset(
        streams=[Stream(**s) for s in streams.values()], batch_size=16, batching_method=method
    )
    came: Counter[int] = Counter()
    for batch in DataLoader(real, batch_size=16, num_workers=workers):
        came[len(batch["tokens"])] += len(batch["tokens"])
    shares = epoch_of(mix.train, mix.yaml.batch_size)
    assert sum(share.delivered for share in shares) == came.total()
    assert [share.drawn for share in shares] == [223, 101, 37]
    assert sum(row[3] for row in epoch_table(shares).rows) == pytest.approx(1)
    if method != "random":
        assert set(came) == {16}
        assert came.total() < 361

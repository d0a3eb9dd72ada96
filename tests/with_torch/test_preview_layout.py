"""The layout of an epoch that nobody runs is what real datasets yield: Streaming's own iteration, worker by worker, is asked.

A real StreamingDataset keeps apart who it works together with and whose samples it gives (for `replication`). So one
process gives the samples of each device of a cluster in turn, through torch's DataLoader with its workers.
"""

import dataclasses
import gc
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import StreamingDataLoader
from streaming.base.world import World

from mdsmix.errors import RecipeError
from mdsmix.load import build_loader
from mdsmix.load.layout import NOBODY, Layout
from mdsmix.load.loader_settings import read_settings
from mdsmix.mix.draws import World as Machines
from mdsmix.mix.resolve import mix_of
from mdsmix.preview.asked import EpochState
from tests.with_torch.load_streams import IDS, config, first_tokens, write_stream

SIZES = {"web": 211, "faq": 97, "chat": 53}
MIXES: dict[str, Mapping[str, Any]] = {
    "whole": {"web": {}, "faq": {}, "chat": {}},
    "repeat": {"web": {"repeat": 0.7}, "faq": {"repeat": 1.5}, "chat": {"choose": 80}},
    "proportion": {"web": {"proportion": 3}, "faq": {"proportion": 2}, "chat": {"proportion": 1}},
}
"Each row of 8 tokens begins with its sample id, as Streaming counts them."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three streams of several shards, whose rows begin with the sample id that Streaming gives them."""
    root, first = tmp_path_factory.mktemp("streams"), 0
    for name, count in SIZES.items():
        rows = [{"tokens": np.full(8, first + i, np.uint16)} for i in range(count)]
        write_stream(root / name, {"tokens": "ndarray:uint16:8"}, rows, shard_bytes=700)
        first += count
    return root


def settings(folder: Path, mix: str = "whole", **dataset: Any) -> dict[str, Any]:
    streams = {n: {"local": str(folder / n), **w} for n, w in MIXES[mix].items()}
    return config(streams, "text", **{"shuffle": True, **dataset})


def layout_of(made: dict[str, Any], cluster: Machines, rows: int) -> Layout:
    return Layout(read_settings(made), mix_of(made, "test").train.streams, cluster, rows)


def laid_out(made: dict[str, Any], cluster: Machines, state: EpochState | None = None) -> list[Any]:
    """Lists [step][rank] of sample ids."""
    layout = layout_of(made, cluster, cluster.rows)
    entered = state or EpochState(epoch=0, sample_in_epoch=0)
    epoch, sample, *of_start = dataclasses.astuple(entered)
    layout.enter(*of_start)
    steps = layout.steps(epoch, sample)
    return [[own[own != NOBODY].tolist() for own in step] for step in steps]


class Real:
    """A real dataset and loader that give what one device of a cluster gets."""

    def __init__(self, made: dict[str, Any], cluster: Machines, rank: int):
        self.loader: StreamingDataLoader = build_loader(made, cluster.rows, ids=IDS)
        self.loader.dataset._parallel_rank_world = World(cluster.nodes, cluster.gpus, 1, rank)
        self.loader.dataset.length = -(-self.loader.dataset.epoch_size // cluster.ranks)

    def batches(self) -> list[list[int]]:
        return [first_tokens([batch]) for batch in self.loader]


def real(made: dict[str, Any], cluster: Machines, state: dict[str, Any] | None = None) -> list[Any]:
    ranks, found = list[list[list[int]]](), layout_of(made, cluster, 1)
    found.enter()
    for rank in range(cluster.ranks):
        asked = Real(made, cluster, rank)
        if state:
            asked.loader.load_state_dict(state)
        ranks.append(asked.batches())
        assert state or found.num_canonical_nodes == asked.loader.dataset.num_canonical_nodes
        del asked
        gc.collect()
    # Under device_per_stream a device may come out of batches before another.
    return [list(step) for step in zip_longest(*ranks, fillvalue=[])]


CASES: list[dict[str, Any]] = [
    {"mix": "proportion", "shuffle_algo": "py1s", "epoch_size": 100},
    {"mix": "whole", "shuffle_algo": "py1br", "shuffle_block_size": 20, "drop_last": True},
    {"mix": "repeat", "sampling_method": "fixed", "sampling_granularity": 4, "shuffle_seed": 7},
    {"mix": "repeat", "partition_algo": "orig", "num_canonical_nodes": 4, "shuffle": False},
    {"mix": "repeat", "batching_method": "stratified"},
    {"mix": "proportion", "batching_method": "per_stream", "num_canonical_nodes": 2},
    {"mix": "repeat", "batching_method": "device_per_stream"},
]


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_steps_are_what_a_real_dataset_yields(folder: Path, keys: dict[str, Any]) -> None:
    cluster = Machines(nodes=1, gpus=2, workers=0, batch=24)
    made = settings(folder, **keys)
    found = laid_out(made, cluster)
    assert found == real(made, cluster)
    assert laid_out(settings(folder, keys["mix"]), cluster) != found, "these keys shape the order"


@pytest.mark.parametrize(("method", "batch"), [("random", 48), ("device_per_stream", 16)])
def test_two_nodes_of_four_devices_with_workers(folder: Path, method: str, batch: int) -> None:
    cluster = Machines(nodes=2, gpus=4, workers=3, batch=batch)
    made = settings(folder, "repeat", batching_method=method, num_workers=3, shuffle_block_size=64)
    found = laid_out(made, cluster)
    assert len(found) >= 5
    assert [b for step in found if (b := step[6])] == Real(made, cluster, 6).batches()


def test_a_state_of_other_devices_is_entered_as_streaming_enters_it(folder: Path) -> None:
    # Three nodes share the canonical nodes of two by no whole number: the order is laid out for the two, then shared out.
    cluster = Machines(nodes=3, gpus=1, workers=0, batch=48)
    made = settings(folder, "repeat")
    told = {"epoch": 4, "sample_in_epoch": 96, "num_canonical_nodes": 2, "shuffle_seed": 3}
    state = EpochState(**told, initial_physical_nodes=2)
    rest = laid_out(made, cluster, state)
    assert rest == real(made, cluster, told | {"initial_physical_nodes": 2})
    assert rest != laid_out(made, cluster)[2:]


def test_what_streaming_refuses_is_told(folder: Path) -> None:
    for keys, batch, told in (
        ({"batching_method": "stratified"}, 2, "is 0 because the portion"),
        ({"batching_method": "per_stream"}, 400, "does not have an adequate number"),
        ({"num_canonical_nodes": 3}, 8, "divisible"),
    ):
        cluster = Machines(nodes=2, gpus=1, workers=0, batch=batch)
        with pytest.raises(RecipeError, match=told):
            laid_out(settings(folder, **keys), cluster)

"""The layout of an epoch that nobody runs is what real datasets yield: Streaming's own iteration,
worker by worker, is asked.

A real StreamingDataset keeps apart who it works together with and whose samples it gives (for
`replication`). So one process gives the samples of each device of a cluster in turn, through
torch's DataLoader with its workers. And two real processes of a run get rows of their own, and
after a stop exactly the rest; a preview says the same of them.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming.base.world import World

from mdsmix.errors import RecipeError
from mdsmix.load import build_loader
from mdsmix.load.layout import NO_SAMPLE, EpochLayout
from mdsmix.load.loader_settings import read_settings
from mdsmix.mix.epoch.draws import Machines
from mdsmix.mix.streams.resolve import make_mix
from mdsmix.preview.options import EpochState
from mdsmix.preview.step_rows import Step
from tests.preloaded import PreloadedPython
from tests.with_torch.load_streams import IDS, PAIR, config, first_tokens, pair, ranks, write_stream
from tests.with_torch.test_preview import preview_of

SIZES = {"web": 211, "faq": 97, "chat": 53}
MIXES: dict[str, Mapping[str, Any]] = {
    "whole": {"web": {}, "faq": {}, "chat": {}},
    "repeat": {"web": {"repeat": 0.7}, "faq": {"repeat": 1.5}, "chat": {"choose": 80}},
    "proportion": {"web": {"proportion": 3}, "faq": {"proportion": 2}, "chat": {"proportion": 1}},
}
"Each row of 8 tokens begins with its sample id, as Streaming counts them."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three streams of several shards, whose rows begin with the sample id that Streaming gives
    them.
    """
    root, first = tmp_path_factory.mktemp("streams"), 0
    for name, count in SIZES.items():
        rows = [{"tokens": np.full(8, first + i, np.uint16)} for i in range(count)]
        write_stream(root / name, {"tokens": "ndarray:uint16:8"}, rows, size_limit=700)
        first += count
    return root


def settings(folder: Path, mix: str = "whole", **dataset: Any) -> dict[str, Any]:
    streams = {n: {"local": str(folder / n), **w} for n, w in MIXES[mix].items()}
    return config(streams, "text", **{"shuffle": True, **dataset})


def laid_out(made: dict[str, Any], cluster: Machines, state: Any = None) -> list[Any]:
    """Lists [step][rank] of sample ids."""
    layout = EpochLayout(
        read_settings(made), make_mix(made, "test").train.streams, cluster, cluster.rows
    )
    entered = {"epoch": 0, "sample_in_epoch": 0, **(state or {})}
    at = entered.pop("epoch"), entered.pop("sample_in_epoch")
    layout.apply_state(**entered)
    return [[own[own != NO_SAMPLE].tolist() for own in step] for step in layout.draw_steps(*at)]


def batches(made: dict[str, Any], cluster: Machines, rank: int, state: Any = None) -> list[Any]:
    """What a real loader gives one device of a cluster."""
    loader = build_loader(made, cluster.rows, ids=IDS)
    loader.dataset._parallel_rank_world = World(cluster.nodes, cluster.gpus, 1, rank)
    loader.dataset.length = -(-loader.dataset.epoch_size // cluster.ranks)
    if state:
        loader.load_state_dict(state)
    found = [first_tokens([batch]) for batch in loader]
    del loader
    gc.collect()
    return found


def real(made: dict[str, Any], cluster: Machines, *state: Mapping[str, Any]) -> list[Any]:
    devices = [batches(made, cluster, rank, *state) for rank in range(cluster.ranks)]
    # Under device_per_stream a device may come out of batches before another.
    return [list(step) for step in zip_longest(*devices, fillvalue=[])]


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
    cluster = Machines(gpus=2, batch=24)
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
    assert [b for step in found if (b := step[6])] == batches(made, cluster, 6)


def test_a_state_of_other_devices_is_entered_as_streaming_enters_it(folder: Path) -> None:
    # Three nodes share the canonical nodes of two by no whole number: the order is laid out for the
    # two, then shared out.
    cluster = Machines(nodes=3, batch=48)
    made = settings(folder, "repeat")
    state = {"epoch": 4, "sample_in_epoch": 96, "num_canonical_nodes": 2, "shuffle_seed": 3}
    state["initial_physical_nodes"] = 2
    rest = laid_out(made, cluster, state)
    assert rest == real(made, cluster, state)
    assert rest != laid_out(made, cluster)[2:]


def test_what_streaming_refuses_is_told(folder: Path) -> None:
    with pytest.raises(RecipeError, match="does not have an adequate number"):
        laid_out(settings(folder, batching_method="per_stream"), Machines(batch=400))


RANK = """
import json, os, sys
from itertools import islice
import torch.distributed as dist
from mdsmix.load import TokenIds, build_loader

config, packed = json.loads(sys.argv[1])
dist.init_process_group("gloo")

def first(batch):
    return batch["input_ids"][:, 0].tolist()

def held(batch):
    trained = int((batch["labels"][:, 1:] != -100).sum())
    documents = (batch["sequence_id"].amax(dim=1) + 1).tolist()
    return [int(batch["attention_mask"].sum()), trained, documents]

def of_all(look, batches):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, [look(batch) for batch in batches])
    return every

def stopped(config, look):
    ids = TokenIds(eos=0, pad=1)
    whole = of_all(look, build_loader(config, 4, ids=ids))
    stopped = build_loader(config, 4, ids=ids)
    batches = iter(stopped)
    before = of_all(look, islice(batches, 3))
    state = json.loads(json.dumps(stopped.state_dict()))
    del stopped, batches
    resumed = build_loader(config, 4, ids=ids)
    resumed.load_state_dict(state)
    return {"whole": whole, "before": before, "after": of_all(look, resumed), "state": state}

print(json.dumps([stopped(config, first), stopped(packed, held)]))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_share_streams(
    folder: Path, tmp_path: Path, programs: PreloadedPython
) -> None:
    workers = {"num_workers": 2, "persistent_workers": False}
    plain = settings(folder, num_canonical_nodes=2, drop_last=True, **workers)
    pairs = {name: {"local": str(tmp_path / name)} for name in ("faq", "forum")}
    for name, count in (("faq", 90), ("forum", 60)):
        write_stream(tmp_path / name, PAIR, map(pair, range(count)), size_limit=900)
    packing = config(pairs, shuffle=True, packing_ratio=2.6)
    argument = json.dumps([plain, packing])
    ended = [each.wait() for each in ranks(programs, RANK, argument)]
    assert [each.returncode for each in ended] == [0, 0], ended
    answer, held = json.loads(ended[0].stdout.splitlines()[-1])
    whole, before, after = answer["whole"], answer["before"], answer["after"]
    assert answer["state"]["sample_in_epoch"] == 3 * 2 * 4
    for rank in (0, 1):
        assert [len(batch) for batch in whole[rank]] == [4] * (sum(SIZES.values()) // 2 // 4)
        assert before[rank] + after[rank] == whole[rank]
    assert whole[0] != whole[1]
    for part, state in (("whole", None), ("after", answer["state"])):
        wanted = [list(step) for step in zip(*answer[part], strict=True)]
        found = previewed(plain, len(wanted), state)
        assert [[list(rank.ids) for rank in step.ranks] for step in found] == wanted
    for part, state in (("whole", None), ("after", held["state"])):
        made = previewed(packing, len(held[part][0]), state)
        for step, (one, other) in zip(made, zip(*held[part], strict=True), strict=True):
            assert step.counts is not None
            samples, tokens, trained = step.counts.sum(axis=0)
            assert (tokens, trained) == (one[0] + other[0], one[1] + other[1])
            assert samples == sum(one[2] + other[2])


def previewed(settings: dict[str, Any], steps: int, state: dict[str, Any] | None) -> Sequence[Step]:
    """What a preview says of these two processes."""
    told = state or {"epoch": 0, "sample_in_epoch": 0}
    entered = EpochState(**{k: told[k] for k in EpochState.__dataclass_fields__ if k in told})
    return preview_of(settings, 8, gpus=2, steps=steps, state=entered).steps

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
from tests.with_torch.load_streams import (
    IDS,
    PAIR,
    config,
    first_tokens,
    pair,
    run_ranks,
    write_stream,
)
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
    """Return a training config of the three streams, weighted as one of MIXES."""
    streams = {n: {"local": str(folder / n), **w} for n, w in MIXES[mix].items()}
    return config(streams, "text", **{"shuffle": True, **dataset})


def lay_out(config: dict[str, Any], cluster: Machines, state: Any = None) -> list[Any]:
    """Return the sample ids that a preview lays out: lists [step][rank]."""
    layout = EpochLayout(
        read_settings(config), make_mix(config, "test").train.streams, cluster, cluster.rows
    )
    keys = {"epoch": 0, "sample_in_epoch": 0, **(state or {})}
    epoch = keys.pop("epoch")
    sample = keys.pop("sample_in_epoch")
    layout.apply_state(**keys)
    steps = list[Any]()
    for step in layout.draw_steps(epoch, sample):
        steps.append([rank_ids[rank_ids != NO_SAMPLE].tolist() for rank_ids in step])
    return steps


def load_batches(
    config: dict[str, Any], cluster: Machines, rank: int, state: Any = None
) -> list[Any]:
    """Return the sample ids of each batch that a real loader gives to one device of a cluster."""
    loader = build_loader(config, cluster.rows, ids=IDS)
    loader.dataset._parallel_rank_world = World(cluster.nodes, cluster.gpus, 1, rank)
    loader.dataset.length = -(-loader.dataset.epoch_size // cluster.ranks)
    if state:
        loader.load_state_dict(state)
    ids_of_batches = [first_tokens([batch]) for batch in loader]
    del loader
    gc.collect()
    return ids_of_batches


def load_steps(config: dict[str, Any], cluster: Machines, *state: Mapping[str, Any]) -> list[Any]:
    """Return the sample ids that real loaders give to all devices: lists [step][rank]."""
    devices = [load_batches(config, cluster, rank, *state) for rank in range(cluster.ranks)]
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
    config = settings(folder, **keys)
    steps = lay_out(config, cluster)
    assert steps == load_steps(config, cluster)
    without_keys = lay_out(settings(folder, keys["mix"]), cluster)
    assert without_keys != steps, "these keys shape the order"


@pytest.mark.parametrize(("method", "batch"), [("random", 48), ("device_per_stream", 16)])
def test_two_nodes_of_four_devices_with_workers(folder: Path, method: str, batch: int) -> None:
    cluster = Machines(nodes=2, gpus=4, workers=3, batch=batch)
    config = settings(
        folder, "repeat", batching_method=method, num_workers=3, shuffle_block_size=64
    )
    steps = lay_out(config, cluster)
    assert len(steps) >= 5
    batches_of_rank = [step[6] for step in steps if step[6]]
    assert batches_of_rank == load_batches(config, cluster, 6)


def test_a_state_of_other_devices_is_entered_as_streaming_enters_it(folder: Path) -> None:
    # Three nodes share the canonical nodes of two by no whole number: the order is laid out for the
    # two, then shared out.
    cluster = Machines(nodes=3, batch=48)
    config = settings(folder, "repeat")
    state = {"epoch": 4, "sample_in_epoch": 96, "num_canonical_nodes": 2, "shuffle_seed": 3}
    state["initial_physical_nodes"] = 2
    steps = lay_out(config, cluster, state)
    assert steps == load_steps(config, cluster, state)
    assert steps != lay_out(config, cluster)[2:]


def test_a_refusal_of_streaming_is_a_recipe_error(folder: Path) -> None:
    with pytest.raises(RecipeError, match="does not have an adequate number"):
        lay_out(settings(folder, batching_method="per_stream"), Machines(batch=400))


RANK = '''
import json, os, sys
from itertools import islice
import torch.distributed as dist
from mdsmix.load import TokenIds, build_loader

config, packed = json.loads(sys.argv[1])
dist.init_process_group("gloo")

def list_sample_ids(batch):
    return batch["input_ids"][:, 0].tolist()

def count(batch):
    """Return tokens, trained tokens, and the samples that are packed into each row."""
    trained = int((batch["labels"][:, 1:] != -100).sum())
    documents = (batch["sequence_id"].amax(dim=1) + 1).tolist()
    return [int(batch["attention_mask"].sum()), trained, documents]

def gather(describe, batches):
    """Return the descriptions of the batches of all processes."""
    descriptions = [None] * dist.get_world_size()
    dist.all_gather_object(descriptions, [describe(batch) for batch in batches])
    return descriptions

def run_twice(config, describe):
    """Read a whole epoch, and an epoch that is stopped after three batches and resumed."""
    ids = TokenIds(eos=0, pad=1)
    whole = gather(describe, build_loader(config, 4, ids=ids))
    stopped = build_loader(config, 4, ids=ids)
    batches = iter(stopped)
    before = gather(describe, islice(batches, 3))
    state = json.loads(json.dumps(stopped.state_dict()))
    del stopped, batches
    resumed = build_loader(config, 4, ids=ids)
    resumed.load_state_dict(state)
    return {"whole": whole, "before": before, "after": gather(describe, resumed), "state": state}

print(json.dumps([run_twice(config, list_sample_ids), run_twice(packed, count)]))
dist.barrier()
dist.destroy_process_group()
'''


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
    processes = run_ranks(programs, RANK, argument)
    sample_ids, counts = json.loads(processes[0].stdout.splitlines()[-1])
    # The two processes read different halves of an epoch, and go on after a stop.
    whole = sample_ids["whole"]
    assert sample_ids["state"]["sample_in_epoch"] == 3 * 2 * 4
    for rank in (0, 1):
        assert [len(batch) for batch in whole[rank]] == [4] * (sum(SIZES.values()) // 2 // 4)
        assert sample_ids["before"][rank] + sample_ids["after"][rank] == whole[rank]
    assert whole[0] != whole[1]
    # A preview shows the same samples in each step.
    for run, state in (("whole", None), ("after", sample_ids["state"])):
        expected = [list(step) for step in zip(*sample_ids[run], strict=True)]
        steps = preview_two_processes(plain, len(expected), state)
        assert [[list(rank.ids) for rank in step.ranks] for step in steps] == expected
    # A preview counts the same tokens and samples in packed rows.
    for run, state in (("whole", None), ("after", counts["state"])):
        steps = preview_two_processes(packing, len(counts[run][0]), state)
        for step, (first, second) in zip(steps, zip(*counts[run], strict=True), strict=True):
            assert step.counts is not None
            samples, tokens, trained = step.counts.sum(axis=0)
            assert (tokens, trained) == (first[0] + second[0], first[1] + second[1])
            assert samples == sum(first[2] + second[2])


def preview_two_processes(
    settings: dict[str, Any], steps: int, state: dict[str, Any] | None
) -> Sequence[Step]:
    """Return the steps that a preview of these two processes shows."""
    keys = state or {"epoch": 0, "sample_in_epoch": 0}
    start = EpochState(**{k: keys[k] for k in EpochState.__dataclass_fields__ if k in keys})
    return preview_of(settings, 8, gpus=2, steps=steps, state=start).steps

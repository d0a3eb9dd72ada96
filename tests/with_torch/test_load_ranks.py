"""Every rank of a training run gets rows of its own; together they get the epoch, and after a stop exactly the rest of it.

Streaming works the division out in rank 0 and hands it over by shared memory, so that it is asked here for 64 ranks in
one process, by the functions and the state that the loader itself uses. Two real processes are at the end.
"""

import dataclasses
import gc
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.load import build_loader
from mdsmix.load.dataset import MixDataset
from mdsmix.mix.draws import World as Machines
from mdsmix.mix.resolve import mix_of
from mdsmix.preview.asked import Asked, EpochState
from mdsmix.preview.first_steps import preview
from mdsmix.preview.step_rows import Step
from tests.forked import Standing
from tests.minio import free_port
from tests.published import CARD
from tests.with_torch.load_streams import IDS, PAIR, config, pair, write_stream, write_tokens

RANKS = [1, 2, 8, 64]
CANONICAL_NODES = [1, 2, 8, 64]
ROWS = 211
"Prime: no number of ranks divides it."
GLOBAL_BATCH = 64


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("streams")
    web = {"local": str(write_tokens(folder / "web", ROWS, shard_bytes=600))}
    return {"web": web, "faq": {"local": str(write_tokens(folder / "faq", 97, shard_bytes=600))}}


@pytest.fixture(params=[*product((1, 2), CANONICAL_NODES)], ids=str, scope="module")
def dataset(
    request: pytest.FixtureRequest, streams: dict[str, dict[str, Any]]
) -> Iterator[MixDataset]:
    """One stream, or two of which one is seen twice."""
    count, nodes = request.param
    mixed = (
        {"web": streams["web"] | {"repeat": 2}, "faq": streams["faq"]}
        if count == 2
        else {"web": streams["web"]}
    )
    settings = config(mixed, "text", shuffle=True, num_canonical_nodes=nodes)
    yield build_loader(settings, 1, ids=IDS).dataset
    gc.collect()


def world(ranks: int) -> World:
    """Nodes of eight ranks."""
    nodes = max(1, ranks // 8)
    return World(nodes, ranks // nodes, 1, 0)


def steps(
    dataset: MixDataset, ranks: int, batch_size: int, state: dict[str, Any] | None = None
) -> NDArray[np.int64]:
    """int64 [steps, ranks, batch_size]: what each rank reads in each step, -1 where there is no more; from `state` on."""
    there = world(ranks)
    dataset.batch_size, dataset.initial_physical_nodes = batch_size, None
    if state:
        dataset.load_state_dict(state)
    epoch, start = dataset._resume(there, 0)
    if state:  # it lies in shared memory, where the next to ask would find it
        dataset._resume_shm.cleanup()
    ids = generate_work(dataset.batching_method, dataset, there, epoch, start)
    return ids.transpose(3, 2, 0, 1, 4).reshape(-1, ranks, batch_size)


def stopped(dataset: MixDataset, ranks: int, samples: int) -> dict[str, Any]:
    state = {
        "epoch": 0,
        "sample_in_epoch": samples,
        "num_canonical_nodes": dataset.num_canonical_nodes,
        "shuffle_seed": dataset.shuffle_seed,
        "initial_physical_nodes": world(ranks).num_nodes,
    }
    assert {*state, "mdsmix_lock"} == dataset.state_dict(samples, True).keys()
    return json.loads(json.dumps(state))


def counted(ids: NDArray[np.int64]) -> Counter[int]:
    return Counter(ids[ids != -1].tolist())


def test_ranks_share_no_sample_and_repeat_only_what_fills_the_last_step(
    dataset: MixDataset,
) -> None:
    wanted = counted(dataset.resample_streams(0)[1])
    n = wanted.total()
    for ranks in RANKS:
        ids = steps(dataset, ranks, 4)
        seen = counted(ids)
        # Streaming divides an epoch by its canonical nodes first: where these are more than the ranks, they are filled up.
        parts = max(ranks, dataset.num_canonical_nodes)
        assert seen.total() - n == -(-n // parts) * parts - n
        assert not wanted - seen, "every sample is seen as often as the mix says"
        if wanted.total() == len(wanted):
            owners = Counter(s for rank in range(ranks) for s in counted(ids[:, rank]))
            shared = sum(count - 1 for count in owners.values())
            assert shared <= seen.total() - n, "but for the repeats, each sample has one owner"
        per_rank = [counted(ids[:, rank]).total() for rank in range(ranks)]
        assert set(per_rank) == {seen.total() // ranks}


def test_after_a_stop_any_number_of_ranks_sees_exactly_the_rest(dataset: MixDataset) -> None:
    wholes = {ranks: steps(dataset, ranks, GLOBAL_BATCH // ranks) for ranks in RANKS}
    for before, after, done in product(RANKS, RANKS, (1, 3)):
        # Streaming keeps the order only where its canonical nodes can be shared out among the real ones.
        if before != after and any(
            dataset.num_canonical_nodes % world(ranks).num_nodes for ranks in (before, after)
        ):
            continue
        whole, state = wholes[before], stopped(dataset, before, done * GLOBAL_BATCH)
        rest = steps(dataset, after, GLOBAL_BATCH // after, state)
        assert len(rest) - (len(whole) - done) in ((0,) if before == after else (0, 1))
        for one, other in zip(whole[done:-1], rest[:-1], strict=False):
            assert counted(one) == counted(other), (before, after)
            assert before != after or np.array_equal(one, other), "each rank its own"
        nothing_is_lost(dataset, whole[:done], rest)


def nothing_is_lost(dataset: MixDataset, *parts: NDArray[np.int64]) -> None:
    """The parts of an epoch hold every sample as often as the mix says; which are repeated to fill the last step may differ."""
    seen = sum((counted(part) for part in parts), Counter[int]())
    assert not counted(dataset.resample_streams(0)[1]) - seen


RANK = """
import json, os, sys
from itertools import islice
import torch.distributed as dist
from mdsmix.load import TokenIds, build_loader

config, packed = json.loads(sys.argv[1])
dist.init_process_group("gloo")

def loader(config):
    return build_loader(config, 4, ids=TokenIds(eos=0, pad=1))

def first(batch):
    return batch["input_ids"][:, 0].tolist()

def held(batch):
    trained = int((batch["labels"][:, 1:] != -100).sum())
    return [int(batch["attention_mask"].sum()), trained, (batch["sequence_id"].amax(dim=1) + 1).tolist()]

def of_all(look, batches):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, [look(batch) for batch in batches])
    return every

def stopped(config, look):
    whole = of_all(look, loader(config))
    stopped = loader(config)
    batches = iter(stopped)
    before = of_all(look, islice(batches, 3))
    state = json.loads(json.dumps(stopped.state_dict()))
    del stopped, batches
    resumed = loader(config)
    resumed.load_state_dict(state)
    return {"whole": whole, "before": before, "after": of_all(look, resumed), "state": state}

answer = [stopped(config, first), stopped(packed, held)]
if dist.get_rank() == 0:
    print(json.dumps(answer))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_share_a_stream(tmp_path: Path, programs: Standing) -> None:
    web = {"local": str(write_tokens(tmp_path / "web", 90, shard_bytes=600))}
    settings = config({"web": web}, "text", shuffle=True, num_canonical_nodes=2, drop_last=True)
    pairs = {name: {"local": str(tmp_path / name)} for name in ("faq", "forum")}
    for name, count in (("faq", 90), ("forum", 60)):
        write_stream(tmp_path / name, PAIR, map(pair, range(count)), shard_bytes=900)
    packing = config(pairs, shuffle=True, packing_ratio=2.6)
    answer, held = json.loads(together(programs, RANK, json.dumps([settings, packing])))
    whole, before, after = answer["whole"], answer["before"], answer["after"]
    assert answer["state"]["sample_in_epoch"] == 3 * 2 * 4
    for rank in (0, 1):
        assert [len(batch) for batch in whole[rank]] == [4] * (90 // 2 // 4)
        assert before[rank] + after[rank] == whole[rank]
    assert whole[0] != whole[1]
    for part, state in (("whole", None), ("after", answer["state"])):
        wanted = [list(step) for step in zip(*answer[part], strict=True)]
        found = previewed(settings, len(wanted), state)
        assert [[[10 + 8 * n for n in r.ids] for r in s.ranks] for s in found] == wanted
    for part, state in (("whole", None), ("after", held["state"])):
        made = previewed(packing, len(held[part][0]), state)
        for step, (one, other) in zip(made, zip(*held[part], strict=True), strict=True):
            assert step.counts is not None
            samples, tokens, trained = step.counts.sum(axis=0)
            assert [tokens, trained] == [one[0] + other[0], one[1] + other[1]]
            assert samples == sum(one[2] + other[2])


def previewed(settings: dict[str, Any], steps: int, state: dict[str, Any] | None) -> Sequence[Step]:
    """What a preview says of these two processes."""
    told = state or {"epoch": 0, "sample_in_epoch": 0}
    entered = EpochState(**{k: told[k] for k in EpochState.__dataclass_fields__ if k in told})
    workers = settings["train_loader"].get("num_workers", 0)
    cluster = Machines(nodes=1, gpus=2, workers=workers, batch=8)
    mix = dataclasses.replace(mix_of(settings, "train.yaml"), tokenizer=CARD)
    return preview(mix, Asked(world=cluster, steps=steps, state=entered)).steps


def together(programs: Standing, program: str, argument: str, ranks: int = 2) -> str:
    """What rank 0 prints, of `ranks` processes on this machine."""
    size = str(ranks)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": size}
    running = [
        programs.start(
            program, argument, RANK=str(n), LOCAL_RANK=str(n), LOCAL_WORLD_SIZE=size, **common
        )
        for n in range(ranks)
    ]
    ended = [each.wait() for each in running]
    assert [each.returncode for each in ended] == [0] * ranks, ended
    return ended[0].stdout.splitlines()[-1]

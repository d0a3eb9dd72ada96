"""What a plan says a node reads, an epoch holds and a batch pads is what Streaming and the loader do."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import Stream, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.load import build_loader
from mdsmix.mix.draws import World as Machines
from mdsmix.mix.plan.make import Plan, PlanOptions, make_plan, resolve_for_plan
from mdsmix.mix.plan.nodes import chance
from mdsmix.mix.render import render
from mdsmix.table import Estimate
from tests.converting import chats, run_recipe, write_jsonl, write_recipe
from tests.published import PAIR, TURNS, publish
from tests.with_torch.load_streams import IDS, write_tokens

SIZES = (331, 120, 77)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    """Three streams, in shards of twenty or so."""
    home = tmp_path_factory.mktemp("spread")
    streams = [
        Stream(local=str(write_tokens(home / str(n), n, length=4, shard_bytes=400))) for n in SIZES
    ]
    return StreamingDataset(streams=streams, batch_size=4)


def _set(dataset: StreamingDataset, drawn: Sequence[int], world: Machines, seed: int) -> None:
    for stream, n in zip(dataset.streams, drawn, strict=True):
        stream.choose, stream.proportion = n, n / sum(drawn)
    dataset.epoch_size = sum(drawn)
    dataset.num_canonical_nodes, dataset.shuffle_seed = world.canonical, seed
    dataset.shuffle, dataset.shuffle_block_size = world.algo != "none", 1 << 18
    dataset.shuffle_algo = "py1e" if world.algo == "none" else world.algo
    dataset.sampling_method = "balanced"
    dataset.epoch_seed_change = dataset.shuffle


def _read(dataset: StreamingDataset, world: Machines, epoch: int) -> Any:
    """bool [nodes, shards], from Streaming's own layout of the epoch."""
    theirs = World(num_nodes=world.nodes, ranks_per_node=world.gpus, workers_per_rank=2, worker=0)
    found = np.zeros((world.nodes, dataset.num_shards), np.bool_)
    ends = np.cumsum(dataset.samples_per_shard)
    for node, ids in enumerate(generate_work("random", dataset, theirs, epoch, 0)):
        found[node, np.searchsorted(ends, np.unique(ids[ids >= 0]), "right")] = True
    return found


CASES: tuple[tuple[Sequence[int], int, int, str], ...] = (
    # drawn of each stream, nodes, canonical nodes, algorithm
    *((SIZES, nodes, nodes * times, "py1e") for nodes in (1, 2, 8) for times in (1, 4)),
    (SIZES, 8, 2, "py1e"),
    *((SIZES, 3, 3, algo) for algo in ("py1br", "py1s", "none")),
    ([662, 0, 77], 2, 2, "py1e"),
    ([60, 90, 5], 4, 4, "py1e"),
    ([60, 90, 5], 1, 1, "py1s"),
    ([400, 60, 77], 4, 8, "py1e"),
    (SIZES, 4, 4, "naive"),
)


def test_a_node_reads_about_as_many_shards_as_streaming_gives_it(dataset: StreamingDataset) -> None:
    """On average over seeds and nodes, in the first epoch and in three."""
    offsets = [*dataset.shard_offset_per_stream, dataset.num_shards]
    samples = [dataset.samples_per_shard[a:b] for a, b in itertools.pairwise(offsets)]
    for drawn, nodes, canonical, algo in CASES:
        how = {"nodes": nodes, "gpus": 1 if canonical < nodes else 2, "algo": algo}
        world = Machines(batch=4 * nodes * how["gpus"], num_canonical_nodes=canonical, **how)
        theirs = []
        for seed in range(10):
            _set(dataset, drawn, world, seed)
            runs = [_read(dataset, world, epoch) for epoch in range(3)]
            theirs.append([runs[0].sum(1).mean(), np.any(runs, axis=0).sum(1).mean()])
        first, whole = np.mean(theirs, axis=0)
        each = [
            chance(of.mean(), n / of.sum(), sum(drawn), "random", world)
            for of, n in zip(samples, drawn, strict=True)
        ]
        counts = [len(of) for of in samples]
        planned = sum(p * n for p, n in zip(each, counts, strict=True))
        assert planned == pytest.approx(first, rel=0.08), (drawn, world)
        if algo != "none" and any(n % size for n, size in zip(drawn, SIZES, strict=True)):
            planned = sum((1 - (1 - p) ** 3) * n for p, n in zip(each, counts, strict=True))
            # The orders of epochs that draw other parts have much in common: more is planned than is read.
            assert whole * 0.92 < planned < whole * 1.5, (drawn, world)
        elif algo != "none":
            assert planned == pytest.approx(whole, rel=0.08), (drawn, world)


WORLDS = (
    ("random", 1, 1, 4),
    ("random", 2, 5, 40),
    ("random", 5, 1, 20),
    ("stratified", 2, 2, 24),
    ("per_stream", 1, 4, 16),
    ("device_per_stream", 1, 4, 16),
    ("device_per_stream", 2, 2, 12),
)


def test_steps_and_samples_are_those_of_real_ranks(
    dataset: StreamingDataset, tmp_path: Path
) -> None:
    """Each rank's batches, as Streaming lays them out. A step that not all ranks have is none of training."""
    streams = {str(n): {"local": dataset.streams[i].local} for i, n in enumerate(SIZES)}
    for (method, nodes, ranks, batch), drop_last in itertools.product(WORLDS, (True, False)):
        dataset.batch_size = batch // nodes // ranks
        dataset.batching_method = method
        _set(dataset, SIZES, Machines(nodes=nodes, gpus=ranks, batch=batch), 9176)
        work = generate_work(method, dataset, World(nodes, ranks, 1, 0), 0, 0)
        of_ranks = (work >= 0).sum(-1).reshape(nodes * ranks, -1)  # samples of each batch
        full = dataset.batch_size if drop_last else 1
        steps = int((of_ranks >= full).sum(1).min())
        keys = {"streams": streams, "max_seq_len": 4, "shuffle": True, "batching_method": method}
        loader = {"name": "text", "dataset": keys, "drop_last": drop_last, "num_workers": 0}
        config = {"train_loader": loader, "global_train_batch_size": batch}
        epoch = _plan(tmp_path, config, nodes=nodes, gpus=ranks).epoch
        held = of_ranks[:, :steps].sum()
        assert (epoch.steps, epoch.samples) == (steps, held), (method, nodes, drop_last)
        # What devices draw beyond the steps that all have is said to be dropped.
        assert epoch.dropped == of_ranks.sum() - held or not drop_last
    dataset.batch_size, dataset.batching_method = 4, "random"


def _plan(folder: Path, config: dict[str, Any], **asked: Any) -> Plan:
    path = folder / "train.yaml"
    path.write_text(json.dumps(config))
    return make_plan(resolve_for_plan([str(path)]), PlanOptions(**{"gpus": 1} | asked))


PAIRS = [{"input_ids": [5] * (i % 3 + 1), "labels": [7] * (i % 4) + [0]} for i in range(37)]
CHATS = [
    {"turns": [{"input_ids": [5], "labels": [7, 0]}] * (i % 3 + 1)} for i in range(30)
]  # 3, 6 or 9 tokens: rows are of 8


def _config(home: Path, **dataset: Any) -> dict[str, Any]:
    lengths = {"tokens": sum(len(r["input_ids"]) + len(r["labels"]) for r in PAIRS)}
    publish(home / "pairs", PAIR, PAIRS, shards=4, card={"layout": None, "totals": lengths})
    cut = {"cut_rows": 10, "cut_tokens": 10, "lengths": {"2^1": 10, "2^2": 10, "2^3": 10}}
    publish(home / "chats", TURNS, CHATS, shards=3, card={"totals": cut})
    streams = {name: {"local": str(home / name), "split": "train"} for name in ("pairs", "chats")}
    keys = {"streams": streams, "max_seq_len": 8, "shuffle": True, "decoder_only_format": True}
    loader = {"name": "finetuning", "dataset": keys | dataset, "num_workers": 0}
    loader |= {"prefetch_factor": None, "persistent_workers": False, "drop_last": True}
    return {"max_seq_len": 8, "train_loader": loader, "global_train_batch_size": 4}


def test_steps_tokens_and_padding_are_those_of_the_loader(tmp_path: Path) -> None:
    config = _config(tmp_path)
    for drop_last in (True, False):
        config["train_loader"]["drop_last"] = drop_last
        plan = _plan(tmp_path, config)
        batches = list(build_loader(config, 4, ids=IDS))
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        positions = sum(batch["input_ids"].numel() for batch in batches)
        assert (plan.epoch.steps, plan.streams[1].cut) == (len(batches), 10)
        if drop_last:
            assert plan.epoch.dropped == 67 - 4 * len(batches) == 3
            assert plan.step.positions == positions / len(batches)
            assert plan.step.padding == pytest.approx(1 - tokens / positions, abs=0.04)
        else:
            assert plan.epoch.tokens == tokens
            assert not isinstance(plan.epoch.tokens, Estimate)


def test_a_plan_counts_the_eos_that_the_loader_adds_once(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Answers of a ChatML template end without an EOS: it is a token more, and among those with a loss when they are counted. A row that is
    full has no room for it, and how many are full to the last token no manifest counts."""
    said = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "so " * n}] for n in range(1, 25)]  # fmt: skip
    data = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in said])
    loader = {"num_workers": 0, "drop_last": False, "dataset": {"shuffle": False}}
    made = {"streams": {"chat": chats(data)}, "max_seq_len": 96, "train_loader": loader}
    for is_full in (False, True):
        recipe, config = write_recipe(tmp_path, tokenizer_folder, **made), tmp_path / "train.yaml"
        (outcome,) = run_recipe(recipe)
        config.write_text(render(str(recipe), [], None)[1])
        run = make_plan(resolve_for_plan([str(config)]), PlanOptions(gpus=1, batch=4)).run
        batches = list(build_loader(str(config), 4))
        seen = sum(int(batch["attention_mask"].sum()) for batch in batches)
        trained = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert (run.tokens, isinstance(run.tokens, Estimate)) == (seen + is_full, is_full)
        assert is_full or run.trained == trained
        made["max_seq_len"] = outcome.manifest.totals.longest

"""What a plan says a node reads, an epoch holds and a batch pads is what Streaming and the loader do."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
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


def _samples(dataset: StreamingDataset) -> list[Any]:
    offsets = [*dataset.shard_offset_per_stream, dataset.num_shards]
    return [dataset.samples_per_shard[a:b] for a, b in itertools.pairwise(offsets)]


@dataclass(frozen=True)
class Case:
    """An epoch that is laid out for some machines."""

    choose: Sequence[int]
    nodes: int
    times: int = 1
    "Canonical nodes a node; below 0: nodes that share one."
    algo: str = "py1e"
    ranks: int = 2

    @property
    def world(self) -> Machines:
        canonical = self.nodes * self.times if self.times > 0 else self.nodes // -self.times
        return Machines(
            batch=4 * self.nodes * self.ranks,
            nodes=self.nodes,
            gpus=self.ranks,
            num_canonical_nodes=canonical,
            algo=self.algo,
        )


def _set(dataset: StreamingDataset, case: Case, seed: int) -> None:
    for stream, n in zip(dataset.streams, case.choose, strict=True):
        stream.choose, stream.proportion = n, n / sum(case.choose)
    dataset.epoch_size = sum(case.choose)
    dataset.num_canonical_nodes, dataset.shuffle_seed = case.world.canonical, seed
    dataset.shuffle, dataset.shuffle_block_size = case.algo != "none", 1 << 18
    dataset.shuffle_algo = "py1e" if case.algo == "none" else case.algo
    dataset.sampling_method = "balanced"
    dataset.epoch_seed_change = dataset.shuffle


def _theirs(dataset: StreamingDataset, case: Case, seed: int, epoch: int) -> Any:
    """bool [nodes, shards], from Streaming's own layout of the epoch."""
    _set(dataset, case, seed)
    world = World(num_nodes=case.nodes, ranks_per_node=case.ranks, workers_per_rank=2, worker=0)
    laid_out = generate_work("random", dataset, world, epoch, 0)
    found = np.zeros((case.nodes, dataset.num_shards), np.bool_)
    ends = np.cumsum(dataset.samples_per_shard)
    for node, ids in enumerate(laid_out):
        read = np.unique(ids[ids >= 0])
        found[node, np.searchsorted(ends, read, "right")] = True
    return found


def _both(dataset: StreamingDataset, case: Case, epochs: int) -> list[tuple[float, float]]:
    """Shards that a node reads on average, in the first epoch and in so many: planned, and over seeds and nodes as Streaming reads."""
    streams = [*zip(_samples(dataset), case.choose, strict=True)]
    first = np.concatenate(
        [
            np.full(
                len(of), chance(of.mean(), n / of.sum(), sum(case.choose), "random", case.world)
            )
            for of, n in streams
        ]
    )
    is_same = case.algo == "none" or not any(n % s for n, s in zip(case.choose, SIZES, strict=True))
    ours = first, first if is_same else 1 - (1 - first) ** epochs
    theirs = []
    for seed in range(10):
        runs = [_theirs(dataset, case, seed, epoch) for epoch in range(epochs)]
        theirs.append((runs[0].sum(1).mean(), np.any(runs, axis=0).sum(1).mean()))
    return list(zip((float(of.sum()) for of in ours), np.mean(theirs, axis=0), strict=True))


CASES = (
    *(Case(choose=SIZES, nodes=n, times=t) for n in (1, 2, 8) for t in (1, 4)),
    Case(choose=SIZES, nodes=8, times=-4, ranks=1),
    *(Case(choose=SIZES, nodes=3, algo=algo) for algo in ("py1br", "py1s", "none")),
    Case(choose=[662, 0, 77], nodes=2),
    Case(choose=[60, 90, 5], nodes=4),
    Case(choose=[60, 90, 5], nodes=1, algo="py1s"),
    Case(choose=[400, 60, 77], nodes=4, times=2),
    Case(choose=SIZES, nodes=4, algo="naive"),
)


def test_a_node_reads_about_as_many_shards_as_streaming_gives_it(dataset: StreamingDataset) -> None:
    assert all(len(of) > 3 for of in _samples(dataset)), "the shards are many"
    for case in CASES:
        first, run = _both(dataset, case, 1 if case.algo == "none" else 3)
        assert first[0] == pytest.approx(first[1], rel=0.08), case
        is_whole = all(n % size == 0 for n, size in zip(case.choose, SIZES, strict=True))
        # The orders of epochs that draw other parts have much in common, so that more is planned than is read.
        assert run[1] * 0.92 < run[0] < run[1] * (1.08 if is_whole else 1.5), case


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
        _set(dataset, Case(choose=SIZES, nodes=nodes, ranks=ranks), 9176)
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


def test_what_lies_on_the_nodes_disk_after_an_epoch_is_what_was_planned(tmp_path: Path) -> None:
    remote = write_tokens(tmp_path / "web", 90, length=8, shard_bytes=400, compression="zstd")
    for keep_zip in (False, True):
        cache = tmp_path / f"cache {keep_zip}"
        stream = {"remote": str(remote), "local": str(cache), "keep_zip": keep_zip}
        keys = {"streams": {"web": stream}, "max_seq_len": 8, "shuffle": True}
        loader = {"name": "text", "dataset": keys}
        node = _plan(tmp_path, {"train_loader": loader, "global_train_batch_size": 4}).node
        real = StreamingDataset(streams=[Stream(**stream)], batch_size=4, shuffle=True)
        assert len(list(real)) == 90
        assert node.kept_bytes == sum(file.stat().st_size for file in cache.iterdir())
        assert not isinstance(node.kept_bytes, Estimate)


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

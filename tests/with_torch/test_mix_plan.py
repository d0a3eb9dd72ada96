"""What a plan says a node reads, an epoch holds and a batch pads is what Streaming and the loader do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming import Stream, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from mdsmix.load import build_loader
from mdsmix.mix.plan.make import Asked, make_plan, see
from mdsmix.mix.plan.nodes import Order, readers
from mdsmix.mix.plan.padding import Lengths, mean_longest
from mdsmix.mix.render import render
from tests.converting import chats, run_recipe, write_jsonl, write_recipe
from tests.published import PAIR, TURNS, publish
from tests.with_torch.load_streams import IDS, write_tokens

SIZES = (331, 120, 77)
ALGOS = ("py1e", "py1br", "py1s", "py2s", "none")
NODES = (1, 2, 3, 8)


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


def _theirs(
    dataset: StreamingDataset, choose: Sequence[int], order: Order, epoch: int, ranks: int = 2
) -> Any:
    """bool [nodes, shards], from Streaming's own layout of the epoch."""
    for stream, n in zip(dataset.streams, choose, strict=True):
        stream.choose, stream.proportion = n, n / sum(choose)
    dataset.epoch_size = sum(choose)
    dataset.num_canonical_nodes, dataset.shuffle_seed = order.canonical, order.seed
    dataset.shuffle, dataset.shuffle_block_size = order.algo != "none", 1 << 18
    dataset.shuffle_algo = "py1e" if order.algo == "none" else order.algo
    dataset.sampling_method = "fixed" if order.is_fixed else "balanced"
    dataset.epoch_seed_change = dataset.shuffle and not order.is_fixed
    world = World(num_nodes=order.nodes, ranks_per_node=ranks, workers_per_rank=2, worker=0)
    laid_out = generate_work("random", dataset, world, epoch, 0)
    found = np.zeros((order.nodes, dataset.num_shards), np.bool_)
    ends = np.cumsum(dataset.samples_per_shard)
    for node, ids in enumerate(laid_out):
        read = np.unique(ids[ids >= 0])
        found[node, np.searchsorted(ends, read, "right")] = True
    return found


def test_the_shards_are_many_and_of_unequal_streams(dataset: StreamingDataset) -> None:
    assert [len(of) > 3 for of in _samples(dataset)] == [True] * 3


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.sampled_from(NODES),
    times=st.sampled_from([1, 2, 8]),
    algo=st.sampled_from(ALGOS),
    repeats=st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any),
    seed=st.integers(0, 99),
)
def test_of_streams_taken_whole_the_shards_of_each_node_are_streamings(
    dataset: StreamingDataset, nodes: int, times: int, algo: str, repeats: list[int], seed: int
) -> None:
    order = Order(nodes=nodes, canonical=nodes * times, seed=seed, algo=algo)
    choose = [n * r for n, r in zip(SIZES, repeats, strict=True)]
    ours = readers(_samples(dataset), choose, order, 0)
    assert (ours == _theirs(dataset, choose, order, 0)).all()
    if algo != "none":  # the same in a later epoch
        assert (ours == _theirs(dataset, choose, order, 5)).all()


def test_fewer_canonical_nodes_than_nodes_share_their_shards(dataset: StreamingDataset) -> None:
    order = Order(nodes=8, canonical=2, seed=3, algo="py1e")
    ours = readers(_samples(dataset), list(SIZES), order, 0)
    theirs = _theirs(dataset, list(SIZES), order, 0, ranks=1)
    assert (ours >= theirs).all(), "no shard is read that was not planned"
    assert theirs.sum() > 0.8 * ours.sum()


@pytest.mark.parametrize("algo", ["py1e", "py1s"])
def test_of_parts_drawn_anew_as_many_shards_are_read_as_streaming_reads(
    dataset: StreamingDataset, algo: str
) -> None:
    """Over a run of five epochs, averaged over seeds; one draw stands for another, so the sets differ."""
    choose, counts = [60, 90, 5], []
    for seed in range(12):
        order = Order(nodes=4, canonical=4, seed=seed, algo=algo)
        runs = []
        for read in (readers, None):
            run = np.zeros((4, dataset.num_shards), np.bool_)
            for epoch in range(5):
                run |= (
                    readers(_samples(dataset), choose, order, epoch)
                    if read
                    else _theirs(dataset, choose, order, epoch)
                )
            runs.append(run.sum(axis=1).max())
        counts.append(runs)
    ours, theirs = np.mean(counts, axis=0)
    assert ours == pytest.approx(theirs, rel=0.1)


def test_the_naive_shuffle_reads_shards_everywhere(dataset: StreamingDataset) -> None:
    order = Order(nodes=4, canonical=4, seed=1, algo="naive")
    ours, theirs = (
        np.mean([read(e).sum() for e in range(6)])
        for read in (
            lambda e: readers(_samples(dataset), list(SIZES), order, e),
            lambda e: _theirs(dataset, list(SIZES), order, e),
        )
    )
    assert ours == pytest.approx(theirs, rel=0.08)


@pytest.mark.parametrize("keep_zip", [False, True])
def test_what_lies_on_the_nodes_disk_after_an_epoch_is_what_was_planned(
    tmp_path: Path, keep_zip: bool
) -> None:
    remote = write_tokens(tmp_path / "web", 90, length=8, shard_bytes=400, compression="zstd")
    stream = {"remote": str(remote), "local": str(tmp_path / "cache"), "keep_zip": keep_zip}
    dataset = {"streams": {"web": stream}, "max_seq_len": 8, "shuffle": True}
    config = {"train_loader": {"name": "text", "dataset": dataset}, "global_train_batch_size": 4}
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps(config))
    plan = make_plan(see([str(path)], 1), Asked(gpus=1))
    assert len(list(StreamingDataset(streams=[Stream(**stream)], batch_size=4, shuffle=True))) == 90
    kept = sum(file.stat().st_size for file in (tmp_path / "cache").iterdir())
    assert plan.node.kept_bytes.value == kept
    assert plan.node.kept_bytes.basis == "exact"


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


@pytest.mark.parametrize("drop_last", [True, False])
def test_steps_tokens_and_padding_are_those_of_the_loader(tmp_path: Path, drop_last: bool) -> None:
    config = _config(tmp_path)
    config["train_loader"]["drop_last"] = drop_last
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps(config))
    plan = make_plan(see([str(path)], 1), Asked(gpus=1))
    batches = list(build_loader(config, 4, ids=IDS))
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    positions = sum(batch["input_ids"].numel() for batch in batches)
    assert plan.step.steps.value == len(batches)
    if drop_last:
        assert plan.step.dropped.value == 67 - 4 * len(batches) == 3
        assert plan.step.positions.value == positions / len(batches)
        assert plan.step.padding.value == pytest.approx(1 - tokens / positions, abs=0.04)
    else:
        assert plan.step.epoch_tokens.value == tokens
        assert plan.step.epoch_tokens.basis == "counted"
    assert plan.streams[1].cut_tokens.value == 10


def test_a_plan_counts_the_eos_that_the_loader_adds_once(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Answers of a ChatML template end without an EOS: it is a token more, and among those with a loss when they are counted."""
    said = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "so " * n}] for n in range(1, 25)]  # fmt: skip
    data = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in said])
    loader = {"num_workers": 0, "drop_last": False, "dataset": {"shuffle": False}}
    made = {"streams": {"chat": chats(data)}, "max_seq_len": 96, "train_loader": loader}
    recipe = write_recipe(tmp_path, tokenizer_folder, **made)
    run_recipe(recipe)
    config = tmp_path / "train.yaml"
    config.write_text(render(str(recipe), [], None)[1])
    plan = make_plan(see([str(config)], 1), Asked(gpus=1, batch=4))
    batches = list(build_loader(str(config), 4))
    seen = sum(int(batch["attention_mask"].sum()) for batch in batches)
    trained = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    assert (plan.run.tokens.value, plan.run.trained.value) == (seen, trained)


def test_packed_rows_are_drawn_as_many_at_a_time_as_the_loader_draws(tmp_path: Path) -> None:
    config = _config(tmp_path, packing_ratio=1.3)
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps(config))
    plan = make_plan(see([str(path)], 1), Asked(gpus=1))
    loader = build_loader(config, 4, ids=IDS)
    batches = list(loader)
    assert plan.step.drawn.value == loader.batch_size == 5
    assert plan.step.steps.value == len(batches)
    held = [int(batch["attention_mask"].sum()) for batch in batches]
    assert plan.step.tokens.value == pytest.approx(np.mean(held), rel=0.08)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("spread", [0.6, 0.9, 1.2])
def test_the_mean_longest_row_of_a_batch_is_found_from_counts_by_powers(
    rows: int, spread: float
) -> None:
    """Against draws of the very lengths, which spread like those of chats."""
    rng = np.random.default_rng(7)
    lengths = np.minimum(rng.lognormal(5, spread, 4000).astype(int) + 1, 2048)
    powers = np.log2(lengths).astype(int)
    counted = Lengths(
        mean=float(lengths.mean()),
        longest=int(lengths.max()),
        histogram={f"2^{p}": int(n) for p, n in enumerate(np.bincount(powers)) if n},
    )
    drawn = rng.choice(lengths, (2000, rows)).max(axis=1).mean()
    assert mean_longest([(counted, 1.0)], rows) == pytest.approx(drawn, rel=0.15)

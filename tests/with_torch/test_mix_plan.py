"""What an epoch draws, delivers and pads, and what a node reads of it, is what Streaming and the
loader do, for all weights, methods and worlds.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml
from streaming import Stream, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World
from torch.utils.data import DataLoader

from mdsmix import plan_phases
from mdsmix.load import build_loader
from mdsmix.mix.epoch import repeats
from mdsmix.mix.epoch.draws import (
    Machines,
    compute_batch_shares,
    count_delivered,
    count_draws,
    count_idle_devices,
)
from mdsmix.mix.epoch.repeats import draw_epoch
from mdsmix.mix.plan.nodes import compute_chance_of_fetch
from mdsmix.mix.plan.plan import Plan, PlanOptions, make_plan, resolve_for_plan
from mdsmix.mix.render.render import render_recipe
from mdsmix.mix.streams.mix import Loader, StreamInMix
from mdsmix.shards.published import open_stream_in
from mdsmix.storage import locate
from mdsmix.table import Estimate
from tests.converting import (
    chats,
    documents,
    manifest_of,
    pairs,
    run_ok,
    run_recipe,
    write_jsonl,
    write_recipe,
)
from tests.published import PAIR, TOKENIZER, TURNS, publish
from tests.with_torch.load_streams import IDS, first_tokens, write_tokens

METHODS = ("stratified", "per_stream", "device_per_stream")
SETS = ((223, 101, 37), (64,), (150, 16, 5, 101), (37, 38))
SCHEMES = ("proportion", "repeat", "choose", "none", "mixed")
SIZES = (331, 120, 77)


def dataset_of(home: Path, sizes: Sequence[int], size_limit: int = 1000) -> StreamingDataset:
    """Streams of so many samples, in shards of sixty or so."""
    folders = [write_tokens(home / str(n), n, length=4, size_limit=size_limit) for n in sizes]
    return StreamingDataset(streams=[Stream(local=str(of)) for of in folders], batch_size=4)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    """Three streams, in shards of twenty or so."""
    return dataset_of(tmp_path_factory.mktemp("spread"), SIZES, 400)


def weight(scheme: str, rng: np.random.Generator, kinds: tuple[str, ...] = SCHEMES[1:4]) -> Any:
    kind = kinds[rng.integers(len(kinds))] if scheme == "mixed" else scheme
    number = int(rng.integers(8, 300)) if kind == "choose" else round(rng.random() * 2 + 0.2, 3)
    return {} if kind == "none" else {kind: number}


def weighted(weights: list[Any], sizes: Sequence[int], epoch_size: int | None, seed: int) -> Any:
    streams = [Stream(local="x", **weight) for weight in weights]
    Stream.apply_weights(streams, np.array(sizes, np.int64), epoch_size, seed)
    return streams


def test_an_epoch_draws_the_samples_that_streaming_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very samples, by the dataset's own `resample_streams`: 60 cases of whole passes and
    parts, seeds, epochs, granules, both sampling methods, with `shuffle` and without, and all
    methods of batching.
    """
    dataset = dataset_of(tmp_path, SIZES, 400)
    rng = np.random.default_rng(4)
    opened = [open_stream_in(locate(stream.local)) for stream in dataset.streams]
    monkeypatch.setattr(repeats, "GRANULES_AT_ONCE", 7)
    for number in range(60):
        chosen = [int(rng.integers(0, 3 * size)) for size in SIZES]
        chosen[number % 3] = SIZES[number % 3] * (number % 4)
        settings = {
            "shuffle_seed": int(rng.integers(0, 99)),
            "sampling_method": ("balanced", "fixed")[number % 2],
            "sampling_granularity": int(rng.integers(1, 30)),
            "shuffle": number % 5 > 1,
            "batching_method": ("random", *METHODS)[number % 4],
        }
        epoch = int(rng.integers(0, 5))
        for key, value in settings.items():
            setattr(dataset, key, value)
        # As in the constructor of StreamingDataset.
        dataset.epoch_seed_change = dataset.shuffle and dataset.sampling_method == "balanced"
        for stream, count in zip(dataset.streams, chosen, strict=True):
            stream.choose = count
        if dataset.batching_method == "random":
            _, ids = dataset.resample_streams(epoch)
        else:  # as generate_work_stratified_batching and the others call it
            ids = np.concatenate([dataset.resample_streams(epoch, i)[1] for i in range(len(SIZES))])
        streams = tuple(
            StreamInMix.of(stream, str(i), {"choose": count})
            for i, (stream, count) in enumerate(zip(opened, chosen, strict=True))
        )
        section = {"name": "text", "dataset": settings}
        loader = Loader(label="train_loader", section=section, streams=streams)
        copies = np.concatenate(draw_epoch(loader, epoch))
        assert copies.tolist() == np.bincount(ids, minlength=sum(SIZES)).tolist(), settings


def test_a_loop_of_ones_own_reads_what_the_plan_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phase n is epoch n of the loader of its YAML, as it is under Composer."""
    monkeypatch.setattr("mdsmix.tokenizer.card.open_tokenizer", lambda spec: TOKENIZER)
    write_tokens(tmp_path / "web", 90)
    phases = {
        name: {"budget": "30 samples", "mix": {"web": "100%"}} for name in ("one", "two", "three")
    }
    loader = {"name": "text", "num_workers": 0, "drop_last": False, "dataset": {"shuffle": True}}
    loader |= {"prefetch_factor": None, "persistent_workers": False}
    recipe = {
        "tokenizer": "tok",
        "max_seq_len": 8,
        "streams": {"web": {"local": str(tmp_path / "web"), "split": "train"}},
        "phases": phases,
        "train_loader": loader,
    }
    seen = set[int]()
    planned = plan_phases(recipe, gpus=1, batch=4)
    for number, rendered in enumerate(render_recipe(recipe, [], None)):
        reader = build_loader(yaml.safe_load(rendered.text), 4, ids=IDS)
        reader.set_epoch(number)
        rows = first_tokens(reader)
        (copies,) = draw_epoch(rendered.mix.train, number)
        assert sorted(rows) == [10 + 8 * i for i in np.flatnonzero(copies)]
        (stream,) = planned.phases[number].streams
        assert stream.repeated == len(seen.intersection(rows))
        seen.update(rows)
    assert 0 < stream.repeated < 30


def test_an_epoch_draws_what_streaming_draws() -> None:
    """3,000 cases that do not change: schemes x sizes x epoch sizes x seeds, odd on purpose. None:
    the weights are refused.
    """
    rng, refused = np.random.default_rng(3), 0
    for number in range(3000):
        samples = [int(x) for x in rng.integers(1, 1000, int(rng.integers(1, 6)))]
        weights = [weight(SCHEMES[number % 5], rng, SCHEMES[:4]) for _ in samples]
        epoch_size = int(rng.integers(1, 5000)) if rng.random() < 0.4 else None
        case, found = (weights, samples, epoch_size, int(rng.integers(0, 10000))), list[Any]()
        for draw in (lambda *of: [int(s.choose) for s in weighted(*of)], count_draws):
            try:
                found.append(draw(*case))
            except ValueError:
                found.append(None)
        assert found[0] == found[1], case
        refused += found[0] is None
    assert 500 < refused < 1500, "both kinds of answer are compared"


def theirs_of(dataset: StreamingDataset, world: World) -> tuple[list[int], int]:
    """Samples of each stream in the epoch that Streaming lays out, and how many devices have a
    batch less than others. 0 everywhere where it refuses.
    """
    try:
        work = generate_work(dataset.batching_method, dataset, world, 0, 0)
    except ValueError:
        return [0] * len(dataset.streams), 0
    batches = (work >= 0).any(axis=-1).sum(axis=(2, 3)).ravel()  # of each device
    assert batches.max() - batches.min() <= 1
    ends = [*dataset.sample_offset_per_stream[1:], dataset.num_samples]
    samples = np.histogram(work[work >= 0], bins=[0, *ends])[0]
    return [int(n) for n in samples], int((batches < batches.max()).sum())


def test_what_is_delivered_is_what_streaming_lays_out(tmp_path: Path) -> None:
    datasets = [dataset_of(tmp_path / str(n), sizes) for n, sizes in enumerate(SETS)]
    for number, method in enumerate(METHODS, 1):
        rng, refused, uneven = np.random.default_rng(number), 0, 0
        for _ in range(100):
            at, scheme = int(rng.integers(len(SETS))), SCHEMES[rng.integers(5)]
            weights = [weight(scheme, rng) for _ in SETS[at]]
            (ours, idle), theirs = _both(method, datasets[at], SETS[at], weights, rng)
            refused += 0 in ours
            expected = ([0] * len(ours), 0) if 0 in ours else (ours, idle)
            assert theirs == expected, (method, weights)
            uneven += idle > 0
        assert 0 < refused < 50, "both kinds of answer are compared"
        assert (uneven > 10) == (method == "device_per_stream")


def _both(method: str, dataset: StreamingDataset, sizes: Any, weights: list[Any], rng: Any) -> Any:
    nodes, ranks, workers = (int(rng.choice(of)) for of in ([1, 2, 4], [1, 2, 3], [1, 2, 3]))
    canonical = int(rng.choice([nodes, 2 * nodes, 8 * nodes, 1]))
    relative = "proportion" in weights[0] or not any(weights)
    epoch_size = int(rng.integers(100, 600)) if relative and rng.random() < 0.5 else None
    streams = weighted(weights, sizes, epoch_size, dataset.shuffle_seed)
    for own, of in zip(dataset.streams, streams, strict=True):
        own.proportion, own.choose = of.proportion, of.choose
    dataset.batching_method, dataset.num_canonical_nodes = method, canonical
    dataset.batch_size, dataset.shuffle = int(rng.integers(1, 9)), bool(rng.integers(2))
    dataset.shuffle_block_size, batch = 1 << 18, dataset.batch_size * nodes * ranks
    how = {"num_canonical_nodes": canonical, "algo": "py1e" if dataset.shuffle else "none"}
    devices = Machines(batch=batch, nodes=nodes, gpus=ranks, **how)
    drawn, shares = (
        count_draws(weights, sizes, epoch_size),
        compute_batch_shares(weights, sizes, epoch_size),
    )
    theirs = theirs_of(dataset, World(nodes, ranks, workers, 0))
    ours = count_delivered(method, drawn, shares, devices)
    return (ours, count_idle_devices(method, ours, devices)), theirs


def _set(dataset: StreamingDataset, drawn: Sequence[int], world: Machines, seed: int) -> None:
    for stream, n in zip(dataset.streams, drawn, strict=True):
        stream.choose, stream.proportion = n, n / sum(drawn)
    dataset.epoch_size = sum(drawn)
    dataset.num_canonical_nodes, dataset.shuffle_seed = world.canonical, seed
    dataset.shuffle, dataset.shuffle_block_size = world.algo != "none", 1 << 18
    dataset.shuffle_algo = "py1e" if world.algo == "none" else world.algo
    dataset.sampling_method, dataset.epoch_seed_change = "balanced", dataset.shuffle


def _read(dataset: StreamingDataset, world: Machines) -> list[int]:
    """How many shards each node reads by Streaming's own layout of the epoch."""
    work = generate_work("random", dataset, World(world.nodes, world.gpus, 2, 0), 0, 0)
    ends = np.cumsum(dataset.samples_per_shard)
    return [len(np.unique(np.searchsorted(ends, of[of >= 0], "right"))) for of in work]


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
    """On average over seeds and nodes, in an epoch."""
    offsets = [*dataset.shard_offset_per_stream, dataset.num_shards]
    samples = [dataset.samples_per_shard[a:b] for a, b in itertools.pairwise(offsets)]
    counts = np.array([*map(len, samples)])
    for drawn, nodes, canonical, algo in CASES:
        how = {"nodes": nodes, "gpus": 1 if canonical < nodes else 2, "algo": algo}
        world = Machines(batch=4 * nodes * how["gpus"], num_canonical_nodes=canonical, **how)
        theirs = []
        for seed in range(10):
            _set(dataset, drawn, world, seed)
            theirs.append(_read(dataset, world))
        pairs = zip(samples, drawn, strict=True)
        each = [
            compute_chance_of_fetch(s.mean(), n / s.sum(), sum(drawn), "random", world)
            for s, n in pairs
        ]
        assert each @ counts == pytest.approx(np.mean(theirs), rel=0.08), (drawn, world)


WORLDS = (
    *(("random", 1, 1, 4), ("random", 2, 5, 40), ("random", 5, 1, 20), ("stratified", 2, 2, 24)),
    *(("per_stream", 1, 4, 16), ("device_per_stream", 1, 4, 16), ("device_per_stream", 2, 2, 12)),
)


def test_steps_are_those_of_real_ranks(dataset: StreamingDataset, tmp_path: Path) -> None:
    """Each rank's batches, as Streaming lays them out. Training has only the steps that all ranks
    have.
    """
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
        plan = _plan(tmp_path, config, nodes=nodes, gpus=ranks)
        epoch = plan.epoch
        held = of_ranks[:, :steps].sum()
        batches = (of_ranks > 0).sum(1)
        idle = int((batches < batches.max()).sum()) if method != "stratified" else 0
        warned = [note for note in plan.notes if "so training hangs" in note]
        assert len(warned) == (idle > 0)
        assert all(f" {idle} of " in note for note in warned)
        assert (epoch.steps, epoch.samples) == (steps, held), (method, nodes, drop_last)
        # What devices draw beyond the steps that all have is said to be dropped.
        assert epoch.dropped == of_ranks.sum() - held or not drop_last
    dataset.batch_size, dataset.batching_method = 4, "random"


def test_steps_without_shuffling_follow_the_shuffle_algo(
    dataset: StreamingDataset, tmp_path: Path
) -> None:
    """Streaming takes 64 canonical nodes under py1s and py2s, with and without shuffling. An epoch
    then has more samples than the stream, since each canonical node gets as many as the others.
    """
    local = dataset.streams[0].local
    for algo, is_shuffled in itertools.product(("py1s", "py2s", "py1e"), (False, True)):
        keys = {"shuffle": is_shuffled, "shuffle_algo": algo}
        theirs = StreamingDataset(local=local, batch_size=4, **keys)
        steps = len(list(DataLoader(theirs, batch_size=4, collate_fn=len)))
        section = {"streams": {"web": {"local": local}}, "max_seq_len": 4, **keys}
        loader = {"name": "text", "dataset": section, "drop_last": False, "num_workers": 0}
        plan = _plan(tmp_path, {"train_loader": loader, "global_train_batch_size": 4})
        assert plan.epoch.steps == steps, keys
        assert (steps > -(-SIZES[0] // 4)) == (algo != "py1e")


def _plan(folder: Path, config: dict[str, Any], **asked: Any) -> Plan:
    path = folder / "train.yaml"
    path.write_text(json.dumps(config))
    return make_plan(resolve_for_plan([str(path)]), PlanOptions(**{"gpus": 1} | asked))


PAIRS = [{"input_ids": [5] * (i % 3 + 1), "labels": [7] * (i % 4) + [0]} for i in range(37)]
CHATS = [{"turns": [{"input_ids": [5], "labels": [7, 0]}] * (i % 3 + 1)} for i in range(30)]
"3, 6 or 9 tokens: rows are of 8."


def test_steps_tokens_and_padding_are_those_of_the_loader(tmp_path: Path) -> None:
    lengths = {"tokens": sum(len(r["input_ids"]) + len(r["labels"]) for r in PAIRS)}
    publish(tmp_path / "pairs", PAIR, PAIRS, shards=4, card={"layout": None, "totals": lengths})
    cut = {"cut_rows": 10, "cut_tokens": 10, "lengths": {"2^1": 10, "2^2": 10, "2^3": 10}}
    publish(tmp_path / "chats", TURNS, CHATS, shards=3, card={"totals": cut})
    streams = {n: {"local": str(tmp_path / n), "split": "train"} for n in ("pairs", "chats")}
    keys = {"streams": streams, "max_seq_len": 8, "shuffle": True, "decoder_only_format": True}
    loader = {"name": "finetuning", "dataset": keys, "num_workers": 0, "persistent_workers": False}
    for drop_last in (True, False):
        section = loader | {"prefetch_factor": None, "drop_last": drop_last}
        config = {"max_seq_len": 8, "train_loader": section, "global_train_batch_size": 4}
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


def test_an_eos_that_the_loader_adds_counts_once(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Answers of a ChatML template end without an EOS: it is a token more, and among those with a
    loss when they are counted. A row that is full has no room for it.
    """
    said = [(("user", f"{n}?"), ("assistant", "so " * n)) for n in range(1, 25)]
    talks = [[{"role": role, "content": text} for role, text in each] for each in said]
    data = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in talks])
    loader = {"num_workers": 0, "drop_last": False, "dataset": {"shuffle": False}}
    made = {"streams": {"chat": chats(data)}, "max_seq_len": 96, "train_loader": loader}
    for _ in range(2):  # in the second conversion a row is full to its last token
        recipe, config = write_recipe(tmp_path, tokenizer_folder, **made), tmp_path / "train.yaml"
        (outcome,) = run_recipe(recipe)
        config.write_text(render_recipe(str(recipe), [], None)[0].text)
        run = make_plan(resolve_for_plan([str(config)]), PlanOptions(gpus=1, batch=4)).run
        batches = list(build_loader(str(config), 4))
        seen = sum(int(batch["attention_mask"].sum()) for batch in batches)
        trained = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert (run.tokens, isinstance(run.tokens, Estimate)) == (seen, False)
        assert run.trained == trained
        budgeted = render_recipe(str(recipe), [f"budget={seen} tokens"], None)[0].text
        assert "choose: 24" in budgeted, "the EOS is in the budget"
        made["max_seq_len"] = outcome.manifest.totals.longest


WORDS = [" ".join(f"word{n % 7}" for n in range(size)) for size in range(1, 60)]
ASKED = [{"prompt": "Say it.", "response": text} for text in WORDS]
TALKED = [
    {"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": text}]}
    for text in WORDS
]


def _one_loader(folder: Path, loader: str) -> dict[str, Any]:
    """Streams of all kinds that the loader reads: rows that are cut, full to the last token, one
    token short, and short.
    """
    asked, talked = write_jsonl(folder / "a.jsonl", ASKED), write_jsonl(folder / "t.jsonl", TALKED)
    texts = write_jsonl(folder / "d.jsonl", [{"text": text} for text in WORDS])
    streams = {
        "pairs": pairs(asked),
        "chats": chats(talked),
        "compact": chats(talked, columns="compact"),
        "first": chats(talked, too_long="first_turns"),
        "web": documents(texts),
        "docs": documents(texts, layout="document"),
    }
    if loader == "mdsmix":
        streams["packed"] = pairs(asked, pack=True)
        streams["packed-chats"] = chats(talked, pack=True)
        streams["packed-docs"] = documents(texts, layout="document", pack=True)
    return streams


@pytest.mark.parametrize("loader", ["finetuning", "mdsmix", "sides"])
def test_every_command_counts_the_tokens_of_a_pass_of_the_loader(
    tmp_path: Path, tokenizer_folder: Path, loader: str
) -> None:
    """One count, of the row as it is trained: of each stream alone, and exact."""
    streams = _one_loader(tmp_path, loader)
    dataset: dict[str, Any] = {"shuffle": False}
    if loader == "mdsmix":
        dataset["eos_token_id"] = 0
    if loader == "sides":
        streams = {"pairs": streams["pairs"], "chats": streams["chats"]}
    name = "mdsmix" if loader == "mdsmix" else "finetuning"
    section = {"name": name, "num_workers": 0, "drop_last": False, "dataset": dataset}
    made = {"streams": streams, "max_seq_len": 48, "train_loader": section}
    if loader == "sides":
        made["decoder_only_format"] = False
    recipe = write_recipe(tmp_path, tokenizer_folder, **made)
    told = orjson.loads(run_ok("convert", recipe, "--json").out)
    converted = {row["stream"]: row["tokens"] for row in told["rows"]}
    rendered = tmp_path / "train.yaml"
    run_ok("render-yaml", recipe, "-o", rendered)
    tree = yaml.safe_load(rendered.read_text())
    seen = dict[str, int]()
    for each, settings in tree["train_loader"]["dataset"]["streams"].items():
        one = json.loads(json.dumps(tree))
        one["train_loader"]["dataset"]["streams"] = {each: settings}
        seen[each] = _tokens_of_a_pass(one)
    assert converted == seen
    checked = orjson.loads(run_ok("check", recipe, "--json").out)["epoch"]
    assert {row["stream"]: row["tokens"] for row in checked} == seen
    for line in rendered.read_text().splitlines()[1:]:
        _, _, row = line.partition("# mdsmix:   ")
        cells = row.split()
        if cells and cells[0] in seen:
            assert cells[-2] == f"{seen[cells[0]]:,}", "exact, without ~"
    plan = _plan_of(rendered)
    assert {stream.stream: stream.tokens for stream in plan.streams} == seen
    assert not any(isinstance(stream.tokens, Estimate) for stream in plan.streams)
    for each, tokens in seen.items():
        out = run_ok("inspect", tmp_path / "out" / each, "-n", 0).out
        (line,) = [line for line in out.splitlines() if line.split()[:1] == ["tokens"]]
        assert line.split()[1].rstrip(",") == f"{tokens:,}", each


def test_a_manifest_that_counts_no_eos_gives_a_marked_number(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """As earlier commits wrote them."""
    talked = write_jsonl(tmp_path / "t.jsonl", TALKED)
    made = {"streams": {"chats": chats(talked)}, "max_seq_len": 48}
    recipe = write_recipe(tmp_path, tokenizer_folder, **made)
    run_ok("convert", recipe)
    forget_eos(tmp_path / "out/chats/train")
    header = run_ok("render-yaml", recipe).out
    plan = make_plan(resolve_for_plan([str(recipe)]), PlanOptions(gpus=1, batch=4))
    assert isinstance(plan.streams[0].tokens, Estimate)
    assert f"~{plan.streams[0].tokens:,.0f}" in header
    assert "~" in run_ok("convert", recipe).out.splitlines()[3]
    (line,) = [
        line
        for line in run_ok("inspect", tmp_path / "out/chats", "-n", 0).out.splitlines()
        if line.split()[:1] == ["tokens"]
    ]
    assert "~" in line


def _tokens_of_a_pass(config: dict[str, Any]) -> int:
    """Count the tokens of one epoch's batches, of encoder and decoder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = [*build_loader(config, 4)]
    masks = ("attention_mask", "decoder_attention_mask")
    return sum(int(batch[mask].sum()) for batch in batches for mask in masks if mask in batch)


def _plan_of(config: Path) -> Plan:
    return make_plan(resolve_for_plan([str(config)]), PlanOptions(gpus=1, batch=4))


def forget_eos(split: Path) -> None:
    """Rewrite a manifest without its counts of appended EOS."""
    manifest = manifest_of(split)
    totals = replace(manifest.totals, given_eos=0, not_given_eos=0)
    (split / "mdsmix.manifest").write_bytes(replace(manifest, totals=totals).to_bytes())

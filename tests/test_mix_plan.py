"""What a run comes to, before it is paid for: of published streams by their counts, of others by a survey of their records."""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.mix.plan import forecast as forecasting
from mdsmix.mix.plan.forecast import forecast
from mdsmix.mix.plan.make import Plan, PlanOptions, figures, make_plan, problems, resolve_for_plan
from mdsmix.mix.stream_counts import spread
from mdsmix.shards.counts import Totals
from mdsmix.shards.published import Stream
from mdsmix.sources import unit_plan
from mdsmix.table import UNKNOWN, Column, Estimate, cell_text, is_known
from tests.converting import (
    documents,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    write_jsonl,
    write_recipe,
)
from tests.pictures import record, seeing_tokenizer, stream, write_drawings
from tests.published import CONCAT, LENGTH, PAIR, PAIR_ROW, TOKEN_ROW, publish

FULL = {"loss_tokens": 30 * (LENGTH - 1)}


COUNT = Column("")
GUESSED = ["run.hours"]
"What nobody gave."


def _yaml(home: Path, **settings: Any) -> str:
    """A config of one stream: 30 full rows in 3 shards, fetched from `remote`."""
    publish(home / "web", CONCAT, [TOKEN_ROW] * 30, shards=3, card={"totals": FULL})
    stream = {"local": str(home / "cache"), "remote": str(home / "web"), "split": "train"}
    stream |= settings.pop("stream", {})
    dataset = {"streams": {"web": stream}, "max_seq_len": LENGTH, "shuffle": True}
    dataset |= settings.pop("dataset", {})
    loader = {"name": settings.pop("name", "text"), "dataset": dataset, "num_workers": 8}
    loader["drop_last"] = settings.pop("drop_last", True)
    path = home / "train.yaml"
    path.write_text(json.dumps({"train_loader": loader, "global_train_batch_size": 4} | settings))
    return str(path)


def _plan(target: str, **asked: Any) -> Plan:
    return make_plan(resolve_for_plan([target]), PlanOptions(**{"gpus": 2} | asked))


def _setting(plan: Plan, key: str) -> Any:
    return next(each for each in plan.settings if each.key == key)


def exact(figure: float) -> bool:
    return not isinstance(figure, Estimate)


def test_what_is_worked_out_from_an_estimate_is_one() -> None:
    guessed = Estimate(5)
    for found in (guessed + 1, 1 + guessed, 2 - guessed, guessed - 2, 2 * guessed, guessed / 2, 1 / guessed, sum([1, guessed])):  # fmt: skip
        assert isinstance(found, Estimate)
    assert [1 + guessed, 7 - guessed, guessed * 2, 10 / guessed] == [6, 2, 10, 2]
    assert not is_known(sum([1, UNKNOWN]))
    assert [cell_text(COUNT, figure) for figure in (10, guessed, UNKNOWN)] == ["10", "~5", "?"]


def test_a_stream_of_full_rows_is_exact_throughout(tmp_path: Path) -> None:
    plan = _plan(_yaml(tmp_path), batch=8, tokens="1k")
    (web,) = plan.streams
    assert (web.samples, web.padding) == (30, 0)
    assert plan.epoch.steps == 3
    assert (plan.step.tokens, plan.step.trained) == (8 * 8, 8 * 7)
    assert plan.epoch.dropped == 6
    assert plan.run.steps == math.ceil(1000 / 64)
    assert plan.run.tokens == 16 * 64
    assert web.passes == pytest.approx(16 / 3)
    assert [path for path, each in figures(asdict(plan)) if not exact(each)] == GUESSED


def test_nodes_fetch_all_shards_between_them_and_each_the_index(tmp_path: Path) -> None:
    target, home = _yaml(tmp_path), tmp_path / "web/train"
    stored = sum(f.stat().st_size for f in home.glob("*.mds"))
    index = (home / "index.json").stat().st_size
    alone, three = _plan(target), _plan(target, nodes=3, batch=6)
    assert alone.node.run_bytes == stored + index
    assert exact(alone.node.run_bytes)
    # One shard each, and of the next one where a cut falls into it: three parts have two cuts in three shards.
    assert three.node.run_bytes == pytest.approx(stored / 3 * (1 + 2 * 9 / 29) + index)


def test_a_run_that_ends_within_its_first_epoch_fetches_a_part_of_it(tmp_path: Path) -> None:
    in_order = _yaml(tmp_path, max_duration="2ba", dataset={"shuffle": False})
    index = (tmp_path / "web/train/index.json").stat().st_size
    shards = sum(f.stat().st_size for f in (tmp_path / "web/train").glob("*.mds"))
    node = _plan(in_order).node
    assert node.run_bytes == pytest.approx(2 / 7 * shards + index)
    assert not exact(node.run_bytes)


def test_a_part_that_is_drawn_anew_reads_other_shards_in_each_epoch(tmp_path: Path) -> None:
    """30 shards of one row, of which an epoch draws 8."""
    target = _yaml(tmp_path, max_duration="2ep", stream={"choose": 8})
    publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 30, shards=30, card={"totals": FULL})
    index = (tmp_path / "web/train/index.json").stat().st_size
    shards = sum(f.stat().st_size for f in (tmp_path / "web/train").glob("*.mds"))
    read = _plan(target).node.run_bytes - index
    assert read == pytest.approx(shards * (1 - (22 / 30) ** 2))


def test_compressed_shards_are_fetched_packed_and_kept_unpacked(tmp_path: Path) -> None:
    target = _yaml(tmp_path)
    publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 30, card={"totals": FULL}, compression="zstd")
    shard = json.loads((tmp_path / "web/train/index.json").read_bytes())["shards"][0]
    index = (tmp_path / "web/train/index.json").stat().st_size
    raw, packed = (shard[data]["bytes"] for data in ("raw_data", "zip_data"))
    node = _plan(target).node
    assert (node.run_bytes, node.kept_bytes) == (packed + index, raw + index)
    assert node.largest_shard == raw + packed
    kept = _plan(_yaml(tmp_path / "kept", dataset={"keep_zip": True})).node
    assert kept.remote_streams == 1


def test_a_stream_on_the_nodes_disk_is_not_fetched_and_gets_no_limit(tmp_path: Path) -> None:
    publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 30, card={"totals": FULL})
    target = _yaml(tmp_path, stream={"remote": None, "local": str(tmp_path / "web")})
    plan = _plan(target, disk="1kb")
    assert (plan.node.remote_streams, plan.node.run_bytes) == (0, 0)
    assert _setting(plan, "cache_limit").use is None
    assert "only copy" in _setting(plan, "cache_limit").why


def test_a_disk_that_holds_a_nodes_shards_needs_no_limit_and_one_that_does_not_gets_one(
    tmp_path: Path,
) -> None:
    """Shards of 3 x 2 MB or so, of which 4 must fit."""
    rows = [{"tokens": TOKEN_ROW["tokens"]}] * 90_000
    target = _yaml(tmp_path, dataset={"shuffle_block_size": 1000})
    publish(tmp_path / "web", CONCAT, rows, shards=6, card={"totals": {"loss_tokens": 7 * 90_000}})
    plans = {
        disk: _setting(_plan(target, disk=disk), "cache_limit") for disk in ("1gb", "2mb", "100kb")
    }
    assert (plans["1gb"].use, plans["100kb"].use) == (None, None)
    assert "too few" in plans["100kb"].why
    limit = _plan(target, disk="2mb")
    use = _setting(limit, "cache_limit").use
    assert use == "1mb"
    kept = _yaml(tmp_path / "set", dataset={"cache_limit": "2gb"})
    assert _setting(_plan(kept, disk="1kb"), "cache_limit").use == "2gb"


@pytest.mark.parametrize(
    ("settings", "use"),
    [
        ({}, "2"),
        ({"shuffle_algo": "py1s"}, "128"),
        ({"num_canonical_nodes": 4}, "4"),
    ],
)
def test_canonical_nodes_are_streamings_for_these_nodes(
    settings: dict[str, Any], use: str, tmp_path: Path
) -> None:
    plan = _plan(_yaml(tmp_path, dataset=settings), nodes=2)
    assert _setting(plan, "num_canonical_nodes").use == use


def test_lengths_between_two_powers_are_spread_evenly() -> None:
    lengths, samples = spread(Totals(longest=13, lengths={"2^2": 64, "2^3": 128}))
    assert (lengths.min(), lengths.max(), samples.sum()) == (4, 13, 192)
    assert (lengths @ samples) == pytest.approx(64 * 5.5 + 128 * 10.5)


def test_tokens_of_a_max_duration_are_places_where_the_text_loader_counts_them(
    tmp_path: Path,
) -> None:
    """Composer takes the size of a text batch, padding included, and of others their attention mask. Of 4 rows of 8 places half are tokens."""
    lengths = {"tokens": 120, "longest": 4, "lengths": {"2^2": 30}, "loss_tokens": 60}
    publish(tmp_path / "qa", PAIR, [PAIR_ROW] * 30, card={"totals": lengths})
    stream = {"local": str(tmp_path / "qa"), "remote": None}
    yaml = {"stream": stream, "dataset": {"decoder_only_format": True}, "max_duration": "48tok"}
    assert _plan(_yaml(tmp_path, name="finetuning", **yaml)).run.steps == 3
    full = {"tokens": 150, "longest": 8, "lengths": {"2^1": 15, "2^3": 15}, "loss_tokens": 60}
    publish(tmp_path / "qa", PAIR, [PAIR_ROW] * 30, card={"totals": full})
    plan = _plan(_yaml(tmp_path, **yaml))
    assert plan.run.steps == math.ceil(48 / plan.step.positions) < math.ceil(48 / plan.step.tokens)


LENGTHS = (("2ep", 14), ("9ba", 9), ("40sp", 10), ("96tok", 3), (3, 21), ("10sec", 7), (None, 7))
LAST = (("1ep", 2, 240), ("2ep", 4, 480), ("3ba", 3, 360), ("41sp", 3, 360), ("51sp", 4, 480))
Figures = dict[str, float]
PLANNED: list[tuple[dict[str, Any], dict[str, Any], Figures]] = [
    *(({"max_duration": long}, {}, {"steps": n, "epochs": n / 7}) for long, n in LENGTHS),
    # 30 rows of 8 tokens in steps of 20: an epoch is 2 steps, and 240 tokens. A step is a mean one.
    *(
        (
            {"max_duration": long, "drop_last": False},
            {"batch": 20},
            {"steps": n, "tokens": tokens, "epochs": n / 2, "step.padding": 0},
        )
        for long, n, tokens in LAST
    ),
    # An epoch is 4.29 steps of 7, which no float says: what rounding adds is no row.
    *(
        (
            {"max_duration": f"{30 * n}sp", "drop_last": False},
            {"batch": 7, "gpus": 1},
            {"steps": 5 * n},
        )
        for n in (1, 5, 9)
    ),
    # Devices that draw the same rows count as one; of nodes and canonical ones either may be a multiple of the other.
    ({"dataset": {"replication": 2}}, {"gpus": 4, "batch": 2}, {"steps": 15}),
    ({"dataset": {"num_canonical_nodes": 1}}, {"nodes": 2}, {"steps": 8}),
    ({"dataset": {"num_canonical_nodes": 4}}, {"nodes": 2}, {"steps": 8}),
    # What streams come to in a run adds up to it.
    *(
        (
            {"max_duration": "3ep", "drop_last": drops},
            {"batch": 8},
            {
                "tokens": 3 * n * 8,
                "streams.0.run_tokens": 3 * n * 8,
                "streams.0.run_trained": 3 * n * 7,
            },
        )
        for drops, n in ((True, 24), (False, 30))
    ),
    ({}, {"speed": 2.0}, {"hours": 7 * 4 * LENGTH / 2 / 3600}),
]


@pytest.mark.parametrize(("settings", "asked", "expected"), PLANNED)
def test_a_run_comes_to_what_is_worked_out_by_hand(
    settings: dict[str, Any], asked: dict[str, Any], expected: Figures, tmp_path: Path
) -> None:
    found = dict(figures(asdict(_plan(_yaml(tmp_path, **settings), **asked))))
    paths = {key: key if "." in key else f"run.{key}" for key in expected}
    assert {key: float(found[path]) for key, path in paths.items()} == pytest.approx(expected)


def test_samples_that_the_batching_method_drops_are_said(tmp_path: Path) -> None:
    plan = _plan(_yaml(tmp_path, dataset={"batching_method": "per_stream"}), batch=8)
    assert plan.streams[0].delivered == 24
    assert any("6 of 30 samples of an epoch are dropped" in note for note in plan.notes)


def test_a_stream_of_another_length_is_not_said_to_be_counted(tmp_path: Path) -> None:
    lengths = {"tokens": 120, "longest": 4, "lengths": {"2^2": 30}, "loss_tokens": 60}
    publish(tmp_path / "qa", PAIR, [PAIR_ROW] * 30, card={"totals": lengths})
    stream = {"local": str(tmp_path / "qa"), "remote": None}
    plans = [
        _plan(_yaml(tmp_path, stream=stream, dataset={"max_seq_len": n})) for n in (LENGTH, 4, 3)
    ]
    assert [p.streams[0].tokens for p in plans] == [120, 120, pytest.approx(90)]
    assert [exact(p.streams[0].tokens) for p in plans] == [True, True, False]


def test_packing_that_overfills_its_rows_is_said(tmp_path: Path) -> None:
    lengths = {"tokens": 120, "longest": 4, "lengths": {"2^2": 30}, "loss_tokens": 60}
    publish(tmp_path / "qa", PAIR, [PAIR_ROW] * 30, card={"totals": lengths, "layout": None})
    stream = {"local": str(tmp_path / "qa"), "remote": None}
    keys = {"packing_ratio": 4, "decoder_only_format": True}
    plan = _plan(_yaml(tmp_path, name="finetuning", stream=stream, dataset=keys))
    assert plan.step.drawn == 16
    assert not is_known(plan.streams[0].padding), "packed rows belong to several streams"
    assert (plan.step.tokens, exact(plan.step.tokens)) == (4 * LENGTH, False)
    assert any("take a smaller ratio" in note for note in plan.notes)


def test_a_run_may_be_shorter_than_a_full_step_where_an_epoch_is(tmp_path: Path) -> None:
    """30 rows in steps of 64: an epoch is one step that holds less than half of a full one."""
    yaml = _yaml(tmp_path, drop_last=False)
    epoch = _plan(yaml, batch=64)
    tokens = int(epoch.run.tokens)
    assert _plan(yaml, batch=64, tokens=str(tokens)).run.steps == 1
    with pytest.raises(RecipeError, match=f"which holds {tokens:,}:"):
        _plan(yaml, batch=64, tokens=str(tokens - 1))


@pytest.mark.parametrize(
    ("asked", "dataset", "words"),
    [
        ({"batch": 5}, {}, "take a multiple of 2,"),
        ({"batch": 64}, {}, "does not fill one step"),
        ({"tokens": "0"}, {}, "no number of tokens"),
        ({"tokens": "many"}, {}, "no number of tokens"),
        ({"tokens": "31"}, {}, "less than one step, which holds 32:"),
        ({"disk": "big"}, {}, "no size"),
        ({"nodes": 2}, {"num_canonical_nodes": 3}, "must be a multiple"),
        ({"nodes": 2}, {"replication": 3}, "does not divide 4 devices"),
        ({}, {"packing_ratio": "much"}, "packing_ratio"),
        ({}, {"epoch_size": 10, "shuffle_seed": -1}, "draw nothing"),
        ({}, {"max_seq_len": None}, "no max_seq_len"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    asked: dict[str, Any], dataset: dict[str, Any], words: str, tmp_path: Path
) -> None:
    kind = MixRefused if "shuffle_seed" in dataset else RecipeError
    with pytest.raises(kind, match=words):
        _plan(_yaml(tmp_path, dataset=dataset), **asked)


def test_a_stream_whose_text_the_loader_tokenizes_has_steps_and_no_tokens(tmp_path: Path) -> None:
    publish(tmp_path / "raw", {"text": "str"}, [{"text": "a b"}] * 10)
    stream = {"local": str(tmp_path / "raw"), "remote": None}
    plan = _plan(_yaml(tmp_path, stream=stream))
    assert (plan.epoch.steps, is_known(plan.step.tokens)) == (2, False)
    with pytest.raises(RecipeError, match="cannot be turned into steps"):
        _plan(_yaml(tmp_path, stream=stream), tokens="1B")


# Before conversion


@pytest.fixture
def corpus(tmp_path: Path) -> list[dict[str, str]]:
    """Documents of which the later ones are longer: what stands first is no sample of the rest."""
    rng = np.random.default_rng(5)
    return [{"text": "word " * int(rng.integers(1, 9) * (1 + n // 400))} for n in range(1600)]


def _surveyed(recipe: Path, name: str = "a", *overrides: str) -> tuple[Stream, str]:
    opened = open_recipe(recipe, overrides)
    return forecast(opened, opened.streams[name])


def _looked_at(said: str) -> tuple[int, int]:
    """Records and places."""
    found = re.search(r"([\d,]+) records? at (\d+) places? looked at", said)
    assert found, said
    return int(found[1].replace(",", "")), int(found[2])


def totals_of(published: Stream) -> Any:
    assert published.manifest is not None
    return published.manifest.totals


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a source of 100 kB, about a third is looked at."""
    monkeypatch.setattr(forecasting, "LEAST_WINDOW", 1 << 12)
    monkeypatch.setattr(forecasting, "BYTES", 1 << 15)


def test_a_survey_of_some_records_all_over_the_source_comes_near_what_converting_counts(
    corpus: list[dict[str, str]], tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", corpus)
    streams = {
        "a": documents(source),
        "b": documents(source, layout="document"),
        "packed": documents(source, layout="document", pack=True),
        # Of the few records that are looked at none might be in it.
        "part": documents(source, sample="1%"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams)
    run_recipe(recipe, only=["a", "b", "packed"])
    looked = {name: _surveyed(recipe, name) for name in streams}
    for name, (published, said) in looked.items():
        records, places = _looked_at(said)
        assert records < len(corpus) / 2
        assert 10 < places <= unit_plan.MOST
        if name == "part":
            continue
        true, seen = manifest_of(tmp_path / f"out/{name}/train").totals, totals_of(published)
        for key in ("samples", "tokens", "loss_tokens"):
            assert getattr(seen, key) == pytest.approx(getattr(true, key), rel=0.15), (name, key)
    stored = sum(f.stat().st_size for f in (tmp_path / "out/b/train").glob("*.mds"))
    assert looked["b"][0].index.bytes == pytest.approx(stored, rel=0.15)
    whole, part = looked["a"][0], looked["part"][0]
    assert totals_of(part).tokens == pytest.approx(totals_of(whole).tokens / 100, rel=0.1)
    assert part.index.bytes == pytest.approx(whole.index.bytes / 100, rel=0.2)


def test_of_a_budget_what_a_conversion_takes_is_planned(
    corpus: list[dict[str, str]], tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", corpus)
    mix = {"a": {"share": "60%"}, "b": {"share": "40%"}}
    streams = {name: documents(source, sample="budget") for name in mix}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, mix=mix, budget="30k tokens")
    looked = {name: _surveyed(recipe, name)[0].manifest for name in mix}
    whole = _surveyed(recipe, "a", "budget=9B tokens")[0].manifest
    assert whole
    assert whole.encoding.sample is None
    for outcome in run_recipe(recipe):
        planned = looked[outcome.stream]
        assert planned
        assert planned.encoding.sample == outcome.manifest.encoding.sample is not None
        assert planned.totals.tokens == pytest.approx(outcome.manifest.totals.tokens, rel=0.4)
        assert planned.totals.tokens >= outcome.wanted.tokens  # type: ignore[union-attr]


def test_a_source_below_two_mebibytes_is_read_whole(
    corpus: list[dict[str, str]], tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Whatever the file's format: of tables their rows tell how far reading has come, of packed files their stored bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(corpus), tmp_path / "a.parquet", row_group_size=100)
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b"".join(orjson.dumps(record) + b"\n" for record in corpus))
    )
    write_jsonl(tmp_path / "a.jsonl", corpus)
    names = ("jsonl", "parquet", "jsonl.gz")
    streams = {
        n.replace(".", "-"): documents(tmp_path / f"a.{n}", layout="document") for n in names
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    looked = [_surveyed(recipe, name) for name in streams]
    assert {_looked_at(said)[0] for _, said in looked} == {len(corpus)}
    tokens = [totals_of(published).tokens for published, _ in looked]
    assert ["which are all" in said for _, said in looked[:2]] == [True, True]
    assert tokens[0] == tokens[1] == pytest.approx(tokens[2], rel=0.15)


def test_columns_that_are_not_read_make_no_source_larger(
    corpus: list[dict[str, str]], tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    import pyarrow as pa

    table = pa.Table.from_pylist([each | {"more": "x" * 100} for each in corpus])
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    write_jsonl(tmp_path / "a.jsonl", corpus)
    streams = {k: documents(tmp_path / f"a.{k}", layout="document") for k in ("jsonl", "arrow")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    run_recipe(recipe, only=["jsonl"])
    tokens = manifest_of(tmp_path / "out/jsonl/train").totals.tokens
    published, said = _surveyed(recipe, "arrow")
    assert _looked_at(said)[0] < len(corpus)
    assert totals_of(published).tokens == pytest.approx(tokens, rel=0.2)


def test_images_beside_their_records_are_looked_at(tmp_path: Path, tokenizer_folder: Path) -> None:
    tokenizer = seeing_tokenizer(tokenizer_folder, tmp_path / "seeing")
    records = [record(f"img/{path.name}") for path in write_drawings(tmp_path / "img", 10)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    recipe = write_recipe(tmp_path, tokenizer, max_seq_len=400, streams={"a": stream(source)})
    published, said = _surveyed(recipe)
    run_recipe(recipe)
    stored = (tmp_path / "out/a/train").glob("*.mds")
    assert "which are all" in said
    assert totals_of(published).tokens == manifest_of(tmp_path / "out/a/train").totals.tokens
    assert published.index.bytes == pytest.approx(sum(f.stat().st_size for f in stored), rel=0.05)


def test_what_is_published_and_what_is_not_are_planned_together(
    corpus: list[dict[str, str]], tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", corpus)
    qa = write_jsonl(tmp_path / "qa.jsonl", [{"prompt": "word", "response": "word word"}] * 4000)
    recipe = write_recipe(
        tmp_path,
        tokenizer_folder,
        streams={"a": documents(source), "qa": pairs(qa), "val": documents(source, split="val")},
        mix={"a": {"share": 0.5}, "qa": {"share": 0.5}},
        max_repeat=100,
    )
    before = make_plan(resolve_for_plan([str(recipe)]), PlanOptions(gpus=1, batch=4))
    assert [exact(s.samples) for s in before.streams] == [False, False]
    assert not (tmp_path / "out").exists(), "nothing was written"
    run_recipe(recipe, only=["qa"])
    mixed = make_plan(resolve_for_plan([str(recipe)]), PlanOptions(gpus=1, batch=4))
    assert [exact(s.samples) for s in mixed.streams] == [False, True]
    assert "not converted yet" in mixed.notes[0]
    run_recipe(recipe)
    seen = resolve_for_plan([str(recipe)])
    after = make_plan(seen, PlanOptions(gpus=1, batch=4))
    assert all(exact(s.samples) for s in after.streams)
    assert [s.share for s in after.streams] == [pytest.approx(0.5, abs=0.01)] * 2
    assert problems(seen) == []


def test_a_stream_of_which_nothing_becomes_a_sample_is_refused(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"body": "x"}] * 5)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"a": documents(source)})
    with pytest.raises(RecipeError, match=r"5 of these records become no sample \(5 missing_field"):
        resolve_for_plan([str(recipe)])
    source.write_bytes(b"")
    with pytest.raises(RecipeError, match=r"holds no byte"):
        resolve_for_plan([str(recipe)])


def test_the_command_shows_what_its_json_says(
    corpus: list[dict[str, str]], tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", corpus)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"a": documents(source)})
    asked = (recipe, "--gpus", 2, "--batch", 4, "--tokens-per-second", 100)
    told, data = mdsmix("plan", *asked), mdsmix("plan", *asked, "--json")
    assert (told.code, data.code) == (0, 0)
    tree = orjson.loads(data.out)
    assert "epoch.tokens" in tree["estimated"]
    assert f"~{tree['epoch']['tokens']:,.0f}" in told.out
    assert max(len(line) for line in told.out.splitlines() if line.startswith("  a ")) <= 80
    assert {each["key"] for each in tree["settings"]} == {"cache_limit", "num_canonical_nodes"}
    assert "~ is estimated" in told.out
    assert mdsmix("plan", recipe, "--batch", 4, "--nodes", 0).code == 2


def test_a_mix_with_errors_is_refused_with_them(tmp_path: Path) -> None:
    target = _yaml(tmp_path, stream={"repeat": 1, "choose": 2})
    answer = mdsmix("plan", target, "--gpus", 1)
    assert answer.code == 3
    assert "weights-scheme" in answer.err
    assert "nothing was planned" in answer.err

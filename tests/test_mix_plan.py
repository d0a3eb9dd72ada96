"""The plan of a run, from the counts of published streams and a survey of the others' sources."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.estimate import forecast
from mdsmix.kinds import open_recipe
from mdsmix.mix.epoch.figures import make_epoch_table, measure_epoch
from mdsmix.mix.plan.plan import Plan, PlanOptions, list_figures, make_plan, resolve_for_plan
from mdsmix.sources import unit_plan
from mdsmix.table import Estimate, is_known, table_to_json
from tests.converting import (
    Project,
    assert_refused,
    documents,
    manifest_of,
    mdsmix,
    pairs,
    run_ok,
    run_recipe,
)
from tests.published import CONCAT, LENGTH, TOKEN_ROW, publish


def _publish(home: Path, rows: int = 30, shards: int = 3) -> tuple[int, int]:
    """Publish a stream of full rows, and return the bytes of its shards and of its index."""
    counts = {"loss_tokens": rows * (LENGTH - 1)}
    publish(home / "web", CONCAT, [TOKEN_ROW] * rows, shards=shards, card={"totals": counts})
    return _stored(home / "web/train")


def _stored(split: Path) -> tuple[int, int]:
    shards = sum(f.stat().st_size for f in split.glob("*.mds*"))
    return shards, (split / "index.json").stat().st_size


def _yaml(home: Path, **settings: Any) -> str:
    """Write a training YAML that reads the stream from its `remote`."""
    if not (home / "web").exists():
        _publish(home)
    stream = {"local": str(home / "cache"), "remote": str(home / "web"), "split": "train"}
    streams = {"web": stream | settings.pop("stream", {})}
    dataset = {"streams": streams, "max_seq_len": LENGTH, "shuffle": True}
    loader = {"name": "text", "dataset": dataset | settings.pop("dataset", {}), "num_workers": 8}
    loader["drop_last"] = settings.pop("drop_last", True)
    path = home / "train.yaml"
    path.write_text(json.dumps({"train_loader": loader, "global_train_batch_size": 4} | settings))
    return str(path)


def _plan(target: str, **options: Any) -> Plan:
    return make_plan(resolve_for_plan([target]), PlanOptions(**{"gpus": 2} | options))


def is_exact(figure: float) -> bool:
    return not isinstance(figure, Estimate)


def test_a_stream_of_full_rows_is_exact_throughout(tmp_path: Path) -> None:
    plan = _plan(_yaml(tmp_path), batch=8, tokens="1k")
    (project,) = plan.streams
    assert (project.samples, project.padding, plan.epoch.steps, plan.epoch.dropped) == (30, 0, 3, 6)
    assert (plan.step.tokens, plan.step.trained) == (8 * 8, 8 * 7)
    assert (plan.run.steps, plan.run.tokens) == (math.ceil(1000 / 64), 16 * 64)
    assert project.passes == pytest.approx(16 / 3)
    estimated = [path for path, figure in list_figures(asdict(plan)) if not is_exact(figure)]
    assert estimated == ["run.hours"], "the speed is unknown"


def test_nodes_fetch_the_shards_of_their_sections_and_the_index(tmp_path: Path) -> None:
    stored, index = _publish(tmp_path)
    target = _yaml(tmp_path)
    alone, three = _plan(target).node, _plan(target, nodes=3, batch=6).node
    assert (alone.run_bytes, is_exact(alone.run_bytes)) == (stored + index, True)
    # One shard each, and of the next one where a cut falls into it: three parts have two cuts in
    # three shards.
    assert three.run_bytes == pytest.approx(stored / 3 * (1 + 2 * 9 / 29) + index)
    part = _plan(_yaml(tmp_path, max_duration="2ba", dataset={"shuffle": False})).node
    assert part.run_bytes == pytest.approx(2 / 7 * stored + index), "a part of the first epoch"
    assert not is_exact(part.run_bytes)
    # Of 30 shards of one row an epoch draws 8, others in each.
    stored, index = _publish(tmp_path, shards=30)
    eight = _plan(_yaml(tmp_path, max_duration="2ep", stream={"choose": 8})).node
    assert eight.run_bytes - index == pytest.approx(stored * (1 - (22 / 30) ** 2))


def test_the_cache_limit_fits_the_disk_and_the_workers(tmp_path: Path) -> None:
    """60 shards of 35 kB. The windows of 16 workers, of 53 samples each, are in 5 of them without
    shuffling, otherwise in all. A stream that is only on the node's disk must keep its shards.
    """
    stored, index = _publish(tmp_path, 90_000, 60)
    alone = {"remote": None, "local": str(tmp_path / "web")}
    need = index + 5 * stored // 60
    in_order = {"shuffle": False}
    for disk, settings, use, why in (
        ("1gb", {}, None, ""),
        ("1.9mb", {"dataset": in_order}, "1mb", "up to 5 shards"),
        ("1.9mb", {}, None, "too few"),
        ("100kb", {"dataset": in_order}, None, "too few"),
        ("1kb", {"dataset": in_order | {"cache_limit": need}}, str(need), "up to 5 shards"),
        ("1kb", {"dataset": in_order | {"cache_limit": need - 1}}, None, "too few"),
        (
            "1kb",
            {"dataset": {"cache_limit": index + stored}},
            str(index + stored),
            "up to 60 shards",
        ),
        ("1kb", {"dataset": {"cache_limit": index + stored - 1}}, None, "too few"),
        ("1kb", {"dataset": {"cache_limit": "2gb"}}, "2gb", ""),
        ("1kb", {"stream": alone}, None, "only copy"),
    ):
        by_key = {s.key: s for s in _plan(_yaml(tmp_path, **settings), disk=disk).settings}
        limit = by_key["cache_limit"]
        assert (limit.use, why in limit.why) == (use, True)


LENGTHS = (("2ep", 14), ("9ba", 9), ("40sp", 10), ("96tok", 3), (3, 21), ("10sec", 7), (None, 7))
LAST = [
    (long, {"steps": n, "epochs": n / 2, "tokens": 120 * n, "step.padding": 0})
    for long, n in (("1ep", 2), ("2ep", 4), ("3ba", 3), ("41sp", 3), ("51sp", 4))
]
KEPT = {"drop_last": False}
OF_WEB = {"streams.0.run_tokens": 576, "streams.0.run_trained": 504}
PLANNED: list[tuple[dict[str, Any], dict[str, Any], dict[str, float]]] = [
    *(({"max_duration": long}, {}, {"steps": n, "epochs": n / 7}) for long, n in LENGTHS),
    # 30 rows of 8 tokens in steps of 20: an epoch is 2 steps, and 240 tokens. A step is a mean one.
    *(({"max_duration": long} | KEPT, {"batch": 20}, of) for long, of in LAST),
    # An epoch is 4.29 steps of 7, which no float says: what rounding adds is no row.
    ({"max_duration": "270sp"} | KEPT, {"batch": 7, "gpus": 1}, {"steps": 45}),
    # Devices that draw the same rows count as one; of nodes and canonical ones either may be a
    # multiple of the other.
    ({"dataset": {"replication": 2}}, {"gpus": 4, "batch": 2}, {"steps": 15}),
    ({"dataset": {"num_canonical_nodes": 1}}, {"nodes": 2}, {"steps": 8}),
    ({"dataset": {"num_canonical_nodes": 4}}, {"nodes": 2}, {"steps": 8}),
    # What streams come to in a run adds up to it.
    ({"max_duration": "3ep"}, {"batch": 8}, {"tokens": 576, **OF_WEB}),
    ({}, {"speed": 2.0}, {"hours": 7 * 4 * LENGTH / 2 / 3600}),
]


def test_the_figures_of_a_run_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    for settings, options, expected in PLANNED:
        figures = dict(list_figures(asdict(_plan(_yaml(tmp_path, **settings), **options))))
        actual = {key: float(figures[key if "." in key else f"run.{key}"]) for key in expected}
        assert actual == pytest.approx(expected), (settings, options)


def test_a_stream_of_weight_0_is_planned_as_if_it_were_absent(project: Project) -> None:
    """Without the first batches of a report: they import torch, and each later test of this process
    would fork it. tests/with_torch/test_preview.py shows them.
    """
    streams = {
        "web": documents(project.write_source(CORPUS)),
        "b": documents(project.write_source(CORPUS, "b.jsonl")),
    }
    half, nothing = {"proportion": 0.5}, {"proportion": 0}
    for weights in (
        {"b": {"repeat": 0}},
        {"b": {"choose": 0}},
        {"b": {"share": 0}},
        {"web": half, "b": nothing},
    ):
        recipe = project.configure(streams=streams, mix=weights).recipe
        run_recipe(recipe)
        yaml = project.folder / "train.yaml"
        for command in (
            ("check", recipe),
            ("plan", recipe, "--batch", 8),
            ("report", recipe, "--batch", 8, "--no-preview", "-o", project.folder / "report.html"),
            ("render-yaml", recipe, "-o", yaml),
            ("plan", yaml, "--batch", 8),
            ("report", yaml, "--batch", 8, "--no-preview", "-o", project.folder / "report.html"),
        ):
            run_ok(*command)
        with_b = _plan(str(recipe), gpus=1, batch=8)
        alone = _plan(
            str(project.configure(streams={"web": streams["web"]}).recipe), gpus=1, batch=8
        )
        b = with_b.streams[1]
        assert (b.delivered, b.tokens, b.share, b.padding, b.run_tokens) == (0, 0, 0, 0, 0)
        if "web" not in weights:
            assert with_b.step == alone.step, weights


IMPOSSIBLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"batch": 5}, {}, "take a multiple of 2,"), ({"batch": 64}, {}, "does not fill one step"),
    ({"tokens": "0"}, {}, "not a number of tokens"), ({"tokens": "many"}, {}, "not a number of tokens"),
    ({"tokens": "31"}, {}, "less than one step, which has 32 tokens:"), ({"disk": "big"}, {}, "not a size"),
    ({"nodes": 2}, {"num_canonical_nodes": 3}, "a multiple of the other"),
    ({"nodes": 2}, {"replication": 3}, "does not divide 4 devices"),
    ({}, {"packing_ratio": "much"}, "packing_ratio"),
    ({}, {"epoch_size": 10, "shuffle_seed": -1}, "draw no samples"),
    ({}, {"max_seq_len": None}, "no max_seq_len"),
]  # fmt: skip


def test_impossible_options_are_refused_in_one_sentence(tmp_path: Path) -> None:
    for options, dataset, words in IMPOSSIBLE:
        kind = MixRefused if "shuffle_seed" in dataset else RecipeError
        with pytest.raises(kind, match=words):
            _plan(_yaml(tmp_path, dataset=dataset), **options)


def test_tokens_and_shares_are_unknown_if_the_loader_tokenizes(tmp_path: Path) -> None:
    publish(tmp_path / "raw", {"text": "str"}, [{"text": "a b"}] * 10)
    raw = {"local": str(tmp_path / "raw"), "remote": None}
    plan = _plan(_yaml(tmp_path, stream=raw))
    assert (plan.epoch.steps, is_known(plan.step.tokens)) == (2, False)
    with pytest.raises(RecipeError, match="tokenizes the text of web, so"):
        _plan(_yaml(tmp_path, stream=raw), tokens="1B")
    both = (("raw", raw), ("web", {"local": str(tmp_path / "web")}))
    streams = {name: place | {"split": "train"} for name, place in both}
    epoch = measure_epoch(resolve_for_plan([_yaml(tmp_path, dataset={"streams": streams})]).train)
    assert [(each.drawn, is_known(each.tokens)) for each in epoch] == [(10, False), (30, True)]
    rows = table_to_json(make_epoch_table(epoch))["rows"]
    shares = [(row["share_of_samples"], row["share_of_tokens"]) for row in rows]
    assert shares == [(0.25, None), (0.75, None)]


def test_a_remote_that_streaming_alone_reads_is_named_and_not_taken_for_a_folder(
    tmp_path: Path,
) -> None:
    _publish(tmp_path)
    for remote in ("dbfs:/Volumes/a/b/c", "dbfs:/a", "sftp://a/b", "oci://a/b"):
        yaml = _yaml(tmp_path, stream={"remote": remote})
        answer = mdsmix("check", yaml)
        assert answer.code == 0
        assert f"web is at {remote}, which Streaming can read and mdsmix cannot" in answer.out
        for command in (
            ("plan", yaml, "--gpus", 1),
            ("preview", yaml, "--gpus", 1, "--batch", 4),
            ("leaks", yaml, "--eval", tmp_path / "web"),
            ("check", yaml, "--lock"),
        ):
            assert_refused(mdsmix(*command), 4, f"train_loader reads web ({remote})")
    for remote in ("s3:/a/b", "ftp://a/b", "gs:/a/b"):
        yaml = _yaml(tmp_path, stream={"remote": remote})
        assert_refused(mdsmix("check", yaml), 2, f"{remote} cannot be opened")


DRAW = np.random.default_rng(5)
CORPUS = [{"text": "word " * int(DRAW.integers(1, 9) * (1 + n // 400))} for n in range(1600)]
"Documents that become longer: the first ones are not typical of the others."


def _surveyed(recipe: Path, name: str = "web", *overrides: str) -> tuple[Any, str]:
    opened = open_recipe(recipe, overrides)
    return forecast.forecast_stream(opened, opened.streams[name])


def test_a_survey_comes_near_what_is_counted(project: Project) -> None:
    """Of a source of 100 kB, about a third is looked at."""
    project.patch.setattr(forecast, "LEAST_WINDOW", 1 << 12)
    project.patch.setattr(forecast, "BYTES", 1 << 15)
    source, arrow = project.write_source(CORPUS), project.folder / "a.arrow"
    table = pa.Table.from_pylist([each | {"more": "x" * 100} for each in CORPUS])
    with pa.ipc.new_file(str(arrow), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    streams = {
        "web": documents(source),
        "packed": documents(source, layout="document", pack=True),
        # Columns that are not read make no source larger.
        "arrow": documents(arrow, layout="document"),
        "b": documents(source, layout="document"),
    }
    recipe = project.configure(max_seq_len=64, streams=streams).recipe
    run_recipe(recipe, only=["web", "b", "packed"])
    for name in streams:
        published, sentence = _surveyed(recipe, name)
        looked_at = re.search(
            r"([\d,]+) records? at (\d+) places? of its source w\w+ read", sentence
        )
        assert looked_at, sentence
        assert int(looked_at[1].replace(",", "")) < len(CORPUS) / 2
        assert 10 < int(looked_at[2]) <= unit_plan.MOST_SPLITS
        converted = project.out / f"{'b' if name == 'arrow' else name}/train"
        true = manifest_of(converted).totals
        for key in ("samples", "tokens", "loss_tokens"):
            counted = getattr(published.manifest.totals, key)
            assert counted == pytest.approx(getattr(true, key), rel=0.2), (name, key)
    stored, _ = _stored(converted)
    assert published.index.bytes == pytest.approx(stored, rel=0.15)
    packed, _ = _surveyed(recipe, "b", "compression=zstd")
    assert packed.index.bytes < stored / 2
    # Of the few records that are looked at none might be in the part.
    (whole, _), (part, _) = _surveyed(recipe), _surveyed(recipe, "web", "streams.web.sample=1%")
    assert part.manifest.totals.tokens == pytest.approx(whole.manifest.totals.tokens / 100, rel=0.1)


def test_of_a_budget_what_it_takes_is_planned(project: Project) -> None:
    mix, source = {"web": {"share": "60%"}, "b": {"share": "40%"}}, project.write_source(CORPUS)
    streams = {name: documents(source, sample="budget") for name in mix}
    recipe = project.configure(streams=streams, mix=mix, budget="30k tokens").recipe
    looked = {name: _surveyed(recipe, name)[0].manifest for name in mix}
    whole, _ = _surveyed(recipe, "web", "budget=9B tokens")
    assert whole.manifest.encoding.sample is None
    for outcome in run_recipe(recipe):
        planned = looked[outcome.stream]
        assert planned.encoding.sample == outcome.manifest.encoding.sample is not None
        assert planned.totals.tokens == pytest.approx(outcome.manifest.totals.tokens, rel=0.4)
        assert planned.totals.tokens >= outcome.budget_share.tokens


def test_published_streams_and_others_are_planned(project: Project) -> None:
    source = project.write_source(CORPUS)
    qa = project.write_source([{"prompt": "word", "response": "word word"}] * 4000, "qa.jsonl")
    streams = {"web": documents(source), "qa": pairs(qa), "val": documents(source, split="val")}
    mix = {"web": {"share": 0.5}, "qa": {"share": 0.5}}
    recipe = project.configure(streams=streams, mix=mix, max_repeat=100).recipe
    for only, known in ((None, [False, False]), ("qa", [False, True]), ("web", [True, True])):
        if only:
            run_recipe(recipe, only=[only])
        plan = _plan(str(recipe), gpus=1, batch=4)
        assert [is_exact(s.samples) for s in plan.streams] == known
        assert project.out.exists() is any(known), "planning writes nothing"
        assert all(known) or "not converted yet" in plan.notes[0]
    assert [s.share for s in plan.streams] == [pytest.approx(0.5, abs=0.01)] * 2


def test_a_stream_of_which_nothing_becomes_a_sample_is_refused(project: Project) -> None:
    source = project.write_source([{"body": "x"}] * 5)
    with pytest.raises(RecipeError, match=r"5 of these records become no sample \(5 missing_field"):
        resolve_for_plan([str(project.recipe)])
    source.write_bytes(b"")
    with pytest.raises(RecipeError, match=r"the source of stream web is empty"):
        resolve_for_plan([str(project.recipe)])


def test_the_command_shows_what_its_json_says(project: Project) -> None:
    project.write_source(CORPUS)
    command = ("plan", project.recipe, "--gpus", 2, "--batch", 4, "--tokens-per-second", 100)
    output, tree = run_ok(*command), orjson.loads(run_ok(*command, "--json").out)
    assert "epoch.tokens" in tree["estimated"]
    assert f"~{tree['epoch']['tokens']:,.0f}" in output.out
    assert max(len(line) for line in output.out.splitlines() if line.startswith("  web ")) <= 80
    assert {each["key"] for each in tree["settings"]} == {"cache_limit", "num_canonical_nodes"}
    assert "~ estimated" in output.out
    assert mdsmix("plan", project.recipe, "--batch", 4, "--nodes", 0).code == 2
    bad = _yaml(project.folder, stream={"repeat": 1, "choose": 2})
    output = mdsmix("plan", bad, "--gpus", 1)
    assert (output.code, "weights-scheme" in output.err) == (3, True)
    assert "nothing was planned" in output.err

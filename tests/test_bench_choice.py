"""Which settings are tried, which one is chosen and why, and what a rendering takes of it; nothing
here is timed.

What `make bench` times runs, and does the same work.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import outputs
from benchmarks.contenders import HERE
from mdsmix.bench import TOLERATED, LoaderSetting, Pass, chosen, table, verdict
from mdsmix.table import table_to_json
from tests.converting import documents, done, mdsmix, run_recipe, token_rows, write_recipe
from tests.published import SPLIT, SPLIT_ROW, publish, write_mix

STEP = 0.25


def measured(setting: LoaderSetting, warm: float, cold: float | None = None) -> list[Pass]:
    waits = {"warm": warm} if cold is None else {"cold": cold, "warm": warm}
    return [
        Pass(setting=setting, cache=cache, first=0.1, wait=wait, samples=100.0, batches=30)
        for cache, wait in waits.items()
    ]


waits = st.floats(0, 0.02)


@given(st.lists(st.tuples(st.integers(0, 8), waits, waits), min_size=1, max_size=8))
@settings(max_examples=60)
def test_the_fewest_workers_that_keep_up_are_chosen(drawn: list[tuple[int, float, float]]) -> None:
    of = {LoaderSetting(n, 2 if n else 0): (warm, cold) for n, warm, cold in drawn}
    best = chosen([each for s, both in of.items() for each in measured(s, *both)], STEP)
    assert best.wait == max(of[best.setting])
    enough = [setting for setting, both in of.items() if max(both) <= TOLERATED * STEP]
    if enough:
        assert best.setting == min(enough)
    else:
        assert best.wait == min(map(max, of.values()))


def test_the_verdict_says_who_waits_and_how_long_and_the_table_has_a_row_for_each_pass() -> None:
    keeps_up = measured(LoaderSetting(2, 4), 0.001, cold=0.002)
    late = measured(LoaderSetting(0), 0.25, cold=0.75)
    said = verdict(chosen(keeps_up, STEP), STEP, 8)
    assert said.startswith("the loader waits for the model: with 2 workers, prefetch 4 a step of")
    assert "a step of 250 ms waits 2.0 ms" in said
    assert "a step asks for 32" in said
    said = verdict(chosen(late, STEP), STEP, 8)
    assert said.startswith("the model waits for the loader: at best, with 0 workers, a step of")
    assert "waits 750.0 ms for its batch, 75% of the time" in said
    rows = table_to_json(table(keeps_up + late))["rows"]
    said = [(r["workers"], r["cache"], round(r["wait_ms"])) for r in rows]
    assert said == [(2, "cold", 2), (2, "warm", 1), (0, "cold", 750), (0, "warm", 250)]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 30)
    loader = {"num_workers": 3, "pin_memory": False}
    return write_mix(tmp_path, "web", tokenizer=str(tokenizer_folder), train_loader=loader)


def rendered(*arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """The loader's keys that a setting says, and all others but its data set."""
    loader = yaml.safe_load(done("render-yaml", *arguments).out)["train_loader"]
    del loader["dataset"]
    return {key: loader.pop(key, None) for key in LoaderSetting(0).loader_keys}, loader


def test_what_bench_writes_is_what_is_rendered(recipe: Path) -> None:
    _, before = rendered(recipe)
    for setting in (LoaderSetting(0), LoaderSetting(4, 2)):
        assert rendered(recipe, *setting.overrides) == (setting.loader_keys, before)


def test_what_cannot_be_measured_is_one_sentence_before_torch_is_imported(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe.rename("recipe.yaml")
    loader = {"dataset": {"streams": {"web": {"local": "web"}}}}
    train = {"global_train_batch_size": 8, "train_loader": loader}
    Path("train.yaml").write_text(json.dumps(train))
    Path("seven.yaml").write_text(json.dumps(train | {"global_train_batch_size": 7}))
    indivisible = "global_train_batch_size 8 of train.yaml cannot be divided by --gpus 3"
    for arguments, said in (
        ("gone.yaml", "no such file"),
        ("recipe.yaml", "is a recipe"),
        ("train.yaml --workers 1,x", "--workers 1,x"),
        ("train.yaml --workers 9999", "--workers 9999: a rank has"),
        ("train.yaml --gpus 3", indivisible),
        ("seven.yaml", "7 of seven.yaml cannot be divided by --gpus 8"),  # as plan and preview
        ("train.yaml --loader eval_loader.x", "eval_loader.x is not one loader"),
        ("train.yaml --tmp nowhere", "--tmp nowhere is not a folder"),
        ("train.yaml -o nowhere/x.json", "there is no folder"),
    ):
        answer = mdsmix("bench", *arguments.split())
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), arguments
        assert said in answer.err


def _script(name: str, *arguments: object) -> str:
    command = [sys.executable, HERE / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_worker_is_ready_without_transformers(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing them takes 2.5 s, the start of a worker 0.1; here they cannot be imported
    at all.
    """
    (tmp_path / "transformers.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert float(_script("worker_start.py", tokenizer_folder)) > 0


def test_the_ceiling_writes_the_rows_that_mdsmix_writes(
    tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path
) -> None:
    source, out = corpus_folder / "docs.jsonl", tmp_path / "ceiling"
    out.mkdir()
    _script("ceiling.py", source, tokenizer_folder / "tokenizer.json", out, 16)
    (ours,) = run_recipe(write_recipe(tmp_path, tokenizer_folder, streams={"s": documents(source)}))
    assert token_rows(out) == token_rows(ours.target)
    assert 0 <= outputs.mdsmix(Path(ours.target)) - outputs.mds_rows(out) < 16

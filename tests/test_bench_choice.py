"""`mdsmix bench`: which settings of a loader are tried, which one is chosen and why, and that
`render-yaml` writes it; nothing here is timed.

The scripts that `make bench` times run here too, and do the same work as mdsmix.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import outputs
from benchmarks.contenders import HERE
from mdsmix.bench.choice import (
    TOLERATED,
    Pass,
    choose_pass,
    describe_choice,
    make_bench_table,
)
from mdsmix.bench.loader_bench import LoaderSetting
from mdsmix.table import table_to_json
from tests.converting import documents, mdsmix, read_token_rows, run_ok, run_recipe, write_recipe
from tests.published import SPLIT, SPLIT_ROW, publish, write_mix

STEP = 0.25


def make_passes(setting: LoaderSetting, warm: float, cold: float | None = None) -> list[Pass]:
    """Make the passes of a setting from its waits, in seconds."""
    waits = {"warm": warm} if cold is None else {"cold": cold, "warm": warm}
    return [
        Pass(setting=setting, cache=cache, first=0.1, wait=wait, samples=100.0, batches=30)
        for cache, wait in waits.items()
    ]


waits = st.floats(0, 0.02)


@given(st.lists(st.tuples(st.integers(0, 8), waits, waits), min_size=1, max_size=8))
@settings(max_examples=60)
def test_the_fewest_workers_that_keep_up_are_chosen(drawn: list[tuple[int, float, float]]) -> None:
    slower_waits = dict[LoaderSetting, float]()
    passes = dict[LoaderSetting, list[Pass]]()
    for workers, warm, cold in drawn:
        setting = LoaderSetting(workers, 2 if workers else 0)
        slower_waits[setting] = max(warm, cold)
        passes[setting] = make_passes(setting, warm, cold)
    best = choose_pass([*chain(*passes.values())], STEP)
    assert best.wait == slower_waits[best.setting]
    fast_enough = [s for s, wait in slower_waits.items() if wait <= TOLERATED * STEP]
    if fast_enough:
        assert best.setting == min(fast_enough)
    else:
        assert best.wait == min(slower_waits.values())


def test_the_conclusion_names_who_waits_and_the_table_has_a_row_for_each_pass() -> None:
    keeps_up = make_passes(LoaderSetting(2, 4), 0.001, cold=0.002)
    late = make_passes(LoaderSetting(0), 0.25, cold=0.75)
    conclusion = describe_choice(choose_pass(keeps_up, STEP), STEP, 8)
    assert conclusion.startswith(
        "the loader waits for the model: with 2 workers, prefetch 4 a step of"
    )
    assert "a step of 250 ms waits 2.0 ms" in conclusion
    assert "a step needs 32" in conclusion
    conclusion = describe_choice(choose_pass(late, STEP), STEP, 8)
    assert conclusion.startswith(
        "the model waits for the loader: at best, with 0 workers, a step of"
    )
    assert "waits 750.0 ms for its batch, 75% of the time" in conclusion
    rows = table_to_json(make_bench_table(keeps_up + late))["rows"]
    shown = [(row["workers"], row["cache"], round(row["wait_ms"])) for row in rows]
    assert shown == [(2, "cold", 2), (2, "warm", 1), (0, "cold", 750), (0, "warm", 250)]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 30)
    loader = {"num_workers": 3, "pin_memory": False}
    return write_mix(tmp_path, "web", tokenizer=str(tokenizer_folder), train_loader=loader)


def render_loader(*arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the loader's keys that a setting has, and all others except its dataset."""
    loader = yaml.safe_load(run_ok("render-yaml", *arguments).out)["train_loader"]
    del loader["dataset"]
    return {key: loader.pop(key, None) for key in LoaderSetting(0).loader_keys}, loader


def test_the_settings_that_bench_writes_are_rendered(recipe: Path) -> None:
    _, other_keys = render_loader(recipe)
    for setting in (LoaderSetting(0), LoaderSetting(4, 2)):
        assert render_loader(recipe, *setting.overrides) == (setting.loader_keys, other_keys)


def test_wrong_arguments_are_refused_in_one_sentence_before_torch_is_imported(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe.rename("recipe.yaml")
    loader = {"dataset": {"streams": {"web": {"local": "web"}}}}
    train = {"global_train_batch_size": 8, "train_loader": loader}
    Path("train.yaml").write_text(json.dumps(train))
    Path("seven.yaml").write_text(json.dumps(train | {"global_train_batch_size": 7}))
    indivisible = "global_train_batch_size 8 of train.yaml cannot be divided by --gpus 3"
    for arguments, sentence in (
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
        assert sentence in answer.err


def _run_script(name: str, *arguments: object) -> str:
    command = [sys.executable, HERE / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_worker_starts_without_importing_transformers(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing transformers takes 2.5 s, the start of a worker 0.1; here it cannot be imported."""
    (tmp_path / "transformers.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert float(_run_script("worker_start.py", tokenizer_folder)) > 0


def test_the_ceiling_writes_the_rows_that_mdsmix_writes(
    tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path
) -> None:
    source = corpus_folder / "docs.jsonl"
    out = tmp_path / "ceiling"
    out.mkdir()
    _run_script("ceiling.py", source, tokenizer_folder / "tokenizer.json", out, 16)
    (ours,) = run_recipe(write_recipe(tmp_path, tokenizer_folder, streams={"s": documents(source)}))
    assert read_token_rows(out) == read_token_rows(ours.target)
    assert 0 <= outputs.mdsmix(Path(ours.target)) - outputs.mds_rows(out) < 16

"""`check` and `render-yaml` as a user meets them: what is told apart, what is printed where, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mdsmix.cli.main import app
from mdsmix.errors import MixRefused, RecipeError, Unreachable
from tests.published import (
    CONCAT,
    LENGTH,
    SPLIT,
    SPLIT_ROW,
    TOKEN_ROW,
    TURNS,
    TURNS_ROW,
    publish,
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 30)
    publish(tmp_path / "plain", CONCAT, [TOKEN_ROW] * 30)
    publish(tmp_path / "chat", TURNS, [TURNS_ROW] * 30)
    return tmp_path


def recipe(home: Path, tokenizer: Path, **changes: Any) -> Path:
    path = home / "mix.yaml"
    settings = {
        "tokenizer": str(tokenizer),
        "max_seq_len": LENGTH,
        "streams": {"web": {"local": "web"}, "chat": {"local": "chat"}},
        "train_loader": {"num_workers": 0},
    }
    path.write_text(json.dumps(settings | changes))
    return path


def test_streams_are_named_by_folder_split_or_index(streams: Path) -> None:
    for place in ("web", "web/train", "web/train/index.json"):
        result = run("check", streams / place, streams / "chat")
        assert result.exit_code == 0, result.output
        assert "2 streams may be mixed" in result.stdout


def test_two_kinds_are_refused_with_exit_code_3(streams: Path) -> None:
    result = run("check", streams / "plain", streams / "chat")
    assert result.exit_code == 3
    assert result.stdout.startswith("error columns-loader [plain, chat]: ")
    assert "2 streams may not be mixed (1 error, 1 note)" in result.stdout


def test_json_is_for_machines(streams: Path) -> None:
    result = run("check", "--json", streams / "plain", streams / "chat")
    report = json.loads(result.stdout)
    assert result.exit_code == 3
    assert report["may_be_mixed"] is False
    assert set(report["findings"][0]) == {"id", "severity", "streams", "message", "why", "fix"}
    assert [share["drawn"] for share in report["epoch"]] == [30, 30]


def test_what_is_not_there_is_exit_code_4_and_not_a_verdict(streams: Path) -> None:
    with pytest.raises(Unreachable, match="holds no stream"):
        _raised(run("check", streams / "nothing"))


def test_overrides_need_a_recipe(streams: Path) -> None:
    with pytest.raises(RecipeError, match="overrides a recipe"):
        _raised(run("check", streams / "web", "max_seq_len=4"))


def test_a_file_that_is_neither_recipe_nor_config_is_named(streams: Path) -> None:
    (streams / "x.yaml").write_text("seed: 1\n")
    with pytest.raises(RecipeError, match="neither a recipe nor a training YAML"):
        _raised(run("check", streams / "x.yaml"))


def test_a_recipe_and_what_it_renders_get_the_same_findings(
    streams: Path, tokenizer_folder: Path
) -> None:
    path = recipe(streams, tokenizer_folder)
    rendered = run("render-yaml", path, "-o", streams / "out.yaml")
    assert rendered.exit_code == 0, rendered.output
    assert rendered.stdout == ""
    reports = [json.loads(run("check", "--json", p).stdout) for p in (path, streams / "out.yaml")]
    assert reports[0]["findings"] == reports[1]["findings"]
    assert reports[0]["epoch"] == reports[1]["epoch"]


def test_without_a_target_the_yaml_is_all_of_stdout(streams: Path, tokenizer_folder: Path) -> None:
    result = run("render-yaml", recipe(streams, tokenizer_folder))
    assert result.exit_code == 0
    assert result.stdout.startswith("# mdsmix: rendered by")
    assert "may be mixed" in result.stderr


def test_a_refused_mix_writes_nothing(streams: Path, tokenizer_folder: Path) -> None:
    path = recipe(streams, tokenizer_folder)
    typo = "train_loader.dataset.shuffel=true"
    result = run("render-yaml", path, typo, "-o", streams / "out.yaml")
    assert "error key-rejected: " in result.stderr
    assert "write shuffle, if that is what was meant" in result.stderr
    assert not (streams / "out.yaml").exists()
    with pytest.raises(MixRefused, match="nothing was rendered"):
        _raised(result)


def test_validate_without_foundry_is_one_sentence(streams: Path, tokenizer_folder: Path) -> None:
    result = run("render-yaml", recipe(streams, tokenizer_folder), "--validate")
    with pytest.raises(RecipeError, match="llmfoundry is not installed"):
        _raised(result)


def _raised(result: Result) -> None:
    """The error that the console script turns into a sentence and an exit code."""
    assert result.exception is not None
    raise result.exception

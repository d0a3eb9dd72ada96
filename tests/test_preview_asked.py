"""What a preview cannot be asked is told in a sentence, before Streaming is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mdsmix.errors import RecipeError
from mdsmix.preview.asked import EpochState, read_state
from tests.converting import mdsmix
from tests.published import CONCAT, TOKEN_ROW, publish

TOLD = {"epoch": 2, "sample_in_epoch": 96, "num_canonical_nodes": 4, "shuffle_seed": 9}


@pytest.mark.parametrize(
    "tree",
    [TOLD, {"state": {"dataset_state": {"train": TOLD}}}, {"train": TOLD}, TOLD | {"lock": {}}],
)
def test_a_state_is_read_as_a_loader_or_composer_writes_it(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text(json.dumps(tree))
    assert read_state(tmp_path / "state.json") == EpochState(**TOLD)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("{", "no state of a loader"),
        ("[1]", "no state of a loader"),
        ('{"epoch": 1}', "sample_in_epoch is missing"),
        ('{"epoch": 1, "sample_in_epoch": "x"}', "sample_in_epoch is 'x'"),
    ],
)
def test_what_is_no_state_is_refused(text: str | None, told: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "state.json").write_text(text)
    with pytest.raises(RecipeError, match=told):
        read_state(tmp_path / "state.json")


@pytest.mark.parametrize(
    ("options", "told", "code"),
    [
        ([], "nothing says how large a batch is", 2),
        (["--batch", "8", "--gpus", "3"], "take a multiple of 3,", 2),
        (["--batch", "8", "--read", "much"], "--read much is no size", 2),
        (["--batch", "8", "--state", "none"], "--state none is no state", 2),
        (["--batch", "8", "--state", "none", "--epoch", "1"], "leave --epoch", 2),
    ],
)
def test_the_command_tells_it_without_importing_streaming(
    options: list[str], told: str, code: int, tmp_path: Path
) -> None:
    publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 4)
    dataset = {
        "streams": {"web": {"local": str(tmp_path / "web"), "split": "train"}},
        "max_seq_len": 8,
    }
    config = {"max_seq_len": 8, "train_loader": {"name": "text", "dataset": dataset}}
    (tmp_path / "train.yaml").write_text(json.dumps(config))
    answer = mdsmix("preview", tmp_path / "train.yaml", *options)
    assert (answer.code, answer.out) == (code, "")
    assert told in answer.err
    assert len(answer.err.splitlines()) == 1
    assert "streaming" not in sys.modules


def test_streams_alone_have_no_batches(tmp_path: Path) -> None:
    publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 4)
    answer = mdsmix("preview", tmp_path / "web", "--batch", "4")
    assert answer.code == 2
    assert "streams alone have no batches" in answer.err

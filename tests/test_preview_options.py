"""A preview refuses wrong options in one sentence, before Streaming is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mdsmix.errors import RecipeError
from mdsmix.preview.options import EpochState, read_state
from tests.converting import mdsmix
from tests.published import CONCAT, TOKEN_ROW, publish

TOLD = {"epoch": 2, "sample_in_epoch": 96, "num_canonical_nodes": 4, "shuffle_seed": 9}
NO_STATES = (
    ("{", "not a loader's state"), ("[1]", "not a loader's state"),
    ('{"epoch": 1}', "sample_in_epoch is missing"),
    ('{"epoch": 1, "sample_in_epoch": "x"}', "sample_in_epoch is 'x'"),
)  # fmt: skip


def test_a_state_is_read_as_a_loader_or_composer_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with pytest.raises(RecipeError, match="No such file"):
        read_state(path)
    composers = {"state": {"dataset_state": {"train": TOLD}}}
    for tree in (TOLD, composers, {"train": TOLD}, TOLD | {"lock": {}}):
        path.write_text(json.dumps(tree))
        assert read_state(path) == EpochState(**TOLD)
    for text, message in NO_STATES:
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            read_state(path)


def test_the_command_refuses_in_a_sentence_without_importing_streaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "streaming", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "mdsmix.preview.preview", raising=False)
    project = str(publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 4))
    dataset = {"streams": {"web": {"local": project, "split": "train"}}, "max_seq_len": 8}
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps({"train_loader": {"name": "text", "dataset": dataset}}))
    eight = [config, "--batch", "8"]
    for arguments, message in (
        ([config], "the size of a batch is unknown"),
        ([*eight, "--gpus", "3"], "take a multiple of 3,"),
        ([*eight, "--read", "much"], "--read much is not a size"),
        ([*eight, "--state", "none"], "--state none is not a loader's state"),
        ([*eight, "--state", "none", "--epoch", "1"], "leave --epoch"),
        ([eight[0], "--batch", "4"], "take a multiple of 8,"),  # as plan, bench and report
        ([project, "--batch", "8"], "streams alone have no batches"),
    ):
        answer = mdsmix("preview", *arguments)
        assert (answer.code, answer.out, len(answer.err.splitlines())) == (2, "", 1), message
        assert message in answer.err

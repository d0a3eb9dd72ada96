"""What a preview cannot be asked is told in a sentence, before Streaming is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mdsmix.errors import RecipeError
from mdsmix.preview.asked import Asked, Cluster, State, batch_of, read_state
from tests.converting import mdsmix
from tests.published import CONCAT, TOKEN_ROW, publish


def cluster(**keys: Any) -> Cluster:
    return Cluster(**{"nodes": 1, "gpus": 2, "workers": 0, "batch": 8, **keys})


def test_a_batch_is_shared_by_devices_that_get_rows_of_their_own() -> None:
    shared = cluster(nodes=2, gpus=4, batch=32, replication=2)
    assert (shared.devices, shared.ranks, shared.rows) == (8, 4, 8)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"batch": 7}, "not divisible by 2 devices.*make it 6 or 8"),
        ({"batch": 1}, "not divisible by 2 devices.*make it 2,"),
        ({"batch": 0}, "has none: give --batch"),
        ({"batch": -4}, "has none: give --batch"),
        ({"replication": 3}, "does not divide 2 GPUs"),
    ],
)
def test_devices_that_cannot_share_a_batch_are_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        cluster(**keys)


def test_steps_are_bounded() -> None:
    with pytest.raises(RecipeError, match="ask for at most 131"):
        Asked(cluster=cluster(batch=1000), steps=132)
    Asked(cluster=cluster(batch=1000), steps=131)


def test_the_batch_is_what_is_given_or_the_yamls() -> None:
    assert batch_of(4, 8, "a.yaml") == 4
    assert batch_of(None, 8.0, "a.yaml") == 8
    with pytest.raises(RecipeError, match="has no global_train_batch_size"):
        batch_of(None, None, "a.yaml")
    with pytest.raises(RecipeError, match="global_train_batch_size: 'many'"):
        batch_of(None, "many", "a.yaml")


TOLD = {"epoch": 2, "sample_in_epoch": 96, "num_canonical_nodes": 4, "shuffle_seed": 9}


@pytest.mark.parametrize(
    "tree",
    [TOLD, {"state": {"dataset_state": {"train": TOLD}}}, {"train": TOLD}, TOLD | {"lock": {}}],
)
def test_a_state_is_read_as_a_loader_or_composer_writes_it(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text(json.dumps(tree))
    assert read_state(tmp_path / "state.json") == State(**TOLD)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ("[1]", "its epoch is None"),
        ('{"epoch": 1}', "its sample_in_epoch is None"),
        ('{"epoch": -1, "sample_in_epoch": 2}', "its epoch is -1"),
        ('{"epoch": 1, "sample_in_epoch": "x"}', "its sample_in_epoch is 'x'"),
        ('{"epoch": 1, "sample_in_epoch": 2, "num_canonical_nodes": 0}', "canonical_nodes is 0"),
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
        ([], "nothing says how many rows a step takes", 2),
        (["--batch", "8", "--gpus", "3"], "make it 6 or 9", 2),
        (["--batch", "8", "--read", "much"], "--read much is no size", 2),
        (["--batch", "8", "--state", "none"], "--state none cannot be read", 2),
        (["--batch", "8", "--state", "none", "--epoch", "1"], "leave --epoch", 2),
        (["--batch", "8", "--steps", "100000"], "ask for at most", 2),
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

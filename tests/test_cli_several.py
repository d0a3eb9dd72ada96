"""Commands that look at streams take several, or a recipe: one that fails ends no other, and the gravest decides the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert.garbage import Garbage
from mdsmix.storage import Location
from tests.converting import documents, mdsmix, write_jsonl, write_recipe
from tests.published import CONCAT, TOKEN_ROW, publish

COMMANDS = ("inspect", "verify", "gc", "quarantine")


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """Two streams that are converted, with a bad record each, and one of another tool, that lies flat."""
    bad: dict[str, list[Any]] = {"a": [{"text": 5}], "b": [{"text": 5}, {"other": 1}]}
    for name in bad:
        rows = [{"text": f"Document {n} of {name}"} for n in range(20)]
        write_jsonl(tmp_path / f"{name}.jsonl", [*rows, *bad[name]])
    publish(tmp_path / "theirs", CONCAT, [TOKEN_ROW], split="")
    streams = {
        "a": documents(tmp_path / "a.jsonl"),
        "b": documents(tmp_path / "b.jsonl"),
        "c": {"kind": "pretraining", "local": str(tmp_path / "theirs")},
    }
    path = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    assert mdsmix("convert", path).code == 0
    return path


def asked(*arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    answer = mdsmix(*arguments, "--json")
    return answer.code, json.loads(answer.out)["streams"], answer.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recipe_is_all_its_streams(command: str, recipe: Path, tmp_path: Path) -> None:
    code, streams, err = asked(command, recipe)
    made = [str(tmp_path / "out" / name / "train") for name in "ab"]
    theirs = [] if command == "gc" else [str(tmp_path / "theirs")]
    assert (code, err) == (0, "")
    assert [stream["stream"] for stream in streams] == made + theirs
    assert all(place in mdsmix(command, recipe).out for place in made + theirs)
    moved = mdsmix(command, recipe, f"local={tmp_path / 'elsewhere'}")
    assert (moved.code, moved.err.count("error: ")) == (4, 2)


@pytest.mark.parametrize("command", COMMANDS)
def test_one_that_fails_ends_no_other(command: str, recipe: Path, tmp_path: Path) -> None:
    places = [tmp_path / "nowhere", tmp_path / "out/b", tmp_path / "neither"]
    answer = mdsmix(command, *places)
    assert answer.code == 4
    assert answer.err.count("error: ") == 2
    assert str(places[1]) in answer.out
    code, streams, _ = asked(command, *places)
    assert code == 4
    assert ["error" in stream for stream in streams] == [True, False, True]


def test_a_damaged_stream_is_less_grave_than_one_that_could_not_be_looked_at(
    recipe: Path, tmp_path: Path
) -> None:
    (shard,) = (tmp_path / "out/a/train").glob("*.mds")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    code, streams, _ = asked("verify", recipe)
    assert code == 3
    assert [len(stream["faults"]) for stream in streams] == [1, 0, 0]
    assert mdsmix("verify", recipe, "--quick").code == 0
    assert mdsmix("verify", tmp_path / "out/a", tmp_path / "nowhere").code == 4
    assert mdsmix("verify", tmp_path / "out/b", tmp_path / "out/a").code == 3


def test_a_reason_that_one_of_the_streams_has_is_known(recipe: Path) -> None:
    answer = mdsmix("quarantine", recipe, "--reason", "missing_field")
    assert answer.code == 0
    assert answer.out.count("missing_field: 1") == 1
    answer = mdsmix("quarantine", recipe, "--reason", "no_such")
    assert answer.code == 2
    assert "the reasons are field_not_text, missing_field" in answer.err


def test_a_recipe_beside_streams_or_an_override_without_one_is_refused(
    recipe: Path, tmp_path: Path
) -> None:
    for wrong in ((recipe, tmp_path / "out/a"), (tmp_path / "out/a", "max_seq_len=4"), (recipe, recipe)):  # fmt: skip
        answer = mdsmix("verify", *wrong)
        assert (answer.code, answer.out) == (2, "")
        assert "name one recipe" in answer.err


def test_gc_tells_of_a_tokenizer_once(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needless(root: Location, older_than: float) -> list[Garbage]:
        return [Garbage(kind="tokenizer", name="tokenizer-0", bytes=1, age=9, discard=print)]

    monkeypatch.setattr("mdsmix.convert.garbage.needless", needless)
    _, streams, _ = asked("gc", recipe)
    assert [len(stream["garbage"]) for stream in streams] == [1, 0]

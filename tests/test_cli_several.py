"""Commands that look at streams take several, or a recipe: one that fails ends no other, and the gravest decides the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.converting import documents, flip, manifest_of, mdsmix, write_jsonl, write_recipe
from tests.published import CONCAT, TOKEN_ROW, publish

COMMANDS = ("inspect", "verify", "gc", "quarantine")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Two streams that are converted, with a bad record each, and one of another tool, that lies flat."""
    folder = tmp_path_factory.mktemp("several")
    bad: dict[str, list[Any]] = {"a": [{"text": 5}], "b": [{"text": 5}, {"other": 1}]}
    for name in bad:
        rows = [{"text": f"Document {n} of {name}"} for n in range(20)]
        write_jsonl(folder / f"{name}.jsonl", [*rows, *bad[name]])
    publish(folder / "theirs", CONCAT, [TOKEN_ROW], split="")
    streams = {name: documents(folder / f"{name}.jsonl") for name in bad}
    streams["c"] = {"kind": "pretraining", "local": str(folder / "theirs")}
    recipe = write_recipe(folder, tokenizer_folder, streams=streams)
    answer = mdsmix("convert", recipe, "--json")
    assert answer.code == 0, answer.err
    (folder / "convert.json").write_text(answer.out)
    return folder


@pytest.fixture(scope="module")
def recipe(home: Path) -> Path:
    return home / "recipe.yaml"


def asked(*arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    answer = mdsmix(*arguments, "--json")
    return answer.code, json.loads(answer.out)["streams"], answer.err


def test_programs_get_the_figures_that_a_person_is_shown(recipe: Path, home: Path) -> None:
    def told(*arguments: object) -> Any:
        return json.loads(mdsmix(*arguments, "--json").out)

    first, again, at = json.loads((home / "convert.json").read_text()), told("convert", recipe), home / "out/a"  # fmt: skip
    a, b = first["rows"]
    totals = manifest_of(at / "train").totals
    assert (a["stream"], a["read"], a["tokens"]) == ("a", 21, totals.tokens)
    assert b["reasons"] == {"filtered": {}, "quarantined": {"field_not_text": 1, "missing_field": 1}}  # fmt: skip
    assert again["rows"][0]["state"].startswith("up to date")
    assert again["total"]["read"] == 43
    assert told("convert", recipe, "--dry-run")["plan"]
    card = told("inspect", at)
    assert card["manifest"]["totals"]["samples"] == card["samples"] > 0
    assert [shown["number"] for shown in card["shown"]] == [0, 1, 2]
    assert (card["shown"][0]["sample"][-1]["trained"], card["is_whole"]) == (True, True)
    assert told("verify", at)["faults"] == []
    assert told("repair", at, "--recipe", recipe)["units"] == 0
    garbage = told("gc", at, "--older-than", "0s")
    assert (garbage["deleted"], garbage["garbage"]) == (False, [])
    assert told("check", at)["may_be_mixed"] is True


def test_a_recipe_is_all_its_streams_and_one_that_fails_ends_no_other(
    recipe: Path, home: Path
) -> None:
    made = [str(home / "out" / name / "train") for name in "ab"]
    some = [home / "nowhere", home / "out/b", home / "neither"]
    for command in COMMANDS:
        code, streams, err = asked(command, recipe)
        assert (code, err) == (0, "")
        places = made + [str(home / "theirs")] * (command != "gc")
        assert [stream["stream"] for stream in streams] == places
        assert all(place in mdsmix(command, recipe).out for place in places)
        moved = mdsmix(command, recipe, f"local={home / 'elsewhere'}")
        assert (moved.code, moved.err.count("error: ")) == (4, 2)
        answer = mdsmix(command, *some)
        assert (answer.code, answer.err.count("error: ")) == (4, 2)
        assert str(some[1]) in answer.out
        code, streams, _ = asked(command, *some)
        assert (code, ["error" in stream for stream in streams]) == (4, [True, False, True])
    a = home / "out/a"
    for wrong in ((recipe, a), (a, "max_seq_len=4"), (recipe, recipe)):
        answer = mdsmix("verify", *wrong)
        assert (answer.code, answer.out) == (2, "")
        assert "name one recipe" in answer.err


def test_a_damaged_stream_is_less_grave_than_one_that_could_not_be_looked_at(
    recipe: Path, home: Path
) -> None:
    (shard,) = (home / "out/a/train").glob("*.mds")
    flip(shard)
    code, streams, _ = asked("verify", recipe)
    assert code == 3
    assert [len(stream["faults"]) for stream in streams] == [1, 0, 0]
    a, b, none = home / "out/a", home / "out/b", home / "nowhere"
    for arguments, grave in (((recipe, "--quick"), 0), ((a, none), 4), ((none, a), 4), ((b, a), 3)):
        assert mdsmix("verify", *arguments).code == grave
    flip(shard)

"""The share of bad records of the whole stream decides; a run stops early only where that share can be told already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert.bad_records import refuse_too_many_bad
from mdsmix.convert.job import make_job
from mdsmix.encode.pretrained import open_tokenizer
from mdsmix.errors import TooManyBadRecords
from mdsmix.recipe import load_recipe
from mdsmix.shards.counts import Records
from tests.converting import (
    Answer,
    documents,
    files,
    mdsmix,
    quarantined,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)

WINDOW = 600
"A file of ten records is a unit."


def source(folder: Path, shares: Sequence[float]) -> Path:
    """A file for each share of bad records, a work unit each, of 10 records."""
    for number, share in enumerate(shares):
        write_jsonl(folder / f"{number:02}.jsonl", records(round(10 * share), 10, number))
    return folder / "*.jsonl"


def records(bad: int, count: int = 10, seed: int = 0) -> list[dict[str, str]]:
    """The first ones have no text."""
    names = ["body"] * bad + ["text"] * (count - bad)
    return [{name: f"text {n:03} of file {seed:03}, some words"} for n, name in enumerate(names)]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    windows(monkeypatch, WINDOW)
    streams = {"web": documents(tmp_path / "data" / "*.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams, max_bad=None)


def done_units(folder: Path) -> int:
    return len([n for n in files(folder) if re.fullmatch(r".*/\.mdsmix/.*\.unit", n)])


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_source_that_is_bad_from_the_beginning_is_not_gone_through(
    recipe: Path, tmp_path: Path, workers: int
) -> None:
    """The same sentence whoever works; what it names can be read."""
    source(tmp_path / "data", [1.0] * 40)
    answer = mdsmix("convert", recipe, "--workers", workers)
    published = tmp_path / "out" / "web" / "train"
    assert answer.code == 5
    assert said(answer) == (
        "error: stream web: 30 of 30 records are bad (30 missing_field) in the first 3 of 40 work units, and max_bad "
        "is 10%, so the others were not waited for; nothing new is published, finished units are kept. "
        "The recipe reads text; a bad record of data/00.jsonl has the fields body. "
        f"They lie in {published}/quarantine (mdsmix quarantine shows them): mend the source, or raise max_bad (1.0 allows any number)."
    )
    assert not (published / "index.json").exists()
    assert 3 <= done_units(tmp_path / "out") < 3 + 4 * workers
    bad = quarantined(published)
    assert [(b["file"], b["line"]) for b in sorted(bad, key=lambda b: (b["file"], b["line"]))] == [
        (f"data/{n:02}.jsonl", line) for n in range(3) for line in range(1, 11)
    ]


def said(answer: Answer) -> str:
    (error,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    return error


def test_the_same_command_says_the_same_without_doing_more(recipe: Path, tmp_path: Path) -> None:
    source(tmp_path / "data", [1.0] * 12)
    first = mdsmix("convert", recipe, "--workers", 1)
    done = done_units(tmp_path / "out")
    again = mdsmix("convert", recipe, "--workers", 1)
    assert said(again) == said(first)
    assert done_units(tmp_path / "out") == done


def test_lines_are_those_of_the_file_where_a_unit_begins_inside(
    recipe: Path, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "data" / "a.jsonl", records(100, 100))
    with pytest.raises(TooManyBadRecords, match="the first 3 of "):
        run_recipe(recipe)
    lines = sorted(b["line"] for b in quarantined(tmp_path / "out" / "web" / "train"))
    assert lines == [*range(1, len(lines) + 1)]


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ([1, 1, 1, *[0.0] * 9], "in the first 3 of 12 work units"),
        (
            [1, 1, 0.7, *[1.0] * 9],
            "117 of 120 records are bad (117 missing_field), more than max_bad 10%",
        ),
        (
            [1, 1, 0.6, *[0.0] * 9],
            "26 of 120 records are bad (26 missing_field), more than max_bad 10%",
        ),
        ([0.3] * 12, "36 of 120 records"),
        ([0.0] * 3 + [1.0] * 3, "30 of 60 records"),
    ],
)
def test_else_the_stream_is_gone_through_for_as_long_as_it_may_be_published(
    recipe: Path, tmp_path: Path, shares: list[float], verdict: str
) -> None:
    """90 % of the first three units is not nearly all, and the beginning of a file is not the file."""
    source(tmp_path / "data", shares)
    with pytest.raises(TooManyBadRecords, match=re.escape(verdict)):
        run_recipe(recipe)


def test_a_bad_beginning_of_a_good_stream_is_published(recipe: Path, tmp_path: Path) -> None:
    source(tmp_path / "data", [0.9, 0.9, 0.9, *[0.0] * 27])
    (outcome,) = run_recipe(recipe)
    assert (outcome.manifest.records.bad, outcome.manifest.records.read) == (27, 300)


@pytest.mark.parametrize("most", ["1.0", "100%"])
def test_a_recipe_may_allow_any_number(recipe: Path, tmp_path: Path, most: str) -> None:
    source(tmp_path / "data", [1.0] * 5 + [0.0])
    (outcome,) = run_recipe(recipe, f"max_bad={most}")
    assert outcome.manifest.records.bad == 50


def test_a_recipe_that_allows_95_percent_is_not_stopped_at_92(recipe: Path, tmp_path: Path) -> None:
    for number in range(6):
        write_jsonl(tmp_path / "data" / f"{number}.jsonl", records(92, 100, number))
    with pytest.MonkeyPatch.context() as patch:
        windows(patch, 6000)
        (outcome,) = run_recipe(recipe, "max_bad=95%")
    assert outcome.manifest.records.bad == 6 * 92


def test_without_a_word_in_the_recipe_a_tenth_may_be_bad(recipe: Path, tmp_path: Path) -> None:
    source(tmp_path / "data", [0.1] * 5)
    assert run_recipe(recipe)[0].manifest.records.bad == 5
    write_jsonl(tmp_path / "data" / "04.jsonl", records(2))
    with pytest.raises(
        TooManyBadRecords, match=r"6 of 50 records are bad .*, more than max_bad 10%"
    ):
        run_recipe(recipe)


@pytest.mark.parametrize("percent", range(101))
def test_a_share_of_exactly_max_bad_is_not_more(
    tmp_path: Path, tokenizer_folder: Path, percent: int
) -> None:
    """As floats 0.29 * 100 is less than 29, and seven more are."""
    for text in (f"{percent}%", repr(percent / 100)):
        job = make(tmp_path, tokenizer_folder, f"max_bad={text}")
        refuse_too_many_bad(job, Records(read=100, quarantined={"not_json": percent}))
        with pytest.raises(TooManyBadRecords):
            refuse_too_many_bad(job, Records(read=100, quarantined={"not_json": percent + 1}))


def make(folder: Path, tokenizer_folder: Path, *overrides: str) -> Any:
    streams = {"web": documents(folder / "*.jsonl")}
    recipe = load_recipe(
        write_recipe(folder, tokenizer_folder, streams=streams, max_bad=None), overrides
    )
    return make_job(recipe, recipe.sourced[0], open_tokenizer(recipe.tokenizer), None)

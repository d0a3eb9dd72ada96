"""What stands at the target is replaced by a new version of itself, and by nothing else unless the user says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mdsmix.convert.dry_run import describe
from mdsmix.convert.planning import Options
from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from tests.converting import (
    documents,
    files,
    list_in_parts,
    manifest_of,
    run_recipe,
    write_jsonl,
    write_recipe,
)
from tests.published import CONCAT, TOKEN_ROW, publish


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    for name in ("a", "b"):
        texts = [f"{name} {n} a text of some words" + "!" * (name == "b") for n in range(9)]
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


def refused(recipe: Path, *overrides: str, match: str) -> None:
    """The run is refused in a sentence, changes nothing, and `--reencode` does it all the same."""
    published = recipe.parent / "out" / "web" / "train"
    before = files(published)
    with pytest.raises(RecipeError, match=match):
        run_recipe(recipe, *overrides)
    assert files(published) == before
    run_recipe(recipe, *overrides, reencode=True)
    assert files(published)["index.json"] != before["index.json"]
    assert run_recipe(recipe, *overrides)[0].state == "up to date"


def test_what_is_another_stream_is_refused(recipe: Path) -> None:
    """One that mdsmix did not make; other columns, with how much is to be done again; none of the sources of before."""
    publish(recipe.parent / "out" / "web", CONCAT, [TOKEN_ROW])
    refused(recipe, match="stream web: .*/web/train holds a stream without an mdsmix manifest")
    total = manifest_of(recipe.parent / "out" / "web" / "train").totals.tokens
    columns = "train_loader.name=finetuning"
    refused(
        recipe,
        columns,
        match=rf"for the text loader with the columns tokens; the recipe now wants input_ids, labels "
        rf"for the finetuning loader: all 9 records, {total} tokens, .* pass --reencode",
    )
    other = f"streams.web.source.path={recipe.parent / 'b.jsonl'}"
    none = r"made of a\.jsonl, none of which is among its sources now \(b\.jsonl\)"
    refused(recipe, columns, other, match=none)


@pytest.mark.parametrize(
    "wider", ["[{0}/a.jsonl,{0}/b/b.jsonl]", "[{0}/a.jsonl,{0}/b/*.jsonl]", "{0}/**/*.jsonl"]
)
def test_one_more_file_or_a_wider_pattern_is_a_new_version(recipe: Path, wider: str) -> None:
    """And of what was there before nothing is done again. Another layout with the same columns is one too."""
    (recipe.parent / "b").mkdir()
    run_recipe(recipe)
    (outcome,) = run_recipe(recipe, "streams.web.layout=document")
    assert outcome.manifest.totals.samples == 9
    (recipe.parent / "b.jsonl").rename(recipe.parent / "b" / "b.jsonl")
    path = f"streams.web.source.path={wider.format(recipe.parent)}"
    (outcome,) = run_recipe(recipe, path, "streams.web.layout=document")
    assert outcome.manifest.records.read == 18
    assert len(outcome.manifest.sources) == 2


def test_a_manifest_without_an_index_is_an_interrupted_publication(recipe: Path) -> None:
    run_recipe(recipe)
    published = recipe.parent / "out" / "web" / "train"
    before = files(published)
    (published / "index.json").unlink()
    run_recipe(recipe)
    assert files(published) == before


def test_the_quarantine_is_no_source(recipe: Path, tmp_path: Path) -> None:
    """It would grow with every run: what is set aside there is no document."""
    (tmp_path / "a.jsonl").write_text("not json\n" + (tmp_path / "a.jsonl").read_text())
    everything = f"streams.web.source.path={tmp_path}/**/*.jsonl*"
    run_recipe(recipe, everything)
    for settings in ({}, {"limit": 3}, {"reencode": True}):
        with pytest.raises(
            RecipeError, match=r"finds files in .*/web/train/quarantine, .*narrow the pattern"
        ):
            run_recipe(recipe, everything, **settings)


def vanishing(tmp_path: Path, tokenizer_folder: Path, kept: int, gone: int) -> Path:
    """A recipe over a folder with two files of records of one length, whose second has vanished since it was published."""
    for name, count in (("a", kept), ("b", gone)):
        texts = [f"{name} {n:04} a text of some words" for n in range(count)]
        write_jsonl(tmp_path / "g" / f"{name}.jsonl", [{"text": text} for text in texts])
    streams = {"g": documents(tmp_path / "g" / "*.jsonl")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    run_recipe(recipe)
    (tmp_path / "g" / "b.jsonl").rename(tmp_path / "b.jsonl")
    return recipe


def test_a_source_file_that_has_vanished_is_told_up_to_a_tenth_of_the_stream(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe = vanishing(tmp_path, tokenizer_folder, kept=95, gone=5)
    words = "g/b.jsonl is no longer among its sources: about 5 of the 100 records published, 5.0% of their bytes"
    assert words in "".join(describe(open_recipe(recipe), Options()))
    (outcome,) = run_recipe(recipe)
    assert outcome.manifest.records.read == 95
    assert [note for note in outcome.notes if note.startswith("WARNING: ") and words in note]
    assert not any("no longer" in note for note in run_recipe(recipe)[0].notes)


def test_more_than_a_tenth_that_has_vanished_is_refused_as_other_sources_are(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe = vanishing(tmp_path, tokenizer_folder, kept=30, gone=300)
    published = tmp_path / "out" / "g" / "train"
    before = files(published)
    refusal = (
        r"stream g: g/b.jsonl is no longer among its sources: about 300 of the 330 "
        r"records published, 90.9% of their bytes; bring back what is gone, or pass --reencode to replace .*/g/train by a stream without it"
    )
    said = "\n".join(describe(open_recipe(recipe), Options()))
    assert re.search(f"it would be refused: {refusal}", said)
    with pytest.raises(RecipeError, match=refusal) as refused:
        run_recipe(recipe)
    assert refused.value.exit_code == 2
    assert before.items() <= files(published).items()
    assert run_recipe(recipe, reencode=True)[0].manifest.records.read == 30


@pytest.mark.parametrize("is_listed_in_parts", [False, True])
def test_a_file_that_was_moved_within_the_source_has_not_vanished(
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_listed_in_parts: bool,
) -> None:
    if is_listed_in_parts:
        list_in_parts(monkeypatch)
    recipe = vanishing(tmp_path, tokenizer_folder, kept=30, gone=300)
    with pytest.raises(RecipeError, match="no longer among"):
        run_recipe(recipe)
    (tmp_path / "b.jsonl").rename(tmp_path / "g" / "c.jsonl")
    (outcome,) = run_recipe(recipe)
    assert outcome.manifest.records.read == 330
    assert not any("no longer" in note for note in outcome.notes)

"""What an earlier commit of mdsmix made is told in one sentence, and made anew:
tests/golden/earlier is of b9d3ed4.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.lock import LoaderLock, parse_lock
from mdsmix.shards.published import find_published
from mdsmix.storage import locate
from tests.converting import documents, mdsmix, read_files, read_samples, run_ok, write_recipe

GOLDEN = Path(__file__).parent / "golden" / "earlier"
EARLIER = "an earlier commit of mdsmix"


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    lines = [json.dumps({"text": f"a document, number {n}"}) for n in range(9)]
    (tmp_path / "web.jsonl").write_text("\n".join([*lines, "not json"]) + "\n")
    streams = {"web": documents(tmp_path / "web.jsonl", layout="document")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


def lay(recipe: Path, name: str) -> Path:
    """Puts a golden target where the recipe publishes; returns the split's folder."""
    shutil.copytree(GOLDEN / name / "web", recipe.parent / "out" / "web")
    return recipe.parent / "out" / "web" / "train"


def test_a_stream_of_an_earlier_commit_is_told_in_one_sentence(recipe: Path) -> None:
    split = lay(recipe, "published")
    before = read_files(split)
    for command in ("verify", "check", "inspect", "repair"):
        answer = mdsmix(command, split, *(["--recipe", recipe] if command == "repair" else []))
        assert answer.code == 4
        (line,) = answer.err.splitlines()
        assert EARLIER in line
        assert "mdsmix convert" in line
    assert read_files(split) == before


@pytest.mark.parametrize("way", [[], ["publish=versioned"], ["--finish"]])
def test_a_conversion_makes_it_anew_and_says_so(recipe: Path, way: list[str]) -> None:
    split = lay(recipe, "array" if way == ["--finish"] else "published")
    assert EARLIER in mdsmix("convert", recipe, "--dry-run").out
    answer = run_ok("convert", recipe, *way)
    assert answer.err.count(EARLIER) == 1
    assert f"at {split}" in answer.err
    assert len(read_samples(find_published(locate(split)).url)) == 9
    run_ok("verify", split.parent)
    again = run_ok("convert", recipe, *way if way != ["--finish"] else [])
    assert "up to date" in again.out
    assert EARLIER not in again.out + again.err


def test_a_lock_beside_a_yaml_and_one_in_a_checkpoint_are_told(recipe: Path) -> None:
    rendered = recipe.parent / "train.yaml"
    run_ok("convert", recipe)
    run_ok("render-yaml", recipe, "-o", rendered)
    shutil.copy(GOLDEN / "train.yaml.mix.lock", f"{rendered}.mix.lock")
    answer = mdsmix("check", "--lock", rendered)
    assert (answer.code, EARLIER in answer.err) == (2, True)
    assert "render the YAML again" in answer.err
    state = json.loads((GOLDEN / "state.json").read_text())
    with pytest.raises(RecipeError, match=EARLIER):
        parse_lock(LoaderLock, state["mdsmix_lock"], "the lock", "use the one that wrote it")

"""Streams and locks of an earlier commit of mdsmix are refused in one sentence, and convert makes
the streams again. tests/golden/earlier is of commit b9d3ed4.
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


def copy_target(recipe: Path, name: str) -> Path:
    """Copy a golden target to the place where the recipe publishes. Return the split's folder."""
    shutil.copytree(GOLDEN / name / "web", recipe.parent / "out" / "web")
    return recipe.parent / "out" / "web" / "train"


def test_a_stream_of_an_earlier_commit_is_refused_in_one_sentence(recipe: Path) -> None:
    split = copy_target(recipe, "published")
    before = read_files(split)
    for command in ("verify", "check", "inspect", "repair"):
        options = ["--recipe", recipe] if command == "repair" else []
        answer = mdsmix(command, split, *options)
        assert answer.code == 4
        (line,) = answer.err.splitlines()
        assert EARLIER in line
        assert "mdsmix convert" in line
    assert read_files(split) == before


@pytest.mark.parametrize("options", [[], ["publish=versioned"], ["--finish"]])
def test_a_conversion_makes_it_again_with_a_message(recipe: Path, options: list[str]) -> None:
    is_finish = options == ["--finish"]
    split = copy_target(recipe, "array" if is_finish else "published")
    assert EARLIER in mdsmix("convert", recipe, "--dry-run").out
    answer = run_ok("convert", recipe, *options)
    assert answer.err.count(EARLIER) == 1
    assert f"at {split}" in answer.err
    assert len(read_samples(find_published(locate(split)).url)) == 9
    run_ok("verify", split.parent)
    again = run_ok("convert", recipe, *([] if is_finish else options))
    assert "up to date" in again.out
    assert EARLIER not in again.out + again.err


def test_locks_of_an_earlier_commit_are_refused(recipe: Path) -> None:
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

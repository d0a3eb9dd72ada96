"""What a recipe's paths name, each file once, and what is said when they name nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdsmix.errors import RecipeError
from mdsmix.sources import find


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"1\n")


def names(paths: list[str], base: Path) -> list[str]:
    return [file.name for file in find(paths, base)]


def test_names_are_relative_to_the_recipe_so_that_both_may_be_moved_together(
    tmp_path: Path,
) -> None:
    for folder in ("here", "there [1]"):
        make(tmp_path / folder, "data/a.jsonl", "data/sub/b.jsonl.gz")
        expected = ["data/a.jsonl", "data/sub/b.jsonl.gz"]
        assert names(["data/**/*.jsonl*"], tmp_path / folder) == expected
        assert names([f"{tmp_path}/{folder}/data/a.jsonl"], tmp_path / folder) == expected[:1]
        (tmp_path / folder / "recipes").mkdir()
        assert names(["../data/a.jsonl"], tmp_path / folder / "recipes") == ["../data/a.jsonl"]


def test_a_file_that_two_paths_name_is_found_once(tmp_path: Path) -> None:
    make(tmp_path, "data/a.jsonl", "data/b.jsonl")
    paths = ["data/b.jsonl", "data/*.jsonl", "**/*.jsonl", f"{tmp_path}/data/../data/a.jsonl"]
    assert names(paths, tmp_path) == ["data/b.jsonl", "data/a.jsonl"]


def test_no_entry_has_a_part_in_the_names_of_another(tmp_path: Path) -> None:
    make(tmp_path, "a/x.jsonl", "b/x.jsonl", "c/b/x.jsonl", "c/x~1/x.jsonl", "b~1/x.jsonl")
    paths = ["a/*.jsonl", "b/x.jsonl", "c/b/x.jsonl", "c/x~1/*", "b~1/x.jsonl"]
    alone = [name for path in paths for name in names([path], tmp_path)]
    assert names(paths, tmp_path) == alone
    assert len(set(alone)) == 5
    assert sorted(names(["**/*.jsonl"], tmp_path)) == sorted(alone)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("data/*.jsonl", ["matches no file: there is none at /", "/data/*.jsonl"]),
        ("data/none.jsonl", ["matches no file: there is none at /", "/data/none.jsonl"]),
        ("data", ["is a folder", "data/*.jsonl"]),
        ("data/", ["is a folder", "data/*.jsonl"]),
        ("other/*.xlsx", ["a.xlsx has no suffix that mdsmix reads", ".jsonl", "also with .gz"]),
        ("other/*.gz", ["unpack it"]),
        ("other/*.jl", ["say what it is by source.format, rename"]),
        ("ftp://host/x.jsonl", ["cannot be opened"]),
    ],
)
def test_a_path_that_names_no_source_says_why(
    tmp_path: Path, path: str, expected: list[str]
) -> None:
    make(tmp_path, "data/a.csv", "data/b.csv", "data/c.csv", "data/d.csv")
    make(tmp_path, "other/a.xlsx", "other/a.zip.gz", "other/a.jl")
    with pytest.raises(RecipeError) as refusal:
        find([path], tmp_path)
    for words in expected:
        assert words in str(refusal.value)


def test_a_name_that_no_manifest_could_hold_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "\udcff.jsonl")
    with pytest.raises(RecipeError, match="not valid UTF-8"):
        find(["*"], tmp_path)

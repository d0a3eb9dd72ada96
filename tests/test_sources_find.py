"""What a recipe's paths name, each file once, and what is said when they name nothing."""

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


def test_a_file_is_found_once_and_no_entry_has_a_part_in_its_name(tmp_path: Path) -> None:
    make(tmp_path, "a/x.jsonl", "a/y.jsonl", "b/x.jsonl", "c/x~1/x.jsonl")
    paths = ["a/y.jsonl", "a/*.jsonl", "b/x.jsonl", "c/x~1/*", f"{tmp_path}/a/../a/x.jsonl"]
    found = names(paths, tmp_path)
    assert found == ["a/y.jsonl", "a/x.jsonl", "b/x.jsonl", "c/x~1/x.jsonl"]
    assert [*dict.fromkeys(n for path in paths for n in names([path], tmp_path))] == found
    assert sorted(names(["**/*.jsonl"], tmp_path)) == sorted(found)


REFUSED = {
    "data/*.jsonl": ["matches no file: there is none at /", "/data/*.jsonl"],
    "data": ["is a folder", "data/*.jsonl"],
    "data/": ["is a folder", "data/*.jsonl"],
    "other/*.xlsx": ["a.xlsx has no suffix that mdsmix reads", ".jsonl", "also with .gz"],
    "other/*.gz": ["unpack it"],
    "other/*.jl": ["say what it is by source.format, rename"],
    "ftp://host/x.jsonl": ["cannot be opened"],
    "\udcff*": ["not valid UTF-8"],
}


def test_a_path_that_names_no_source_says_why(tmp_path: Path) -> None:
    make(tmp_path, "data/a.csv", "other/a.xlsx", "other/a.zip.gz", "other/a.jl", "\udcff.jsonl")
    for path, expected in REFUSED.items():
        with pytest.raises(RecipeError) as refusal:
            find([path], tmp_path)
        assert all(words in str(refusal.value) for words in expected), path

"""Which files are one stream, what it is called, and by which pattern the recipe finds just these."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.init.data_files import find_data
from mdsmix.init.drafts import name_apart, paths_of, sort_out
from mdsmix.recipe.rules import STREAM_NAME
from mdsmix.sources import SourceFile
from mdsmix.storage import Stat, locate
from tests.converting import write_jsonl

TEXT, PAIR = {"text": "some words"}, {"prompt": "a", "response": "b"}


def streams(
    folder: Path, files: dict[str, Any]
) -> dict[str, tuple[list[str], str | None, list[str]]]:
    """Stream -> its paths, split and fields, of a folder with these files of one record each."""
    for name, record in files.items():
        write_jsonl(folder / name, [record])
    said: list[Any] = []
    drafts = sort_out(find_data([str(folder)], folder, said), said)
    assert not said
    name_apart(drafts)
    return {
        draft.name: (draft.source["path"], draft.keys.get("split"), list(draft.guess.fields))
        for draft in drafts
    }


def test_names_that_differ_in_numbers_are_one_stream(tmp_path: Path) -> None:
    files = {f"web/part-{n:04}.jsonl": TEXT for n in range(12)} | {"web/faq.jsonl": PAIR}
    assert streams(tmp_path, files) == {
        "web": (["web/part-*.jsonl"], None, ["text"]),
        "faq": (["web/faq.jsonl"], None, ["prompt", "response"]),
    }
    others = {"a-1.jsonl": TEXT, "a-2.jsonl": TEXT, "a-x.jsonl": PAIR}
    found = streams(tmp_path / "others", others)
    assert found["a"][0] == ["a-1.jsonl", "a-2.jsonl"], "a-*.jsonl would find the pairs too"


def test_a_run_whose_ends_differ_is_taken_apart(tmp_path: Path) -> None:
    files = {"c-1.jsonl": TEXT, "c-2.jsonl": PAIR, "c-3.jsonl": PAIR, "c-4.jsonl": PAIR}
    found = streams(tmp_path, files)
    assert sorted(path for paths, _, _ in found.values() for path in paths) == sorted(files)
    assert {fields[0] for _, _, fields in found.values()} == {"text", "prompt"}


def test_many_alike_are_one_stream_and_a_few_are_several(tmp_path: Path) -> None:
    few = {f"few/{word}.jsonl": TEXT for word in ("news", "law", "code")}
    many = {f"many/{word}.jsonl": TEXT for word in "abcdefghijk"}
    found = streams(tmp_path, few | many)
    assert found.keys() == {"news", "law", "code", "many"}
    assert found["many"][0] == ["many/*.jsonl"]


def test_the_words_of_a_split_are_no_part_of_a_name(tmp_path: Path) -> None:
    """Where all is a test, it is trained."""
    files = ("chat/train.jsonl", "chat/test.jsonl", "valid_qa.jsonl", "protest.jsonl")
    found = streams(tmp_path / "some", dict.fromkeys(files, PAIR))
    splits = {"chat": None, "chat-test": "test", "qa-validation": "validation"}
    assert {name: split for name, (_, split, _) in found.items()} == splits | {"protest": None}
    assert streams(tmp_path / "all", {"test.jsonl": PAIR})["data"][1] is None


def test_names_are_apart_and_fit_a_recipe(tmp_path: Path) -> None:
    files = {"a/x.jsonl": TEXT, "b/x.jsonl": TEXT, "c/数据.jsonl": TEXT, "1.jsonl": TEXT}
    found = streams(tmp_path, files)
    assert len(found) == len(files)
    assert {"x", "x-2"} <= found.keys()
    assert all(STREAM_NAME.fullmatch(name) for name in found)


NAMES = st.lists(st.from_regex(r"[ab\[\]*?]{1,2}[0-9]{0,2}\.jsonl", fullmatch=True), unique=True, min_size=2, max_size=6)  # fmt: skip


@settings(max_examples=40)
@given(NAMES, st.integers(1, 6))
def test_the_paths_of_files_find_them_and_no_other_that_is_known(
    names: list[str], count: int
) -> None:
    known = [SourceFile(location=locate(name), stat=Stat(1, ""), name=name) for name in names]
    own = known[:count]
    for folder in ("", "in/"):
        files = [SourceFile(location=f.location, stat=f.stat, name=folder + f.name) for f in known]
        paths = paths_of(files[: len(own)], files)
        found = {f.name for f in files if any(fnmatchcase(f.name, path) for path in paths)}
        assert found == {f.name for f in files[: len(own)]}

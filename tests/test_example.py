"""`mdsmix example`: the texts are those of the library, the folder is never one with other files,
and its recipe may be mixed as it is. tests/with_torch/test_starters.py draws batches from it, and
tests/foundry trains it.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from mdsmix.example import example, library_texts
from tests.converting import mdsmix, read_files, run_ok
from tests.small_disk import SmallDisk, run_in_process


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "first try"
    run_ok("example", folder)
    return folder


def read_lines(path: Path) -> list[Any]:
    """The records of the lines that are JSON."""
    records = []
    for line in path.read_text("utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            records.append(None)
    return records


def test_answers_are_the_docstrings_of_the_objects(written: Path) -> None:
    """The oracle is Python's own `inspect` of modules that are imported here anyway."""
    compared = 0
    for chat in read_lines(written / "chats.jsonl"):
        messages = [m for m in chat["messages"] if m["role"] != "system"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            words = question["content"].split()
            module, _, name = words[2].rpartition(".")
            value = getattr(sys.modules.get(module), name, None)
            if words[0] == "What" and inspect.isfunction(value) and value.__doc__:
                # Under Python 3.12 cleandoc leaves the white space at the end of the last line.
                assert answer["content"] == inspect.cleandoc(value.__doc__).strip().split("\n\n")[0]
                compared += 1
    assert compared > 10


def test_one_line_is_broken_and_texts_differ(written: Path) -> None:
    articles = read_lines(written / "articles.jsonl")
    (broken,) = (number for number, record in enumerate(articles, 1) if record is None)
    assert broken == example.BROKEN_LINE
    texts = [record["text"] for record in articles if record]
    assert len({*texts}) == len(texts) > 500


def test_the_same_files_are_written_again(written: Path, tmp_path: Path) -> None:
    run_ok("example", tmp_path / "again")
    assert read_files(tmp_path / "again") == read_files(written)


def test_the_next_commands_are_printed_and_run(tmp_path: Path) -> None:
    """As they are printed, a folder with a space in its name included."""
    folder = tmp_path / "my example"
    told = json.loads(run_ok("example", folder, "--json").out)
    assert told["folder"] == str(folder)
    commands = [shlex.split(command) for command in told["next_commands"]]
    assert [words[:2] for words in commands] == [
        ["mdsmix", "convert"],
        ["mdsmix", "check"],
        ["mdsmix", "render-yaml"],
        ["llmfoundry", "train"],
    ]
    for words in commands[:-1]:
        run_ok(*words[1:])
    config = yaml.safe_load((folder / "foundry.yaml").read_text())
    assert list(config["train_loader"]["dataset"]["streams"]) == ["articles", "chats"]
    assert [entry["label"] for entry in config["eval_loader"]] == ["chats-eval"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    assert config["model"]["vocab_size"] >= tokenizer.get_vocab_size()
    assert config["tokenizer"]["name"] == os.path.realpath(folder / "tokenizer")


@pytest.mark.parametrize("kind", ["file", "full folder", "bucket"])
def test_a_place_that_is_not_free_is_refused_and_kept(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("mine")
    elif kind == "full folder":
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    before = read_files(tmp_path)
    answer = mdsmix("example", "s3://bucket/place" if kind == "bucket" else place)
    assert (answer.code, answer.out) == (2, "")
    reason = {
        "file": "is a file",
        "full folder": "is not empty (notes.txt)",
        "bucket": "is not a local folder",
    }[kind]
    assert reason in answer.err
    assert answer.err.count("\n") == 1
    assert read_files(tmp_path) == before


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run_ok("example", tmp_path / "empty")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    answer = mdsmix("example", tmp_path / "file" / "below")
    assert answer.code == 4
    assert "cannot write the example into" in answer.err


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_no_half_of_an_example(tmp_path: Path, exists: bool) -> None:
    """So the same command can be run again when there is space. A folder that was there stays."""

    def write() -> None:
        disk = SmallDisk(tmp_path / "disk", 200_000)
        folder = tmp_path / "disk/a/b"
        if exists:
            folder.mkdir(parents=True)
        answer = mdsmix("example", folder)
        assert answer.code == 4
        assert "cannot write the example into" in answer.err
        left = [path.relative_to(tmp_path / "disk") for path in (tmp_path / "disk").rglob("*")]
        assert sorted(map(str, left)) == (["a", "a/b"] if exists else [])
        disk.grow()
        run_ok("example", folder)

    run_in_process(write)


def test_a_python_without_its_sources_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_texts.sysconfig, "get_path", lambda name: str(tmp_path))
    answer = mdsmix("example", tmp_path / "place")
    assert answer.code == 4
    assert "has only 0 of them" in answer.err
    assert not (tmp_path / "place").exists()

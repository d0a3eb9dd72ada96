"""A record that is nothing but the list of its messages, as nanochat writes them, is read as the
object with these messages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdsmix.shapes import SHAPES
from tests.converting import (
    chats,
    done,
    manifest_of,
    pairs,
    run_recipe,
    token_rows,
    write_jsonl,
    write_recipe,
)

TALKS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}]
    for n in range(6)
]


def as_sharegpt(talk: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[message["role"]], "value": message["content"]} for message in talk]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_rows_are_those_of_objects(tmp_path: Path, tokenizer_folder: Path, suffix: str) -> None:
    kinds: dict[str, tuple[str, list[Any]]] = {
        "messages": ("messages", TALKS),
        "shared": ("conversations", [*map(as_sharegpt, TALKS)]),
    }
    streams = dict[str, Any]()
    for name, (field, talks) in kinds.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [{field: talk} for talk in talks])
        bare = tmp_path / f"{name}-bare.{suffix}"
        if suffix == "json":
            bare.write_text(json.dumps(talks))
        else:
            write_jsonl(bare, talks)
        streams[name] = pairs(f"{name}.jsonl", field)
        streams[f"{name}-bare"] = pairs(bare.name, field)
    run_recipe(write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams))
    for name in kinds:
        split, bare = (tmp_path / "out" / each / "train" for each in (name, f"{name}-bare"))
        assert not manifest_of(bare).records.bad
        rows = token_rows(bare)
        assert len(rows) == len(TALKS)
        assert rows == token_rows(split)


def test_init_knows_them(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TALKS)
    made = tmp_path / "made.yaml"
    done("init", tmp_path / "a.jsonl", "--tokenizer", tokenizer_folder, "-o", made)
    assert "messages: messages" in made.read_text()
    done("convert", made)


def test_a_list_of_records_is_a_whole_file(tmp_path: Path, tokenizer_folder: Path) -> None:
    lines: list[Any] = [[{"messages": talk} for talk in TALKS], [], ["a"], [*TALKS[0], 3], TALKS[0]]
    read = [SHAPES["messages"].read(line, {"messages": "m"}) for line in lines]
    assert read[:4] == ["json_array", "not_an_object", "not_an_object", "json_array"]
    assert read[4] == SHAPES["messages"].read({"m": TALKS[0]}, {"messages": "m"})
    write_jsonl(tmp_path / "a.jsonl", lines)
    run_recipe(write_recipe(tmp_path, tokenizer_folder, streams={"a": chats("a.jsonl")}))
    records = manifest_of(tmp_path / "out" / "a" / "train").records
    assert records.quarantined == {"json_array": 2, "not_an_object": 2}

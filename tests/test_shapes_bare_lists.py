"""A record that is a bare list of messages, as nanochat writes them, is read as an object with
these messages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdsmix.shapes import SHAPES
from tests.converting import (
    chats,
    manifest_of,
    pairs,
    read_token_rows,
    run_ok,
    run_recipe,
    write_jsonl,
    write_recipe,
)

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}]
    for n in range(6)
]


def as_sharegpt(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[message["role"]], "value": message["content"]} for message in messages]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_bare_lists_give_the_same_rows_as_objects(
    tmp_path: Path, tokenizer_folder: Path, suffix: str
) -> None:
    kinds: dict[str, tuple[str, list[Any]]] = {
        "messages": ("messages", CONVERSATIONS),
        "shared": ("conversations", [*map(as_sharegpt, CONVERSATIONS)]),
    }
    streams = dict[str, Any]()
    for name, (field, conversations) in kinds.items():
        write_jsonl(
            tmp_path / f"{name}.jsonl", [{field: conversation} for conversation in conversations]
        )
        bare = tmp_path / f"{name}-bare.{suffix}"
        if suffix == "json":
            bare.write_text(json.dumps(conversations))
        else:
            write_jsonl(bare, conversations)
        streams[name] = pairs(f"{name}.jsonl", field)
        streams[f"{name}-bare"] = pairs(bare.name, field)
    run_recipe(write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams))
    for name in kinds:
        split = tmp_path / "out" / name / "train"
        bare = tmp_path / "out" / f"{name}-bare" / "train"
        assert not manifest_of(bare).records.bad
        rows = read_token_rows(bare)
        assert len(rows) == len(CONVERSATIONS)
        assert rows == read_token_rows(split)


def test_init_recognises_bare_lists(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", CONVERSATIONS)
    recipe = tmp_path / "recipe.yaml"
    run_ok("init", tmp_path / "a.jsonl", "--tokenizer", tokenizer_folder, "-o", recipe)
    assert "messages: messages" in recipe.read_text()
    run_ok("convert", recipe)


def test_a_list_of_other_objects_is_refused_as_a_whole_file(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    lines: list[Any] = [
        [{"messages": conversation} for conversation in CONVERSATIONS],
        [],
        ["a"],
        [*CONVERSATIONS[0], 3],
        CONVERSATIONS[0],
    ]
    read = [SHAPES["messages"].read(line, {"messages": "m"}) for line in lines]
    assert read[:4] == ["json_array", "not_an_object", "not_an_object", "json_array"]
    assert read[4] == SHAPES["messages"].read({"m": CONVERSATIONS[0]}, {"messages": "m"})
    write_jsonl(tmp_path / "a.jsonl", lines)
    run_recipe(write_recipe(tmp_path, tokenizer_folder, streams={"a": chats("a.jsonl")}))
    records = manifest_of(tmp_path / "out" / "a" / "train").records
    assert records.quarantined == {"json_array": 2, "not_an_object": 2}

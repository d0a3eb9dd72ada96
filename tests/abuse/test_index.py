"""An index or a manifest from anyone: no command follows it out of its folder, believes its sizes, or chokes on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.abuse.conftest import Arena
from tests.published import CONCAT, TOKEN_ROW, edit, publish

COMMANDS = ["verify", "inspect", "gc", "check"]
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def stream(arena: Arena) -> Path:
    """40 rows in four shards, with a manifest."""
    return publish(arena.out / "web", CONCAT, [TOKEN_ROW] * 40, card={}, shards=4)


def answers(arena: Arena, stream: Path) -> dict[str, str]:
    """What every command says of the stream; none may take it for a good one."""
    train = arena.home / "train.yaml"
    streams = {"web": {"local": str(stream), "split": "train"}}
    section = {"name": "text", "dataset": {"streams": streams, "max_seq_len": 8, "shuffle": True}}
    train.write_text(json.dumps({"max_seq_len": 8, "train_loader": section}))
    return {
        name: arena.refused(name, train if name == "check" else stream / "train")
        for name in COMMANDS
    }


def rewritten(stream: Path, change: Change, name: str = "index.json") -> None:
    edit(stream / "train" / name, change)


def set_in(*keys: Any) -> Change:
    """Puts the last key's value there: set_in("raw_data", "bytes", 1) in the first shard."""

    def change(tree: dict[str, Any]) -> None:
        *path, last, value = keys
        node = tree["shards"][0]
        for key in path:
            node = node[key]
        node[last] = value

    return change


SECRET = "precious.jsonl"
HOSTILE: dict[str, Change] = {
    "a name that climbs": set_in("raw_data", "basename", f"../../../../{SECRET}"),
    "an absolute name": set_in("raw_data", "basename", "/etc/passwd"),
    "a name of two parts": set_in("raw_data", "basename", "a/b.mds"),
    "a name with a NUL": set_in("raw_data", "basename", "a\0b"),
    "no name": set_in("raw_data", "basename", ""),
    "the folder itself": set_in("raw_data", "basename", "."),
    "a packed file that climbs": set_in("zip_data", {"basename": "../x", "bytes": 1, "hashes": {}}),
    "a size below zero": set_in("raw_data", "bytes", -1),
    "a size of 4 GiB": set_in("raw_data", "bytes", 1 << 32),
    "a size that is a fraction": set_in("raw_data", "bytes", 1.5),
    "a size that is no number": set_in("raw_data", "bytes", float("nan")),
    "a size of a million digits": set_in("raw_data", "bytes", 10**4000),
    "samples below zero": set_in("samples", -1),
    "samples without end": set_in("samples", float("inf")),
    "samples that are a yes": set_in("samples", True),
    "fewer columns than encodings": set_in("column_names", []),
    "fewer sizes than columns": set_in("column_sizes", []),
    "columns of another type": set_in("column_names", [7]),
    "no shards": lambda tree: {"version": 2},
    "a shard that is none": lambda tree: {"version": 2, "shards": [None]},
    "nested without end": lambda tree: {"version": 2, "shards": json.loads("[" * 900 + "]" * 900)},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_index_that_no_writer_writes_is_refused_by_every_command(
    arena: Arena, stream: Path, change: Change
) -> None:
    rewritten(stream, change)
    for name, sentence in answers(arena, stream).items():
        assert "index.json" in sentence or "web" in sentence, name


LYING: dict[str, Change] = {
    "larger": set_in("raw_data", "bytes", (1 << 32) - 1),
    "smaller": set_in("raw_data", "bytes", 10),
    "more samples": set_in("samples", 1 << 31),
    "fewer samples": set_in("samples", 1),
    "no samples": set_in("samples", 0),
    "another hash": set_in("raw_data", "hashes", {"xxh128": "0" * 32}),
    "another width": set_in("column_sizes", [1 << 31]),
    "a width below zero": set_in("column_sizes", [-16]),
    "another encoding": set_in("column_encodings", ["ndarray:float64:8"]),
    "no such encoding": set_in("column_encodings", ["ndarray:tensor:-1"]),
    "an encoding without end": set_in("column_encodings", ["ndarray:uint16:" + "9" * 3000]),
    "another file": set_in("raw_data", "basename", "shard.00001.mds"),
    "a missing file": set_in("raw_data", "basename", "nothing.mds"),
    "a hundred times": lambda tree: tree | {"shards": tree["shards"] * 100},
}


@pytest.mark.parametrize("change", LYING.values(), ids=LYING.keys())
def test_an_index_that_lies_is_found_out(arena: Arena, stream: Path, change: Change) -> None:
    rewritten(stream, change)
    assert arena.refused("verify", stream / "train")
    for name in COMMANDS[1:3]:
        arena.run(name, stream / "train")


@pytest.mark.parametrize("name", ["index.json", "mdsmix.manifest"])
def test_one_of_a_gigabyte_is_not_read(arena: Arena, stream: Path, name: str) -> None:
    with (stream / "train" / name).open("r+b") as file:
        file.truncate(1 << 30)
    for command, sentence in answers(arena, stream).items():
        assert "1,073,741,824 bytes" in sentence, command


def test_twenty_thousand_shards_are_looked_at_in_a_moment(arena: Arena, stream: Path) -> None:
    rewritten(stream, lambda tree: tree | {"shards": tree["shards"][:1] * 20_000})
    assert arena.refused("verify", stream / "train", "--quick")


MANIFEST: dict[str, Any] = {
    "totals": {"samples": -1, "tokens": 10**18},
    "records": {"read": 1, "written": 2},
    "parts": [{"key": "../../x", "shards": -4, "samples": 10**9}],
    "sources": [{"path": "../../etc/passwd", "size": -1, "hash": ""}],
    "index_hash": "../x",
    "encoding": [],
    "tokenizer": None,
    "format_version": 10**9,
}


@pytest.mark.parametrize("key", MANIFEST)
def test_a_manifest_that_lies_is_found_out(arena: Arena, stream: Path, key: str) -> None:
    rewritten(stream, lambda tree: tree | {key: MANIFEST[key]}, "mdsmix.manifest")
    for name in COMMANDS[1:3]:
        arena.run(name, stream / "train")
    answer = arena.run("verify", stream / "train")
    assert answer.code or key == "sources", "which says nothing that could be looked at"

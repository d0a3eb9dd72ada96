"""A stream from anyone: no command follows an index out of its folder, believes its sizes or chokes on it, unpacks a shard a thousandfold, or runs code that lies in one.

What of an index is refused, value by value: test_shards_files.py and test_fuzz.py. Damage: test_shards_verify.py."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.abuse.conftest import Arena
from tests.published import CONCAT, TOKEN_ROW, edit, publish

COMMANDS = ["verify", "inspect", "gc", "check"]
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def stream(arena: Arena) -> Path:
    """40 rows in four shards, with a manifest."""
    return publish(arena.out / "web", CONCAT, [TOKEN_ROW] * 40, card={}, shards=4) / "train"


def answers(arena: Arena, stream: Path) -> dict[str, str]:
    """What every command says of the stream; none may take it for a good one."""
    train = arena.home / "train.yaml"
    streams = {"web": {"local": str(stream.parent), "split": "train"}}
    section = {"name": "text", "dataset": {"streams": streams, "max_seq_len": 8, "shuffle": True}}
    train.write_text(json.dumps({"max_seq_len": 8, "train_loader": section}))
    return {name: arena.refused(name, train if name == "check" else stream) for name in COMMANDS}


def set_in(*keys: Any) -> Change:
    """Puts the last key's value into the first shard: set_in("raw_data", "bytes", 1)."""

    def change(tree: dict[str, Any]) -> None:
        *path, last, value = keys
        node = tree["shards"][0]
        for key in path:
            node = node[key]
        node[last] = value

    return change


LYING: dict[str, Change] = {
    "larger": set_in("raw_data", "bytes", (1 << 32) - 1),
    "smaller": set_in("raw_data", "bytes", 10),
    "more samples": set_in("samples", 1 << 31),
    "fewer samples": set_in("samples", 1),
    "no samples": set_in("samples", 0),
    "another hash": set_in("raw_data", "hashes", {"xxh128": "0" * 32}),
    "a width below zero": set_in("column_sizes", [-16]),
    "another encoding": set_in("column_encodings", ["ndarray:float64:8"]),
    "an encoding without end": set_in("column_encodings", ["ndarray:uint16:" + "9" * 3000]),
    "another file": set_in("raw_data", "basename", "shard.00001.mds"),
    "a missing file": set_in("raw_data", "basename", "nothing.mds"),
    "a hundred times": lambda tree: tree | {"shards": tree["shards"] * 100},
}
CARDS: dict[str, Any] = {
    "totals": {"samples": -1, "tokens": 10**18},
    "records": {"read": 1, "written": 2},
    "parts": [{"key": "../../x", "shards": -4, "samples": 10**9}],
    "sources": [{"path": "../../etc/passwd", "size": -1, "hash": ""}],
    "index_hash": "../x",
    "encoding": [],
    "tokenizer": None,
    "format_version": 10**9,
}


def test_an_index_or_a_manifest_that_lies_is_found_out(arena: Arena, stream: Path) -> None:
    cards = {key: lambda tree, key=key: tree | {key: CARDS[key]} for key in CARDS}
    for file, changes in (("index.json", LYING), ("mdsmix.manifest", cards)):
        whole = (stream / file).read_bytes()
        for name, change in changes.items():
            edit(stream / file, change)
            for command in ("inspect", "gc"):
                arena.run(command, stream)
            answer = arena.run("verify", stream)
            # Of a source nothing lies there that could be looked at.
            assert answer.code or name == "sources", name
            (stream / file).write_bytes(whole)
    edit(stream / "index.json", lambda tree: tree | {"shards": tree["shards"][:1] * 20_000})
    assert arena.refused("verify", stream, "--quick"), "in a moment"
    edit(stream / "index.json", set_in("raw_data", "basename", "../../../../precious.jsonl"))
    for name, sentence in answers(arena, stream).items():
        assert "index.json" in sentence or "web" in sentence, name


def test_one_of_a_gigabyte_is_not_read(arena: Arena, stream: Path) -> None:
    for name in ("index.json", "mdsmix.manifest"):
        whole = (stream / name).read_bytes()
        with (stream / name).open("r+b") as file:
            file.truncate(1 << 30)
        for command, sentence in answers(arena, stream).items():
            assert "1,073,741,824 bytes" in sentence, command
        (stream / name).write_bytes(whole)


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_command_unpickles(arena: Arena) -> None:
    sprung = arena.home / "sprung"
    rows = [{"tokens": pickle.dumps(Trap(sprung))}] * 9
    stream = publish(arena.out / "web", {"tokens": "pkl"}, rows)
    recipe = arena.recipe(streams={"web": {"local": str(stream)}})
    for command in ("verify", "inspect", "gc"):
        arena.run(command, stream)
    for command in ("check", "render-yaml"):
        assert arena.refused(command, recipe)
    arena.refused("mix", recipe, "--out", arena.out / "mixed")
    assert not sprung.exists()
    pickle.loads(rows[0]["tokens"])
    assert sprung.exists(), "the trap is one"


def test_a_packed_shard_is_not_unpacked_beyond_the_size_of_its_index(arena: Arena) -> None:
    folder = publish(arena.out / "web", CONCAT, [TOKEN_ROW] * 9, compression="zstd:3") / "train"
    packer = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1024)) + packer.flush()
    assert len(bomb) * 1000 < 1 << 30
    (folder / "shard.00000.mds.zstd").write_bytes(bomb)
    for said in (1 << 16, 1 << 20):

        def lie(tree: Any, said: int = said) -> None:
            tree["shards"][0]["zip_data"] |= {"bytes": len(bomb), "hashes": {}}
            tree["shards"][0]["raw_data"]["bytes"] = said

        edit(folder / "index.json", lie)
        answer = arena.run("verify", folder, "--json")
        (fault,) = json.loads(answer.out)["faults"]
        assert (answer.code, fault["file"]) == (3, "shard.00000.mds.zstd")
        assert "decompressed it is not the" in fault["problem"]
        assert "damaged" in arena.refused("inspect", folder)

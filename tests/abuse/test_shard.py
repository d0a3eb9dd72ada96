"""A shard from anyone: packed a thousandfold, or with code inside that must never run. Damage: test_shards_verify.py."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.abuse.conftest import Arena
from tests.published import CONCAT, TOKEN_ROW, publish


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def pickled(arena: Arena) -> Path:
    rows = [{"tokens": pickle.dumps(Trap(arena.home / "sprung"))}] * 9
    return publish(arena.out / "web", {"tokens": "pkl"}, rows)


def test_the_trap_is_one(arena: Arena) -> None:
    pickle.loads(pickle.dumps(Trap(arena.home / "sprung")))
    assert (arena.home / "sprung").exists()


def test_no_command_unpickles(arena: Arena, pickled: Path) -> None:
    recipe = arena.recipe(streams={"web": {"local": str(pickled)}})
    for command in ("verify", "inspect", "gc"):
        arena.run(command, pickled)
    for command in ("check", "render-yaml"):
        assert arena.refused(command, recipe)
    arena.refused("mix", recipe, "--out", arena.out / "mixed")
    assert not (arena.home / "sprung").exists()


@pytest.mark.parametrize("said", [1 << 16, 1 << 20])
def test_a_packed_shard_is_not_unpacked_beyond_the_size_of_its_index(
    arena: Arena, said: int
) -> None:
    folder = publish(arena.out / "web", CONCAT, [TOKEN_ROW] * 9, compression="zstd:3")
    path = folder / "train" / "index.json"
    tree = json.loads(path.read_bytes())
    packer = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(2048)) + packer.flush()
    (folder / "train" / "shard.00000.mds.zstd").write_bytes(bomb)
    tree["shards"][0]["zip_data"] |= {"bytes": len(bomb), "hashes": {}}
    tree["shards"][0]["raw_data"]["bytes"] = said
    path.write_text(json.dumps(tree))
    assert len(bomb) * 1000 < 2 << 30
    assert "shard.00000.mds.zstd" in _all(arena, "verify", folder)
    assert "damaged" in _all(arena, "inspect", folder)


def _all(arena: Arena, *arguments: object) -> str:
    answer = arena.run(*arguments)
    assert answer.code in (3, 4)
    return answer.out + answer.err

"""A shard from anyone: packed a thousandfold, or with code inside that must never run. Damage: test_shards_verify.py."""

import json
import pickle
from pathlib import Path
from typing import Any

import zstandard

from tests.abuse.conftest import Arena
from tests.published import CONCAT, TOKEN_ROW, edit, publish


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

"""Streams of unknown origin: no command follows an index out of its folder, trusts its sizes,
crashes on it, decompresses a shard a thousandfold, or runs code in one.

Valid files with a wrong value are read as far as they make sense, or refused in one sentence.
Random bytes are refused at once; files with one changed value get further. test_shards_files.py
tests every value of an index, test_shards_verify.py damage.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.shards.index import read_index
from mdsmix.shards.manifest import read_manifest
from mdsmix.shards.shard_samples import read_all_samples, read_first_samples
from mdsmix.storage import locate
from tests.abuse.conftest import Arena
from tests.converting import read_files
from tests.published import CONCAT, TOKEN_ROW, TURNS, TURNS_ROW, edit, publish
from tests.test_mix_cli import list_paths, replace_value

COMMANDS = ["verify", "inspect", "gc", "check"]
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def stream(arena: Arena) -> Path:
    """40 rows in four shards, with a manifest."""
    return publish(arena.out / "web", CONCAT, [TOKEN_ROW] * 40, card={}, shards=4) / "train"


def refuse_everywhere(arena: Arena, stream: Path) -> dict[str, str]:
    """Run every command on the stream. Return command -> its sentence; none may accept it."""
    train = arena.home / "train.yaml"
    streams = {"web": {"local": str(stream.parent), "split": "train"}}
    section = {"name": "text", "dataset": {"streams": streams, "max_seq_len": 8, "shuffle": True}}
    train.write_text(json.dumps({"max_seq_len": 8, "train_loader": section}))
    return {name: arena.refused(name, train if name == "check" else stream) for name in COMMANDS}


def set_in(*keys: Any) -> Change:
    """Return a change that sets a value of the first shard: set_in("raw_data", "bytes", 1)."""
    return lambda tree: replace_value(tree, ("shards", 0, *keys[:-1]), keys[-1])


WRONG_INDEXES: dict[str, Change] = {
    "larger": set_in("raw_data", "bytes", (1 << 32) - 1),
    "more samples": set_in("samples", 1 << 31),
    "fewer samples": set_in("samples", 1),
    "no samples": set_in("samples", 0),
    "a width below zero": set_in("column_sizes", [-16]),
    "another encoding": set_in("column_encodings", ["ndarray:float64:8"]),
    "an encoding without end": set_in("column_encodings", ["ndarray:uint16:" + "9" * 3000]),
    "a width that is no number": set_in("column_encodings", ["ndarray:uint16:x"]),
    "another file": set_in("raw_data", "basename", "shard.00001.mds"),
    "a hundred times": lambda tree: tree | {"shards": tree["shards"] * 100},
}
WRONG_VALUES: dict[str, Any] = {
    "totals": {"samples": -1, "tokens": 10**18},
    "records": {"read": 1, "written": 2},
    "parts": [{"key": "../../x", "shards": -4, "samples": 10**9}],
    "sources": [{"path": "../../etc/passwd", "size": -1, "hash": ""}],
    "index_hash": "../x",
    "encoding": [],
    "tokenizer": None,
    "format_version": 10**9,
}


def test_a_wrong_index_or_manifest_is_noticed(arena: Arena, stream: Path) -> None:
    manifests = {key: lambda tree, key=key: tree | {key: WRONG_VALUES[key]} for key in WRONG_VALUES}
    for file, changes in (("index.json", WRONG_INDEXES), ("mdsmix.manifest", manifests)):
        content = (stream / file).read_bytes()
        for name, change in changes.items():
            edit(stream / file, change)
            for command in ("inspect", "gc"):
                arena.run(command, stream)
            answer = arena.run("verify", stream)
            # The sources are not there to be checked.
            assert answer.code or name == "sources", name
            (stream / file).write_bytes(content)
    edit(stream / "index.json", lambda tree: tree | {"shards": tree["shards"][:1] * 20_000})
    assert arena.refused("verify", stream, "--quick"), "within the time limit"
    edit(stream / "index.json", set_in("raw_data", "basename", "../../../../precious.jsonl"))
    for name, sentence in refuse_everywhere(arena, stream).items():
        assert "index.json" in sentence or "web" in sentence, name


def test_an_index_or_manifest_of_a_gigabyte_is_not_read(arena: Arena, stream: Path) -> None:
    for name in ("index.json", "mdsmix.manifest"):
        content = (stream / name).read_bytes()
        with (stream / name).open("r+b") as file:
            file.truncate(1 << 30)
        for command, sentence in refuse_everywhere(arena, stream).items():
            assert "1,073,741,824 bytes" in sentence, command
        (stream / name).write_bytes(content)


class Trap:
    """An object that creates a file when it is unpickled."""

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
    assert sprung.exists(), "the trap works"


def test_a_shard_is_not_decompressed_beyond_the_size_in_its_index(arena: Arena) -> None:
    folder = publish(arena.out / "web", CONCAT, [TOKEN_ROW] * 9, compression="zstd:3") / "train"
    packer = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1024)) + packer.flush()
    assert len(bomb) * 1000 < 1 << 30
    (folder / "shard.00000.mds.zstd").write_bytes(bomb)
    for size in (1 << 16, 1 << 20):

        def set_sizes(tree: Any, size: int = size) -> None:
            tree["shards"][0]["zip_data"] |= {"bytes": len(bomb), "hashes": {}}
            tree["shards"][0]["raw_data"]["bytes"] = size

        edit(folder / "index.json", set_sizes)
        answer = arena.run("verify", folder, "--json")
        (fault,) = json.loads(answer.out)["faults"]
        assert (answer.code, fault["file"]) == (3, "shard.00000.mds.zstd")
        assert "does not decompress to" in fault["problem"]
        assert "damaged" in arena.refused("inspect", folder)


WORDS = st.text(max_size=9) | st.sampled_from(["/", "../x", "\0", "\ud800"])
NUMBERS = st.floats() | st.integers(-(10**30), 10**30) | st.sampled_from([1 << 32, 10**400])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
)
WRONG: dict[type, list[Any]] = {
    int: [-1, 0, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63],
    str: ["", "..", "a/b", "/etc/passwd", "a\0b", "pkl", "ndarray:uint16:-1"],
}
"Wrong values of the right type."


def edit_randomly(tree: Any, data: st.DataObject) -> Any:
    """Return the tree with one to three changes: a wrong value, a value of another place, a dropped
    key or an added key.
    """
    for _ in range(data.draw(st.integers(1, 3))):
        paths = [*list_paths(tree)]
        *path, last = data.draw(st.sampled_from(paths))
        values = st.sampled_from([reduce(getitem, value_path, tree) for value_path in paths])
        tree = copy.deepcopy(tree)
        node = reduce(getitem, path, tree)
        how = data.draw(st.sampled_from(["put", "put", "drop", "add"]))
        if how == "drop":
            del node[last]
            continue
        wrong = st.sampled_from(WRONG.get(type(node[last]), [None]))
        key = data.draw(WORDS) if how == "add" and isinstance(node, dict) else last
        node[key] = data.draw(wrong | VALUES | values)
    return tree


def damage_randomly(content: bytes, data: st.DataObject) -> bytes:
    """Return the content with a few bytes changed, removed or inserted, or truncated."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(changed)))
        end = data.draw(st.sampled_from([start, start + 1, start + 1, len(changed)]))
        changed[start:end] = data.draw(st.binary(max_size=5))
    return bytes(changed)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("streams")
    publish(folder / "web", CONCAT, [TOKEN_ROW] * 9, card={}, shards=3)
    publish(folder / "chat", TURNS, [TURNS_ROW] * 9, card={}, shards=2, compression="zstd:1")
    return [folder / name / "train" for name in ("web", "chat")]


def read_or_refuse(read: Callable[[], Any], folder: str) -> Any:
    """Return what is read. None if it is refused in one sentence that names the folder."""
    try:
        return read()
    except Unreachable as refusal:
        sentence = str(refusal)
    assert folder in sentence
    assert "\n" not in sentence
    assert len(sentence) < 600
    return None


def assert_safe(index: Any) -> None:
    """Assert that no file of an index is outside of its folder or has an impossible size."""
    for shard in index.shards if index else ():
        for file in filter(None, (shard.raw_data, shard.zip_data)):
            assert Path(file.basename).name == file.basename != ".."
            assert "\0" not in file.basename
            assert 0 <= file.bytes < 1 << 32


@settings(max_examples=120)
@given(st.data())
def test_random_changes_of_any_file_are_read_or_refused(
    streams: list[Path], tmp_path: Path, data: st.DataObject
) -> None:
    contents = read_files(data.draw(st.sampled_from(streams)))
    name = data.draw(st.sampled_from(["index.json", *contents]))
    if ".mds" not in name and data.draw(st.booleans()):
        contents[name] = json.dumps(edit_randomly(json.loads(contents[name]), data)).encode()
    else:
        contents[name] = damage_randomly(contents[name], data)
    for file_name, content in contents.items():
        (tmp_path / file_name).write_bytes(content)
    folder = locate(tmp_path)
    read_or_refuse(partial(read_manifest, folder), str(tmp_path))
    index = read_or_refuse(partial(read_index, folder), str(tmp_path))
    assert_safe(index)
    for shard in index.shards if index else ():
        for read in (read_first_samples, read_all_samples):
            read_or_refuse(partial(read, folder, shard), str(tmp_path))

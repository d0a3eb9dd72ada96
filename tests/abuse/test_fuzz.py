"""Good files with something wrong in them: whatever it is, a reader gives what is left of sense or says one sentence.

Bytes at random are refused by the first look at them; what gets further is a whole file of which one thing was changed.
"""

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.shards.index import parse_index, read_index
from mdsmix.shards.manifest import parse_manifest
from mdsmix.shards.shard_samples import read_head, read_whole
from mdsmix.storage import locate
from tests.published import CONCAT, TOKEN_ROW, TURNS, TURNS_ROW, publish

FUZZ = settings(max_examples=60)
PARSERS: dict[str, Any] = {"index.json": parse_index, "mdsmix.manifest": parse_manifest}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, -1, 1 << 31, 1 << 32, 1 << 63, 10**400]),
    st.floats(),
    st.text(max_size=9),
    st.sampled_from(["", "..", "/", "../x", "\0", "\ud800", "ndarray:uint16:-1", "pkl"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places(tree[key], (*at, key))


def edited(tree: Any, data: st.DataObject) -> Any:
    """The tree with one to three values put in another's place, keys dropped, or keys added."""
    tree = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(tree))
        if not found:
            break
        *path, last = data.draw(st.sampled_from(found))
        node = reduce(getitem, path, tree)
        how = data.draw(st.sampled_from(["put", "put", "drop", "add", "swap"]))
        if how == "drop":
            del node[last]
        elif how == "add" and isinstance(node, dict):
            node[data.draw(st.text(max_size=5))] = data.draw(VALUES)
        elif how == "swap":
            other = data.draw(st.sampled_from(found))
            node[last] = copy.deepcopy(reduce(getitem, other, tree))
        else:
            wrong = WRONG.get(type(node[last]))
            node[last] = data.draw(VALUES if wrong is None else st.sampled_from(wrong) | VALUES)
    return tree


WRONG: dict[type, list[Any]] = {
    int: [-1, 0, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63],
    str: ["", "..", "a/b", "/etc/passwd", "a\0b", "pkl", "ndarray:uint16:-1"],
}
"What has the type that is wanted, and is wrong all the same."


def flipped(content: bytes, data: st.DataObject) -> bytes:
    """The content with a few bytes changed, taken out, put in, or the rest cut off."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        end = data.draw(st.sampled_from([at, at + 1, at + 1, len(changed)]))
        changed[at:end] = data.draw(st.binary(max_size=5))
    return bytes(changed)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("streams")
    publish(folder / "web", CONCAT, [TOKEN_ROW] * 9, card={}, shards=3)
    publish(folder / "chat", TURNS, [TURNS_ROW] * 9, card={}, shards=2, compression="zstd:1")
    return [folder / name / "train" for name in ("web", "chat")]


def read_or_refused(act: Callable[[], Any], where: str) -> Any:
    """What is read, or None after one sentence."""
    try:
        return act()
    except Unreachable as refusal:
        sentence = str(refusal)
    assert where in sentence
    assert "\n" not in sentence
    assert len(sentence) < 600
    return None


@FUZZ
@given(st.data())
def test_an_index_or_manifest_is_read_or_refused(streams: list[Path], data: st.DataObject) -> None:
    for name, parse in PARSERS.items():
        content = (data.draw(st.sampled_from(streams)) / name).read_bytes()
        if data.draw(st.booleans()):
            content = json.dumps(edited(json.loads(content), data)).encode()
        else:
            content = flipped(content, data)
        judge(read_or_refused(partial(parse, content, "there"), "there"))


def test_one_wrong_value_anywhere_in_an_index_is_seen(streams: list[Path]) -> None:
    tree = json.loads((streams[1] / "index.json").read_bytes())
    for *path, last in places(tree):
        for value in WRONG.get(type(reduce(getitem, [*path, last], tree)), []):
            wrong = copy.deepcopy(tree)
            reduce(getitem, path, wrong)[last] = value
            content = json.dumps(wrong).encode()
            judge(read_or_refused(partial(parse_index, content, "there"), "there"))


def judge(found: Any) -> None:
    """No file of an index lies outside of its folder, or has a size that no shard has."""
    for shard in getattr(found, "shards", ()):
        for file in filter(None, (shard.raw_data, shard.zip_data)):
            assert Path(file.basename).name == file.basename != ".."
            assert "\0" not in file.basename
            assert 0 <= file.bytes < 1 << 32


@FUZZ
@given(st.data())
def test_the_shards_of_such_an_index_are_read_or_refused(
    streams: list[Path], tmp_path: Path, data: st.DataObject
) -> None:
    stream = data.draw(st.sampled_from(streams))
    for path in stream.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if data.draw(st.booleans()):
        tree = edited(json.loads((stream / "index.json").read_bytes()), data)
        (tmp_path / "index.json").write_text(json.dumps(tree))
    else:
        file = tmp_path / min(path.name for path in stream.glob("*.mds*"))
        file.write_bytes(flipped(file.read_bytes(), data))
    folder = locate(tmp_path)
    index = read_or_refused(lambda: read_index(folder), str(tmp_path))
    for shard in index.shards if index else ():
        for look in (read_head, read_whole):
            read_or_refused(partial(look, folder, shard), str(tmp_path))

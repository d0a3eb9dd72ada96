"""index.json and the manifest are parsed strictly, since they may come from anywhere. Shards are
named by their bytes, written once, and copied from any folder that has them whole.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from mdsmix.errors import Unreachable
from mdsmix.ragged import Ragged
from mdsmix.shards import shard_files
from mdsmix.shards.counts import Records, count_by_length
from mdsmix.shards.index import Shard, StoredFile, make_index, parse_index, read_index
from mdsmix.shards.manifest import TokenizerCard, parse_manifest
from mdsmix.shards.shard_files import (
    ShardLayout,
    copy_missing,
    make_names_distinct,
    make_shard,
    store_shards,
    write_if_changed,
    write_once,
)
from mdsmix.shards.shard_samples import HEAD_BYTES, Sample, read_first_samples
from mdsmix.storage import Location, locate
from mdsmix.storage.local import LocalPath
from tests.alarm import WAIT_SECONDS
from tests.published import make_manifest, publish, seal_manifest

LAYOUT = ShardLayout({"tokens": "ndarray:uint16:8"})
FILE = StoredFile(basename="ab.mds", bytes=100, hashes={"xxh128": "ab"})
INDEX = make_index([make_shard(LAYOUT, 3, FILE, None)])
MANIFEST = make_manifest(
    LAYOUT.encodings,
    [],
    INDEX,
    tokenizer=TokenizerCard(name="t", hash="h", vocab_size=9),
    totals={"samples": 3},
    records=Records(read=3, written=3),
    **dict.fromkeys(("layout", "add_bos", "add_eos")),
)


def test_an_index_is_parsed_as_it_was_made() -> None:
    """Unknown top-level keys are ignored, as Streaming ignores them."""
    again = parse_index(INDEX.content, "x")
    assert again == INDEX
    assert (again.samples, again.bytes, len(again.hash)) == (3, 100, 32)
    tree = json.loads(INDEX.content)
    assert INDEX.content == json.dumps(tree, sort_keys=True).encode(), "as MDSWriter does"
    assert parse_index(json.dumps(tree | {"extra": 1}).encode(), "x").shards == INDEX.shards


def change_index(path: str, value: Any) -> bytes:
    """Return the index with another value at a dotted path of its shard's entry."""
    tree = json.loads(INDEX.content)
    *parents, last = path.split(".")
    node = tree["shards"][0]
    for key in parents:
        node = node[key]
    node[last] = value
    return json.dumps(tree).encode()


OUTSIDE = "not inside the stream's folder"
NAMES_OUTSIDE = ("../ab.mds", "a\0b", "", "/ab.mds", "a/../../b", "a//b", "./a")
HOSTILE: list[tuple[bytes, str]] = [
    (b"", "is not an index"),
    (b"[" * 100_000, "is not an index"),
    (b"[]", "no list `shards`"),
    (b'{"shards": 3}', "no list `shards`"),
    (b'{"chunks": [{"filename": "chunk-0-0.bin"}], "config": {}}', "is an index of litData"),
    (b'{"shards": [null]}', "must contain keys"),
    (b'{"shards": ' + b"[" * 900 + b"]" * 900 + b"}", "must contain keys"),
    *((change_index("raw_data.basename", name), OUTSIDE) for name in NAMES_OUTSIDE),
    (change_index("raw_data.bytes", 1 << 32), "has a size of 4294967296 bytes"),
    (change_index("raw_data.bytes", 10**4000), "has a size of 1000"),
    (change_index("raw_data.bytes", 1.5), "must be a whole number"),
    (change_index("samples", -1), "has a negative number of samples, -1"),
    (change_index("samples", True), "must be a whole number"),
    (change_index("samples", float("inf")), "must be a whole number"),
    (change_index("column_names", []), "different numbers of column names"),
    (change_index("column_names", [7]), "must be text"),
    (change_index("column_encodings", ["ndarray:tensor:1"]), "wrong encoding 'ndarray:tensor:1'"),
    (change_index("compression", "zstd"), "only one of the keys `compression` and `zip_data`"),
    (change_index("zip_data", {"basename": "../x", "bytes": 1, "hashes": {}}), OUTSIDE),
    (change_index("surprise", 1), "surprise is not a known key"),
]


def test_a_hostile_or_damaged_index_is_refused_in_one_sentence() -> None:
    for content, sentence in HOSTILE:
        with pytest.raises(Unreachable) as refusal:
            parse_index(content, "there/index.json")
        assert sentence in str(refusal.value), content[:200]
        assert "there/index.json" in str(refusal.value)
        assert ".;" not in str(refusal.value)


def test_a_damaged_or_newer_manifest_is_refused_in_one_sentence() -> None:
    whole = orjson.loads(MANIFEST.to_bytes())
    changed = MANIFEST.to_bytes().replace(b'"hash": "h"', b'"hash": "i"')
    for content, sentence in (
        (b"{", "cannot be read as a manifest"),
        (b"3", "format_version is None"),
        (orjson.dumps({"format_version": 4}), "format_version is 4, and this mdsmix reads 3"),
        (orjson.dumps({"format_version": 1}), "an earlier commit of mdsmix (format version 1;"),
        (seal_manifest({"format_version": 3}), "is missing"),
        (changed, "the manifest was changed after mdsmix wrote it"),
        (seal_manifest(whole | {"compleat": True}), "did you mean complete"),
        (seal_manifest(whole | {"complete": False}), "complete"),
    ):
        with pytest.raises(Unreachable) as refusal:
            parse_manifest(content, "there")
        assert sentence in str(refusal.value)


def test_a_manifest_is_parsed_as_it_was_made_and_leaves_defaults_out() -> None:
    compact = replace(MANIFEST, encoding=replace(MANIFEST.encoding, compact=True))
    for manifest in (MANIFEST, compact):
        parsed = parse_manifest(manifest.to_bytes(), "x")
        assert parsed == manifest
        assert parsed.to_bytes() == manifest.to_bytes()
    tree = orjson.loads(MANIFEST.to_bytes())
    assert set(tree["encoding"]) == {
        *("kind", "loader", "columns", "max_seq_len", "decoder_only_format"),
        *("target_prompts", "target_responses", "special_tokens_in_text"),
    }
    assert (tree["totals"], tree["records"]) == ({"samples": 3}, {"read": 3, "written": 3})
    assert {"mixed", "seed", "source_parts", "side_files"}.isdisjoint(tree)
    settings = asdict(MANIFEST.encoding).items()
    left_out = {key: value for key, value in settings if value and key not in tree["encoding"]}
    assert left_out == {"rewritten_history": "reject", "too_long": "cut", "duplicates": "keep"}


def test_lengths_are_counted_by_powers_of_two() -> None:
    assert count_by_length(np.array([1, 2, 3, 4, 7, 8])) == {"2^0": 1, "2^1": 2, "2^2": 2, "2^3": 1}
    assert count_by_length(np.array([], np.int64)) == {}


CONTENT = b"abcde"
PAIRS = ShardLayout({"tokens": "ndarray:uint16:2"}, None)


def pairs_of(*values: int) -> Ragged:
    """Return laid-out samples of PAIRS, two of the values each."""
    body = np.array(values, np.uint16).view(np.uint8)
    return Ragged.from_lengths(body, np.full(len(values) // 2, 4))


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return locate(tmp_path / "here")


def test_a_file_that_exists_is_not_written_again(folder: Location) -> None:
    """A file that is named by its hash is recognised by its size: `ABCDE` is not overwritten."""
    file = folder / "a"
    for writer, before, is_written in (
        (write_once, None, True),
        (write_once, b"abcd", True),
        (write_once, b"abcdef", True),
        (write_once, b"ABCDE", False),
        (write_if_changed, b"", True),
        (write_if_changed, CONTENT, False),
        (write_if_changed, b"longer than that", True),
        (write_if_changed, None, True),
    ):
        file.delete()
        if before is not None:
            file.write(before)
        stat_before = file.stat()
        writer(file, CONTENT)
        assert file.read() == (CONTENT if is_written else before)
        assert (file.stat() != stat_before) is is_written


def test_a_store_gets_two_shards_at_once_and_a_disk_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of the index are in the order of the rows all the same."""
    rows = pairs_of(*range(8))
    monkeypatch.setattr(shard_files, "SHARD_BYTES", 1)
    barrier = threading.Barrier(2, timeout=WAIT_SECONDS)
    writing = list[str]()
    most = list[int]()

    def write(file: Location, *parts: bytes | memoryview) -> None:
        writing.append(file.name)
        most.append(len(writing))
        if file.is_store:
            barrier.wait()  # until another shard is written at the same moment
        writing.remove(file.name)

    monkeypatch.setattr(LocalPath, "write", write)
    on_disk = store_shards(locate(tmp_path), PAIRS, rows, is_new=True)
    assert most == [1] * 4
    most.clear()
    monkeypatch.setattr(LocalPath, "is_store", True)
    assert store_shards(locate(tmp_path), PAIRS, rows, is_new=True) == on_disk
    assert max(most) == 2


@pytest.fixture
def shard(folder: Location) -> Shard:
    (shard,) = store_shards(folder, PAIRS, pairs_of(1, 2))
    return shard


def test_shards_with_equal_bytes_are_copied_and_a_shard_in_another_folder_is_linked(
    folder: Location, shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache evicts a shard by deleting its file, and damage to one must not damage the others."""
    equal_files = [equal.stored for equal in make_names_distinct([shard] * 3)]
    copy_missing(folder, equal_files, [folder])
    paths = [Path(str(folder / file.basename)) for file in equal_files]
    assert len({path.read_bytes() for path in paths}) == 1
    assert len({path.stat().st_ino for path in paths}) == 3
    assert [path.name[32:] for path in paths] == [".mds", "-1.mds", "-2.mds"]
    flushed = list[LocalPath]()
    monkeypatch.setattr(LocalPath, "flush", lambda folder: flushed.append(folder))
    version = locate(tmp_path / "version")
    copy_missing(version, [shard.stored], [folder])
    assert flushed[-1] == version, "a link is not flushed by itself"
    assert os.path.samefile(tmp_path / "version" / paths[0].name, paths[0])


def test_a_file_of_another_size_is_not_copied_and_is_overwritten(
    folder: Location, shard: Shard, tmp_path: Path
) -> None:
    name = shard.stored.basename
    other = locate(tmp_path / "b")
    target = locate(tmp_path / "c")
    whole = (folder / name).read()
    (other / name).write(whole[:-1])
    (target / name).write(whole + b"x")
    copy_missing(target, [shard.stored], [other, folder])
    assert (target / name).read() == whole
    with pytest.raises(Unreachable, match="was deleted from"):
        copy_missing(locate(tmp_path / "third"), [shard.stored], [other])


def read_beginning(folder: Path) -> list[Sample]:
    split = locate(folder / "train")
    return read_first_samples(split, read_index(split).shards[0], 4)


def test_the_first_samples_are_limited_by_number_and_bytes(tmp_path: Path) -> None:
    """One sample is read, however large it is."""
    for size, count in ((1, 4), (HEAD_BYTES // 2, 1), (2 * HEAD_BYTES, 1)):
        folder = publish(tmp_path / str(size), {"e": "bytes"}, [{"e": bytes(size)}] * 10)
        assert len(read_beginning(folder)) == count


DAMAGE = [
    (0, b"\x05\x00\x00\x00", "the file contains 5 samples, but its index states 4"),
    (4, b"\x00\x00\x00\x00", "point outside"),  # the first one begins inside the table
    (8, b"\xff\xff\xff\x7f", "do not ascend"),
    (20, b"\xff\xff\xff\x7f", "point outside"),  # the last one ends outside the file
    (-6, b"\xff\xff\xff\xff\xff\xff", "decode"),  # a JSON column that is not valid JSON
]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    rows = [{"c": [1, 2, 3]}] * 4
    path = publish(tmp_path, {"c": "json"}, rows) / "train" / "shard.00000.mds"
    whole = path.read_bytes()
    for offset, data, problem in DAMAGE:
        content = bytearray(whole)
        start = offset % len(whole)
        content[start : start + len(data)] = data
        path.write_bytes(content)
        with pytest.raises(Unreachable, match=rf"shard\.00000\.mds is damaged: .*{problem}"):
            read_beginning(tmp_path)
    compressed = publish(tmp_path / "packed", {"c": "json"}, rows, compression="zstd:3")
    os.truncate(compressed / "train" / "shard.00000.mds.zstd", 9)
    with pytest.raises(Unreachable, match=r"shard\.00000\.mds\.zstd is damaged: "):
        read_beginning(compressed)

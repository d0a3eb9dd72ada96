"""The head of a shard is what was written, whatever the encoding; a damaged one is named, never half read."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mdsmix.errors import Unreachable
from mdsmix.ragged import Ragged
from mdsmix.shards.index import Shard, StoredFile, read_index
from mdsmix.shards.shard_samples import HEAD_BYTES, decoded_samples, read_head
from mdsmix.storage import locate
from tests.published import encode, publish

COLUMNS = {"a": "ndarray:int32", "b": "ndarray:uint16:3", "c": "json", "d": "str", "e": "bytes"}
ROW = {"a": [1, 2, 70000], "b": [4, 5, 6], "c": {"x": [1]}, "d": "é", "e": b"\x00z"}


def head(folder: Path, limit: int = 4) -> list[dict[str, object]]:
    place = locate(str(folder / "train"))
    return read_head(place, read_index(place).shards[0], limit)


def test_the_first_samples_are_what_was_written(tmp_path: Path) -> None:
    rows = [ROW | {"d": str(n)} for n in range(10)]
    for compression in (None, "zstd:3"):
        folder = publish(tmp_path / str(compression), COLUMNS, rows, compression=compression)
        samples = head(folder)
        assert len(samples) == 4
        for sample, row in zip(samples, rows, strict=False):
            assert np.asarray(sample["a"]).tolist() == row["a"]
            assert np.asarray(sample["b"]).dtype == "uint16"
            assert [sample[c] for c in "cde"] == [row[c] for c in "cde"]


def test_a_head_is_short_in_bytes_too_and_one_sample_is_read_however_large(tmp_path: Path) -> None:
    for name, size in (("half", HEAD_BYTES // 2), ("twice", 2 * HEAD_BYTES)):
        publish(tmp_path / name, {"e": "bytes"}, [{"e": bytes(size)}] * 10)
        assert len(head(tmp_path / name, 10)) == 1, name


VALUES: list[tuple[str, bytes, object]] = [
    ("int", (-5).to_bytes(8, "little", signed=True), -5),
    ("uint8", b"\x07", 7),
    ("float32", np.float32(0.5).tobytes(), 0.5),
    ("str_int", b"12", 12),
    ("ndarray", bytes([17, 8, 2, 1]) + np.arange(2, dtype="i2").tobytes(), [[0], [1]]),
    ("png", b"\x89PNG", b"\x89PNG"),
    ("pkl", b"N.", b"N."),
]


def test_every_encoding_is_decoded_or_left_as_bytes() -> None:
    for encoding, data, value in VALUES:
        size = None if encoding in ("str_int", "ndarray", "png", "pkl") else len(data)
        shard = Shard(
            version=2,
            format="mds",
            samples=1,
            raw_data=StoredFile(basename="x", bytes=1),
            column_names=["x"],
            column_encodings=[encoding],
            column_sizes=[size],
        )
        stored = data if size else len(data).to_bytes(4, "little") + data
        found = next(decoded_samples(shard, Ragged.of([stored], np.uint8)))["x"]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, encoding


DAMAGE = [
    (0, b"\x05\x00\x00\x00", "it holds 5 samples, and its index says 4"),
    (4, b"\x00\x00\x00\x00", "leads outside"),  # the first one begins inside the table
    (8, b"\xff\xff\xff\x7f", "not ascending"),
    (20, b"\xff\xff\xff\x7f", "leads outside"),  # the last one ends outside the file
    (-6, b"\xff\xff\xff\xff\xff\xff", "decode"),  # a JSON column that is none
]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    publish(tmp_path, {"c": "json"}, [{"c": [1, 2, 3]}] * 4)
    path = tmp_path / "train" / "shard.00000.mds"
    whole = path.read_bytes()
    for at, data, why in DAMAGE:
        content, at = bytearray(whole), at % len(whole)
        content[at : at + len(data)] = data
        path.write_bytes(content)
        with pytest.raises(Unreachable, match=rf"shard\.00000\.mds is damaged: .*{why}"):
            head(tmp_path)
    publish(tmp_path / "packed", {"c": "json"}, [{"c": [1, 2, 3]}] * 4, compression="zstd:3")
    path = tmp_path / "packed" / "train" / "shard.00000.mds.zstd"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Unreachable, match=r"shard\.00000\.mds\.zstd is damaged: "):
        head(tmp_path / "packed")


def test_the_hand_made_samples_are_json_and_arrays_as_mds_has_them() -> None:
    assert encode("json", [1]) == json.dumps([1]).encode()
    assert encode("ndarray:uint16", [1, 2]) == bytes([5, 2, 0, 1, 0, 2, 0])


def test_a_codec_that_this_package_cannot_unpack_gives_no_head(tmp_path: Path) -> None:
    stored = read_index(
        locate(str(publish(tmp_path / "a", {"e": "bytes"}, [{"e": b"a"}]) / "train"))
    )
    shard = replace(stored.shards[0], compression="br:4", zip_data=stored.shards[0].raw_data)
    assert read_head(locate(str(tmp_path / "a/train")), shard) == []

"""A shard read whole is the samples that were written, or a sentence that names it."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from streaming import MDSWriter
from streaming.base.format.mds.encodings import mds_encode

from mdsmix.errors import Unreachable
from mdsmix.shards.codecs import codec_of
from mdsmix.shards.index import Shard, StoredFile, read_index
from mdsmix.shards.shard_samples import decoded_samples, read_whole
from mdsmix.storage import locate

COLUMNS = {"id": "int", "n": "uint8", "square": "ndarray:int32:2,3", "text": "str"}


def write(folder: Path, **settings: object) -> Shard:
    with MDSWriter(out=str(folder), columns=COLUMNS, **settings) as writer:
        for i in range(20):
            square = np.full((2, 3), i, np.int32)
            writer.write({"id": i, "n": np.uint8(i), "square": square, "text": "x" * i})
    (shard,) = read_index(locate(folder)).shards
    return shard


def test_every_sample_is_there(tmp_path: Path) -> None:
    packings, hashes = (None, "zstd:7", "gz", "bz2"), ([], ["sha1"], ["blake2b", "xxh64"])
    for number, (compression, each) in enumerate(itertools.product(packings, hashes)):
        folder = tmp_path / str(number)
        shard = write(folder, compression=compression, hashes=each)
        found = list(decoded_samples(shard, read_whole(locate(folder), shard)))
        assert [(s["id"], s["n"], len(s["text"])) for s in found] == [(i, i, i) for i in range(20)]


NUMBERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMBERS += [f"float{bits}" for bits in (16, 32, 64)]
SHAPES = [(1,), (3,), (2, 3), (1, 2, 3), (255,), (256,), (65_535,), (65_536,), (2, 65_536)]
VALUES: list[tuple[str, Any]] = [
    ("int", -(1 << 62)),
    ("str", "é 東京"),
    ("str_int", 12),
    ("str_float", 0.5),
    ("json", {"a": [1, None]}),
    ("bytes", b"\x00z"),
    *((name, np.dtype(name).type(5)) for name in NUMBERS),
    *(("ndarray", np.arange(1, 4).astype(name)) for name in NUMBERS),
    *((f"ndarray:{name}", np.arange(1, 4).astype(name)) for name in NUMBERS),
    *(("ndarray:int16", np.ones(shape, np.int16)) for shape in SHAPES),
    *(("ndarray", np.ones(shape, np.uint8)) for shape in SHAPES),
    ("ndarray:int32:2,3", np.arange(6, dtype=np.int32).reshape(2, 3)),
]


def test_what_streaming_encodes_is_decoded() -> None:
    for encoding, value in VALUES:
        found = codec_of(encoding).decode(mds_encode(encoding, value))
        assert np.array_equal(found, value), encoding
        if isinstance(value, np.ndarray):
            assert (found.dtype, found.shape) == (value.dtype, value.shape)


def test_hashes_that_nobody_here_can_make_are_left_alone(tmp_path: Path) -> None:
    shard = write(tmp_path / "s")
    unknown = dataclasses.replace(shard.raw_data, hashes={"shake_128": "ab", "murmur3": "cd"})
    again = dataclasses.replace(shard, raw_data=unknown)
    assert len(read_whole(locate(tmp_path / "s"), again)) == 20


def test_a_shard_that_contradicts_its_index_is_damaged(tmp_path: Path) -> None:
    shard = write(tmp_path / "s")
    file = tmp_path / "s" / shard.stored.basename
    data = file.read_bytes()
    short = dataclasses.replace(shard.raw_data, bytes=4 * (1 + 20 + 1) - 1, hashes={})
    wrongs = {
        "table of samples is cut off": (data[: short.bytes], {"raw_data": short}),
        "its index says 21": (data, {"samples": 21}),
        "bytes, and its index says": (data[:-1], {}),
        "leads outside": (data[:4] + b"\xff" * 4 + data[8:], {}),
        "compressed by br": (data, {"compression": "br", "zip_data": shard.raw_data}),
        "decompressed it is not": (zstandard.compress(data + b"x"), {"compression": "zstd"}),
    }
    for match, (content, changes) in wrongs.items():
        if changes.get("compression") == "zstd":
            zipped = StoredFile(basename=shard.raw_data.basename, bytes=len(content))
            changes = changes | {"zip_data": zipped}
        file.write_bytes(content)
        with pytest.raises(Unreachable, match=match):
            read_whole(locate(tmp_path / "s"), dataclasses.replace(shard, **changes))

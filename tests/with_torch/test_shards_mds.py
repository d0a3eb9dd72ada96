"""A shard laid out from arrays is, byte for byte, what streaming's own MDSWriter writes for the
same samples; and what is read of one is what was written.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from streaming import MDSWriter
from streaming.base.compression import get_compressions
from streaming.base.format.mds.encodings import mds_encode
from streaming.base.storage import download

from mdsmix.errors import Unreachable
from mdsmix.ragged import Ragged
from mdsmix.shards import shard_files
from mdsmix.shards.codecs import find_codec
from mdsmix.shards.index import (
    HASH_ALGORITHM,
    Shard,
    StoredFile,
    make_index,
    parse_index,
    read_index,
)
from mdsmix.shards.shard_files import (
    ShardLayout,
    lay_out_samples,
    make_shard,
    make_shard_parts,
    split_into_shards,
)
from mdsmix.shards.shard_samples import decode_samples, read_all_samples
from mdsmix.storage import import_stores, is_for_streaming_alone, locate
from mdsmix.storage.gcs import GCSPath

RNG = np.random.default_rng(7)
PAIR = {"input_ids": "ndarray:uint16", "labels": "ndarray:uint16"}
CHUNK = {"input_ids": "ndarray:int32:1", "labels": "ndarray:int32:63"}
WIDTHS = (1, 255, 256, 65_535, 65_536, 70_000)


def ids(length: int, dtype: str = "uint16") -> Any:
    return RNG.integers(0, 50_000, length).astype(dtype)


LAYOUTS: tuple[tuple[dict[str, str], Callable[[int], dict[str, Any]]], ...] = (
    ({"tokens": "ndarray:uint16:64"}, lambda i: {"tokens": ids(64)}),
    ({"tokens": "ndarray:int32"}, lambda i: {"tokens": ids(1 + 7 * i, "int32")}),
    (CHUNK, lambda i: {"input_ids": ids(1, "int32"), "labels": ids(63, "int32")}),
    (PAIR, lambda i: {"input_ids": ids(1 + 9 * i), "labels": ids(260 - i)}),
    ({"tokens": "ndarray:uint16"}, lambda i: {"tokens": ids(WIDTHS[i % 6])}),
    ({"id": "int", "n": "uint8"}, lambda i: {"id": i, "n": np.uint8(i)}),
    (
        {"n": "uint8", "tokens": "ndarray:uint16"},
        lambda i: {"n": np.uint8(i), "tokens": ids(1 + i)},
    ),
    ({"turns": "json"}, lambda i: {"turns": b'[{"input_ids":[1],"labels":[%d]}]' % i}),
)


def columns_of(layout: ShardLayout, samples: list[dict[str, Any]]) -> dict[str, Ragged]:
    rows = {name: [s[name] for s in samples] for name in layout.codecs}
    for name, values in rows.items():
        if np.isscalar(values[0]) and not isinstance(values[0], bytes):
            rows[name] = [[value] for value in values]
    return {
        name: Ragged.from_rows(rows[name], codec.dtype) for name, codec in layout.codecs.items()
    }


def test_the_bytes_are_mdswriters(tmp_path: Path) -> None:
    for number, ((encodings, make), compression) in enumerate(
        itertools.product(LAYOUTS, (None, "zstd", "zstd:1", "zstd:9"))
    ):
        samples = [make(i) for i in range(30)]
        theirs, ours = tmp_path / f"{number}-theirs", tmp_path / f"{number}-ours"
        how = {"columns": encodings, "hashes": [HASH_ALGORITHM], "compression": compression}
        with MDSWriter(out=str(theirs), **how) as writer:
            for sample in samples:
                writer.write(sample)
        layout = ShardLayout(encodings, compression)
        rows = lay_out_samples(layout, columns_of(layout, samples))
        shards = shard_files.store_shards(locate(ours), layout, rows)
        (stored,) = (p.read_bytes() for p in ours.iterdir())
        (written,) = (p.read_bytes() for p in theirs.iterdir() if p.name != "index.json")
        assert stored == written, (encodings, compression)
        index = json.loads(make_index(shards).content)
        expected = json.loads((theirs / "index.json").read_bytes())
        for shard in (*index["shards"], *expected["shards"]):
            for file in filter(None, (shard["raw_data"], shard["zip_data"])):
                del file["basename"]
        assert index == expected, (encodings, compression)


def test_a_sample_that_no_shard_may_hold_is_refused() -> None:
    """An empty row as by MDSWriter; and a shard's last offset fits 32 bits."""
    tokens = {"tokens": Ragged.from_rows([[1], []], "uint16")}
    with pytest.raises(ValueError, match="column tokens: a sample has an array without values"):
        lay_out_samples(ShardLayout({"tokens": "ndarray:uint16"}), tokens)

    def of_bytes(count: int) -> Any:
        body = Ragged.from_lengths(np.empty(0, np.uint8), np.array([count], np.int64))
        return make_shard_parts(ShardLayout({"turns": "json"}), body)[0]

    head, last = len(of_bytes(0)), (1 << 32) - 1
    assert np.frombuffer(of_bytes(last - head), "<u4", 3).tolist() == [1, head, last]
    with pytest.raises(ValueError, match=f"a shard would have {last + 1:,} bytes"):
        of_bytes(last + 1 - head)


SPLITS: list[tuple[list[int], int, int, list[int]]] = [
    # sizes of rows, bytes and rows of a shard, and the rows that its shards get
    ([10] * 10, 1 << 20, 1 << 20, [10]),
    ([10] * 10, 1 << 20, 3, [2, 3, 2, 3]),
    ([96] * 11, 500, 1 << 20, [3, 4, 4]),
    ([96, 96, 5_000, 96], 500, 1 << 20, [1, 1, 1, 1]),
    ([5_000, *[24] * 40], 500, 1 << 20, [1, 17, 17, 6]),
    ([5_000, 5_000], 500, 10, [1, 1]),
    ([], 500, 10, []),
]


def test_rows_are_split_evenly_within_both_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, most_bytes, most_rows, shards in SPLITS:
        monkeypatch.setattr(shard_files, "SHARD_BYTES", most_bytes)
        monkeypatch.setattr(shard_files, "SHARD_ROWS", most_rows)
        body = np.arange(sum(sizes), dtype=np.uint32).astype(np.uint8)
        pieces = list(split_into_shards(Ragged.from_lengths(body, np.array(sizes, np.int64))))
        assert [len(piece) for piece in pieces] == shards
        assert b"".join(piece.values.tobytes() for piece in pieces) == body.tobytes()


def test_what_streaming_reads_is_no_fault() -> None:
    """Columns of encodings that mdsmix does not know, every compression of Streaming, and an empty
    shard.
    """
    columns = {"a": "pkl", "b": "jpeg", "c": "str", "d": "int", "e": "ndarray"}
    sizes = [None, None, None, 8, None]
    for packed in (None, *get_compressions()):
        file = StoredFile(basename="ab.mds", bytes=100)
        tree = json.loads(make_index([make_shard(ShardLayout({}), 3, file, None)]).content)
        tree["shards"][0] |= {"column_names": [*columns], "column_encodings": [*columns.values()]}
        zipped = tree["shards"][0]["raw_data"] if packed else None
        tree["shards"][0] |= {"column_sizes": sizes, "compression": packed, "zip_data": zipped}
        assert parse_index(json.dumps(tree).encode(), "x").shards[0].columns == columns
    tree["shards"][0]["samples"] = 0
    assert parse_index(json.dumps(tree).encode(), "x").samples == 0


COLUMNS = {"id": "int", "n": "uint8", "square": "ndarray:int32:2,3", "text": "str"}


def write(folder: Path, **settings: object) -> Shard:
    with MDSWriter(out=str(folder), columns=COLUMNS, **settings) as writer:
        for i in range(20):
            square = np.full((2, 3), i, np.int32)
            writer.write({"id": i, "n": np.uint8(i), "square": square, "text": "x" * i})
    (shard,) = read_index(locate(folder)).shards
    return shard


def test_a_gs_url_names_to_streaming_the_bucket_and_key_that_mdsmix_writes(tmp_path: Path) -> None:
    """With HMAC keys Streaming downloads by boto3 from an address that it fixes. `tests/stores`
    downloads by Google's library.
    """
    file = locate("gs://bucket/the mix/ü/50%/index.json")
    assert isinstance(file, GCSPath)
    downloader = download.CloudDownloader.get(file.url)
    downloader._gcs_client = Mock()
    downloader.download(file.url, str(tmp_path / "index.json"))
    named = downloader._gcs_client.download_file.call_args.args[:2]
    assert named == (file.bucket, file.key) == ("bucket", "the mix/ü/50%/index.json")


def test_the_schemes_that_streaming_reads_are_known() -> None:
    """`dbfs-uc` is dbfs:/Volumes; no scheme is a local path."""
    opened = {store.scheme.partition("://")[0] for store in import_stores()}
    read = set(download.DOWNLOADER_MAPPINGS) - {"", "dbfs-uc"} - opened
    assert {scheme for scheme in read if is_for_streaming_alone(f"{scheme}://a/b")} == read
    assert is_for_streaming_alone("dbfs:/Volumes/a/b/c")
    for place in (
        "s3://a/b",
        "gs://a/b",
        "hf://datasets/a/b/c",
        "/data/a",
        "oci:/a/b",
        "file:///a",
        "ftp://a",
    ):
        assert not is_for_streaming_alone(place), place


def test_every_sample_is_there(tmp_path: Path) -> None:
    """Hashes that nobody here can make are left alone."""
    packings, hashes = (None, "zstd:7", "gz", "bz2"), ([], ["sha1"], ["blake2b", "xxh64"])
    for number, (compression, each) in enumerate(itertools.product(packings, hashes)):
        folder = tmp_path / str(number)
        shard = write(folder, compression=compression, hashes=each)
        samples = list(decode_samples(shard, read_all_samples(locate(folder), shard)))
        assert [(s["id"], s["n"], len(s["text"])) for s in samples] == [
            (i, i, i) for i in range(20)
        ]
        if not compression:
            unknown = dataclasses.replace(shard.raw_data, hashes={"shake_128": "ab"})
            again = dataclasses.replace(shard, raw_data=unknown)
            assert len(read_all_samples(locate(folder), again)) == 20


NUMBERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMBERS += [f"float{bits}" for bits in (16, 32, 64)]
SHAPES = [(1,), (3,), (2, 3), (1, 2, 3), (255,), (256,), (65_535,), (65_536,), (2, 65_536)]
VALUES: list[tuple[str, Any]] = [
    *(("int", -(1 << 62)), ("str", "é 東京"), ("str_int", 12), ("str_float", 0.5)),
    *(("json", {"a": [1, None]}), ("bytes", b"\x00z")),
    *((name, np.dtype(name).type(5)) for name in NUMBERS),
    *((f"ndarray{of}", np.arange(1, 4).astype(n)) for n in NUMBERS for of in ("", f":{n}")),
    *((f"ndarray{of}", np.ones(shape, np.int16)) for shape in SHAPES for of in ("", ":int16")),
    ("ndarray:int32:2,3", np.arange(6, dtype=np.int32).reshape(2, 3)),
]


def test_what_streaming_encodes_is_decoded() -> None:
    for encoding, value in VALUES:
        decoded = find_codec(encoding).decode(mds_encode(encoding, value))
        assert np.array_equal(decoded, value), encoding
        if isinstance(value, np.ndarray):
            assert (decoded.dtype, decoded.shape) == (value.dtype, value.shape)


def test_a_shard_that_contradicts_its_index_is_damaged(tmp_path: Path) -> None:
    shard = write(tmp_path)
    file, raw = tmp_path / shard.stored.basename, shard.raw_data
    whole, table = file.read_bytes(), 4 * (1 + 20 + 1)
    short = dataclasses.replace(raw, bytes=table - 1, hashes={})
    for content, changes, match in (
        (whole[:-1], {}, "bytes, but its index states"),
        (whole[: table - 1], {"raw_data": short}, "ends before the end of the table"),
        (whole, {"compression": "br", "zip_data": raw}, "compressed by br"),
    ):
        file.write_bytes(content)
        with pytest.raises(Unreachable, match=match):
            read_all_samples(locate(tmp_path), dataclasses.replace(shard, **changes))

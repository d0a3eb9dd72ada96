"""A shard laid out from arrays is, byte for byte, what streaming's own MDSWriter writes for the same samples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter
from streaming.base.compression import get_compressions

from mdsmix.ragged import Ragged
from mdsmix.shards import shard_files as mds
from mdsmix.shards.index import StoredFile, make_index, parse_index
from mdsmix.shards.shard_files import (
    HASH,
    ShardLayout,
    lay_out,
    shard_bytes,
    shard_of,
    split,
    store_shards,
)
from mdsmix.storage import locate

RNG = np.random.default_rng(7)


def ids(length: int, dtype: str = "uint16") -> Any:
    return RNG.integers(0, 50_000, length).astype(dtype)


LAYOUTS: dict[str, tuple[dict[str, str], Callable[[int], dict[str, Any]]]] = {
    "text, concat": ({"tokens": "ndarray:uint16:64"}, lambda i: {"tokens": ids(64)}),
    "text, document": ({"tokens": "ndarray:int32"}, lambda i: {"tokens": ids(1 + 7 * i, "int32")}),
    "finetuning, concat": (
        {"input_ids": "ndarray:int32:1", "labels": "ndarray:int32:63"},
        lambda i: {"input_ids": ids(1, "int32"), "labels": ids(63, "int32")},
    ),
    "finetuning, pairs": (
        {"input_ids": "ndarray:uint16", "labels": "ndarray:uint16"},
        lambda i: {"input_ids": ids(1 + 9 * i), "labels": ids(260 - i)},
    ),
    "rows of every width of length": (
        {"tokens": "ndarray:uint16"},
        lambda i: {"tokens": ids((1, 255, 256, 65_535, 65_536, 70_000)[i % 6])},
    ),
    "numbers beside arrays": (
        {"id": "int", "n": "uint8", "tokens": "ndarray:uint16"},
        lambda i: {"id": i, "n": np.uint8(i), "tokens": ids(1 + i)},
    ),
    "turns": ({"turns": "json"}, lambda i: {"turns": b'[{"input_ids":[1],"labels":[%d]}]' % i}),
}


def columns_of(layout: ShardLayout, samples: list[dict[str, Any]]) -> dict[str, Ragged]:
    rows = {name: [s[name] for s in samples] for name in layout.codecs}
    for name, values in rows.items():
        if np.isscalar(values[0]) and not isinstance(values[0], bytes):
            rows[name] = [[value] for value in values]
    return {name: Ragged.of(rows[name], codec.dtype) for name, codec in layout.codecs.items()}


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:1", "zstd:9"])
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_the_bytes_are_mdswriters(
    tmp_path: Path, layout_name: str, compression: str | None
) -> None:
    encodings, make = LAYOUTS[layout_name]
    samples = [make(i) for i in range(30)]
    theirs = tmp_path / "theirs"
    with MDSWriter(
        out=str(theirs), columns=encodings, hashes=[HASH], compression=compression
    ) as writer:
        for sample in samples:
            writer.write(sample)
    layout = ShardLayout(encodings, compression)
    shards = store_shards(
        locate(tmp_path / "ours"), layout, lay_out(layout, columns_of(layout, samples))
    )

    (ours,) = (p.read_bytes() for p in (tmp_path / "ours").iterdir())
    (written,) = (p.read_bytes() for p in theirs.iterdir() if p.name != "index.json")
    assert ours == written
    index = json.loads(make_index(shards).content)
    expected = json.loads((theirs / "index.json").read_bytes())
    for shard in (*index["shards"], *expected["shards"]):
        for file in (shard["raw_data"], shard["zip_data"]):
            if file:
                del file["basename"]
    assert index == expected


def test_an_empty_row_is_refused_as_mdswriter_refuses_it() -> None:
    layout = ShardLayout({"tokens": "ndarray:uint16"})
    with pytest.raises(ValueError, match="column tokens holds an empty row"):
        lay_out(layout, {"tokens": Ragged.of([[1], []], "uint16")})


@pytest.mark.parametrize(
    ("sizes", "most_bytes", "most_rows", "shards"),
    [
        ([10] * 10, 1 << 20, 1 << 20, [10]),
        ([10] * 10, 1 << 20, 3, [2, 3, 2, 3]),
        ([96] * 10, 500, 1 << 20, [5, 5]),
        ([96] * 11, 500, 1 << 20, [3, 4, 4]),
        ([96, 96, 5_000, 96], 500, 1 << 20, [1, 1, 1, 1]),
        ([5_000, *[24] * 40], 500, 1 << 20, [1, 17, 17, 6]),
        ([5_000, 5_000], 500, 10, [1, 1]),
        ([], 500, 10, []),
    ],
)
def test_rows_are_split_evenly_within_both_limits(
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    most_bytes: int,
    most_rows: int,
    shards: list[int],
) -> None:
    monkeypatch.setattr(mds, "SHARD_BYTES", most_bytes)
    monkeypatch.setattr(mds, "SHARD_ROWS", most_rows)
    body = np.arange(sum(sizes), dtype=np.uint32).astype(np.uint8)
    pieces = list(split(Ragged.from_lengths(body, np.array(sizes, np.int64))))
    assert [len(piece) for piece in pieces] == shards
    assert b"".join(piece.values.tobytes() for piece in pieces) == body.tobytes()


def test_a_shards_last_offset_fits_32_bits_or_the_shard_is_refused() -> None:
    layout, body = ShardLayout({"turns": "json"}), np.empty(0, np.uint8)
    head = len(shard_bytes(layout, Ragged.from_lengths(body, np.array([0], np.int64))))
    last = (1 << 32) - 1
    written = shard_bytes(layout, Ragged.from_lengths(body, np.array([last - head], np.int64)))
    assert np.frombuffer(written, "<u4", 3).tolist() == [1, head, last]
    with pytest.raises(ValueError, match=f"a sample of {last + 1} bytes"):
        shard_bytes(layout, Ragged.from_lengths(body, np.array([last + 1 - head], np.int64)))


def test_what_streaming_reads_is_no_fault() -> None:
    """Columns of encodings that mdsmix does not know, every compression of Streaming, and an empty shard."""
    columns = {"a": "pkl", "b": "jpeg", "c": "str", "d": "int", "e": "ndarray"}
    sizes = [None, None, None, 8, None]
    for packed in (None, *get_compressions()):
        file = StoredFile(basename="ab.mds", bytes=100)
        tree = json.loads(make_index([shard_of(ShardLayout({}), 3, file, None)]).content)
        tree["shards"][0] |= {"column_names": [*columns], "column_encodings": [*columns.values()]}
        zipped = tree["shards"][0]["raw_data"] if packed else None
        tree["shards"][0] |= {"column_sizes": sizes, "compression": packed, "zip_data": zipped}
        assert parse_index(json.dumps(tree).encode(), "x").shards[0].columns == columns
    tree["shards"][0]["samples"] = 0
    assert parse_index(json.dumps(tree).encode(), "x").samples == 0

"""Exported rows of every kind of stream have the ids, labels and documents that mdsmix's own loader
makes of each sample.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from tests.converting import mdsmix, run_ok
from tests.every_kind import (
    FINETUNING,
    PACKED,
    PLAIN,
    Row,
    Streams,
    expected_preferences,
    expected_unpaired,
    publish_every_kind,
)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Streams:
    return publish_every_kind(tmp_path_factory.mktemp("streams"), tokenizer_folder)


def read_parquet(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all files in the order of their names."""
    rows = list[dict[str, Any]]()
    for path in sorted(folder.glob("*.parquet")):
        rows += parquet.read_table(path).to_pylist()
    return rows


@pytest.mark.filterwarnings("ignore:The loader cuts rows")
@pytest.mark.parametrize("name", PLAIN + FINETUNING)
def test_a_parquet_row_is_the_row_of_the_loader(
    streams: Streams, tmp_path: Path, name: str
) -> None:
    run_ok("export", streams.url(name), "--to", "parquet", "-o", tmp_path / "out", "-q")
    actual = read_parquet(tmp_path / "out")
    expected = streams.rows(name)
    assert len(actual) == len(expected) > 10
    is_masked = any(label == -100 for row in expected for label in row.labels[1:])
    assert is_masked == (name not in ("concat", "document"))
    for row, expected_row in zip(actual, expected, strict=True):
        assert row.pop("input_ids") == expected_row.ids
        assert row.pop("labels") == expected_row.labels
        assert row.pop("attention_mask") == [1] * len(expected_row.ids)
        positions = [position for length in expected_row.lengths for position in range(length)]
        assert row.pop("position_ids") == positions
        assert row == ({"seq_lengths": expected_row.lengths} if name in PACKED else {})


def split_documents(row: Row) -> list[list[int]]:
    ends = np.cumsum(row.lengths)[:-1]
    return [part.tolist() for part in np.split(np.array(row.ids), ends)]


@pytest.mark.parametrize("name", PLAIN)
def test_an_indexed_dataset_has_the_documents(streams: Streams, tmp_path: Path, name: str) -> None:
    run_ok("export", streams.url(name), "--to", "megatron", "-o", tmp_path / "out", "-q")
    documents = [document for row in streams.rows(name) for document in split_documents(row)]
    tokens = np.fromfile(tmp_path / "out/train.bin", np.uint16)
    assert tokens.tolist() == [token for document in documents for token in document]
    index = (tmp_path / "out/train.idx").read_bytes()
    count = len(documents)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1)
    lengths = np.array([*map(len, documents)], np.int32)
    starts = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    numbers = np.arange(count + 1, dtype=np.int64)
    assert index == head + lengths.tobytes() + starts.tobytes() + numbers.tobytes()


@pytest.mark.parametrize("name", PACKED)
def test_a_mask_of_megatron_bridge_is_at_the_token_before(
    streams: Streams, tmp_path: Path, name: str
) -> None:
    run_ok("export", streams.url(name), "--to", "megatron-bridge", "-o", tmp_path / "out", "-q")
    expected = streams.rows(name)
    actual = read_parquet(tmp_path / "out")
    for row, expected_row in zip(actual, expected, strict=True):
        mask = [int(label != -100) for label in expected_row.labels]
        starts = np.cumsum([0, *expected_row.lengths[:-1]]).tolist()
        assert row == {
            "input_ids": expected_row.ids,
            "loss_mask": [*mask[1:], 0],
            "seq_start_id": starts,
        }
    (path,) = (tmp_path / "out").glob("*.idx.parquet")
    types = {field.name: str(field.type.value_type) for field in parquet.read_schema(path)}
    assert types == {"input_ids": "int32", "loss_mask": "int8", "seq_start_id": "int32"}


def test_unpaired_preferences_have_the_columns_of_trl(streams: Streams, tmp_path: Path) -> None:
    url = streams.url("unpaired")
    answer = run_ok("export", url, "--to", "parquet", "-o", tmp_path / "out")
    expected = expected_unpaired(url)
    assert read_parquet(tmp_path / "out") == expected
    assert {row["label"] for row in expected} == {True, False}
    completions = sum(len(row["completion_ids"]) for row in expected)
    totals = streams.manifest("unpaired").totals
    assert completions == totals.loss_tokens
    assert f" {completions:,} " in answer.out
    for to in ("litdata", "megatron", "megatron-bridge"):
        refused = mdsmix("export", url, "--to", to, "-o", tmp_path / to)
        assert (refused.code, "has unpaired preferences" in refused.err) == (2, True), to


def test_preferences_have_the_columns_of_trl(streams: Streams, tmp_path: Path) -> None:
    url = streams.url("preferences")
    answer = run_ok("export", url, "--to", "parquet", "-o", tmp_path / "out")
    expected = expected_preferences(url)
    assert read_parquet(tmp_path / "out") == expected
    # Each answer is a row of its own, so the tokens that ComposeRL would cut off are trained.
    answers = sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in expected)
    totals = streams.manifest("preferences").totals
    assert answers == totals.loss_tokens + totals.cut_tokens > totals.loss_tokens
    assert f" {answers:,} " in answer.out

"""Exported rows of every kind of stream have the ids, labels and documents that mdsmix's own loader
makes of each sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.converting import run_ok
from tests.every_kind import (
    FINETUNING,
    PACKED,
    PLAIN,
    Streams,
    expected_preferences,
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


@pytest.mark.filterwarnings("ignore:Rows longer than max_seq_len")
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
    for row, wanted in zip(actual, expected, strict=True):
        assert row.pop("input_ids") == wanted.ids
        assert row.pop("labels") == wanted.labels
        assert row.pop("attention_mask") == [1] * len(wanted.ids)
        positions = [position for length in wanted.lengths for position in range(length)]
        assert row.pop("position_ids") == positions
        assert row == ({"seq_lengths": wanted.lengths} if name in PACKED else {})


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

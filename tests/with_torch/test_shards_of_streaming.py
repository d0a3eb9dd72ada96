"""Streams as Streaming's own writers leave them: merged indexes, a first shard without samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import CSVWriter, JSONWriter, MDSWriter
from streaming.base.util import merge_index

from mdsmix import sources
from mdsmix.errors import MixRefused, Unreachable
from mdsmix.init.data_files import find_data
from mdsmix.load.training_rows import RowRules, make_training_row
from mdsmix.mix.check import run_checks
from mdsmix.mix.streams.resolve import make_stream_mix
from mdsmix.shards.published import open_stream_in
from mdsmix.shards.verification import verify
from mdsmix.sources.find import find_files
from mdsmix.sources.units import ReadAs
from mdsmix.storage import locate
from tests.converting import RecordingWatcher
from tests.with_torch.load_streams import IDS, first_tokens, loaded, write_stream, write_tokens


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """Two parts of 6 and 4 rows, joined as Spark jobs and parallel writers join theirs."""
    folder = tmp_path / "merged"
    write_tokens(folder / "0", 6)
    write_tokens(folder / "1", 4)
    merge_index(str(folder), keep_local=True)
    return folder


def test_a_merged_index_is_read_like_any_other(merged: Path) -> None:
    """Its basenames are paths: `0/shard.00000.mds`. The oracle is Streaming's own loader."""
    stream = open_stream_in(locate(merged))
    assert [shard.stored.basename[:2] for shard in stream.shards] == ["0/", "1/"]
    assert not stream.contradictions
    assert not verify(locate(merged), RecordingWatcher()).faults
    refused = [
        each for each in run_checks(make_stream_mix([str(merged)])) if each.severity == "error"
    ]
    assert refused == []
    rows = [stream.read_sample(number)["tokens"].tolist() for number in range(10)]
    by_streaming = first_tokens(loaded({"web": {"local": str(merged)}}, batch=1))
    assert sorted(row[0] for row in rows) == sorted(by_streaming)


def test_a_missing_shard_of_a_merged_index_is_missed(merged: Path) -> None:
    (shard,) = (merged / "1").glob("*.mds")
    shard.unlink()
    assert [fault.file for fault in open_stream_in(locate(merged)).contradictions] == [
        f"1/{shard.name}"
    ]
    assert verify(locate(merged), RecordingWatcher()).faults


def test_a_merged_index_is_one_source(merged: Path) -> None:
    """Its parts keep indexes of their own, which would give their records a second time."""
    (unit,) = sources.plan_units(find_files([str(merged)], merged.parent))
    records = [record for batch in sources.read_batches(unit) for record in batch.records]
    assert len(records) == 10
    notices = []
    files = find_data([str(merged)], merged.parent, notices)
    assert [Path(file.location.url) for file in files] == [merged / "index.json"]


def test_first_samples_are_those_of_the_first_shard_that_has_any(tmp_path: Path) -> None:
    """MDSWriter begins with a shard of 0 samples if the first sample is larger than
    `size_limit`.
    """
    folder = tmp_path / "large"
    large = np.full(200, 90_000, np.int32)
    rows = [{"tokens": large}] * 3
    write_stream(folder, {"tokens": "ndarray:int32"}, rows, size_limit=300)
    index = json.loads((folder / "index.json").read_bytes())
    assert index["shards"][0]["samples"] == 0
    mix = make_stream_mix([str(folder)])
    (stream,) = mix.train.streams
    assert [sample["tokens"].max() for sample in stream.head.samples] == [90_000]


@pytest.mark.parametrize(("writer", "format"), [(JSONWriter, "jsonl"), (CSVWriter, "csv")])
def test_a_stream_of_another_writer_is_named_as_what_it_is(
    writer: Any, format: str, tmp_path: Path
) -> None:
    with writer(out=str(tmp_path / "rows"), columns={"text": "str"}) as out:
        for text in ("one", "two"):
            out.write({"text": text})
    message = f"Streaming's {writer.__name__} writes, .* with format: {format}"
    with pytest.raises(Unreachable, match=message):
        open_stream_in(locate(tmp_path / "rows"))
    files = find_files(["rows/shard.00000.*[nv]"], tmp_path, ReadAs(format=format))
    (unit,) = sources.plan_units(files)
    records = [record for batch in sources.read_batches(unit) for record in batch.records]
    assert [record["text"] for record in records] == ["one", "two"]


def test_ids_below_zero_are_refused_by_the_loader(tmp_path: Path) -> None:
    """Rows in Hugging Face's form: labels as long as input_ids, -100 for the prompt."""
    folder = tmp_path / "hf"
    columns = dict.fromkeys(("input_ids", "labels"), "ndarray:int32")
    row = {"input_ids": np.array([5, 6, 7], np.int32), "labels": np.array([-100, 6, 7], np.int32)}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        writer.write(row)
    ids = {
        each.id for each in run_checks(make_stream_mix([str(folder)])) if each.severity == "error"
    }
    assert "labels-repeated" in ids
    with pytest.raises(MixRefused, match="contains the token id -100"):
        make_training_row(
            open_stream_in(locate(folder)).read_sample(0), RowRules(max_seq_len=8, ids=IDS)
        )

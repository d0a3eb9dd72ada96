"""Arrow's files and streams: the same rows as of parquet, each told by its record batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.sources import RecordBatch, arrow, content_of, find, plan, read

TABLE = pa.table({"text": [f"text {n}" for n in range(20)], "n": list(range(20))})


def write(path: Path, table: pa.Table = TABLE, batch: int = 6, stream: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def batches(folder: Path, name: str, *fields: str, window: int = 1 << 20) -> list[RecordBatch]:
    units = plan(find([name], folder), window, fields)
    return [batch for unit in units for batch in read(unit)]


@pytest.mark.parametrize("stream", [True, False])
def test_rows_come_in_order_with_their_places(tmp_path: Path, stream: bool) -> None:
    write(tmp_path / "a.arrow", stream=stream)
    (batch,) = batches(tmp_path, "a.arrow", "text")
    assert batch.records == TABLE.select(["text"]).to_pylist()
    assert batch.unseen == {"n": 20}
    origins = [batch.origin(i) for i in range(20)]
    assert [origin.place for origin in origins] == [{"row": n, "batch": n // 6} for n in range(20)]
    assert origins[7].shown == "row 7, batch 1"
    assert sorted({o.ordinal for o in origins}) == [o.ordinal for o in origins]


def test_a_large_file_is_cut_at_its_batches_and_a_stream_is_not(tmp_path: Path) -> None:
    for stream in (True, False):
        path = write(tmp_path / "a.arrow", batch=2, stream=stream)
        units = plan(find(["a.arrow"], tmp_path), path.stat().st_size // 4, ("text",))
        assert len(units) == 1 if stream else len(units) >= 4
        found = [r["text"] for unit in units for b in read(unit) for r in b.records]
        assert found == TABLE["text"].to_pylist()


def test_what_parquet_and_arrow_hold_alike_is_known_alike(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow")
    pa.feather.write_feather(TABLE, tmp_path / "b.feather", compression="zstd")
    pa.parquet.write_table(TABLE, tmp_path / "c.parquet")
    files = find(["?.*"], tmp_path)
    known = [content_of(plan([file], fields=("text",))[0]).windows[0].digest for file in files]
    assert len(set(known)) == 1


def test_a_folder_of_save_to_disk_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    names = ["b.arrow", "a.arrow", "c.arrow"]
    for n, name in enumerate(names):
        write(tmp_path / "set" / name, TABLE.slice(5 * n, 5))
    write(tmp_path / "set" / "cache-1.arrow")
    state = {"_data_files": [{"filename": name} for name in names]}
    (tmp_path / "set/state.json").write_text(json.dumps(state))
    for window in (1 << 20, 400):
        found = [r["n"] for b in batches(tmp_path, "set", "n", window=window) for r in b.records]
        assert found == list(range(15))


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("dataset_dict.json", {"splits": ["train", "test"]}, RecipeError, "set/train"),
        ("state.json", {"_data_files": [{"filename": "gone.arrow"}]}, Unreachable, "gone.arrow is missing"),
        ("state.json", {}, Unreachable, "does not say its _data_files"),
        ("state.json", {"_data_files": [{"filename": "../a.arrow"}]}, Unreachable, "leads out of"),
    ],
)  # fmt: skip
def test_a_folder_that_says_something_else_is_a_sentence(
    tmp_path: Path, name: str, content: Any, error: type[Exception], said: str
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_text(json.dumps(content))
    with pytest.raises(error, match=said):
        find(["set"], tmp_path)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cut", [3, 9, 200])
def test_a_file_that_was_cut_off_is_a_sentence(tmp_path: Path, stream: bool, cut: int) -> None:
    path = write(tmp_path / "a.arrow", stream=stream)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(Unreachable, match="is no whole arrow file"):
        batches(tmp_path, "a.arrow", "text")


def test_offsets_that_lead_out_of_a_file_are_not_followed(tmp_path: Path) -> None:
    offsets = pa.array([0, 1 << 30, 5], pa.int32()).buffers()[1]
    hostile = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"x" * 64)])
    write(tmp_path / "a.arrow", pa.table({"text": hostile}), stream=False)
    with pytest.raises(Unreachable, match="is no whole arrow file"):
        batches(tmp_path, "a.arrow", "text")


def test_of_a_large_batch_only_some_rows_are_decoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "MOST_ROWS", 3)
    write(tmp_path / "a.arrow", batch=20)
    found = [r["n"] for b in batches(tmp_path, "a.arrow", "n", window=90) for r in b.records]
    assert found == list(range(20))

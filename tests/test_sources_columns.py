"""Rows of parquet and Arrow: only what is wanted is read, each row knows where it stands, and a file is known by its rows."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.sources import arrow, read
from tests.formats import as_arrow, digests, origins, read_file, records, units

ROWS = pa.table({"text": [f"text {n}" for n in range(20)], "n": list(range(20))})
ODD = pa.table(
    {
        "text": ["one", "two", None, "four"],
        "n": [1, 2, None, 4],
        "blank": ["", "", "", ""],
        "void": pa.nulls(4, pa.int64()),
        "chat": [[{"role": "user", "n": None}], [], None, [{"role": "tool", "n": 3}]],
    }
)
STREAM, FILE = pa.ipc.new_stream, pa.ipc.new_file


def test_only_wanted_columns_are_read_and_the_footer_tells_which_others_are_empty(
    tmp_path: Path,
) -> None:
    pq.write_table(ODD, tmp_path / "a.parquet", row_group_size=3)
    [batch] = read_file(tmp_path, "a.parquet", fields=("text",))
    assert batch.records == [{"text": "one"}, {"text": "two"}, {"text": None}, {"text": "four"}]
    assert batch.unseen == {"n": 4, "chat": 4}
    found = read_file(tmp_path, "a.parquet", fields=("chat",))
    assert records(found) == [{"chat": row} for row in ODD["chat"].to_pylist()], "nulls stay"
    last, raw = origins(found)[3], b'{"chat":[{"role":"tool","n":3}]}'
    assert (last.place, last.raw, last.length) == ({"row": 3}, raw, len(raw))
    assert records(read_file(tmp_path, "a.parquet", fields=("nowhere",))) == [{}] * 4


def test_rows_of_arrow_come_in_order_with_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is cut at its record batches of three rows, a stream is not; of a batch some rows are decoded at once."""
    monkeypatch.setattr(arrow, "MOST_ROWS", 2)
    for new in (STREAM, FILE):
        content = as_arrow(ROWS.to_pylist(), new)
        [whole] = read_file(tmp_path, "a.arrow", content, fields=("text",))
        assert whole.records == ROWS.select(["text"]).to_pylist()
        assert whole.unseen == {"n": 20}
        found = origins([whole])
        assert [o.place for o in found] == [{"row": n, "batch": n // 3} for n in range(20)]
        assert found[7].where == "row 7, batch 2"
        assert sorted({o.ordinal for o in found}) == [o.ordinal for o in found]
        settings = {"window": len(content) // 4, "fields": ("text",)}
        cut = units(tmp_path, "a.arrow", **settings)
        assert len(cut) == 1 if new is STREAM else len(cut) >= 4
        assert records(read_file(tmp_path, "a.arrow", **settings)) == whole.records


def test_a_folder_of_save_to_disk_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    names = ["b.arrow", "a.arrow", "c.arrow"]
    (tmp_path / "set").mkdir()
    for n, name in enumerate(names):
        rows = ROWS.slice(5 * n, 5).to_pylist()
        (tmp_path / "set" / name).write_bytes(as_arrow(rows, STREAM))
    (tmp_path / "set/cache-1.arrow").write_bytes(as_arrow(ROWS.to_pylist(), STREAM))
    state = {"_data_files": [{"filename": name} for name in names]}
    (tmp_path / "set/state.json").write_text(json.dumps(state))
    for window in (1 << 20, 400):
        found = records(read_file(tmp_path, "set", window=window, fields=("n",)))
        assert [row["n"] for row in found] == list(range(15))


@settings(max_examples=15)
@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=40),
    st.integers(1, 20),
    st.integers(40, 400),
)
def test_neither_row_groups_nor_compression_nor_batches_change_what_a_file_is_known_by(
    tmp_path: Path, texts: list[str], group: int, window: int
) -> None:
    """The records, their windows and their keys are those of any other way to write them; splits read every row once."""
    table, path = pa.table({"text": texts, "other": list(range(len(texts)))}), tmp_path / "a.parquet"  # fmt: skip
    whole = {"window": 1 << 30, "fields": ("text",)}
    pq.write_table(table, path)
    known = digests(tmp_path, **whole)
    pq.write_table(table, path, row_group_size=group, compression="zstd", use_dictionary=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow, "MOST_ROWS", 3)
        assert digests(tmp_path, **whole) == known
        splits = units(tmp_path, "*", window=window, fields=("text",))
        found = [(unit, batch) for unit in splits for batch in read(unit)]
    batches = [batch for _, batch in found]
    assert [record["text"] for record in records(batches)] == texts
    assert [origin.ordinal for origin in origins(batches)] == list(range(len(texts)))
    assert all(unit.start <= batch.origin(0).ordinal for unit, batch in found)


def test_dictionaries_and_views_and_large_texts_read_alike(tmp_path: Path) -> None:
    texts = pa.array(["x", "y", None, "x"])
    kinds = [texts.dictionary_encode(), texts.cast(pa.string_view()), texts.cast(pa.large_string())]
    for n, kind in enumerate(kinds):
        pq.write_table(pa.table({"text": kind}), tmp_path / f"{n}.parquet")
    found = records(read_file(tmp_path, "*.parquet", fields=("text",)))
    assert [record["text"] for record in found] == texts.to_pylist() * 3

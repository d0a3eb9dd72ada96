"""Rows of parquet: only what is wanted is read, each row knows where it stands, and damage costs its own rows alone."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.sources import RecordBatch, Unit, content_of, find, plan, read

TABLE = pa.table(
    {
        "text": ["one", "two", None, "four"],
        "n": [1, 2, None, 4],
        "blank": ["", "", "", ""],
        "void": pa.nulls(4, pa.int64()),
        "chat": [[{"role": "user", "n": None}], [], None, [{"role": "tool", "n": 3}]],
    }
)


def units(folder: Path, *fields: str, window: int = 1 << 20, name: str = "*.parquet") -> list[Unit]:
    return plan(find([name], folder), window, fields)


def batches(folder: Path, *fields: str, **more: Any) -> list[RecordBatch]:
    return [batch for unit in units(folder, *fields, **more) for batch in read(unit)]


def records(found: Sequence[RecordBatch]) -> list[Any]:
    return [record for batch in found for record in batch.records]


def bad(found: Sequence[RecordBatch]) -> list[tuple[int, str]]:
    return [(wrong.origin.place["row"], wrong.reason) for b in found for wrong in b.bad]


def test_only_wanted_columns_are_read_and_of_the_others_the_footer_tells_which_are_empty(
    tmp_path: Path,
) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=3)
    (batch,) = batches(tmp_path, "text")
    assert batch.records == [{"text": "one"}, {"text": "two"}, {"text": None}, {"text": "four"}]
    assert batch.unseen == {"n": 4, "chat": 4}
    (batch,) = batches(tmp_path, "chat")
    assert batch.records == [{"chat": row} for row in TABLE["chat"].to_pylist()], "nulls stay"
    assert batch.origin(3).place == {"row": 3}
    assert batch.origin(3).raw == b'{"chat":[{"role":"tool","n":3}]}'
    assert batch.origin(3).length == len(batch.origin(3).raw)


def test_a_column_that_is_missing_leaves_rows_without_it(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    assert records(batches(tmp_path, "nowhere")) == [{}] * 4


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=40),
    st.integers(1, 20),
    st.integers(40, 400),
)
def test_neither_row_groups_nor_compression_nor_batches_change_what_a_file_is_known_by(
    tmp_path: Path, texts: list[str], group: int, window: int
) -> None:
    """The records, their windows and their keys are those of any other way to write them; splits read every row once."""
    from mdsmix.sources import arrow

    table = pa.table({"text": texts, "other": list(range(len(texts)))})
    pq.write_table(table, tmp_path / "a.parquet")
    whole = content_of(units(tmp_path, "text", window=1 << 30)[0])
    pq.write_table(
        table,
        tmp_path / "a.parquet",
        row_group_size=group,
        compression="zstd",
        use_dictionary=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow, "MOST_ROWS", 3)
        assert content_of(units(tmp_path, "text", window=1 << 30)[0]) == whole
        found = [
            (unit, batch) for unit in units(tmp_path, "text", window=window) for batch in read(unit)
        ]
    assert [r["text"] for _, batch in found for r in batch.records] == texts
    assert [b.origin(i).ordinal for _, b in found for i in range(len(b.records))] == list(
        range(len(texts))
    )
    assert all(unit.start <= batch.origin(0).ordinal for unit, batch in found)


def test_the_same_rows_have_the_same_content_however_they_were_written(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    pq.write_table(
        TABLE.select(["n", "text"]), tmp_path / "b.parquet", row_group_size=1, compression="gzip"
    )
    one, other = (content_of(units(tmp_path, "text", name=f"{x}.parquet")[0]) for x in "ab")
    assert one.files == other.files
    assert one.windows[0].digest == other.windows[0].digest
    assert one.files != content_of(units(tmp_path, "n", name="a.parquet")[0]).files


def test_dictionaries_and_views_and_large_texts_read_alike(tmp_path: Path) -> None:
    texts = pa.array(["x", "y", None, "x"])
    kinds = [texts.dictionary_encode(), texts.cast(pa.string_view()), texts.cast(pa.large_string())]
    for n, kind in enumerate(kinds):
        pq.write_table(pa.table({"text": kind}), tmp_path / f"{n}.parquet")
    assert [r["text"] for r in records(batches(tmp_path, "text"))] == texts.to_pylist() * 3


def test_values_that_are_no_texts_come_as_what_they_are(tmp_path: Path) -> None:
    """The shape refuses them; a nanosecond is none of Python's, and is cut."""
    moment = pa.array([1_500], pa.timestamp("ns", "Europe/Berlin"))
    columns = {
        "t": moment,
        "d": pa.array([Decimal("1.50")]),
        "b": pa.array([b"\xff"]),
        "in": [[{"t": 1}]],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (batch,) = batches(tmp_path)
    (record,) = batch.records
    assert record["t"] == datetime.datetime(1970, 1, 1, microsecond=1, tzinfo=datetime.timezone.utc)
    assert (record["d"], record["b"]) == (Decimal("1.50"), b"\xff")
    assert b'{"Decimal":"1.50"}' in batch.origin(0).raw


def test_a_row_that_is_no_record_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    cells = pa.array([b"ok", b"\xff\xfe", b"fine"], pa.binary())
    pq.write_table(
        pa.table({"text": pa.Array.from_buffers(pa.string(), 3, cells.buffers())}),
        tmp_path / "a.parquet",
    )
    pq.write_table(
        pa.table({"text": pa.array([0, 2**61], pa.timestamp("us"))}), tmp_path / "b.parquet"
    )
    found = batches(tmp_path, "text")
    assert len(records(found)) == 3
    assert bad(found) == [(1, "invalid_utf8"), (1, "unreadable_value")]
    assert next(iter(found[0].bad)).origin.raw == b"\xff\xfe"


def test_rows_of_a_group_that_cannot_be_decompressed_are_bad_and_the_others_are_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"text {n} " * 9 for n in range(90)]}),
        path,
        row_group_size=30,
        use_dictionary=False,
    )
    page = pq.read_metadata(path).row_group(1).column(0)
    stored = bytearray(path.read_bytes())
    middle = page.data_page_offset + page.total_compressed_size // 2
    stored[middle : middle + 40] = b"\xff" * 40
    path.write_bytes(stored)
    found = batches(tmp_path, "text")
    assert len(records(found)) == 60
    assert bad(found) == [(row, "damaged_rows") for row in range(30, 60)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: whole[:-9], "is no whole parquet file"),
        (lambda whole: b"", ""),
        (lambda whole: b'{"text": "a"}\n' * 9, "is no whole parquet file"),
        (lambda whole: whole[:4] + b"\0" * 400 + b"\xff\xff\0\0PAR1", "is no whole parquet file"),
    ],
)  # fmt: skip
def test_a_file_that_is_cut_off_or_something_else_is_a_sentence(
    tmp_path: Path, content: Any, said: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path)
    path.write_bytes(content(path.read_bytes()))
    if not said:
        assert batches(tmp_path, "text") == []
        return
    with pytest.raises(Unreachable, match=said):
        batches(tmp_path, "text")


def test_of_two_columns_of_one_name_none_is_guessed(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(Unreachable, match="has two columns text"):
        batches(tmp_path, "text")


def test_a_first_look_decodes_the_head_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mdsmix.sources import arrow, format

    monkeypatch.setattr(arrow, "MOST_ROWS", 10)
    monkeypatch.setattr(format, "MOST_ITEMS", 10)
    pq.write_table(pa.table({"text": ["x"] * 500}), tmp_path / "a.parquet")
    seen: list[int] = []
    readable = arrow._readable
    monkeypatch.setattr(
        arrow, "_readable", lambda rows: seen.append(rows.num_rows) or readable(rows)
    )
    [unit] = units(tmp_path, "text")
    assert sum(len(batch.records) for batch in read(unit, limit=7)) == 7
    assert sum(seen) == 10

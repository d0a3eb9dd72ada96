"""Rows of csv and tsv: what the csv reader of Python finds in the whole file, each row with its bytes and its place."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.sources import ReadAs, RecordBatch, csv_table, find, jsonl, plan, read

FUZZ = settings(
    max_examples=80, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip
CELL = st.text(st.sampled_from('ab",\n\r \té'), max_size=7)


def read_file(
    folder: Path,
    content: bytes,
    name: str = "a.csv",
    window: int = 1 << 20,
    parsed: Any = (),
    **said: Any,
) -> list[RecordBatch]:
    (folder / name).write_bytes(content)
    units = plan(find([name], folder, ReadAs(**said)), window, parsed=parsed)
    return [batch for unit in units for batch in read(unit)]


def records(found: list[RecordBatch]) -> list[Any]:
    return [record for batch in found for record in batch.records]


def bad(found: list[RecordBatch]) -> list[tuple[str, bytes, int]]:
    return [(w.reason, w.origin.raw, w.origin.place["line"]) for b in found for w in b.bad]


@FUZZ
@given(
    st.lists(st.lists(CELL, min_size=2, max_size=2), max_size=8),
    st.integers(4, 30),
    st.sampled_from([",", "\t"]),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_what_a_writer_wrote_is_read_whatever_the_pieces(
    tmp_path: Path, rows: list[list[str]], piece: int, delimiter: str, quoted: bool, end: str
) -> None:
    out = io.StringIO(newline="")
    # With "\n" alone the writer leaves a "\r" unquoted.
    style = csv.QUOTE_ALL if quoted or end == "\n" else csv.QUOTE_MINIMAL
    writer = csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=style)
    writer.writerows([["x", "y"], *rows])
    data = b"\xef\xbb\xbf" * (piece % 2) + out.getvalue().encode()
    with patch.object(jsonl, "PIECE_BYTES", piece):
        found = read_file(tmp_path, data, "a.csv" if delimiter == "," else "a.tsv", window=40)
    assert records(found) == [dict(zip("xy", row, strict=True)) for row in rows]
    assert bad(found) == []
    for batch in found:
        for i, record in enumerate(batch.records):
            origin = batch.origin(i)
            at = origin.place
            assert data[at["offset"] :].startswith(origin.raw)
            assert at["line"] == data.count(b"\n", 0, at["offset"]) + 1
            assert next(
                csv.reader(io.StringIO(origin.raw.decode(), newline=""), delimiter=delimiter)
            ) == list(record.values())


@FUZZ
@example(b'5" disk,1\n"a\nb",2\nc,3\n', 9)
@given(
    st.binary(max_size=60).map(lambda b: bytes(b'",\n\ra1'[c % 6] for c in b)), st.integers(3, 70)
)
def test_whatever_the_bytes_every_one_is_in_one_row(
    tmp_path: Path, data: bytes, piece: int
) -> None:
    """In order and with nothing left out, blank lines apart; and good rows are those that the reader finds in their bytes."""
    if not data:
        return
    with patch.object(jsonl, "PIECE_BYTES", piece):
        found = read_file(tmp_path, data, header=("x", "y"))
    spans = sorted(
        [
            (o.place["offset"], o.raw)
            for b in found
            for o in [*map(b.origin, range(len(b.records))), *(w.origin for w in b.bad)]
        ]
    )
    at = 0
    for offset, raw in spans:
        assert offset >= at
        assert data[at:offset].strip(b"\r\n") == b""
        assert data[offset : offset + len(raw)] == raw
        at = offset + len(raw)
    assert data[at:].strip(b"\r\n") == b""


def test_texts_stay_texts(tmp_path: Path) -> None:
    """Arrow and pandas make null of NA and 7 of 007, and of 20,000 rows with quoted line ends 20,001."""
    rows = [["NA", "007"], ["null", "1e5"], ["", "true"], ["two\nlines", "2020-01-01"]]
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["a", "b"], *rows])
    assert [list(r.values()) for r in records(read_file(tmp_path, out.getvalue().encode()))] == rows


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"1,2,3\n", "too_many_fields"),
        (b"1\n", "too_few_fields"),
        (b"1,\xff\n", "invalid_utf8"),
        (b"1,a\0b\n", "nul_byte"),
        (b'1,"a"b\n', "not_csv"),
        (b'"1,a\n', "not_csv"),
    ],
)
def test_a_bad_row_is_named_and_costs_its_neighbours_nothing(
    tmp_path: Path, row: bytes, reason: str
) -> None:
    found = read_file(tmp_path, b"x,y\n1,a\n" + row + b'2,b\n"3","c"\n')
    assert [r["y"] for r in records(found)] == ["a", "b", "c"]
    assert bad(found) == [(reason, row, 3)]


def test_lines_after_a_fault_are_read_again_in_their_order(tmp_path: Path) -> None:
    data = b'x,y\n5" disk,1\n"a\nb"c,2\nd,3\ne",4\n'
    found = read_file(tmp_path, data)
    assert [r["x"] for r in records(found)] == ['5" disk', 'b"c', "d", 'e"']
    assert bad(found) == [("not_csv", b'"a\n', 3)]


def test_a_row_is_in_the_window_of_its_first_byte(tmp_path: Path) -> None:
    found = read_file(tmp_path, b"abc,defgh\n" * 9, header=("x", "y"), window=20)
    places = [(b.window, b.origin(i).place["offset"]) for b in found for i in range(len(b.records))]
    assert places == [(n // 2, 10 * n) for n in range(9)]


@pytest.mark.parametrize("inner", [b"word " * 40, b"word\n" * 40])
def test_a_field_that_is_too_long_is_passed_over(tmp_path: Path, inner: bytes) -> None:
    long = b'1,"' + inner + b'"\n'
    small = {"LONGEST_FIELD": 50, "LONGEST_ROW": 100}
    with patch.multiple(csv_table, **small), patch.object(jsonl, "PIECE_BYTES", 30):
        found = read_file(tmp_path, b"x,y\n1,a\n" + long + b"2,b\n")
    assert records(found) == [{"x": "1", "y": "a"}, {"x": "2", "y": "b"}]
    [wrong] = found[0].bad
    assert (wrong.reason, wrong.origin.length) == ("record_too_long", len(long))


def test_cells_of_fields_that_hold_lists_are_json(tmp_path: Path) -> None:
    data = b'm,t\n"[{""role"": ""user""}]",[1]\n,\n{,x\n'
    found = records(read_file(tmp_path, data, parsed=("m",)))
    assert found == [
        {"m": [{"role": "user"}], "t": "[1]"},
        {"m": None, "t": ""},
        {"m": "{", "t": "x"},
    ]


def test_semicolons_divide_cells_where_the_first_row_has_no_comma(tmp_path: Path) -> None:
    for end in ("\n", "\r\n"):
        said = end.join(['prompt;"a;b"', '"1,5; 2";"x', ';y"', "3;4", ""]).encode()
        expected = [{"prompt": "1,5; 2", "a;b": f"x{end};y"}, {"prompt": "3", "a;b": "4"}]
        assert records(read_file(tmp_path, said)) == expected
        assert records(read_file(tmp_path, said, window=7)) == expected
    assert records(read_file(tmp_path, b"1;2\n3;4\n", header=("a", "b"))) == [
        {"a": "1", "b": "2"},
        {"a": "3", "b": "4"},
    ]
    assert records(read_file(tmp_path, b"a;b,c\n1;2,3\n")) == [{"a;b": "1;2", "c": "3"}]


def test_the_recipe_may_name_the_columns(tmp_path: Path) -> None:
    found = read_file(tmp_path, b"1,a\n", header=("n", "text"))
    assert records(found) == [{"n": "1", "text": "a"}]
    with pytest.raises(Unreachable, match="two columns are named 'a'"):
        read_file(tmp_path, b"a,a\n1,2\n")
    with pytest.raises(RecipeError, match=r"header means nothing for a\.jsonl"):
        read_file(tmp_path, b"1\n", "a.jsonl", header=("n",))
    with pytest.raises(RecipeError, match=r"source\.format is 'cvs'; did you mean csv"):
        read_file(tmp_path, b"1\n", "a.jsonl", format="cvs")
    found = read_file(tmp_path, b"n,text\n1,a\n", "a.dat", format="csv")
    assert records(found) == [{"n": "1", "text": "a"}]

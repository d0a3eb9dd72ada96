"""A JSON file that is one array gives its elements, each with its bytes and its place, however it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.sources import RecordBatch, content_of, find, format, jsonl, plan, read

FUZZ = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip
TEXT = st.text(st.sampled_from('ab"\\{}[], \n\u00e9'), max_size=9)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 99), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, VALUE, max_size=3)


def read_file(folder: Path, content: bytes, window: int = 1 << 20) -> list[RecordBatch]:
    (folder / "a.json").write_bytes(content)
    units = plan(find(["a.json"], folder), window)
    return [batch for unit in units for batch in read(unit)]


@FUZZ
@example([{"a": "\\"}, {}], 1, None, False)
@given(st.lists(OBJECT, max_size=6), st.integers(1, 30), st.sampled_from([None, 2]), st.booleans())
def test_elements_are_those_of_the_array_whatever_the_pieces(
    tmp_path: Path, values: list[Any], piece: int, indent: int | None, ascii_only: bool
) -> None:
    data = (
        b"\xef\xbb\xbf" * (piece > 2 and piece % 2)
        + json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()
    )
    with patch.object(jsonl, "PIECE_BYTES", piece):
        found = read_file(tmp_path, data, window=50)
    assert [record for batch in found for record in batch.records] == values
    origins = [batch.origin(i) for batch in found for i in range(len(batch.records))]
    assert [origin.place["index"] for origin in origins] == list(range(len(values)))
    for origin, value in zip(origins, values, strict=True):
        assert data[origin.place["offset"] :].startswith(origin.raw)
        assert json.loads(origin.raw) == value


@settings(FUZZ, max_examples=20)
@given(
    st.lists(VALUE | OBJECT, min_size=1, max_size=6),
    st.integers(1, 20),
    st.sampled_from([None, 1]),
)
@example([{"a": "b"}, 3, None, "s", [1], {"a": "c"}], 20, None)
@example(["\\", 'a",', 2], 1, None)
def test_what_is_no_object_is_an_element_of_its_own(
    tmp_path: Path, values: list[Any], piece: int, indent: int | None
) -> None:
    """Each with its number, its place and its bytes, whatever stands around it."""
    data = json.dumps(values, indent=indent).encode()
    with patch.object(jsonl, "PIECE_BYTES", piece):
        found = read_file(tmp_path, data)
    assert [record for batch in found for record in batch.records] == values
    origins = [batch.origin(i) for batch in found for i in range(len(batch.records))]
    assert [origin.place["index"] for origin in origins] == list(range(len(values)))
    for origin, value in zip(origins, values, strict=True):
        assert data[origin.place["offset"] :].startswith(origin.raw)
        assert json.loads(origin.raw) == value


def test_what_stands_between_elements_and_is_no_value_is_kept_with_its_place(
    tmp_path: Path,
) -> None:
    (batch,) = read_file(tmp_path, b'\xef\xbb\xbf[{"n": 1} x, "y, 4 z",, \\", 3]')
    assert batch.records == ["y, 4 z", 3]
    places = [(bad.origin.raw, *bad.origin.place.values()) for bad in batch.bad]
    assert places == [(b'{"n": 1} x', 0, 4), (b'\\"', 2, 27)]


def test_a_bad_element_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    bad = {b'{"a": NaN}': "not_json", b'{"a" 1}': "not_json", b'{"a": "\\ud800"}': "lone_surrogate", b'{"a": "\xff"}': "invalid_utf8", b'{"a"}}': ""}  # fmt: skip
    for raw, reason in list(bad.items())[:4]:
        (batch,) = read_file(tmp_path, b'[{"n": 1}, ' + raw + b', {"n": 2}]')
        assert batch.records == [{"n": 1}, {"n": 2}]
        [wrong] = batch.bad
        assert (wrong.reason, wrong.origin.raw, wrong.origin.place["index"]) == (reason, raw, 1)


@pytest.mark.parametrize("content", [b'[{"a": 1}, {"a"', b'[{"a": "x', b'[{"a": 1}', b"[", b'[{"a": 1}]]', b'[{}, "\\'])  # fmt: skip
def test_an_array_that_is_not_closed_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(Unreachable, match="is no whole JSON array"):
        read_file(tmp_path, content)


def test_lines_that_are_named_json_are_lines(tmp_path: Path) -> None:
    data = b'{"a": 1}\n{"a": 2}\n'
    (batch,) = read_file(tmp_path, data)
    assert batch.records == [{"a": 1}, {"a": 2}]
    (tmp_path / "a.jsonl").write_bytes(data)
    one, other = (content_of(plan(find([name], tmp_path))[0]) for name in ("a.json", "a.jsonl"))
    assert one.windows[0].digest == other.windows[0].digest, "the keys of what was converted stay"


def test_an_element_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    long = b'{"a": "' + b"x" * 200 + b'"}'
    with patch.object(jsonl, "PIECE_BYTES", 30), patch.object(format, "LONGEST", 100):
        (batch,) = read_file(tmp_path, b'[{"n": 1}, ' + long + b', {"n": 2}]')
    assert batch.records == [{"n": 1}, {"n": 2}]
    [wrong] = batch.bad
    assert (wrong.reason, wrong.origin.length, wrong.origin.raw) == (
        "record_too_long",
        len(long),
        b"",
    )

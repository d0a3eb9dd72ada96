"""Ragged rows behave as the same rows in a list of arrays."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix import ragged
from mdsmix.ragged import Chunked, Interleaved, Ragged
from tests.styles import to_lists

ROWS = st.lists(st.lists(st.integers(0, 1000), max_size=6), max_size=12)


@settings(max_examples=40)
@given(ROWS, ROWS, st.randoms(use_true_random=False))
def test_rows_are_the_same_after_take_concat_and_slice(
    rows: list[list[int]], more_rows: list[list[int]], random: random.Random
) -> None:
    ragged_rows = Ragged.from_rows(rows, np.uint16)
    assert to_lists(ragged_rows) == rows
    mask = np.array([random.random() < 0.5 for _ in rows], bool)
    assert to_lists(ragged_rows.take(mask)) == [
        row for row, is_in in zip(rows, mask, strict=True) if is_in
    ]
    order = np.array(random.sample(range(len(rows)), len(rows)), np.int64)
    assert to_lists(ragged_rows.take(order)) == [rows[i] for i in order]
    both = Ragged.concat([ragged_rows, Ragged.from_rows(more_rows, np.uint16)])
    assert to_lists(both) == rows + more_rows
    assert to_lists(both.slice(len(rows), len(both))) == more_rows
    cut = Chunked.from_parts([ragged_rows, both]).slice(len(rows) // 2, len(rows) + len(both) // 2)
    values = np.concatenate([np.empty(0, np.uint16), *cut.arrays])
    assert (
        to_lists(Ragged(values, cut.offsets))
        == (rows * 2 + more_rows)[len(rows) // 2 :][: len(cut)]
    )


def test_cut_takes_a_part_of_each_row_and_bytes_are_read_as_the_dtype() -> None:
    rows = Ragged.from_rows([[1, 2, 3], [], [4, 5]], "uint16")
    assert to_lists(rows.cut(np.array([1, 0, 0]), np.array([2, 0, 1]))) == [[2, 3], [], [4]]
    assert to_lists(rows.first(2)) == [[1, 2], [], [4, 5]]
    assert rows.first(3) is rows
    assert to_lists(rows.take(np.arange(0, len(rows), 2))) == [[1, 2, 3], [4, 5]]
    assert to_lists(Ragged.from_rows([b"ab", b"", b"c"], np.uint8)) == [[97, 98], [], [99]]


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.lists(st.integers(0, 9), max_size=4)] * 3), min_size=1))
def test_zip_joins_the_rows_of_all_parts(rows: list[tuple[list[int], ...]]) -> None:
    parts = [Ragged.from_rows(part, np.uint16) for part in zip(*rows, strict=True)]
    for short in (0, ragged.SHORT):  # every row is long, or none is
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ragged, "SHORT", short)
            assert to_lists(Ragged.zip(parts)) == [
                [v for cell in row for v in cell] for row in rows
            ]
    columns = Interleaved("abc", Ragged.from_rows(chain.from_iterable(rows), np.uint16))
    assert {name: to_lists(columns[name]) for name in columns} == {
        name: to_lists(part) for name, part in zip("abc", parts, strict=True)
    }
    assert "d" not in columns

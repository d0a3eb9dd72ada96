"""Best fit from the longest down: every document once, no row too full, as few rows as the textbook's way gives."""

from bisect import bisect_left, insort

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.kinds.assemble import best_fit


def textbook(lengths: list[int], width: int) -> int:
    """Rows of best-fit decreasing, one document after the other."""
    rooms: list[int] = []
    rows = 0
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            rows, room = rows + 1, width
        else:
            room = rooms.pop(place)
        insort(rooms, room - length)
    return rows


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_each_document_is_in_one_row_and_there_are_as_few_rows_as_by_the_textbook(
    data: st.DataObject,
) -> None:
    width = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(1, width), max_size=60))
    packed = best_fit(np.array(lengths, np.int64), width)
    assert sorted(packed.values.tolist()) == list(range(len(lengths)))
    rows = [packed[row].tolist() for row in range(len(packed))]
    assert all(sum(lengths[i] for i in row) <= width for row in rows)
    assert len(packed) == textbook(lengths, width)
    assert all(row == sorted(row) and row for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_worked_by_hand() -> None:
    """Of equal documents the first share a row: published rows hold these."""
    for lengths, rows in (([], 0), ([7], 1), ([7] * 10, 10), ([3] * 10, 5)):
        assert len(best_fit(np.array(lengths, np.int64), 7)) == rows
    packed = best_fit(np.array([3, 3, 3]), 7)
    assert [packed[row].tolist() for row in range(len(packed))] == [[0, 1], [2]]

"""Which documents share a packed row: best fit from the longest down, over all documents of a work unit.

A document goes into the fullest row that still has room for it, and into a new one where none has. Longest first, so that the many
short ones fill what the long ones leave: chats whose lengths spread from tens to thousands of tokens fill rows of 4,096 to 99.9 %. No
document is split, so where all are longer than half a row there is nothing to join. Documents of one length are placed together: a
unit of a million short pairs has a few hundred lengths, and takes as many steps as there are lengths and rooms that they meet.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mdsmix.ragged import Ragged

Numbers = NDArray[np.int64]


def best_fit(lengths: Numbers, width: int) -> Ragged:
    """Rows of at most `width` tokens from documents of these lengths (int64 [n], 1 to `width` each).

    Returns:
        int64 rows of the documents' numbers: each is in one row. Numbers rise within a row, and rows stand in the order of their
        first documents, so that rows of every filling lie side by side where a source mixes lengths.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    rooms = _Rooms(width)
    placed = [
        row
        for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True)
        for row in rooms.place(size, count)
    ]
    row_of = np.empty(len(lengths), np.int64)
    row_of[longest_first] = placed
    return _in_order(row_of, rooms.rows)


class _Rooms:
    """The rows that are open, by the tokens that they have room for."""

    def __init__(self, width: int) -> None:
        self._width, self.rows = width, 0
        self._by_room: dict[int, list[int]] = {}
        self._rooms = 0
        "Bit r: some row has room for r tokens."

    def place(self, size: int, count: int) -> list[int]:
        """The rows of `count` documents of one length. The fullest row with room takes one after the other, since it is
        the fullest still after each."""
        placed = list[int]()
        while left := count - len(placed):
            room = self._tightest(size)
            each = room // size
            rows = self._take(room, -(-left // each))
            full, rest = divmod(left, each) if each * len(rows) > left else (len(rows), 0)
            placed += [row for row in rows[:full] for _ in range(each)]
            self._put(room - each * size, rows[:full])
            if rest:
                placed += rows[full:] * rest
                self._put(room - rest * size, rows[full:])
        return placed

    def _tightest(self, size: int) -> int:
        """The least room that takes so many tokens; a whole row's where none does."""
        fitting = self._rooms >> size
        return size + (fitting & -fitting).bit_length() - 1 if fitting else self._width

    def _take(self, room: int, most: int) -> list[int]:
        """At most so many rows of this room; new ones where there are none."""
        rows = self._by_room.get(room)
        if rows is None:
            self.rows += most
            return list(range(self.rows - most, self.rows))
        taken, kept = rows[:most], rows[most:]
        if kept:
            self._by_room[room] = kept
        else:
            del self._by_room[room]
            self._rooms ^= 1 << room
        return taken

    def _put(self, room: int, rows: list[int]) -> None:
        if rows and room:
            self._by_room.setdefault(room, []).extend(rows)
            self._rooms |= 1 << room


def _in_order(row_of: Numbers, rows: int) -> Ragged:
    """The documents of each row; rows in the order of their first documents."""
    documents = np.argsort(row_of, kind="stable")
    sizes = np.bincount(row_of, minlength=rows)
    by_row = Ragged.from_lengths(documents, sizes)
    return by_row.take(np.argsort(documents[by_row.offsets[:-1]])) if rows else by_row

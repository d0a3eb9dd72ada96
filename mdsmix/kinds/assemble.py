"""Encoded batches -> the rows of a work unit, growing in one buffer.

A unit's rows are kept in memory until it is finished (47 MB for 96 MiB of English in uint16), because its shards are
cut evenly and so want the number of rows first. A bytearray grows in place, so the buffer is never held twice.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.encoded import Encoded, encoded
from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Totals, histogram
from mdsmix.shards.shard_files import ShardLayout, fixed_rows, lay_out
from mdsmix.shards.token_ids import STARTS


class Assembled(NamedTuple):
    """The rows of a work unit."""

    rows: Ragged
    "uint8: the bytes of each sample."
    totals: Totals
    "What they hold."
    leftover: NDArray[Any] = np.empty(0, np.uint8)
    "Concat: the tokens behind the last full row."
    documents: Ragged | None = None
    "int64: the numbers of each row's documents, in the order in which they were added; None where each row is one of them."


class Assembler(Protocol):
    """Takes batches, gives rows."""

    def add(self, batch: Encoded) -> Iterable[Ragged]:
        """Takes a batch; yields the shards that are full, which it holds no longer."""
        ...

    def finish(self) -> Assembled: ...


class _Growing:
    """What batches bring, in buffers that grow."""

    def __init__(self, layout: ShardLayout, width: int, dtype: str) -> None:
        self._layout, self._width, self._dtype = layout, width, dtype
        self._buffers = defaultdict[str, bytearray](bytearray)
        self._lengths, self._totals = [np.empty(0, np.int64)], Totals()

    def _take(
        self, totals: Totals, lengths: NDArray[np.int64], **values: NDArray[Any]
    ) -> tuple[()]:
        for name, array in values.items():
            self._buffers[name] += memoryview(np.ascontiguousarray(array)).cast("B")
        self._lengths.append(lengths)
        self._totals += totals
        return ()


class JoinedRows(_Growing):
    """Concat: documents one behind the other, cut into rows of max_seq_len."""

    def add(self, batch: Encoded) -> Iterable[Ragged]:
        specials = Totals(specials=batch.totals.specials)
        return self._take(specials, batch.lengths[:0], tokens=batch.columns["tokens"].values)

    def add_tokens(self, tokens: NDArray[Any]) -> None:
        self._take(Totals(), np.empty(0, np.int64), tokens=tokens)

    def finish(self) -> Assembled:
        width, tokens = self._width, np.frombuffer(self._buffers["tokens"], self._dtype)
        lengths = np.full(len(tokens) // width, width)
        whole, rest = np.split(tokens, [lengths.sum()])
        full = encoded({}, [Ragged.from_lengths(whole, lengths)], (), int((lengths - 1).sum()))
        return Assembled(fixed_rows(self._layout, whole), full.totals + self._totals, rest)


class SampleRows(_Growing):
    """Every other layout: each batch's samples are laid out as they come."""

    def add(self, batch: Encoded) -> Iterable[Ragged]:
        rows = lay_out(self._layout, batch.columns)
        return self._take(batch.totals, rows.lengths, body=rows.values)

    def finish(self) -> Assembled:
        body = np.frombuffer(self._buffers["body"], np.uint8)
        return Assembled(Ragged.from_lengths(body, np.concatenate(self._lengths)), self._totals)


class PackedRows(_Growing):
    """Whole documents, as many to a row as fit: a row holds their tokens, what is trained of them, and where each begins."""

    def add(self, batch: Encoded) -> Iterable[Ragged]:
        totals = replace(batch.totals, documents=batch.totals.samples)
        values = {name: rows.values for name, rows in batch.columns.items()}
        return self._take(totals, batch.lengths, **values)

    def finish(self) -> Assembled:
        lengths = np.concatenate(self._lengths)
        packed = best_fit(lengths, self._width)
        sizes = lengths[packed.values]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        rows = Ragged(ends, ends[packed.offsets])
        starts = (ends[:-1] - np.repeat(ends[packed.offsets[:-1]], packed.lengths)).astype(np.int32)
        totals = replace(
            self._totals,
            samples=len(packed),
            longest=int(rows.lengths.max(initial=0)),
            lengths=histogram(rows.lengths),
        )
        columns = {STARTS: Ragged(starts, packed.offsets)}
        for name, codec in self._layout.codecs.items():
            if name != STARTS:
                values = np.frombuffer(self._buffers[name], codec.dtype)
                taken = Ragged.from_lengths(values, lengths).take(packed.values)
                columns[name] = Ragged(taken.values, rows.offsets)
        return Assembled(lay_out(self._layout, columns), totals, documents=packed)


def best_fit(lengths: NDArray[np.int64], width: int) -> Ragged:
    """Rows of at most `width` tokens from documents of these lengths (int64 [n], 1 to `width` each), by best fit from the longest down.

    A document goes into the fullest row that still has room for it, and into a new one where none has. Longest first, so that the many
    short ones fill what the long ones leave: chats whose lengths spread from tens to thousands of tokens fill rows of 4,096 to 99.9 %. No
    document is split, so where all are longer than half a row there is nothing to join. Documents of one length are placed together: a
    unit of a million short pairs has a few hundred lengths, and takes at most a step for each row.

    Returns:
        int64 rows of the documents' numbers: each is in one row. The numbers rise within a row, and rows stand in the order of their
        first documents, so that rows of every filling lie side by side where a source mixes lengths.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    open_rows, rooms, rows, placed = dict[int, deque[int]](), 0, 0, list[int]()
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = len(placed) + count
        while len(placed) < end:
            if fitting := rooms >> size:  # bit r of `rooms`: some row has room for r tokens
                room = size + (fitting & -fitting).bit_length() - 1
                row = open_rows[room].popleft()
                rooms ^= 0 if open_rows[room] else 1 << room
            else:
                room, row, rows = width, rows, rows + 1
            # The fullest row with room is the fullest still after each.
            taken = min(end - len(placed), room // size)
            placed += [row] * taken
            if room := room - taken * size:
                open_rows.setdefault(room, deque()).append(row)
                rooms |= 1 << room
    row_of = np.empty(len(lengths), np.int64)
    row_of[longest_first] = placed
    return _in_order(row_of, rows)


def _in_order(row_of: NDArray[np.int64], rows: int) -> Ragged:
    """The documents of each row; rows in the order of their first documents."""
    documents = np.argsort(row_of, kind="stable")
    sizes = np.bincount(row_of, minlength=rows)
    by_row = Ragged.from_lengths(documents, sizes)
    return by_row.take(np.argsort(documents[by_row.offsets[:-1]])) if rows else by_row

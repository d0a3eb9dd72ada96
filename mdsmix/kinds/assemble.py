"""Encoded batches -> the rows of a work unit.

A unit's rows are kept in memory until the unit is finished (47 MB for 96 MiB of English in uint16):
its shards are cut evenly, for which the number of rows must be known. They stay in the arrays of
their batches until they are written.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.encoded import Encoded
from mdsmix.ragged import Chunked, Ragged
from mdsmix.shards.counts import Totals, count_by_length
from mdsmix.shards.shard_files import Rows, ShardLayout, lay_out_samples
from mdsmix.shards.token_ids import STARTS


class Assembled(NamedTuple):
    """The rows of a work unit."""

    rows: Rows
    totals: Totals
    "Counts over the rows."
    leftover: NDArray[Any] = np.empty(0, np.uint8)
    "Concat: the tokens behind the last full row, in the stream's token dtype."
    documents: Ragged | None = None
    """int64, for packed rows: each row's documents, by their numbers in the order in which they
    were added. None: each row is one sample.
    """


class Assembler:
    """Takes encoded batches and gives the rows of a work unit. The columns that `laid_out` makes of
    each batch are kept.
    """

    def __init__(self, layout: ShardLayout, width: int, dtype: str) -> None:
        self._layout, self._width, self._dtype = layout, width, dtype
        self._columns, self._totals = defaultdict[str, list[Ragged]](list), Totals()

    def add(self, batch: Encoded) -> Iterable[Rows]:
        """Takes a batch; yields the rows of each shard that is full, which are no longer
        held here.
        """
        self._totals += batch.totals
        self.keep(self.laid_out(batch))
        return ()

    def laid_out(self, batch: Encoded) -> Mapping[str, Ragged]:
        """The columns of a batch that are kept."""
        return batch.columns

    def keep(self, columns: Mapping[str, Ragged]) -> None:
        for name, rows in columns.items():
            self._columns[name].append(rows)

    def kept(self, name: str) -> list[Ragged]:
        """A column of each batch, which is then no longer held here."""
        return self._columns.pop(name, [])

    def finish(self) -> Assembled:
        raise NotImplementedError


class JoinedRows(Assembler):
    """Concat: documents one behind the other, cut into rows of max_seq_len. `largest_id` counts all
    of their tokens, the leftover too.
    """

    def finish(self) -> Assembled:
        arrays = [rows.values.view(np.uint8) for rows in self.kept("tokens")]
        width, size = self._width, self._width * np.dtype(self._dtype).itemsize
        count, over = divmod(sum(map(len, arrays)), size)
        cut = Chunked(arrays, np.cumsum([0, count * size, over]))
        whole, rest = (cut.slice(at, at + 1).arrays for at in (0, 1))
        totals = replace(
            self._totals,
            samples=count,
            tokens=count * width,
            loss_tokens=count * (width - 1),
            longest=width if count else 0,
            lengths=count_by_length(np.full(count, width)),
        )
        return Assembled(
            Chunked(whole, np.arange(count + 1) * size),
            totals,
            np.concatenate([np.empty(0, np.uint8), *rest]).view(self._dtype),
        )


class SampleRows(Assembler):
    """Every other layout: each batch's samples are laid out as they come."""

    def laid_out(self, batch: Encoded) -> Mapping[str, Ragged]:
        return {"rows": lay_out_samples(self._layout, batch.columns)}

    def finish(self) -> Assembled:
        return Assembled(Chunked.from_parts(self.kept("rows")), self._totals)


class PackedRows(Assembler):
    """Whole documents, as many to a row as fit. A row holds their tokens, the mask of trained
    tokens, and where each document begins.
    """

    def finish(self) -> Assembled:
        codecs = self._layout.codecs
        kept = {
            name: Ragged.concat([Ragged.from_rows([], codecs[name].dtype), *self.kept(name)])
            for name in codecs
            if name != STARTS
        }
        lengths = next(iter(kept.values())).lengths
        packed = best_fit(lengths, self._width)
        ends = np.concatenate([[0], np.cumsum(lengths[packed.values])])
        offsets = ends[packed.offsets]
        starts = ends[:-1] - np.repeat(offsets[:-1], packed.lengths)
        columns = {STARTS: Ragged(starts.astype(np.int32), packed.offsets)}
        for name, documents in kept.items():
            columns[name] = Ragged(documents.take(packed.values).values, offsets)
        totals = replace(
            self._totals,
            samples=len(packed),
            documents=len(lengths),
            longest=int(np.diff(offsets).max(initial=0)),
            lengths=count_by_length(np.diff(offsets)),
        )
        return Assembled(lay_out_samples(self._layout, columns), totals, documents=packed)


def best_fit(lengths: NDArray[np.int64], width: int) -> Ragged:
    """Rows of at most `width` tokens from documents of these lengths (int64 [n], 1 to `width`
    each), by best fit from the longest down.

    A document goes into the fullest row that still has room for it, or into a new row where none
    has. The longest go first, so the many short ones fill the room that the long ones leave: chats
    of tens to thousands of tokens fill rows of 4,096 to 99.9 %. No document is split, so documents
    longer than half a row are never joined. Documents of one length are placed together: a unit of
    a million short pairs has a few hundred lengths, and takes at most a step for each row.

    Returns:
        int64: for each row the numbers of its documents. Each document is in one row. Numbers rise
        within a row, and rows are ordered by
        their first document, so full and less full rows lie side by side where a source mixes
        lengths.
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
            # A row that takes a document is still the fullest with room, so it takes as many of
            # this length as fit.
            taken = min(end - len(placed), room // size)
            placed += [row] * taken
            if room := room - taken * size:
                open_rows.setdefault(room, deque()).append(row)
                rooms |= 1 << room
    row_of = np.empty(len(lengths), np.int64)
    row_of[longest_first] = placed
    by_row = Ragged.from_lengths(np.argsort(row_of, kind="stable"), np.bincount(row_of))
    return by_row.take(np.argsort(by_row.values[by_row.offsets[:-1]]))

"""Encoded batches -> the rows of a work unit.

A work unit is the part of a source that one task converts. Its rows are kept in memory until the
unit is finished (47 MB for 96 MiB of English in uint16), because its shards get equally many rows,
and so the number of rows must be known first. Rows stay in the arrays of their batches until they
are written.
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
    """The rows of a work unit, as `Assembler.finish` returns them."""

    rows: Rows
    totals: Totals
    "Counts over the rows."
    leftover: NDArray[Any] = np.empty(0, np.uint8)
    "Concat: the tokens after the last full row, in the stream's token dtype."
    documents: Ragged | None = None
    """int64, for packed rows: the numbers of each row's documents, in the order that they were
    added. None: each row is one sample.
    """


class Assembler:
    """Collects encoded batches, and joins them to the rows of a work unit.

    `laid_out` decides which columns of a batch are kept; `finish` returns the rows.
    """

    def __init__(self, layout: ShardLayout, width: int, dtype: str) -> None:
        """Start without rows.

        Args:
            layout: the columns of the shards.
            width: tokens of a row.
            dtype: the NumPy dtype of the stream's tokens, such as `uint16`.
        """
        self._layout = layout
        self._width = width
        self._dtype = dtype
        self._columns = defaultdict[str, list[Ragged]](list)
        self._totals = Totals()

    def add(self, batch: Encoded) -> Iterable[Rows]:
        """Add a batch. Yield the rows of each shard that is full; these rows are then no longer
        kept here.
        """
        self._totals += batch.totals
        self.keep(self.laid_out(batch))
        return ()

    def laid_out(self, batch: Encoded) -> Mapping[str, Ragged]:
        """Return the columns of a batch that are kept."""
        return batch.columns

    def keep(self, columns: Mapping[str, Ragged]) -> None:
        """Keep the columns of a batch (name -> rows) until `finish`."""
        for name, rows in columns.items():
            self._columns[name].append(rows)

    def take_column(self, name: str) -> list[Ragged]:
        """Return the arrays of a column, one for each batch, and forget them."""
        return self._columns.pop(name, [])

    def finish(self) -> Assembled:
        """Join what was kept, and return it as the rows of the work unit."""
        raise NotImplementedError


class JoinedRows(Assembler):
    """Rows of `layout: concat`: documents one after the other, split into rows of max_seq_len. The
    count `largest_id` is over all tokens, including the leftover.
    """

    def finish(self) -> Assembled:
        """Return full rows of the joined documents, and the tokens that are left over."""
        arrays = [rows.values.view(np.uint8) for rows in self.take_column("tokens")]
        width = self._width
        row_bytes = width * np.dtype(self._dtype).itemsize
        count, leftover_bytes = divmod(sum(map(len, arrays)), row_bytes)
        # Two pieces: the bytes of all full rows, and the bytes after them.
        pieces = Chunked(arrays, np.cumsum([0, count * row_bytes, leftover_bytes]))
        full_rows = pieces.slice(0, 1).arrays
        leftover = pieces.slice(1, 2).arrays
        totals = replace(
            self._totals,
            samples=count,
            tokens=count * width,
            loss_tokens=count * (width - 1),
            longest=width if count else 0,
            lengths=count_by_length(np.full(count, width)),
        )
        return Assembled(
            Chunked(full_rows, np.arange(count + 1) * row_bytes),
            totals,
            np.concatenate([np.empty(0, np.uint8), *leftover]).view(self._dtype),
        )


class SampleRows(Assembler):
    """Rows of every other layout: one for each sample, in the order of the batches."""

    def laid_out(self, batch: Encoded) -> Mapping[str, Ragged]:
        return {"rows": lay_out_samples(self._layout, batch.columns)}

    def finish(self) -> Assembled:
        return Assembled(Chunked.from_parts(self.take_column("rows")), self._totals)


class PackedRows(Assembler):
    """Rows of whole documents, as many as fit into each. A row contains their tokens, the mask of
    tokens that the model is trained on, and the offset of each document's first token.
    """

    def finish(self) -> Assembled:
        """Choose the documents of each row, and return the rows with the documents' numbers."""
        # Join the columns of all batches: one row a document.
        codecs = self._layout.codecs
        documents = {
            name: Ragged.concat([Ragged.from_rows([], codecs[name].dtype), *self.take_column(name)])
            for name in codecs
            if name != STARTS
        }
        # Choose the documents of each row.
        lengths = next(iter(documents.values())).lengths
        packed = best_fit(lengths, self._width)
        # Join the documents of each row, and note where each begins in it.
        ends = np.concatenate([[0], np.cumsum(lengths[packed.values])])
        offsets = ends[packed.offsets]
        starts = ends[:-1] - np.repeat(offsets[:-1], packed.lengths)
        columns = {STARTS: Ragged(starts.astype(np.int32), packed.offsets)}
        for name, column in documents.items():
            columns[name] = Ragged(column.take(packed.values).values, offsets)
        totals = replace(
            self._totals,
            samples=len(packed),
            documents=len(lengths),
            longest=int(np.diff(offsets).max(initial=0)),
            lengths=count_by_length(np.diff(offsets)),
        )
        return Assembled(lay_out_samples(self._layout, columns), totals, documents=packed)


def best_fit(lengths: NDArray[np.int64], width: int) -> Ragged:
    """Return rows of at most `width` tokens from documents of these lengths (int64 [n], 1 to
    `width` each), by best fit from the longest down.

    A document goes into the fullest row that still has room for it, or into a new row if none has.
    The longest documents are placed first, so the many short ones fill the room that is left: with
    chats of tens to thousands of tokens, rows of 4,096 tokens are 99.9 % full. No document is
    split, so two documents that are longer than half a row never share one. Documents of equal
    length are placed together: a unit of a million short pairs has a few hundred lengths, so there
    is at most one step for each row.

    Returns:
        int64: for each row the numbers of its documents. Each document is in one row. Numbers rise
        within a row, and rows are ordered by their first document, so full and less full rows are
        next to each other if a source mixes lengths.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    row_count = 0
    open_rows = dict[int, deque[int]]()  # room in tokens -> rows with just that room
    rooms = 0  # bit r: some row has room for r tokens
    placed = list[int]()  # the row of each document, longest first
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = len(placed) + count
        while len(placed) < end:
            fitting = rooms >> size  # bit r: some row has room for size + r tokens
            if fitting:
                # `fitting & -fitting` is the lowest bit that is set: the fullest row with room.
                room = size + (fitting & -fitting).bit_length() - 1
                row = open_rows[room].popleft()
                if not open_rows[room]:
                    rooms ^= 1 << room
            else:
                room = width
                row = row_count
                row_count += 1
            # A row that takes a document is still the fullest with room, so it takes as many of
            # this length as fit.
            fitting_count = min(end - len(placed), room // size)
            placed += [row] * fitting_count
            room -= fitting_count * size
            if room:
                open_rows.setdefault(room, deque()).append(row)
                rooms |= 1 << room
    row_of = np.empty(len(lengths), np.int64)
    row_of[longest_first] = placed
    # Group the documents by row, then order the rows by their first document.
    by_row = Ragged.from_lengths(np.argsort(row_of, kind="stable"), np.bincount(row_of))
    return by_row.take(np.argsort(by_row.values[by_row.offsets[:-1]]))

"""Encoded batches -> the rows of a work unit, growing in one buffer.

A unit's rows are kept in memory until it is finished (47 MB for 96 MiB of English in uint16), because its shards are
cut evenly and so want the number of rows first. A bytearray grows in place, so the buffer is never held twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.encoded import Encoded
from mdsmix.kinds.packing import best_fit
from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Totals, histogram
from mdsmix.shards.shard_layout import Rows, ShardLayout, fixed_rows, lay_out
from mdsmix.shards.token_ids import STARTS


class Assembled(NamedTuple):
    """The rows of a work unit."""

    rows: Rows
    totals: Totals
    "What they hold."
    leftover: NDArray[Any] = np.empty(0, np.uint8)
    "Concat: the tokens behind the last full row."
    documents: Ragged | None = None
    "int64: the numbers of each row's documents, in the order in which they were added; None where each row is one of them."


class Assembler(Protocol):
    """Takes batches, gives rows."""

    def add(self, encoded: Encoded) -> Iterable[Rows]:
        """Takes a batch; yields the shards that are full, which it holds no longer."""
        ...

    def finish(self) -> Assembled: ...


class JoinedRows:
    """Concat: documents one behind the other, cut into rows of max_seq_len."""

    def __init__(self, layout: ShardLayout, width: int, dtype: str) -> None:
        self._layout, self._width, self._dtype = layout, width, dtype
        self._tokens = bytearray()
        self._largest = -1
        self._specials = 0

    def add(self, encoded: Encoded) -> Iterable[Rows]:
        self.add_tokens(encoded.columns["tokens"].values)
        self._specials += encoded.specials
        return ()

    def add_tokens(self, tokens: NDArray[Any]) -> None:
        self._tokens += memoryview(np.ascontiguousarray(tokens)).cast("B")
        if len(tokens):
            self._largest = max(self._largest, int(tokens.max()))

    def finish(self) -> Assembled:
        width = self._width
        tokens = np.frombuffer(self._tokens, self._dtype)
        full = len(tokens) // width
        totals = Totals(
            samples=full,
            tokens=full * width,
            loss_tokens=full * (width - 1),
            largest_id=self._largest,
            longest=width if full else 0,
            lengths=histogram(np.full(full, width)),
            specials=self._specials,
        )
        rows = fixed_rows(self._layout, tokens[: full * width])
        return Assembled(rows, totals, tokens[full * width :])


class SampleRows:
    """Every other layout: each batch's samples are laid out as they come."""

    def __init__(self, layout: ShardLayout) -> None:
        self._layout = layout
        self._body = bytearray()
        self._sizes: list[NDArray[np.int64]] = []
        self._totals = Totals()

    def add(self, encoded: Encoded) -> Iterable[Rows]:
        rows = lay_out(self._layout, encoded.columns)
        self._body += memoryview(rows.body)
        self._sizes.append(rows.sizes)
        self._totals += totals_of(encoded, len(rows))
        return ()

    def finish(self) -> Assembled:
        sizes = np.concatenate(self._sizes) if self._sizes else np.empty(0, np.int64)
        return Assembled(Rows(np.frombuffer(self._body, np.uint8), sizes), self._totals)


def totals_of(encoded: Encoded, rows: int) -> Totals:
    """What a batch of samples comes to."""
    return Totals(
        samples=rows,
        tokens=encoded.tokens,
        loss_tokens=encoded.loss_tokens,
        lost_tokens=encoded.lost_tokens,
        largest_id=encoded.largest_id,
        longest=int(encoded.lengths.max(initial=0)),
        lengths=histogram(encoded.lengths),
        specials=encoded.specials,
        cut_rows=0 if encoded.cut is None else int(np.count_nonzero(encoded.cut)),
        cut_tokens=0 if encoded.cut is None else int(encoded.cut.sum()),
    )


class PackedRows:
    """Whole documents, as many to a row as fit: a row holds their tokens, what is trained of them, and where each begins."""

    def __init__(self, layout: ShardLayout, width: int) -> None:
        self._layout, self._width = layout, width
        self._columns = {name: bytearray() for name in layout.codecs if name != STARTS}
        self._lengths = [np.empty(0, np.int64)]
        self._totals = Totals()

    def add(self, encoded: Encoded) -> Iterable[Rows]:
        for name, buffer in self._columns.items():
            buffer += memoryview(np.ascontiguousarray(encoded.columns[name].values)).cast("B")
        self._lengths.append(encoded.lengths)
        self._totals += Totals(
            documents=len(encoded.lengths),
            tokens=encoded.tokens,
            loss_tokens=encoded.loss_tokens,
            lost_tokens=encoded.lost_tokens,
            largest_id=encoded.largest_id,
            specials=encoded.specials,
        )
        return ()

    def finish(self) -> Assembled:
        lengths = np.concatenate(self._lengths)
        packed = best_fit(lengths, self._width)
        sizes = lengths[packed.values]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        rows = Ragged(ends, ends[packed.offsets])
        starts = (ends[:-1] - np.repeat(ends[packed.offsets[:-1]], packed.lengths)).astype(np.int32)
        totals = self._totals + Totals(
            samples=len(packed),
            longest=int(rows.lengths.max(initial=0)),
            lengths=histogram(rows.lengths),
        )
        columns = {STARTS: Ragged(starts, packed.offsets)}
        encodings = {name: codec.dtype for name, codec in self._layout.codecs.items()}
        for name, buffer in self._columns.items():
            documents = Ragged.from_lengths(np.frombuffer(buffer, encodings[name]), lengths)
            columns[name] = Ragged(documents.take(packed.values).values, rows.offsets)
        return Assembled(lay_out(self._layout, columns), totals, documents=packed)

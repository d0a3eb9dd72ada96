"""Several short rows -> one row of max_seq_len, first fit from the longest down, as LLM-Foundry's BinPackCollator.

Packing saves padding and costs exactness: rows that do not fit wait for the next batch, and those still waiting at the
end of the epoch are never seen. The order in which bins are tried is LLM-Foundry's, so that the same rows give the same
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mdsmix.load.rows import Row


@dataclass(slots=True)
class Bin:
    """Rows that share one packed row, in order."""

    rows: list[Row]
    size: int


@dataclass(slots=True, kw_only=True)
class Packer:
    """Rows of one batch in, `bins` bins out; what is left over is kept for the next batch."""

    bins: int
    "Packed rows per batch: the batch size of the training loop."
    max_seq_len: int
    keep: int | None = None
    "At most so many leftover bins wait for the next batch; None: all."
    waiting: list[Bin] = field(default_factory=list)

    def pack(self, rows: Sequence[Row]) -> list[list[Row]]:
        bins = list(self.waiting)
        by_length = sorted(rows, key=lambda row: row.input_ids.size, reverse=True)
        for i, row in enumerate(by_length):
            # When the remaining rows are only just enough to make the batch full, each gets a bin of its own.
            must_open = len(by_length) - i <= self.bins - len(bins)
            self._place(row, bins, must_open)
        bins.sort(key=lambda b: b.size, reverse=True)
        self.waiting = bins[self.bins :][: self.keep]
        return [b.rows for b in bins[: self.bins]]

    def _place(self, row: Row, bins: list[Bin], must_open: bool) -> None:
        """Into the first bin with room, which then moves to the end of the line, or into a new one."""
        size = row.input_ids.size
        fits = (i for i, b in enumerate(bins) if b.size + size <= self.max_seq_len)
        at = None if must_open else next(fits, None)
        if at is None:
            bins.append(Bin([row], size))
        else:
            chosen = bins.pop(at)
            bins.append(Bin([*chosen.rows, row], chosen.size + size))

"""Several short rows -> one row of max_seq_len, first fit from the longest down, as LLM-Foundry's BinPackCollator.

Packing saves padding and costs exactness: rows that do not fit wait for the next batch, and those still waiting at the end of the
epoch are never seen. Bins are tried in LLM-Foundry's order, so that the same rows give the same batch; so are the ratios of
`packing_ratio: auto`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mdsmix.load.training_rows import TrainingRow


@dataclass(slots=True)
class Bin:
    """Rows that share one packed row, in order."""

    rows: list[TrainingRow]
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

    def pack(self, rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
        bins = list(self.waiting)
        by_length = sorted(rows, key=lambda row: row.input_ids.size, reverse=True)
        for i, row in enumerate(by_length):
            # When the remaining rows are only just enough to make the batch full, each gets a bin of its own.
            must_open = len(by_length) - i <= self.bins - len(bins)
            self._place(row, bins, must_open)
        bins.sort(key=lambda b: b.size, reverse=True)
        self.waiting = bins[self.bins :][: self.keep]
        return [b.rows for b in bins[: self.bins]]

    def _place(self, row: TrainingRow, bins: list[Bin], must_open: bool) -> None:
        """Into the first bin with room, which then moves to the end of the line, or into a new one."""
        size = row.input_ids.size
        fits = (i for i, b in enumerate(bins) if b.size + size <= self.max_seq_len)
        at = None if must_open else next(fits, None)
        if at is None:
            bins.append(Bin([row], size))
        else:
            chosen = bins.pop(at)
            bins.append(Bin([*chosen.rows, row], chosen.size + size))


def ratios(max_seq_len: int, bins: int, steps: int = 20) -> dict[int, float]:
    """The packing ratios that `auto` tries, from 1 to max_seq_len / 100, by the rows that each draws for a batch of `bins`."""
    found: dict[int, float] = {}
    for exact in np.linspace(1, max(1, max_seq_len / 100), steps):
        ratio = float(np.round(10 * exact) / 10)
        found.setdefault(int(ratio * bins), ratio)
    return found


def best_ratio(
    rows: Sequence[TrainingRow], tried: Mapping[int, float], bins: int, max_seq_len: int
) -> float:
    """The last ratio before one that leaves a row waiting when all rows are packed; 1 where they fill no batch."""
    best = 1.0
    for drawn, ratio in tried.items():
        packer = Packer(bins=bins, max_seq_len=max_seq_len)
        batches = [rows[at : at + drawn] for at in range(0, len(rows), drawn)]
        whole = [batch for batch in batches if len(batch) >= bins]
        for batch in whole:
            packer.pack(batch)
        if packer.waiting or not whole:
            break
        best = ratio
    return best

"""What a conversion reports: progress while it runs, and an outcome for each stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mdsmix.convert.budget_share import BudgetShare
from mdsmix.shards.manifest import Manifest


class Watcher(Protocol):
    """Receives the events of a conversion; `report.progress` shows them."""

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Streams are about to be converted, in this order, each from so many source bytes."""

    def begin(self, stream: str, size: int) -> None:
        """A stream of `size` stored source bytes is being converted."""

    def on_progress(self, size: int, tokens: int) -> None:
        """So many more source bytes were read and tokens made of them."""

    def on_bad(self, records: int) -> None:
        """So many more records were quarantined, now or by an earlier run, in units that are done."""

    def on_step(self, sentence: str) -> None:
        """Something begins that takes a while, as it should: no news to a user who asked for quiet."""

    def say(self, sentence: str) -> None:
        """Something that the user should know now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one stream."""

    stream: str
    target: str
    manifest: Manifest
    bytes: int
    "Of all shards as stored."
    units: int
    reused: int
    "Units whose records were there already."
    new_tokens: int
    "Tokens of the units that were worked on now."
    seconds: float
    wanted: BudgetShare | None = None
    "Of a stream that takes a sample for its share of a budget."
    expected_mean: float | None = None
    "Tokens of a record, as the recipe expects them."
    notes: tuple[str, ...] = ()
    peak: int = 0
    "Bytes that the run and its workers held at most; 0 where nothing was done or the system does not tell."

    @property
    def done(self) -> int:
        """Units that were worked on now."""
        return self.units - self.reused

    @property
    def state(self) -> str:
        kept = f", {self.reused} reused" if self.reused else ""
        if not self.done:
            return f"up to date{kept}"
        return f"{self.done} of {self.units} work units converted{kept}"

"""What was measured of each setting -> which one to render, and who waits for whom.

A setting keeps up where a step waits for its batch no more than 2 % of itself. Of those that keep up the one with the fewest
workers is taken, then the one that holds fewest batches: workers cost memory, and cores that the other ranks need. Where
none keeps up it is the one whose steps wait least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mdsmix.bench.settings import Setting
from mdsmix.table import Column, Table

TOLERATED = 0.02
"Of a step: below it the measurement itself is not sure."


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over the beginning of an epoch."""

    first: float
    "Seconds from the request of the first batch until it was there; starting the workers is part of it."
    wait: float
    "Seconds that a step waited for its batch, the mean of all but the first."
    longest: float
    "The longest of these."
    steps: int
    samples: float
    "A second, read as fast as it goes."
    tokens: float
    "A second, without padding."
    batches: int
    "Batches that were read in all."


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting."""

    setting: Setting
    warm: Pass
    cold: Pass | None = None
    "With an empty cache folder; None where nothing is fetched, since no stream has a remote."
    bare: float | None = None
    "Samples a second of a bare StreamingDataset on the same files, which makes no batch of them."

    @property
    def wait(self) -> float:
        """What a step waits where it waits longer: with a cold cache, as a rule."""
        return max(self.warm.wait, self.cold.wait if self.cold else 0.0)

    @property
    def samples(self) -> float:
        return (self.cold or self.warm).samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The setting to render, and why."""

    chosen: Measured
    step: float
    "Seconds of a step of the model."
    batch: int
    "Samples that a step of a device takes."

    @property
    def keeps_up(self) -> bool:
        return keeps_up(self.chosen, self.step)

    @property
    def waits(self) -> str:
        """`loader` or `model`: who waits for the other."""
        return "loader" if self.keeps_up else "model"

    def __str__(self) -> str:
        m, ms = self.chosen, 1000 * self.step
        asked = f"flat out it gives {m.samples:,.0f} samples/s, and a step asks for {self.batch / self.step:,.0f}"
        wait = f"{1000 * m.wait:,.1f} ms"
        if self.keeps_up:
            return f"the loader waits for the model: with {m.setting} a step of {ms:,.0f} ms waits {wait} for its batch; {asked}."
        lost = m.wait / (m.wait + self.step)
        return (
            f"the model waits for the loader: at best, with {m.setting}, a step of {ms:,.0f} ms waits {wait} more for its batch, "
            f"{lost:.0%} of the time; {asked}."
        )


def keeps_up(measured: Measured, step: float) -> bool:
    return measured.wait <= TOLERATED * step


def chosen(measured: Sequence[Measured], step: float) -> Measured:
    """The setting to render."""
    enough = [m for m in measured if keeps_up(m, step)]
    if enough:
        return min(enough, key=lambda m: _cost(m.setting))
    return min(measured, key=lambda m: (m.wait, _cost(m.setting)))


def _cost(setting: Setting) -> tuple[int, int, int]:
    return setting.workers, setting.prefetch or 0, setting.predownload or 0


def table(measured: Sequence[Measured]) -> Table:
    """A row for each pass: cold and warm."""
    columns = [
        Column("workers"),
        Column("prefetch"),
        Column("predownload", "text"),
        Column("cache", "text"),
        Column("first batch, s", "seconds", "first_batch_seconds"),
        Column("samples/s", key="samples_per_second"),
        Column("tokens/s", key="tokens_per_second"),
        Column("wait a step, ms", "seconds", "wait_ms"),
        Column("longest, ms", "seconds", "longest_wait_ms"),
        Column("bare samples/s", key="bare_samples_per_second"),
    ]
    with_bare = any(m.bare is not None for m in measured)
    rows = [row for m in measured for row in _rows(m)]
    if not with_bare:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(columns=columns, rows=rows)


def _rows(measured: Measured) -> Iterator[tuple[object, ...]]:
    s = measured.setting
    for cache, found in (("cold", measured.cold), ("warm", measured.warm)):
        if found is None:
            continue
        waits = (1000 * found.wait, 1000 * found.longest)
        rates = (found.first, found.samples, found.tokens, *waits)
        bare = measured.bare if cache == "warm" else None
        yield s.workers, s.prefetch or 0, s.predownload or "8 batches", cache, *rates, bare

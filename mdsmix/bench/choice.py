"""The choice among measured settings of a loader.

A setting keeps up if a step waits for its batch at most 2 % of the step's time. Among settings that
keep up, the fewest workers win, then the least prefetching: workers cost memory, and cores that
other ranks need. If no setting keeps up, the shortest wait wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdsmix.bench.loader_bench import LoaderSetting
from mdsmix.table import Column, Table

TOLERATED = 0.02
"The share of a step that may be spent waiting; smaller waits cannot be measured reliably."
COLUMNS = (
    Column("workers"),
    Column("prefetch"),
    Column("cache", "text"),
    Column("first batch, s", "seconds", "first_batch_seconds"),
    Column("samples/s", key="samples_per_second"),
    Column("wait a step, ms", "seconds", "wait_ms"),
)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The measurement of one pass over the beginning of an epoch."""

    setting: LoaderSetting
    cache: str
    "`cold`: streams with a remote have an empty cache folder; `warm`: the same batches again."
    first: float
    "Seconds from the request of the first batch to its arrival, with the start of the workers."
    wait: float
    "Mean seconds that a step waited for its batch, without the first batch."
    samples: float
    "Samples a second, read as fast as the loader can."
    batches: int
    "All batches that were read."

    def __str__(self) -> str:
        return (
            f"{self.setting}, {self.cache}: {self.samples:,.0f} samples/s, a step waits "
            f"{1000 * self.wait:,.1f} ms"
        )

    def keeps_up(self, step: float) -> bool:
        return self.wait <= TOLERATED * step


def choose_pass(passes: Sequence[Pass], step: float) -> Pass:
    """Return the chosen setting's pass. Of its two passes (cold and warm cache) the one with the
    longer wait counts.

    Args:
        step: seconds of a step of the model.
    """
    # Passes are sorted by wait, so the slower pass of a setting overwrites the faster one.
    slower_passes = {
        measured.setting: measured
        for measured in sorted(passes, key=lambda measured: measured.wait)
    }

    def rank(measured: Pass) -> tuple[float, LoaderSetting]:
        """Order settings that keep up by workers and prefetching, the others after them by wait."""
        wait = 0.0 if measured.keeps_up(step) else measured.wait
        return wait, measured.setting

    return min(slower_passes.values(), key=rank)


def describe_choice(best: Pass, step: float, batch: int) -> str:
    """Return a sentence on whether the loader or the model waits.

    Args:
        step: seconds of a step of the model.
        batch: rows of one device in a step.
    """
    paced = f"a step of {1000 * step:,.0f} ms waits {1000 * best.wait:,.1f} ms for its batch"
    if best.keeps_up(step):
        verdict = f"the loader waits for the model: with {best.setting} {paced}"
    else:
        lost = best.wait / (best.wait + step)
        verdict = (
            f"the model waits for the loader: at best, with {best.setting}, {paced}, {lost:.0%} of "
            "the time"
        )
    return (
        f"{verdict}; at full speed it gives {best.samples:,.0f} samples/s, and a step needs "
        f"{batch / step:,.0f}."
    )


def make_bench_table(passes: Sequence[Pass]) -> Table:
    """Make a table with a row for each pass."""
    rows = []
    for measured in passes:
        setting = measured.setting
        wait_ms = 1000 * measured.wait
        rows.append(
            (
                setting.workers,
                setting.prefetch,
                measured.cache,
                measured.first,
                measured.samples,
                wait_ms,
            )
        )
    return Table(columns=COLUMNS, rows=rows)

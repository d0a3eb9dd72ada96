"""The choice among measured settings of a loader.

A setting keeps up with the model if a step waits for its batch at most 2 % of the step's time. Of
the settings that keep up, the setting with the fewest workers is chosen, and among equals the
least prefetching, because workers need memory, and cores that other ranks need too. If no setting
keeps up, the setting with the shortest wait is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdsmix.bench.loader_bench import LoaderSetting
from mdsmix.frozen import frozen
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


@frozen(kw_only=True)
class Pass:
    """The measurement of one pass over the beginning of an epoch."""

    setting: LoaderSetting
    cache: str
    "`cold`: streams with a remote have an empty cache folder; `warm`: the same batches again."
    first: float
    "Seconds from the request of the first batch to its arrival, with the start of the workers."
    wait: float
    "Mean seconds that a step waited for its batch; the wait for the first batch does not count."
    samples: float
    "Samples a second, when batches are read as fast as the loader makes them."
    batches: int
    "How many batches were read in all."

    def __str__(self) -> str:
        return (
            f"{self.setting}, {self.cache}: {self.samples:,.0f} samples/s, a step waits "
            f"{1000 * self.wait:,.1f} ms"
        )

    def keeps_up(self, step: float) -> bool:
        """Check whether the loader is fast enough for a model whose step takes `step` seconds."""
        return self.wait <= TOLERATED * step


def choose_pass(passes: Sequence[Pass], step: float) -> Pass:
    """Choose a setting, and return its pass. If a setting has two passes, with a cold and a warm
    cache, its slower pass is compared with other settings, and returned.

    Args:
        passes: the passes of all settings.
        step: seconds of a step of the model.
    """
    slower_passes: dict[LoaderSetting, Pass] = {}
    for measured in passes:
        earlier = slower_passes.get(measured.setting)
        if earlier is None or measured.wait >= earlier.wait:
            slower_passes[measured.setting] = measured

    def rank(measured: Pass) -> tuple[float, LoaderSetting]:
        """Return a sort key: (seconds of waiting, or 0 if the loader keeps up with the model; the
        setting). So settings that keep up come first, the fewest workers before others, and then
        the settings with the shortest waits.
        """
        wait = 0.0 if measured.keeps_up(step) else measured.wait
        return wait, measured.setting

    return min(slower_passes.values(), key=rank)


def describe_choice(best: Pass, step: float, batch: int) -> str:
    """Return a sentence that says whether the loader waits for the model, or the model for the
    loader.

    Args:
        best: the pass of the chosen setting.
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

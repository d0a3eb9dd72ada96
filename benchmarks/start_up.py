"""Subtracts the start-up of a tool from its runs, and says when nothing certain is left.

The slow tools get a small corpus, of which their imports take a large part. The median of several
start-ups is subtracted, so that one disturbed measurement changes nothing. The minimum would be
less disturbed still, but the runs themselves are typical ones with typical disturbances: with
the shortest start-up subtracted, these would count as work and the other tools look slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmarks.measure import Run

STARTS = 3
"The least number of start-ups that are measured for a figure, whatever the number of rounds."
MOST_START_UP = 0.75
"""The largest share of a run that its start-up may take. With a fourth left, 3 % more of a run
change its remainder by 12 %.
"""


def subtract_start_up(runs: Sequence[Run], starts: Sequence[Run]) -> list[Run]:
    """Return the runs without the median wall and CPU seconds of the start-ups."""
    wall = median(start.wall for start in starts)
    cpu = median(start.cpu for start in starts)
    return [replace(run, wall=run.wall - wall, cpu=run.cpu - cpu) for run in runs]


def find_start_up_fault(runs: Sequence[Run], starts: Sequence[Run]) -> str:
    """Return why the runs without start-up are not a figure; empty if they are one."""
    seconds = {
        "s": (min(run.wall for run in runs), median(start.wall for start in starts)),
        "CPU s": (min(run.cpu for run in runs), median(start.cpu for start in starts)),
    }
    for unit, (whole, start) in seconds.items():
        if start > MOST_START_UP * whole:
            return f"UNCERTAIN: start-up took {start:.1f} {unit}, the shortest run {whole:.1f}"
    return ""

"""The loader's figures: what its wrapper costs, and what a start costs the first and the second
time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.contenders import HERE, Place
from benchmarks.figures import Figure
from benchmarks.rounds import environment
from benchmarks.starting import MB, Case, both
from benchmarks.synthetic import stream

QUICK = ["--samples", "2000", "--rounds", "2", "--only", "rows", "pairs"]
FULL = ["--samples", "4000", "--rounds", "3"]
SHARDS = 20_000


def loader_figures(place: Place, is_quick: bool) -> Iterator[Figure]:
    """45 s where it is to be quick, else 4 minutes and 8 GB of memory."""
    samples = 1_000_000 if is_quick else 100_000_000
    yield from _wrapper(place, is_quick)
    yield from _starts(place.work, samples)


def _wrapper(place: Place, is_quick: bool) -> Iterator[Figure]:
    found = place.work / "loading.json"
    options = [*(QUICK if is_quick else FULL), "--workers", "0", "--json", str(found)]
    command = [sys.executable, "-m", "benchmarks.loading", *options]
    subprocess.run(command, check=True, cwd=HERE.parent, env=environment(place))
    for layout, cost in json.loads(found.read_text()).items():
        what = f"`mdsmix.load`, {layout}: CPU over a bare StreamingDataset's"
        yield Figure(what, cost, "x", 1.1)


def _starts(work: Path, samples: int) -> Iterator[Figure]:
    folder = stream(work / f"starting-{samples}-{SHARDS}", samples, SHARDS)
    what = f"{samples:,} samples in {SHARDS:,} shards: "
    first, second = both(Case(who="mdsmix", folder=folder, samples=samples, ranks=1), work, {})
    yield Figure(f"{what}first batch of a first start, imports apart", first.rest, "s", 60)
    yield Figure(f"{what}of a second start", second.rest, "s", 10)
    yield Figure(f"{what}written at the second start", second.written / MB, "MB", 0.1)

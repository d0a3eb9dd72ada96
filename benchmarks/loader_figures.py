"""The loader's figures: the cost of its wrapper, and of a first and a second start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.contenders import HERE, Setup
from benchmarks.figures import Figure
from benchmarks.rounds import environment
from benchmarks.starting import MB, Case, start_twice
from benchmarks.synthetic import write_stream

QUICK = ["--samples", "2000", "--rounds", "2", "--only", "rows", "pairs"]
FULL = ["--samples", "4000", "--rounds", "3"]
SHARDS = 20_000


def loader_figures(setup: Setup, is_quick: bool) -> Iterator[Figure]:
    """Measure the loader. This takes 45 s if `is_quick`, otherwise 4 minutes and 8 GB of memory."""
    samples = 1_000_000 if is_quick else 100_000_000
    yield from _wrapper(setup, is_quick)
    yield from _starts(setup.work, samples)


def _wrapper(setup: Setup, is_quick: bool) -> Iterator[Figure]:
    results = setup.work / "loading.json"
    options = [*(QUICK if is_quick else FULL), "--workers", "0", "--json", str(results)]
    command = [sys.executable, "-m", "benchmarks.loading", *options]
    subprocess.run(command, check=True, cwd=HERE.parent, env=environment(setup))
    for layout, rates in json.loads(results.read_text()).items():
        ours, litdata = rates["mdsmix"], rates["litdata"]
        name = f"`mdsmix.load`, {layout}"
        what = f"{name}: CPU over that of a bare StreamingDataset with mdsmix's rows and collation"
        yield Figure(what, rates["same"] / ours, "x", 1.1)
        what = f"{name}: CPU over that of litData for full rows"
        yield Figure(what, litdata / ours, f"x ({ours:,.0f} and {litdata:,.0f} rows/CPU s)", 1.0)


def _starts(work: Path, samples: int) -> Iterator[Figure]:
    folder = write_stream(work / f"starting-{samples}-{SHARDS}", samples, SHARDS)
    what = f"{samples:,} samples in {SHARDS:,} shards: "
    first, second = start_twice(
        Case(loader="mdsmix", folder=folder, samples=samples, ranks=1), work, {}
    )
    yield Figure(f"{what}first batch of a first start, without imports", first.first_batch, "s", 60)
    yield Figure(f"{what}of a second start", second.first_batch, "s", 10)
    yield Figure(f"{what}written at the second start", second.written / MB, "MB", 0.1)

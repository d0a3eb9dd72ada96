"""The CPU time of a conversion by function: what a worker does, in this process.

    python -m benchmarks.stages documents|words|short|pairs|chats [MEGABYTES]

The work units are converted one after the other without workers, since a profiler does not see
other processes. Shows CPU seconds, so a busy machine does not distort them much. The profiler
itself costs about 2 us per call: the functions that are called for each record look up to twice as
expensive as they are.
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import corpus
from benchmarks.contenders import HERE, Setup, write_recipe
from benchmarks.rounds import MB, environment
from mdsmix.conversion.planning import Options
from mdsmix.conversion.run import convert
from mdsmix.engines.tasks import (
    ActiveRecords,
    Attempt,
    OnProgress,
    R,
    Reporter,
    Task,
    TaskResults,
)
from mdsmix.engines.workers import THREADS
from mdsmix.freed_memory import keep_freed_blocks
from mdsmix.kinds.recipes import open_recipe
from mdsmix.messages import Say
from mdsmix.report.progress import watching

SHOWN = 25
WARM_UP_RECORDS = 512
"Enough for a row of 2,048 tokens, even if a record has 100 bytes."


class InProcess(Reporter):
    """An engine that does each task in this process, and the reporter of these tasks."""

    peak = 0
    memory = 4 << 30

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        for number, task in enumerate(tasks):
            store = task.do(Attempt(), self)
            yield number, store()

    def close(self) -> None: ...

    def on_progress(self, size: int, tokens: int) -> None: ...

    def on_records(self, records: ActiveRecords | None) -> None: ...

    def wait_for_room(self) -> None: ...

    def is_tight(self) -> bool:
        return False


def main(kind: str, size: int) -> None:
    nowhere = Path(os.devnull)
    setup = Setup(work=HERE.parent / ".bench", foundry=nowhere, peers=nowhere)
    os.environ.update(environment(setup))
    os.environ.update(dict.fromkeys(THREADS, "1"))
    corpus.tokenizer(setup.work)
    output = setup.work / "out"
    recipe = write_recipe(setup, {kind: corpus.source(setup.work, kind, size)}, output)
    # Open the tokenizer and import all that a worker inherits, and then set what a worker sets.
    _convert(recipe, output, limit=WARM_UP_RECORDS)
    keep_freed_blocks()
    gc.freeze()
    gc.set_threshold(1_000_000)
    profile = cProfile.Profile(time.process_time)
    profile.runcall(_convert, recipe, output)
    pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)


def _convert(recipe: Path, output: Path, **options: Any) -> None:
    shutil.rmtree(output, ignore_errors=True)
    with watching(False) as watcher:
        list(convert(open_recipe(str(recipe)), Options(**options), watcher, InProcess()))


if __name__ == "__main__":
    main(sys.argv[1], int((sys.argv[2:] or ["200"])[0]) * MB)

"""The CPU time of a conversion in this process, by function.

    python -m benchmarks.stages documents|pairs|chats [MEGABYTES]

Shows CPU seconds of the process with the tokenizer's threads, so a busy machine does not distort
them. The profiler itself costs about 2 us per call: the per-record functions of pairs and chats
look up to twice as expensive as they are.
"""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
import shutil
import sys
import time
from pathlib import Path

from benchmarks import corpus
from benchmarks.contenders import HERE, Setup, write_recipe
from benchmarks.rounds import MB, environment
from mdsmix.cli.main import run

SHOWN = 25


def main(kind: str, size: int) -> None:
    nowhere = Path(os.devnull)
    setup = Setup(work=HERE.parent / ".bench", foundry=nowhere, peers=nowhere)
    os.environ.update(environment(setup))
    corpus.tokenizer(setup.work)
    output = setup.work / "out"
    recipe = str(write_recipe(setup, {kind: corpus.source(setup.work, kind, size)}, output))
    profile = cProfile.Profile(time.process_time)
    _mdsmix("convert", recipe, "--limit", "8")  # opens the tokenizer
    shutil.rmtree(output)
    profile.runcall(_mdsmix, "convert", recipe, "--workers", "1")
    pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)


def _mdsmix(*arguments: str) -> None:
    sys.argv = ["mdsmix", *arguments]
    with contextlib.suppress(SystemExit):
        run()


if __name__ == "__main__":
    main(sys.argv[1], int((sys.argv[2:] or ["200"])[0]) * MB)

"""Where mdsmix's CPU time goes: a conversion in this one process, by function.

    python -m benchmarks.stages documents|pairs|chats [MEGABYTES]

CPU seconds of the process, the tokenizer's threads included, so that a busy machine does not bend
them. The profiler itself costs about 2 us a call: it makes the per-record functions of pairs and
chats look up to twice as dear.
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
from benchmarks.contenders import HERE, Place, write_recipe
from benchmarks.rounds import MB, environment
from mdsmix.cli.main import run

SHOWN = 25


def main(kind: str, size: int) -> None:
    nowhere = Path(os.devnull)
    place = Place(work=HERE.parent / ".bench", foundry=nowhere, others=nowhere)
    os.environ.update(environment(place))
    corpus.tokenizer(place.work)
    out = place.work / "out"
    recipe = str(write_recipe(place, {kind: corpus.source(place.work, kind, size)}, out))
    profile = cProfile.Profile(time.process_time)
    _mdsmix("convert", recipe, "--limit", "8")  # opens the tokenizer
    shutil.rmtree(out)
    profile.runcall(_mdsmix, "convert", recipe, "--workers", "1")
    pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)


def _mdsmix(*arguments: str) -> None:
    sys.argv = ["mdsmix", *arguments]
    with contextlib.suppress(SystemExit):
        run()


if __name__ == "__main__":
    main(sys.argv[1], int((sys.argv[2:] or ["200"])[0]) * MB)

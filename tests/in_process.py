"""Instead of processes: an engine that does a run's units in this one, with which most tests
convert, and forks that look at tokenizers.

A forked worker costs 70 ms of processor time, five times what a handful of records takes, and shows
nothing in a test of what is converted. So workers are forked only where a run asks for more than
one of them or for what only they do (`--workers 2`, `--memory`, `--quarantine-crashes`), and for
tests that use the fixture `processes`. A process that imports transformers takes 2.5 s of processor
time: a first look at a tokenizer is a fork of one that stands by.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from mdsmix.conversion import run
from mdsmix.conversion.planning import Options
from mdsmix.engines.tasks import Attempt, Engine, Reporter
from mdsmix.tokenizer import snapshot
from mdsmix.tokenizer.describe import WITHOUT_FRAMEWORKS
from tests.preloaded import Standing

BY_IMPORT = re.compile("HF_.*|HOME|XDG_CACHE_HOME")
"""The variables that are read when the libraries are imported: a look with others has a process of
its own.
"""
IMPORTS = "from transformers import AutoTokenizer, PreTrainedTokenizerFast"
LOOK = "from mdsmix.tokenizer import describe; describe.main()"
_wants_processes = False


class Here(Engine, Reporter):
    """Tasks and results travel as bytes, as to another process."""

    peak, memory = 0, 1 << 30

    def run(self, tasks: Sequence[Any], on_progress: Any, say: Any) -> Generator[Any, None, None]:
        self.on_progress = on_progress
        for number, task in enumerate(tasks):
            yield number, pickle.loads(pickle.dumps(self.do(pickle.loads(pickle.dumps(task)))))

    def is_tight(self) -> bool:
        return False

    def do(self, task: Any) -> Any:
        return task.do(Attempt(), self)()


@contextmanager
def as_engine() -> Iterator[None]:
    """Conversions of this process are done here, but for those that say what workers they want."""
    make_engine = run.make_engine

    def chosen(recipe: Any, plans: Any, options: Options, watcher: Any) -> Engine:
        wanted = (options.workers or 1) > 1 or options.memory or options.quarantine_crashes
        if _wants_processes or wanted or options.engine != "local":
            return make_engine(recipe, plans, options, watcher)
        return Here()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_engine", chosen)
        yield


@contextmanager
def aside() -> Iterator[None]:
    """Conversions of this process are done here still, but by another thread, as a worker would."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        do = Here.do
        patch.setattr(Here, "do", lambda engine, task: pool.submit(do, engine, task).result())
        yield


@contextmanager
def processes() -> Iterator[None]:
    """All conversions by workers."""
    global _wants_processes
    before, _wants_processes = _wants_processes, True
    try:
        yield
    finally:
        _wants_processes = before


@contextmanager
def forked_looks() -> Iterator[None]:
    """First looks of this process are forks of one that is ready."""

    def now() -> Any:
        return os.getpid(), {k: v for k, v in os.environ.items() if BY_IMPORT.fullmatch(k)}

    look, begun = snapshot.run_describe, now()
    quiet = WITHOUT_FRAMEWORKS | {"TRANSFORMERS_VERBOSITY": "error"}
    standing = Standing(IMPORTS, quiet)

    def looked(asked: str) -> subprocess.CompletedProcess[str]:
        return standing.start(LOOK, given=asked).wait() if now() == begun else look(asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "run_describe", looked)
        yield
    standing.close()

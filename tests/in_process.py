"""Faster replacements of processes: an engine that converts in the test's own process, and a
tokenizer description that is forked from a process with transformers imported.

A forked worker costs 70 ms of processor time, five times as much as converting a few records, and
proves nothing about the converted rows. So workers are only forked if a run asks for more than one
of them, or for an option that needs them (`--workers 2`, `--memory`, `--quarantine-crashes`), and
for tests with the fixture `processes`. A process that imports transformers takes 2.5 s of processor
time, so a tokenizer is described by a fork of one that has imported it.
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

from mdsmix.conversion import early_opening, run
from mdsmix.conversion.planning import Options
from mdsmix.engines.tasks import Attempt, Engine, Reporter
from mdsmix.tokenizer import snapshot
from mdsmix.tokenizer.opening import WITHOUT_FRAMEWORKS
from tests.preloaded import PreloadedPython

READ_AT_IMPORT = re.compile("HF_.*|HOME|XDG_CACHE_HOME")
"""Variables that the libraries read when they are imported. If they have changed since, a tokenizer
is described by a new process.
"""
IMPORTS = (
    "import sys; from mdsmix.tokenizer import describe, opening; opening.hide_torch(); "
    "from transformers import AutoTokenizer, PreTrainedTokenizerFast; del sys.modules['torch']"
)
"""As `describe` itself does, without torch, which transformers 5 would import: a fork of the larger
process takes 0.3 s more.
"""
DESCRIBE = "from mdsmix.tokenizer import describe; describe.main()"
_uses_workers = False


class InProcessEngine(Engine, Reporter):
    """Converts in this process. Tasks and results are pickled, as for another process."""

    peak = 0
    memory = 1 << 30

    def run(self, tasks: Sequence[Any], on_progress: Any, say: Any) -> Generator[Any, None, None]:
        self.on_progress = on_progress
        for number, task in enumerate(tasks):
            yield number, pickle.loads(pickle.dumps(self.do(pickle.loads(pickle.dumps(task)))))

    def is_tight(self) -> bool:
        return False

    def do(self, task: Any) -> Any:
        return task.do(Attempt(), self)()


@contextmanager
def use_own_process() -> Iterator[None]:
    """Convert in this process, except for runs whose options need workers."""
    make_engine = run.make_engine

    def make(recipe: Any, plans: Any, options: Options, watcher: Any) -> Engine:
        needs_workers = (options.workers or 1) > 1 or options.memory or options.quarantine_crashes
        if _uses_workers or needs_workers or options.engine != "local":
            return make_engine(recipe, plans, options, watcher)
        return InProcessEngine()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_engine", make)
        yield


@contextmanager
def use_own_thread() -> Iterator[None]:
    """Convert in this process, but in another thread, as if by a worker."""
    do = InProcessEngine.do
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(
            InProcessEngine, "do", lambda engine, task: pool.submit(do, engine, task).result()
        )
        yield


@contextmanager
def use_workers() -> Iterator[None]:
    """Convert everything by forked workers."""
    global _uses_workers
    before = _uses_workers
    _uses_workers = True
    try:
        yield
    finally:
        _uses_workers = before


@contextmanager
def describe_by_forks() -> Iterator[None]:
    """Describe tokenizers by forks of a process that has transformers imported."""

    def read_environment() -> Any:
        variables = {k: v for k, v in os.environ.items() if READ_AT_IMPORT.fullmatch(k)}
        return os.getpid(), variables

    run_describe = snapshot.run_describe
    environment = read_environment()
    python = PreloadedPython(IMPORTS, WITHOUT_FRAMEWORKS | {"TRANSFORMERS_VERBOSITY": "error"})

    def run_fork(question: str, opener: Any, begun: Any = None) -> subprocess.CompletedProcess[str]:
        if read_environment() != environment:
            return run_describe(question, opener, begun)
        return python.start(DESCRIBE, stdin=question).wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "run_describe", run_fork)
        patch.setattr(early_opening, "begin_description", lambda *_: None)
        yield
    python.close()

"""An engine that does a run's units in this process: what most tests convert with.

A forked worker costs 70 ms of processor time, five times what a handful of records takes, and shows nothing in a test of what is
converted. So workers are forked only where a run asks for more than one of them or for what only they do (`--workers 2`,
`--memory`, `--quarantine-crashes`), and for tests that use the fixture `processes`.
"""

import pickle
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from mdsmix.convert import run
from mdsmix.convert.planning import Options
from mdsmix.engines.tasks import Attempt, Engine, Reporter

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
    engine_of = run.engine_of

    def chosen(recipe: Any, plans: Any, options: Options, watcher: Any) -> Engine:
        wanted = (options.workers or 1) > 1 or options.memory or options.quarantine_crashes
        if _wants_processes or wanted or options.engine != "local":
            return engine_of(recipe, plans, options, watcher)
        return Here()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "engine_of", chosen)
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

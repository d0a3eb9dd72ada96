"""An engine that does a run's units in this process: what most tests convert with.

A forked worker costs 70 ms of processor time, five times what a handful of records takes, and shows nothing in a test of what is
converted. So workers are forked only where a run asks for more than one of them or for what only they do (`--workers 2`,
`--memory`, `--quarantine-crashes`), and for tests that use the fixture `processes`. First looks at tokenizers are forks of a process that
has imported transformers, whose start takes 2.5 s of processor time.
"""

import os
import pickle
import re
import subprocess
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from mdsmix.convert import run
from mdsmix.convert.planning import Options
from mdsmix.encode import pretrained, transformers_process
from mdsmix.engines.tasks import Attempt, Engine, Reporter
from tests.forked import Standing

wants_processes = False


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
        if wants_processes or wanted or options.engine != "local":
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


BY_IMPORT = re.compile("HF_.*|HOME|XDG_CACHE_HOME")
"The variables that are read when the libraries are imported: a look with others has a process of its own."
IMPORTS = "from transformers import AutoTokenizer, PreTrainedTokenizerFast"
LOOK = "from mdsmix.encode import transformers_process; transformers_process.main()"


@contextmanager
def looking() -> Iterator[None]:
    """First looks of this process are forks of one that is ready."""
    ours, look = (_by_import(), os.getpid()), pretrained._look
    quiet = transformers_process.WITHOUT | {"TRANSFORMERS_VERBOSITY": "error"}
    standing = Standing(IMPORTS, quiet)

    def look_by_fork(asked: str) -> subprocess.CompletedProcess[str]:
        if (_by_import(), os.getpid()) != ours:
            return look(asked)
        return standing.start(LOOK, given=asked).wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "_look", look_by_fork)
        yield
    standing.close()


def _by_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if BY_IMPORT.fullmatch(name)}

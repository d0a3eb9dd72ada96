"""Tasks for engines, each a call of a function; and runs of a local engine that is closed again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.tasks import ActiveRecords, Attempt, OnProgress, Reporter, Task, split_positions
from mdsmix.messages import Say
from tests.alarm import WAIT_SECONDS


def return_result(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Call:
    """A task that calls a function, with the attempt and the reporter as its last arguments.
    `store` turns its result into the task's.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str = "number 1"
    store: Callable[[Any], Any] = return_result

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], Any]:
        result = self.function(*self.arguments, attempt, reporter)
        return partial(self.store, result)


def make_call(function: Callable[..., Any], *arguments: Any) -> Call:
    return Call(function, arguments)


def make_records(ordinal: int, records: int = 1, size: int = 0) -> ActiveRecords:
    """Return active records of 9 bytes each, from this one on."""
    return ActiveRecords(
        file="a", ordinal=ordinal, where=f"byte {ordinal}", length=9, records=records, size=size
    )


def report_records(
    count: int, attempt: Attempt, reporter: Reporter, size: int = 0
) -> Iterator[range]:
    """Yield the pieces in which an attempt does a unit of `count` records, and report each as
    active.
    """
    skipped = {ordinal for _, ordinal in attempt.skipped}
    for piece in split_positions(count, attempt.halvings, skipped):
        reporter.on_records(make_records(piece.start, len(piece), size))
        yield piece


def make_settings(workers: int = 1, set_aside: bool = False) -> PoolSettings:
    """Return settings with more memory than any test takes."""
    return PoolSettings(workers=workers, memory=64 << 30, set_aside=set_aside)


def ignore_progress(size: int, tokens: int) -> None: ...


def run_tasks(
    tasks: Sequence[Task[Any]],
    pool: PoolSettings,
    on_progress: OnProgress = ignore_progress,
    say: Say = print,
) -> Iterator[tuple[int, Any]]:
    """Yield the results of an engine that is closed when the tasks have ended."""
    with closing(LocalEngine(pool)) as engine:
        yield from engine.run(tasks, on_progress, say)


def wait_for_file(folder: Path, pattern: str, *_: object) -> None:
    """Return when the folder has a file that matches."""
    while not any(folder.glob(pattern)):
        time.sleep(0.01)


def write_slowly(path: Path, ignores_sigterm: bool, *_: object) -> None:
    """Create a file and wait. When the worker is stopped, it deletes the file, unless it ignores
    SIGTERM.
    """
    if ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path.touch()
    try:
        time.sleep(WAIT_SECONDS)
    except BaseException:
        path.unlink()
        raise

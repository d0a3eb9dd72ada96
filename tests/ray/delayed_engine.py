"""A Ray engine whose first unit waits until a test lets it continue; and a driver that ends itself
in the middle of a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mdsmix.engines.local_engine import PoolSettings
from mdsmix.engines.ray_cluster import Message
from mdsmix.engines.ray_engine import RayEngine
from mdsmix.engines.tasks import Attempt, OnProgress, Reporter
from mdsmix.messages import Say
from tests.alarm import WAIT_SECONDS


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return the result of `condition` as soon as it is true."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.02)


class ProcessTree(NamedTuple):
    """The ids of a worker and of the processes that have started it."""

    raylet: int
    supervisor: int
    worker: int


def describe_process_tree() -> str:
    """Return the process ids from the raylet to this worker: `12_34_56`."""
    pids = [os.getpid()]
    while b"raylet" not in Path(f"/proc/{pids[0]}/cmdline").read_bytes().split(b"\0")[0]:
        stat = Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2]
        pids.insert(0, int(stat.split()[1]))
    return "_".join(map(str, pids))


@dataclass(frozen=True)
class DelayedTask:
    """A task whose first attempt waits, and then does it in other pieces than later attempts."""

    task: Any
    folder: Path

    @property
    def name(self) -> str:
        return str(self.task.name)

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], Any]:
        is_first = not any(self.folder.glob("began*"))
        if is_first:
            (self.folder / f"began_{describe_process_tree()}").touch()
            wait_until((self.folder / "go").exists)
            attempt = replace(attempt, halvings=3)
        result = self.task.do(attempt, reporter)()
        if is_first:
            (self.folder / "ended").touch()
        return lambda: result


def end_after_first_answer(number: int) -> None:
    """Make this process, a driver, send itself a signal when it has received the result of its
    first unit.
    """
    handle_message = RayEngine._handle_message

    def handle_and_end(run: RayEngine, node: Any, message: Message) -> Any:
        yield from handle_message(run, node, message)
        if message[0] == "done":
            os.kill(os.getpid(), number)

    RayEngine._handle_message = handle_and_end  # type: ignore[method-assign]


class DelayingEngine(RayEngine):
    """An engine that delays its first unit. Files in `folder` show which processes have the unit
    and when it has ended.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("", PoolSettings(workers=0, memory=0), {})
        folder.mkdir()
        self.folder = folder

    def find_processes(self) -> ProcessTree:
        """Wait until a worker has the first unit, and return its processes."""
        (began,) = wait_until(lambda: [*self.folder.glob("began_*")])
        return ProcessTree(*map(int, began.name.split("_")[1:]))

    def run(
        self, tasks: Sequence[Any], on_progress: OnProgress, say: Say
    ) -> Generator[Any, None, None]:
        delayed = [DelayedTask(task, self.folder) for task in tasks[:1]]
        return super().run([*delayed, *tasks[1:]], on_progress, say)

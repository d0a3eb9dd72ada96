"""A Ray engine whose first unit waits until a test lets it continue; one whose first unit two
workers share; and a driver that ends itself in the middle of a run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from mdsmix.conversion import shared_batches
from mdsmix.engines.local_engine import PoolSettings
from mdsmix.engines.ray_cluster import Message
from mdsmix.engines.ray_engine import RayEngine
from mdsmix.engines.tasks import Assistant, Attempt, OnProgress, Reporter
from mdsmix.messages import Say
from mdsmix.sources import format as source_format
from mdsmix.sources import jsonl, record_batches
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


@dataclass(frozen=True)
class SharedUnit:
    """A work unit that is done once it has an assistant, and during which a process dies once."""

    task: Any
    folder: Path
    victim: str
    """Who dies: `worker`, which has the unit and two batches with its assistant, as soon as the
    assistant has begun one; or `assistant`.
    """

    shared_bytes = 1 << 30
    "So much is shared by as many workers as there are."

    @property
    def name(self) -> str:
        return str(self.task.name)

    def do(self, attempt: Attempt, reporter: Any) -> Callable[[], Any]:
        _make_batches_small()
        # After the death of a worker its unit gets no assistant.
        while not attempt.deaths and not reporter.list_assistants():
            reporter._receive()
        find_free = shared_batches.find_free_assistant

        def find_or_die(assistants: Sequence[Assistant]) -> Assistant | None:
            assistant = find_free(assistants)
            if self.victim == "worker" and assistants and assistant is None:
                wait_until((self.folder / "assisted").exists)
                self._die_once()
            return assistant

        with mock.patch.object(shared_batches, "find_free_assistant", find_or_die):
            return self.task.do(attempt, reporter)  # type: ignore[no-any-return]

    def open_assistant(self) -> Callable[[Any], Any]:
        _make_batches_small()
        encode = self.task.open_assistant()

        def encode_or_die(batch: Any) -> Any:
            if self.victim == "assistant":
                self._die_once()
            (self.folder / "assisted").touch()
            return encode(batch)

        return encode_or_die

    def _die_once(self) -> None:
        died = self.folder / "died"
        if not died.exists():
            died.write_text(describe_process_tree())
            os.kill(os.getpid(), signal.SIGKILL)


def _make_batches_small() -> None:
    """Let the worker of this process read a few records at a time."""
    for module in (record_batches, source_format):
        module.BLOCK_BYTES = 400
    jsonl.PIECE_BYTES = 400


class SharingEngine(RayEngine):
    """An engine with two workers in a node, whose first unit both do."""

    def __init__(self, folder: Path, victim: str) -> None:
        super().__init__("", PoolSettings(workers=2, memory=0), {})
        folder.mkdir()
        self.folder = folder
        self.victim = victim

    def run(
        self, tasks: Sequence[Any], on_progress: OnProgress, say: Say
    ) -> Generator[Any, None, None]:
        shared = [SharedUnit(task, self.folder, self.victim) for task in tasks[:1]]
        return super().run([*shared, *tasks[1:]], on_progress, say)

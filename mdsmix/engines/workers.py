"""Both sides of a local worker process. The worker takes tasks from a pipe, does them, and reports through the same pipe.

Messages to the worker: (task, attempt); True or False, whether to wait before its next records. SIGTERM ends it.
Messages from it: ("progress", bytes, tokens), ("records", place), ("say", sentence), ("done", result), ("failed", exception).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from mdsmix.engines.hang import Pulse, used_by
from mdsmix.engines.memory import (
    LIFE_BYTES,
    MemoryBudget,
    cpu_count,
    give_back,
    keep_blocks,
    resident,
)
from mdsmix.engines.tasks import Attempt, InWork, Task
from mdsmix.storage.s3_client import say_by

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
THREADS = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")
"""Where tokenizers and fastokens look for their number of threads. Each thread of fastokens has a cache of words of its own: with two threads
in each of two workers on two processors, text took 12 % more CPU time and 230 MB more memory."""


class WorkerChannel:
    """The Reporter of a local worker."""

    def __init__(self, pipe: Connection, parent: int, memory: int, share: int) -> None:
        """`parent`: its process id; `memory`: bytes for the whole run; `share`: bytes for this worker."""
        self._pipe, self._parent, self._share = pipe, parent, share
        self.memory = memory
        self._waits = False
        self._sending = threading.Lock()
        "Threads that read ahead say what they wait for."

    def on_progress(self, size: int, tokens: int) -> None:
        self.send("progress", size, tokens)

    def on_records(self, place: InWork | None) -> None:
        self.send("records", place)

    def wait_for_room(self) -> None:
        while self._waits or self._pipe.poll():
            self._receive()

    def is_tight(self) -> bool:
        """What was freed is returned to the system first, so that only memory in use counts."""
        if resident(os.getpid()) <= self._share:
            return False
        give_back()
        return resident(os.getpid()) > self._share

    def next_task(self) -> Any:
        """Waits for a task, and returns it with its attempt."""
        while isinstance(message := self._receive(), bool):
            pass
        return message

    def _receive(self) -> Any:
        """Waits for a message; obeys a bool (wait or go on) at once."""
        while not self._pipe.poll(1):
            self._end_with_parent()
        message = self._pipe.recv()
        if isinstance(message, bool):
            self._waits = message
            give_back()
        return message

    def send(self, *message: Any) -> None:
        self._end_with_parent()
        with self._sending:
            self._pipe.send(message)

    def _end_with_parent(self) -> None:
        """Ends this process when its parent id has changed, as it does when the parent is killed. The pipe would not show that,
        because workers that were forked later hold the parent's end open."""
        if os.getppid() != self._parent:
            os._exit(1)


def work(pipe: Connection, workers: int, parent: int, memory: int, share: int) -> None:
    """The life of a worker process: until it is stopped, or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    for name in THREADS:
        os.environ.setdefault(name, str(max(1, -(-cpu_count() // workers))))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        _do_tasks(WorkerChannel(pipe, parent, memory, share))
    except _Stopped:
        os._exit(128 + signal.SIGTERM)
    # No exit handlers: thread pools and open files that came from the parent by fork are not this process's to close.
    os._exit(0)


def _do_tasks(channel: WorkerChannel) -> None:
    at_first = resident(os.getpid())
    keep_blocks()
    gc.freeze()  # what the parent has imported is not garbage: looking through it took 15 % of the time of chats
    say_by(partial(channel.send, "say"))
    with suppress(BrokenPipeError, EOFError):
        while True:
            task, attempt = channel.next_task()
            what, said = "done", None
            try:
                said = task.do(attempt, channel)
            except Exception as error:
                what, said = "failed", sendable(error)
            if resident(os.getpid()) - at_first > LIFE_BYTES:
                give_back()  # the parent is to see what the worker keeps; sooner, each task would fault its pages in anew
            channel.send(what, said)


class _Stopped(BaseException):
    """SIGTERM as an exception: whoever is writing a file removes the half that is written."""


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped


def sendable(error: Exception) -> Exception:
    """The error itself where it can be pickled and unpickled, else one with the same words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


GRACE_SECONDS = 5
"A worker that is stopped has so long to remove what it has half written; then it is killed."


@dataclass(slots=True, eq=False)
class Worker:
    """One process, and what it has in work."""

    process: Any
    pipe: Connection
    most: int
    "Bytes that it may hold between two tasks."
    number: int = 0
    "Of the task in work."
    task: Any = None
    attempt: Attempt = field(default_factory=Attempt)
    place: InWork | None = None
    "Of the records in work."
    waits: bool = False
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def is_worn(self) -> bool:
        """Whether it has grown so much that a new one should take its place."""
        return resident(self.pid) > self.most

    def give(self, number: int, attempt: Attempt, task: Task[Any]) -> None:
        self.number, self.attempt, self.task, self.place = number, attempt, task, None
        self.pulse.beat()
        with suppress(ConnectionError):  # it has died, and `receive` will say so
            self.pipe.send((task, attempt))

    def receive(self) -> tuple[Any, ...]:
        """The next message, ("died",) where none will come."""
        self.pulse.beat()
        try:
            return tuple(self.pipe.recv())
        except (EOFError, ConnectionError):
            return ("died",)

    def pause(self, waits: bool) -> None:
        """Makes it wait before its next records, or go on."""
        if waits != self.waits:
            self.waits = waits
            with suppress(ConnectionError):
                self.pipe.send(waits)

    def hangs(self) -> str | None:
        """Why it is taken for hung, None where it is not."""
        size = self.place.size if self.place else None
        return self.pulse.look(partial(used_by, self.pid), size, self.waits)

    def end(self, seconds: float = GRACE_SECONDS) -> str:
        """Returns when the process has ended, killed after so long, with how it ended."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        self.process.close()
        if code >= 0:
            return f"exit code {code}"
        cause = ", most likely for lack of memory" if code == -signal.SIGKILL else ""
        return f"signal {signal.Signals(-code).name}{cause}"


def end_all(workers: Sequence[Worker]) -> None:
    """Returns when all of these have ended. Together they have GRACE_SECONDS."""
    for worker in workers:
        worker.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.end(max(0, deadline - time.monotonic()))


def start_method() -> str:
    """macOS can fork too, but its own libraries may crash in a forked process, so Python spawns there by default. Ray's threads would not
    survive a fork."""
    return "fork" if sys.platform.startswith("linux") and "ray" not in sys.modules else "spawn"


def start_worker(pool_size: int, budget: MemoryBudget) -> Worker:
    context: Any = multiprocessing.get_context(start_method())
    ours, its = context.Pipe()
    share = budget.share(budget.allowed_workers(pool_size))
    arguments = (its, pool_size, os.getpid(), budget.cap, share)
    process = context.Process(target=work, args=arguments, daemon=True)
    # A forked worker must not run its parent's handlers, which clean up after the parent. It unblocks the signals when it has its own.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    its.close()
    return Worker(process, ours, min(share, resident(os.getpid()) + LIFE_BYTES))

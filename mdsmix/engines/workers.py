"""Both sides of a local worker process. The worker takes tasks from a pipe, does them, and reports
through the same pipe.

A thread stores what a task has made, so that the worker does the next task while a disk or a store
is waited for: a tenth of a conversion to a disk that takes 600 MB/s.

Messages to the worker: (task, attempt); True or False: wait before the next records, or go on.
SIGTERM ends the worker. Messages from the worker: ("progress", bytes, tokens), ("records", place),
("say", sentence), ("storing",): it takes another task, ("done", result): of the task that was being
stored, ("failed", exception).
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from mdsmix.engines.hang import HangDetector, read_cpu_ticks
from mdsmix.engines.memory import (
    LIFE_BYTES,
    MemoryBudget,
    count_cpus,
    keep_freed_blocks,
    measure_rss,
    release_freed_memory,
)
from mdsmix.engines.tasks import ActiveRecords, Attempt, Task
from mdsmix.storage.notices import redirect_notices

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
THREADS = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")
"""Environment variables that set the number of threads of tokenizers and fastokens. Each thread of
fastokens has its own cache of words: two threads in each of two workers on two processors took 12 %
more CPU time and 230 MB more memory than one.
"""


class WorkerChannel:
    """The Reporter of a local worker."""

    def __init__(self, pipe: Connection, parent: int, memory: int, share: int) -> None:
        """`parent`: the process id of the engine; `memory`: bytes for the whole run; `share`: bytes
        for this worker.
        """
        self._pipe, self._parent, self._share = pipe, parent, share
        self.memory = memory
        self._waits = False
        self._sending = threading.Lock()
        "A lock on the pipe: threads that read ahead send sentences too."

    def on_progress(self, size: int, tokens: int) -> None:
        self.send("progress", size, tokens)

    def on_records(self, place: ActiveRecords | None) -> None:
        self.send("records", place)

    def wait_for_room(self) -> None:
        while self._waits or self._pipe.poll():
            self._receive()

    def is_tight(self) -> bool:
        """Whether this worker holds more than its share. Freed memory is returned to the system
        first, so only memory in use counts.
        """
        if measure_rss(os.getpid()) <= self._share:
            return False
        release_freed_memory()
        return measure_rss(os.getpid()) > self._share

    def next_task(self) -> Any:
        """Waits for the next task; returns (task, attempt)."""
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
            release_freed_memory()
        return message

    def send(self, *message: Any) -> None:
        """Sends a message; any thread may call it."""
        self._end_with_parent()
        with self._sending:
            self._pipe.send(message)

    def _end_with_parent(self) -> None:
        """Ends this process when its parent id has changed, as it does when the parent is killed.
        The pipe would not show that, because workers that were forked later hold the parent's end
        open.
        """
        if os.getppid() != self._parent:
            os._exit(1)


def run_worker(pipe: Connection, workers: int, parent: int, memory: int, share: int) -> None:
    """The main function of a worker process: does tasks until the process is stopped, or its parent
    is gone. Arguments as WorkerChannel's; `workers`: how many share the processors.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    for name in THREADS:
        os.environ.setdefault(name, str(max(1, -(-count_cpus() // workers))))
    beside = ThreadPoolExecutor(1)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        _do_tasks(WorkerChannel(pipe, parent, memory, share), beside)
    except _Stopped:
        # no half-written file stays, unless storing takes more than GRACE_SECONDS
        beside.shutdown()
        os._exit(128 + signal.SIGTERM)
    # No exit handlers: thread pools and open files that came from the parent by fork are not this
    # process's to close.
    os._exit(0)


def _do_tasks(channel: WorkerChannel, beside: ThreadPoolExecutor) -> None:
    """Does tasks. A task is stored by the one thread of `beside`; the next one but one waits for
    that, so only one is ever stored.
    """
    finish, storing = (
        partial(_finish, channel, measure_rss(os.getpid()) + LIFE_BYTES),
        Future[None](),
    )
    storing.set_result(None)
    keep_freed_blocks()
    # the parent's imports are no garbage; searching them took 15 % of the time of chats
    gc.freeze()
    gc.set_threshold(1_000_000)  # nor are a batch's records: 12 % of the time of texts of 100 bytes
    with suppress(BrokenPipeError, EOFError), redirect_notices(partial(channel.send, "say")):
        while True:
            task, attempt = channel.next_task()
            try:
                store = task.do(attempt, channel)
            except Exception as error:
                channel.send("failed", make_picklable(error))
                continue
            storing.result()
            channel.send("storing")
            storing = beside.submit(finish, store)
            del store  # it holds the unit's rows, which would lie beside those of the next unit


def _finish(channel: WorkerChannel, most: int, store: Callable[[], Any]) -> None:
    """Stores the last task, and sends its result. Above `most` bytes freed memory is returned to
    the system, so that `is_worn` sees memory in use; at less, tasks would fault pages in anew.
    """
    what, said = "done", None
    try:
        said = store()
    except Exception as error:
        what, said = "failed", make_picklable(error)
    if measure_rss(os.getpid()) > most:
        release_freed_memory()
    channel.send(what, said)


class _Stopped(BaseException):
    """SIGTERM as an exception, so that code that writes a file removes the half-written one."""


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped


def make_picklable(error: Exception) -> Exception:
    """The error itself where it can be pickled and unpickled, else a RuntimeError with the same
    words.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


GRACE_SECONDS = 5
"A stopped worker has this long to remove half-written files; then it is killed."


class QueuedTask(NamedTuple):
    """A task of a run, as it waits, is in work or is stored."""

    number: int
    attempt: Attempt
    task: Task[Any]


@dataclass(slots=True, eq=False)
class Worker:
    """The engine's side of a worker process, with its tasks."""

    process: Any
    pipe: Connection
    most: int
    "Resident bytes that the process may hold when a task is stored."
    in_work: QueuedTask | None = None
    storing: QueuedTask | None = None
    place: ActiveRecords | None = None
    "The records in work."
    waits: bool = False
    "The worker was told to wait before its next records."
    is_worn: bool = False
    "The process has grown so much that a new one should replace it."
    pulse: HangDetector = field(default_factory=HangDetector)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def tasks(self) -> list[QueuedTask]:
        """The tasks that are not done: the one in work, then the one that is stored."""
        return [given for given in (self.in_work, self.storing) if given]

    def give(self, given: QueuedTask) -> None:
        self.in_work, self.place = given, None
        self.pulse.beat()
        with suppress(ConnectionError):  # the worker has died; `receive` will tell
            self.pipe.send((given.task, given.attempt))

    def stored(self) -> int:
        """Takes away the task that was stored; returns its number."""
        assert self.storing is not None, "a worker says that it stores"
        number, self.storing = self.storing.number, None
        self.is_worn = measure_rss(self.pid) > self.most
        return number

    def receive(self) -> tuple[Any, ...]:
        """The next message of the worker; ("died",) where its end of the pipe is closed."""
        self.pulse.beat()
        try:
            return tuple(self.pipe.recv())
        except (EOFError, ConnectionError):
            return ("died",)

    def pause(self, waits: bool) -> None:
        """Makes the worker wait before its next records, or go on."""
        if waits != self.waits:
            self.waits = waits
            with suppress(ConnectionError):
                self.pipe.send(waits)

    def hangs(self) -> str | None:
        """A sentence on why the worker is taken for hung; None where it is not."""
        size = self.place.size if self.place else None
        return self.pulse.look(partial(read_cpu_ticks, self.pid), size, self.waits)

    def end(self, seconds: float = GRACE_SECONDS) -> str:
        """Waits for the process to end, and kills it after `seconds`. Returns how it ended: `exit
        code 1`, `signal SIGKILL ...`.
        """
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


def stop_workers(workers: Sequence[Worker]) -> None:
    """Stops these workers, and returns when all have ended. Together they have GRACE_SECONDS; then
    they are killed.
    """
    for worker in workers:
        worker.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.end(max(0, deadline - time.monotonic()))


def choose_start_method() -> str:
    """How workers are started: `fork` on Linux without Ray, else `spawn`. Libraries of macOS may
    crash in a forked process, and Ray's threads would not survive a fork.
    """
    return "fork" if sys.platform.startswith("linux") and "ray" not in sys.modules else "spawn"


def start_worker(pool_size: int, budget: MemoryBudget) -> Worker:
    context: Any = multiprocessing.get_context(choose_start_method())
    ours, its = context.Pipe()
    share = budget.share(budget.allowed_workers(pool_size))
    arguments = (its, pool_size, os.getpid(), budget.cap, share)
    process = context.Process(target=run_worker, args=arguments, daemon=True)
    release_freed_memory()  # a fork takes along what its parent has freed: 20 MB where a tokenizer was opened
    # A forked worker must not run its parent's signal handlers, which clean up after the parent.
    # `work` unblocks the signals once it has set the worker's own handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    its.close()
    return Worker(process, ours, min(share, measure_rss(os.getpid()) + LIFE_BYTES))

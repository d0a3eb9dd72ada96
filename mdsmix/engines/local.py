"""Who works: the tasks of a run over local processes.

A worker is forked in 10 ms and shares what its parent has opened. It lives as long as it holds no more than its share of the
run's memory, from stream to stream: its tokenizer remembers words, and small streams share it. A worker that holds more ends
with its task and gives its memory back with it. Where one dies, its task is given to another. Results come in the order in
which they are finished; the caller puts them in the order of the plan, so the number of processes shapes no byte. Another
engine (a cluster) is another `run`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from mdsmix.engines.attempts import ELSEWHERE, Attempt, End, Place, after_death
from mdsmix.engines.hang import Pulse
from mdsmix.engines.limits import cpu_count
from mdsmix.engines.memory import PERIOD, Watch, give_back, resident

R = TypeVar("R")

LIFE_BYTES = 128 << 20
"""A worker that has grown by so much between two tasks ends: on text with many words after 2 GB. Two workers hold 834 to 862 MB at
most over 2 GB, and 857 MB over 8 GB. Against a worker for each unit it saves 3 % of the CPU on 1 GB of source code and
documentation (four runs of each, side by side on a noisy machine); a small stream takes 28 ms where it took 0.5 s."""
GRACE_SECONDS = 5
"A worker that is to stop takes back what it has half written; one that does not come to it is killed."
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class Line:
    """What a worker tells the run while it works, and hears of it."""

    def __init__(self, pipe: Connection, parent: int, room: int) -> None:
        self._pipe, self._parent, self._room = pipe, parent, room
        self._waits = False

    def told(self, size: int, tokens: int) -> None:
        """So many more source bytes were read and tokens made of them."""
        self._send("told", size, tokens)

    def at(self, place: Place | None) -> None:
        """These records are in work now, or none any more."""
        self._send("at", place)

    def wait_for_room(self) -> None:
        """Returns when the run has room for this worker's next records."""
        while self._waits or self._pipe.poll():
            self._hear()

    def next_task(self) -> tuple[Task[Any], Attempt] | None:
        """The next one, None where there is none any more."""
        while isinstance(message := self._hear(), bool):
            pass
        task: tuple[Task[Any], Attempt] | None = message
        return task

    def _hear(self) -> Any:
        """The next message; a bool, which says whether to wait before the next records, is heeded."""
        while not self._pipe.poll(1):
            self._end_with_parent()
        message = self._pipe.recv()
        if isinstance(message, bool):
            self._waits = message
            give_back()
        return message

    def is_tight(self) -> bool:
        """Whether this process holds more than its share, after what it has freed is given back."""
        if resident(os.getpid()) <= self._room:
            return False
        give_back()
        return resident(os.getpid()) > self._room

    def _send(self, *message: Any) -> None:
        self._end_with_parent()
        self._pipe.send(message)

    def _end_with_parent(self) -> None:
        """A forked worker holds its elder siblings' pipes open, so only its parent's id shows that that was killed."""
        if os.getppid() != self._parent:
            os._exit(1)


Task = Callable[[Attempt, Line], R]
"A call that does the work."


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Who may work, and what is done where workers die."""

    workers: int
    watch: Watch
    set_aside: bool = False
    "Records that workers die of or hang at are set aside; else the first one ends the run."
    say: Callable[[str], None] = print
    "Is told of a worker that hung."
    idle: list[_Worker] | None = None
    "Workers that wait for the tasks of the next run; None: a run ends all that it has started."

    def dismiss(self) -> None:
        """Ends those that wait: there is no further run."""
        waiting = self.idle or []
        for worker in waiting:
            worker.dismiss()
        while waiting:
            waiting.pop().end()


def run(
    tasks: Sequence[Task[R]],
    crew: Crew,
    told: Callable[[int, int], None],
    names: Sequence[str] = (),
) -> Generator[tuple[int, R], None, None]:
    """Yields (number of the task, its result); the first exception of a task ends the run. `names`: of the tasks, for people."""
    shift = _Shift(tasks, crew, told, names)
    try:
        while shift.waiting or shift.workers:
            shift.fill()
            for worker in _heard(shift.workers):
                yield from shift.hear(worker)
            shift.look()
    finally:
        shift.end()


class _Shift:
    """Who is at work on what, from the first task to the last."""

    def __init__(
        self,
        tasks: Sequence[Task[Any]],
        crew: Crew,
        told: Callable[[int, int], None],
        names: Sequence[str],
    ) -> None:
        self._tasks, self._crew, self._told = tasks, crew, told
        self._names = names or [f"number {n} of {len(tasks)}" for n in range(1, len(tasks) + 1)]
        self._limit = min(crew.workers, len(tasks))
        self.waiting = [(number, Attempt()) for number in range(len(tasks))][::-1]
        self.workers: list[_Worker] = []
        self._dismissed: list[_Worker] = []

    def fill(self) -> None:
        """As many workers as have room; those beyond it wait before their next records."""
        places = self._crew.watch.places(self._limit)
        while self.waiting and len(self.workers) < places:
            self._reap()
            self.workers.append(self._idle_worker() or _start(self._limit, self._crew.watch))
            self._give(self.workers[-1])
        for position, worker in enumerate(self.workers):
            worker.pause(position >= places)

    def hear(self, worker: _Worker) -> Iterator[tuple[int, Any]]:
        """Heeds one message; yields the task's number and result where it is that."""
        match worker.receive():
            case "told", size, tokens:
                self._told(size, tokens)
            case "at", place:
                worker.at = place
            case "failed", error:
                raise error
            case "done", result:
                number = worker.number
                self._go_on(worker)
                yield number, result
            case _:
                self._replace(worker, End(how=worker.end()))

    def look(self) -> None:
        """After memory, and after those that hang."""
        self._crew.watch.look(
            [*self.pids(), *(worker.process.pid for worker in self._crew.idle or ())]
        )
        for worker in list(self.workers):
            size = worker.at.size if worker.at else None
            if why := worker.pulse.look(worker.process.pid, size, worker.waits):
                worker.process.kill()
                worker.end()
                self._crew.say(
                    f"a worker process hung ({why}) over the work unit {self._names[worker.number]}, "
                    f"{worker.at or ELSEWHERE}; it was ended, and another one does the unit"
                )
                self._replace(worker, End(how=why, hung=True))

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.workers]

    def end(self) -> None:
        """Stops whoever is at work, and waits until all have ended."""
        for worker in self.workers:
            worker.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self.workers:
            worker.process.join(max(0, deadline - time.monotonic()))
            worker.process.kill()
        for worker in [*self.workers, *self._dismissed]:
            worker.end()

    def _reap(self) -> None:
        """A dismissed worker holds two descriptors until it has ended: as many as are at work may be at that, and no more."""
        late = len(self._dismissed) - self._limit
        for number, worker in enumerate([*self._dismissed]):
            if number < late or worker.process.exitcode is not None:
                self._dismissed.remove(worker)
                worker.end()

    def _give(self, worker: _Worker) -> None:
        number, attempt = self.waiting.pop()
        worker.give(number, attempt, self._tasks[number])

    def _idle_worker(self) -> _Worker | None:
        """One that waits since the stream before, and shares the processors with as many others as are wanted now."""
        while self._crew.idle:
            worker = self._crew.idle.pop()
            if worker.of == self._limit and worker.process.is_alive():
                return worker
            self._dismiss(worker)
        return None

    def _go_on(self, worker: _Worker) -> None:
        """With the next task, or with the next stream; or without this worker, which holds more than its share."""
        self._crew.watch.shown(self.pids())
        held = resident(worker.process.pid)
        is_worn = held > worker.room or held - worker.born > LIFE_BYTES
        if self.waiting and not is_worn:
            self._give(worker)
            return
        self.workers.remove(worker)
        if is_worn or self._crew.idle is None:
            self._dismiss(worker)
        else:
            self._crew.idle.append(worker)

    def _dismiss(self, worker: _Worker) -> None:
        self._dismissed.append(worker)
        worker.dismiss()

    def _replace(self, worker: _Worker, end: End) -> None:
        """Its task waits for another one, who takes fewer records at once."""
        self.workers.remove(worker)
        unit = self._names[worker.number]
        again = after_death(worker.attempt, worker.at, end, self._crew.set_aside, unit)
        self.waiting.append((worker.number, again))


@dataclass(slots=True, eq=False)
class _Worker:
    process: Any
    pipe: Connection
    of: int
    "Workers that it was to share the processors with."
    room: int
    "Bytes that it may hold."
    born: int
    "Bytes that it held at first: its parent's."
    number: int = 0
    "Of the task it has in work."
    attempt: Attempt = field(default_factory=Attempt)
    at: Place | None = None
    waits: bool = False
    pulse: Pulse = field(default_factory=Pulse)

    def give(self, number: int, attempt: Attempt, task: Task[Any]) -> None:
        self.number, self.attempt, self.at = number, attempt, None
        self.pulse.beat()
        with suppress(ConnectionError):  # it has died: `receive` will tell
            self.pipe.send((task, attempt))

    def dismiss(self) -> None:
        """Nobody waits yet for the process to end, which takes 30 ms where much is freed."""
        with suppress(ConnectionError):
            self.pipe.send(None)
        self.pipe.close()

    def receive(self) -> tuple[Any, ...]:
        """The worker's next message, ("died",) where none will come."""
        self.pulse.beat()
        try:
            return tuple(self.pipe.recv())
        except (EOFError, ConnectionError):
            return ("died",)

    def pause(self, waits: bool) -> None:
        """Tells the worker to wait before its next records, or to go on."""
        if waits != self.waits:
            self.waits = waits
            with suppress(ConnectionError):
                self.pipe.send(waits)

    def end(self) -> str:
        """Sees to it that the process has ended, and says how it did."""
        self.process.join(GRACE_SECONDS)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        self.process.close()
        if code >= 0:
            return f"exit code {code}"
        cause = ", most likely for lack of memory" if code == -signal.SIGKILL else ""
        return f"signal {signal.Signals(-code).name}{cause}"


def _heard(workers: list[_Worker]) -> list[_Worker]:
    """Those that have something to say; nobody, after a tenth of a second."""
    ready = wait([worker.pipe for worker in workers], PERIOD)
    return [worker for worker in workers if worker.pipe in ready]


def start_method() -> str:
    """macOS has fork too, but its libraries may crash in a forked process, so that Python itself spawns there."""
    return "fork" if sys.platform.startswith("linux") else "spawn"


def _start(workers: int, watch: Watch) -> _Worker:
    """A forked worker shares what is opened; a spawned one opens it itself."""
    context: Any = multiprocessing.get_context(start_method())
    ours, its = context.Pipe()
    room = watch.share(watch.places(workers))
    process = context.Process(target=_work, args=(its, workers, os.getpid(), room), daemon=True)
    with _signals_waiting():
        process.start()
    its.close()
    return _Worker(process, ours, workers, room, resident(os.getpid()))


@contextmanager
def _signals_waiting() -> Iterator[None]:
    """A forked worker must not run its parent's handlers, which clean up after the parent: it hears of signals when it has
    its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, workers: int, parent: int, room: int) -> None:
    """A worker's life, until it is dismissed, told to stop, or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, -(-cpu_count() // workers))))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _do_tasks(pipe, Line(pipe, parent, room))
    except _Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    # Nothing is torn down: thread pools and open files that it shares with its parent are not its own to close.
    os._exit(0)


def _do_tasks(pipe: Connection, line: Line) -> None:
    """Tasks in, results out."""
    born = resident(os.getpid())
    with suppress(BrokenPipeError, EOFError):
        while task := line.next_task():
            try:
                message: tuple[str, Any] = ("done", task[0](task[1], line))
            except Exception as error:
                message = ("failed", _described(error))
            if resident(os.getpid()) - born > LIFE_BYTES // 4:
                give_back()  # what the task alone has held says nothing about the worker
            pipe.send(message)


class _Stopped(BaseException):
    """Whoever is writing takes back what is half written."""


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped


def _described(error: Exception) -> Exception:
    """The error itself where it can travel, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

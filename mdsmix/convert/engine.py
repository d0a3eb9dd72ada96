"""Who works: the tasks of a run over local processes, or in this one where there is nothing to share out.

A task is any picklable call. Results come back in the order in which they are finished; the caller puts them in the
order of the plan, so the number of processes shapes no byte. Another engine (a cluster) is another `run`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from mdsmix.errors import MdsmixError

R = TypeVar("R")
Task = Callable[[Callable[[int, int], None]], R]
"A call that does the work and tells of it on the way: bytes read and tokens made since it last told."


def cpu_count() -> int:
    """The processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(
    tasks: Sequence[Task[R]], workers: int, told: Callable[[int, int], None]
) -> Iterator[tuple[int, R]]:
    """Yields (number of the task, its result); the first exception of a task ends the run."""
    workers = min(workers, len(tasks))
    if workers <= 1:
        for number, task in enumerate(tasks):
            yield number, task(told)
        return
    yield from _run_processes(tasks, workers, told)


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    task: int | None = None


def _run_processes(
    tasks: Sequence[Task[R]], workers: int, told: Callable[[int, int], None]
) -> Iterator[tuple[int, R]]:
    waiting = list(range(len(tasks)))[::-1]
    crew = [_start(workers) for _ in range(workers)]
    try:
        for worker in crew:
            _give(worker, tasks, waiting)
        while busy := [w for w in crew if w.task is not None]:
            for worker in (
                w for ready in wait([w.pipe for w in busy]) for w in busy if w.pipe is ready
            ):
                kind, *message = _receive(worker)
                if kind == "told":
                    told(*message)
                elif kind == "failed":
                    raise message[0]
                elif worker.task is not None:
                    number, worker.task = worker.task, None
                    _give(worker, tasks, waiting)
                    yield number, message[0]
    finally:
        for worker in crew:
            worker.process.terminate()
        for worker in crew:
            worker.process.join()


def _start(workers: int) -> _Worker:
    """A forked worker starts in 10 ms and shares what is imported; where there is no fork it is spawned."""
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    ours, its = context.Pipe()
    process = context.Process(target=_work, args=(its, workers, os.getpid()), daemon=True)
    process.start()
    its.close()
    return _Worker(process, ours)


def _give(worker: _Worker, tasks: Sequence[Task[R]], waiting: list[int]) -> None:
    if not waiting:
        return
    worker.task = waiting.pop()
    try:
        worker.pipe.send(tasks[worker.task])
    except ConnectionError:
        raise _death(worker) from None


def _receive(worker: _Worker) -> tuple[Any, ...]:
    try:
        return tuple(worker.pipe.recv())
    except (EOFError, ConnectionError):
        raise _death(worker) from None


def _death(worker: _Worker) -> MdsmixError:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return MdsmixError(
        f"a worker process died ({how}{', most likely for lack of memory' if code == -9 else ''}); "
        "finished units are kept: run the same command again, with fewer --workers if it dies again."
    )


def _work(pipe: Connection, workers: int, parent: int) -> None:
    """A worker's life: tasks in, results out, until the pipe or the parent is gone.

    A forked worker holds its elder siblings' pipes open too, so a parent that was killed is seen by its process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, -(-cpu_count() // workers))))

    def told(size: int, tokens: int) -> None:
        if os.getppid() != parent:
            os._exit(1)
        pipe.send(("told", size, tokens))

    while os.getppid() == parent:
        if not pipe.poll(1):
            continue
        try:
            pipe.send(("done", pipe.recv()(told)))
        except (EOFError, BrokenPipeError):
            return
        except Exception as error:
            pipe.send(("failed", _described(error)))


def _described(error: Exception) -> Exception:
    """The error itself where it can travel, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

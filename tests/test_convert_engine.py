"""Whoever does a task and whenever it ends, its result is found under its number; what fails is told in its own words."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from mdsmix.convert.engine import run
from mdsmix.encode.backends import Unequal
from mdsmix.errors import MdsmixError, Unreachable

Told = Callable[[int, int], None]
CREWS = pytest.mark.parametrize("workers", [1, 2, 3, 9])


def silent(size: int, tokens: int) -> None: ...


def square(number: int, seconds: float, told: Told) -> tuple[int, int]:
    time.sleep(seconds)
    told(number, 2 * number)
    return number * number, os.getpid()


def fail(error: Exception, told: Told) -> None:
    raise error


def die(number: int, told: Told) -> None:
    os.kill(os.getpid(), number)


def fail_untransportably(told: Told) -> None:
    raise Untransportable("one, ", "two")


def die_idle(told: Told) -> tuple[int, int]:
    """Gives its result and dies while the run is still busy with what it told before."""
    told(1, 1)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 0, os.getpid()


def leave(code: int, told: Told) -> None:
    os._exit(code)


class Untransportable(Exception):
    """Two words in, one kept: it cannot be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@CREWS
def test_every_task_is_done_once_and_found_by_its_number(workers: int) -> None:
    heard = []
    tasks = [partial(square, n, 0.05 if n % 3 == 0 else 0) for n in range(7)]
    found = list(run(tasks, workers, lambda size, made: heard.append((size, made))))
    assert sorted((n, result[0]) for n, result in found) == [(n, n * n) for n in range(7)]
    assert sorted(heard) == [(n, 2 * n) for n in range(7)]
    crew = {result[1] for _, result in found}
    assert (crew == {os.getpid()}) == (workers == 1)


def test_a_slow_task_holds_up_no_other() -> None:
    tasks = [partial(square, 0, 0.5)] + [partial(square, n, 0) for n in range(1, 5)]
    assert [n for n, _ in run(tasks, 2, silent)] == [1, 2, 3, 4, 0]


def test_no_task_is_no_work() -> None:
    assert list(run([], 4, silent)) == []


@CREWS
@pytest.mark.parametrize(
    "error",
    [
        Unreachable("the store is gone"),
        MdsmixError("a sentence"),
        Unequal("fastokens 1", "a text"),
        KeyError("x"),
    ],
)
def test_an_error_keeps_its_class_and_its_words(workers: int, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        list(run([partial(fail, error), partial(square, 1, 0)], workers, silent))
    assert str(caught.value) == str(error)


def test_an_error_that_cannot_travel_keeps_its_words() -> None:
    tasks = [fail_untransportably, partial(square, 1, 0)]
    with pytest.raises(RuntimeError, match="Untransportable: one, two"):
        list(run(tasks, 2, silent))


@pytest.mark.parametrize(
    ("task", "how"),
    [
        (partial(die, signal.SIGKILL), r"\(signal SIGKILL, most likely for lack of memory\)"),
        (partial(die, signal.SIGTERM), r"\(signal SIGTERM\)"),
        (partial(leave, 3), r"\(exit code 3\)"),
    ],
)
def test_a_worker_that_dies_is_one_sentence(task: Any, how: str) -> None:
    with pytest.raises(
        MdsmixError, match=f"^a worker process died {how}; .*run the same command again"
    ):
        list(run([task, partial(square, 1, 0.2)], 2, silent))


def test_a_worker_that_dies_between_two_tasks_is_the_same_sentence() -> None:
    tasks = [die_idle, partial(square, 1, 0.3), *[partial(square, n, 0) for n in (2, 3)]]
    with pytest.raises(MdsmixError, match="a worker process died"):
        list(run(tasks, 2, lambda size, made: time.sleep(0.2)))


def test_no_worker_outlives_the_run() -> None:
    list(run([partial(square, n, 0) for n in range(4)], 2, silent))
    assert multiprocessing.active_children() == []
    with pytest.raises(KeyError):
        list(run([partial(fail, KeyError("x")), partial(square, 1, 60)], 2, silent))
    assert multiprocessing.active_children() == []


def test_a_run_that_is_given_up_ends_its_workers() -> None:
    results = run([partial(square, n, 0.01) for n in range(50)], 2, silent)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []

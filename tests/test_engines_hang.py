"""A worker of which nothing will come is noticed, told of and replaced; one that only takes long is left alone."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from mdsmix.engines import hang
from mdsmix.engines.hang import SILENT_SECONDS, SLOWEST, Pulse, used_by
from mdsmix.engines.tasks import Attempt, Reporter
from mdsmix.engines.workers import Worker
from tests.alarm import at_most
from tests.clock import Clock
from tests.tasks import Call, call, in_work, place, run, settings


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "SILENT_SECONDS", 0.6)
    monkeypatch.setattr(hang, "LOOK_SECONDS", 0.05)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def read_what_never_comes() -> None:
    """What a mount that does not answer looks like: the read does not return."""
    os.read(os.pipe()[0], 1)


def hang_once(how: Any, attempt: Attempt, reporter: Reporter) -> tuple[int, int]:
    """Hangs while nothing is in work."""
    if not attempt.deaths:
        how()
    return attempt.deaths, attempt.halvings


def loop_at(stuck: int, attempt: Attempt, reporter: Reporter) -> list[int]:
    """A unit of 8 records, one of which takes whoever has it in work for ever."""
    done = list[int]()
    for piece in in_work(8, attempt, reporter, size=72):
        while stuck in piece:
            pass
        done += piece
    reporter.on_records(None)
    return done


@pytest.mark.usefixtures("impatient")
def test_a_worker_without_a_sign_of_life_is_told_of_and_replaced_and_others_go_on() -> None:
    said = list[str]()
    stuck = [Call(hang_once, (how,), "of a.jsonl") for how in (stop, read_what_never_comes)]
    with at_most(60):
        tasks = [*stuck, *[call(hang_once, int)] * 20]
        found = dict(run(tasks, settings(2), say=said.append))
    assert found == {n: (1, 30) if n < 2 else (0, 0) for n in range(22)}
    assert len(said) == 2
    for sentence in said:
        assert "a worker process hung (no sign of life for " in sentence
        assert "it was stopped, or waits for a mount, and uses no processor time" in sentence
        assert "over the work unit of a.jsonl, while no record was in work" in sentence


@pytest.mark.usefixtures("impatient")
def test_a_record_that_is_an_endless_loop_is_found_and_set_aside() -> None:
    said = list[str]()
    with at_most(60):
        ((_, done),) = run([call(loop_at, 5)], settings(set_aside=True), say=said.append)
    assert done == [0, 1, 2, 3, 4, 6, 7]
    many, one, again = said
    assert "the 8 records from byte 0 of a on" in many
    assert "hung (not done with 72 bytes after " in one
    assert "the record at byte 5 of a (9 bytes)" in one
    assert "the record at byte 5 of a" in again


def seconds_until_hung(clock: Clock, used: Any, size: int | None, waits: bool = False) -> int:
    """How long a worker that sends nothing is left alone, a day at most."""
    pulse = Pulse()
    for second in range(86_400):
        clock.sleep(1)
        if pulse.look(used, size, waits):
            return second
    return 86_400


def test_who_works_or_waits_for_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells no processor time (-1), only records are watched. A store that is silent is given up after 123 s."""
    clock = Clock()
    monkeypatch.setattr(hang, "time", clock)
    assert SILENT_SECONDS > 2 * 123
    ticks, day = count(1), 86_400
    rows: list[tuple[Callable[[], int], int | None, bool, float]] = [
        (lambda: 7, None, False, SILENT_SECONDS),
        (lambda: next(ticks), None, False, day),
        (lambda: next(ticks), 10 * SLOWEST, False, SILENT_SECONDS + 10),
        (lambda: -1, None, False, day),
        (lambda: -1, 0, False, SILENT_SECONDS),
        (lambda: 7, None, True, day),
    ]
    for used, size, waits, seconds in rows:
        found = seconds_until_hung(clock, used, size, waits)
        assert abs(found - seconds) <= 1, (used(), size, waits)


def test_a_run_that_stood_still_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, and hours later `fg`: what passed between two looks was not waited."""
    clock = Clock()
    monkeypatch.setattr(hang, "time", clock)
    pulse = Pulse()
    for seconds in (1, 7200, 0.9, 7200):
        clock.sleep(seconds)
        assert pulse.look(lambda: 7, 10, False) is None
    assert 3 < pulse.unheard < 6


def test_a_message_and_a_task_are_signs_of_life_and_so_is_processor_time() -> None:
    ours, its = multiprocessing.Pipe()
    worker = Worker(process=None, pipe=ours, most=0)
    its.send(("records", place(0)))
    acts: list[Callable[[], object]] = [
        worker.receive,
        lambda: worker.give(1, Attempt(), call(int)),
    ]
    for act in acts:
        worker.pulse.silent = worker.pulse.unheard = 9.0
        act()
        assert worker.pulse.silent == worker.pulse.unheard == 0
    before, end = used_by(os.getpid()), time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert used_by(os.getpid()) > before >= 0
    assert used_by(2**22 + 1) == -1

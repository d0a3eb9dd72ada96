"""However small the pieces in which a unit is done, its bytes are the same; a record that kills
workers is named or set aside. A worker of which nothing will come is noticed, told of and replaced;
one that only takes long is left alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdsmix.conversion import unit
from mdsmix.engines import hang
from mdsmix.engines.hang import SILENT_SECONDS, SLOWEST, HangDetector, read_cpu_ticks
from mdsmix.engines.tasks import (
    ALONE,
    MOST_DEATHS,
    Attempt,
    Reporter,
    WorkerEnd,
    plan_next_attempt,
    split_positions,
)
from mdsmix.engines.workers import QueuedTask, Worker
from mdsmix.errors import MdsmixError
from mdsmix.kinds.pretraining import Pretraining
from tests.alarm import fail_after
from tests.clock import Clock
from tests.converting import Web, chats, documents, files, pairs
from tests.tasks import Call, make_call, make_records, make_settings, report_records, run_tasks

DIED, HUNG = WorkerEnd(how="signal SIGKILL"), WorkerEnd(how="no sign of life for 300 s", hung=True)


def test_pieces_are_all_records_in_order_once() -> None:
    for count in (0, 1, 2, 7, 64, 1000):
        for halvings in (0, 1, 3, 30):
            without = {n for n in (0, 3, 4, 6, 999) if n < count}
            found, most = list(split_positions(count, halvings, without)), max(1, count >> halvings)
            assert [n for piece in found for n in piece] == sorted({*range(count)} - without)
            assert all(1 <= len(piece) <= most for piece in found)
            whole = [len(piece) for piece in split_positions(count, halvings, set())]
            assert max(whole, default=0) == min(count, most)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(hang, "CHECK_SECONDS", 0.05)


def refused(attempt: Attempt, at: Any, end: WorkerEnd, set_aside: bool = False) -> str:
    with pytest.raises(MdsmixError) as caught:
        plan_next_attempt(attempt, at, end, set_aside, "of a.jsonl")
    return str(caught.value)


def test_a_record_is_blamed_when_it_kills_or_hangs_alone_and_twice() -> None:
    for end, verb in ((DIED, "die"), (HUNG, "hang")):
        at, skipped = make_records(7), frozenset({("a", 1)})
        once = plan_next_attempt(
            Attempt(deaths=1, halvings=4, skipped=skipped), at, end, False, "a"
        )
        assert (once.deaths, once.halvings, once.died_at) == (2, ALONE, at)
        assert plan_next_attempt(once, make_records(8), end, False, "a").died_at == make_records(8)
        over = "on the work unit of a.jsonl, the record at byte 7 of a (9 bytes)"
        assert f"{verb} ({end.how}) {over}" in refused(once, at, end)
        assert "--quarantine-crashes" in refused(once, at, end)
        aside = plan_next_attempt(once, at, end, True, "a")
        assert aside == Attempt(deaths=1, halvings=ALONE, skipped=skipped | {("a", 7)})


def test_several_records_are_not_blamed_however_often_they_kill() -> None:
    """A hang takes minutes to notice: halving down to one record would take hours. Outside of
    records little is tried again.
    """
    many = make_records(7, records=2)
    for at, end, times, said in (
        (many, DIED, MOST_DEATHS, "the 2 records from byte 7 of a on"),
        (many, HUNG, MOST_DEATHS, "the 2 records from byte 7 of a on"),
        (None, DIED, 3, "while no record was in work"),
        (None, HUNG, 1, "while no record was in work"),
    ):
        attempt = Attempt()
        for deaths in range(1, times + 1):
            attempt = plan_next_attempt(attempt, at, end, True, "a")
            halvings = ALONE if end.hung or deaths > 1 else 4
            assert attempt == Attempt(deaths=deaths, halvings=halvings, died_at=at)
        refusal = refused(attempt, at, end, True)
        assert f"({end.how}) on the work unit of a.jsonl, {said}" in refusal


def test_batches_of_any_size_give_the_same_bytes(web: Web, corpus_folder: Path) -> None:
    makers = {"docs": documents, "faq": pairs, "chat": chats}
    streams = {name: make(corpus_folder / f"{name}.jsonl") for name, make in makers.items()}
    web.says(max_seq_len=64, streams=streams).runs()
    web.patch.setattr(
        unit, "split_positions", lambda count, n, without: split_positions(count, n + 5, without)
    )
    assert files(web.anew().out) == files(web.out)


@pytest.mark.usefixtures("impatient")
def test_records_that_kill_or_hang_are_set_aside(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one unit; the 41st record of the first kills the process that encodes it, that
    of the second stands at the same byte, and the 8th of the second waits for ever.
    """
    encode, kills, hangs = Pretraining.encode, "this one kills  ", "this one hangs  "

    def failing(self: Pretraining, records: list[Any]) -> Any:
        texts = {text for (text,) in records}
        if kills in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        if hangs in texts:
            os.read(os.pipe()[0], 1)
        return encode(self, records)

    monkeypatch.setattr(Pretraining, "encode", failing)
    texts = [f"text number {n:04}" for n in range(100)]
    web.holds([*texts[:40], kills, *texts[41:]])
    web.holds([*texts[:7], hangs, *texts[8:]], "b.jsonl")
    with fail_after(120):
        answer = web.convert("--quarantine-crashes")
    assert answer.code == 0
    assert "quarantined: 2 crashed_worker" in answer.out
    said = [line for line in answer.err.splitlines() if "hung" in line]
    assert said[0].startswith("web: a worker process hung (")
    assert "on the work unit of a.jsonl and 1 files more, the record" in said[0]
    places = [(bad["file"], bad["line"], bad["raw"][9:25]) for bad in web.bad]
    assert places == [("a.jsonl", 41, kills), ("b.jsonl", 8, hangs)]
    assert "up to date" in web.convert().out


def strike(number: int) -> None:
    os.kill(os.getpid(), number)


def read_what_never_comes() -> None:
    """What a mount that does not answer looks like: the read does not return."""
    os.read(os.pipe()[0], 1)


def loop() -> None:
    while True:
        pass


def first(how: Any, deaths: int, attempt: Attempt, reporter: Reporter) -> Attempt:
    """Hangs or dies so often while nothing is in work, then says how it was called."""
    if attempt.deaths < deaths:
        how()
    return attempt


def over(records: set[int], how: Any, attempt: Attempt, reporter: Reporter) -> list[int]:
    """A unit of 100 records, of which whoever has some of them in work hangs or dies; returns those
    that were done.
    """
    done = list[int]()
    for piece in report_records(100, attempt, reporter, size=72):
        if records.intersection(piece):
            how()
        done += piece
    return done


@pytest.mark.usefixtures("impatient")
def test_a_worker_without_a_sign_of_life_is_told_of_and_replaced_and_others_go_on() -> None:
    said = list[str]()
    hanging = (partial(strike, signal.SIGSTOP), read_what_never_comes)
    with fail_after(60):
        stuck = [Call(first, (how, 1), "of a.jsonl") for how in hanging]
        found = dict(
            run_tasks([*stuck, *[make_call(first, int, 0)] * 20], make_settings(2), say=said.append)
        )
    tries = [(found[n].deaths, found[n].halvings) for n in range(22)]
    assert tries == [(1, 30)] * 2 + [(0, 0)] * 20
    assert len(said) == 2
    for sentence in said:
        assert "a worker process hung (no sign of life for " in sentence
        assert "it was stopped, or waits for a mount, and uses no processor time" in sentence
        assert "on the work unit of a.jsonl, while no record was in work" in sentence


@pytest.mark.usefixtures("impatient")
def test_a_record_that_is_an_endless_loop_is_found_and_set_aside() -> None:
    said = list[str]()
    with fail_after(60):
        ((_, done),) = run_tasks(
            [make_call(over, {5}, loop)], make_settings(set_aside=True), say=said.append
        )
    assert done == [*range(5), *range(6, 100)]
    many, one, again = said
    assert "the 100 records from byte 0 of a on" in many
    assert "hung (not done with 72 bytes after " in one
    assert "the record at byte 5 of a (9 bytes)" in one
    assert "the record at byte 5 of a" in again


def leave_a_place(dies: bool, attempt: Attempt, reporter: Reporter) -> None:
    """Its records are in work at the end; or it dies while it stores them."""
    reporter.on_records(make_records(0))
    if dies:
        reporter.on_records(None)
        os._exit(3)


def test_a_worker_that_dies_is_replaced_and_its_task_tried_with_fewer_records() -> None:
    kill, terminate = (partial(strike, n) for n in (signal.SIGKILL, signal.SIGTERM))
    ways = [(kill, 0), (kill, 1), (kill, 3), (terminate, 1), (partial(os._exit, 3), 1)]
    found = sorted(run_tasks([make_call(first, *way) for way in ways], make_settings(2)))
    halvings = [(attempt.deaths, attempt.halvings) for _, attempt in found]
    assert halvings == [(0, 0), (1, 4), (3, 30), (1, 4), (1, 4)]


def test_a_record_that_kills_is_named_where_none_is_set_aside() -> None:
    with pytest.raises(MdsmixError) as caught:
        list(run_tasks([make_call(over, {7}, partial(strike, signal.SIGKILL))], make_settings(2)))
    assert "(signal SIGKILL, most likely for lack of memory)" in str(caught.value)
    assert "the record at byte 7 of a (9 bytes)" in str(caught.value)


def test_no_record_is_blamed_where_none_or_that_of_another_task_was_in_work() -> None:
    said = r"die \(exit code 3\) on the work unit number 1, while"
    with pytest.raises(MdsmixError, match=said):
        list(run_tasks([make_call(leave_a_place, True)], make_settings(1, set_aside=True)))
    dying = make_call(first, partial(os._exit, 3), 1)
    again = dict(run_tasks([make_call(leave_a_place, False), dying], make_settings(1)))[1]
    assert (again.deaths, again.died_at) == (1, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hang, "time", clock)
    return clock


def test_who_works_or_waits_is_left_alone_and_a_run_that_stood_still_blames_nobody(
    clock: Clock,
) -> None:
    """Who waits for memory, for a day. Where the system tells no processor time (-1), only records
    are watched. A store that is silent is given up after 123 s.
    """
    assert SILENT_SECONDS > 2 * 123
    ticks, day = itertools.count(1), 86_400
    rows: list[tuple[Callable[[], int], int | None, bool, float]] = [
        (lambda: 7, None, False, SILENT_SECONDS),
        (lambda: next(ticks), None, False, day),
        (lambda: next(ticks), 10 * SLOWEST, False, SILENT_SECONDS + 10),
        (lambda: -1, None, False, day),
        (lambda: -1, 0, False, SILENT_SECONDS),
        (lambda: 7, None, True, day),
    ]
    for used, size, waits, expected in rows:
        pulse, began = HangDetector(), clock.now
        while clock.now - began < day and not pulse.check(used, size, waits):
            clock.sleep(1)
        assert abs(clock.now - began - expected) <= 2, (used(), size, waits)
    pulse = HangDetector()
    for seconds in (
        1,
        7200,
        0.9,
        7200,
    ):  # Ctrl-Z, and hours later `fg`: what passed in between was not waited
        clock.sleep(seconds)
        assert pulse.check(lambda: 7, 10, False) is None
    assert 3 < pulse.unheard < 6


def test_a_message_and_a_task_are_signs_of_life_and_so_is_processor_time() -> None:
    ours, its = multiprocessing.Pipe()
    worker = Worker(process=None, pipe=ours, limit=0)
    its.send(("records", make_records(0)))
    for act in (worker.receive, partial(worker.assign, QueuedTask(1, Attempt(), make_call(int)))):
        worker.hang_detector.silent = worker.hang_detector.unheard = 9.0
        act()
        assert worker.hang_detector.silent == worker.hang_detector.unheard == 0
    before, end = read_cpu_ticks(os.getpid()), time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert read_cpu_ticks(os.getpid()) > before >= 0
    assert read_cpu_ticks(2**22 + 1) == -1

"""A unit has the same bytes however small the pieces are in which it is done; a record that kills
workers is named or set aside. A hung worker is noticed, reported and replaced; one that only takes
long is left alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdsmix.conversion import unit
from mdsmix.engines import hang
from mdsmix.engines.hang import SILENT_SECONDS, SLOWEST, HangDetector, read_cpu_ticks
from mdsmix.engines.local_engine import LocalEngine
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
from tests.converting import Project, chats, documents, pairs, read_files
from tests.tasks import Call, make_call, make_records, make_settings, report_records, run_tasks

DIED = WorkerEnd(how="signal SIGKILL")
HUNG = WorkerEnd(how="no sign of life for 300 s", hung=True)


def test_pieces_contain_each_record_once_in_order() -> None:
    for count in (0, 1, 2, 7, 64, 1000):
        for halvings in (0, 1, 3, 30):
            without = {n for n in (0, 3, 4, 6, 999) if n < count}
            pieces = list(split_positions(count, halvings, without))
            longest = max(1, count >> halvings)
            assert [n for piece in pieces for n in piece] == sorted({*range(count)} - without)
            assert all(1 <= len(piece) <= longest for piece in pieces)
            lengths = [len(piece) for piece in split_positions(count, halvings, set())]
            assert max(lengths, default=0) == min(count, longest)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a worker for hung after 1.5 s."""
    monkeypatch.setattr(hang, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(hang, "CHECK_SECONDS", 0.05)


def fail_last_attempt(
    attempt: Attempt, records: Any, end: WorkerEnd, set_aside: bool = False
) -> str:
    """Return the message of an attempt after which the unit is given up."""
    with pytest.raises(MdsmixError) as error:
        plan_next_attempt(attempt, records, end, set_aside, "of a.jsonl")
    return str(error.value)


def test_a_record_is_blamed_if_it_alone_ends_two_workers() -> None:
    for end, verb in ((DIED, "die"), (HUNG, "hang")):
        record = make_records(7)
        next_record = make_records(8)
        skipped = frozenset({("a", 1)})
        first = Attempt(deaths=1, halvings=4, skipped=skipped)
        second = plan_next_attempt(first, record, end, False, "a")
        assert (second.deaths, second.halvings, second.died_at) == (2, ALONE, record)
        assert plan_next_attempt(second, next_record, end, False, "a").died_at == next_record
        words = "on the work unit of a.jsonl, the record at byte 7 of a (9 bytes)"
        message = fail_last_attempt(second, record, end)
        assert f"{verb} ({end.how}) {words}" in message
        assert "--quarantine-crashes" in message
        without_record = plan_next_attempt(second, record, end, True, "a")
        assert without_record == Attempt(deaths=1, halvings=ALONE, skipped=skipped | {("a", 7)})


def test_several_records_are_not_blamed_however_often_they_kill() -> None:
    """A hang takes minutes to notice: halving down to one record would take hours. Without active
    records a unit is tried only a few times.
    """
    many = make_records(7, records=2)
    for records, end, times, words in (
        (many, DIED, MOST_DEATHS, "the 2 records from byte 7 of a on"),
        (many, HUNG, MOST_DEATHS, "the 2 records from byte 7 of a on"),
        (None, DIED, 3, "while the worker was converting no record"),
        (None, HUNG, 1, "while the worker was converting no record"),
    ):
        attempt = Attempt()
        for deaths in range(1, times + 1):
            attempt = plan_next_attempt(attempt, records, end, True, "a")
            halvings = ALONE if end.hung or deaths > 1 else 4
            assert attempt == Attempt(deaths=deaths, halvings=halvings, died_at=records)
        message = fail_last_attempt(attempt, records, end, True)
        assert f"({end.how}) on the work unit of a.jsonl, {words}" in message


def test_batches_of_any_size_give_the_same_bytes(project: Project, corpus_folder: Path) -> None:
    makers = {"docs": documents, "faq": pairs, "chat": chats}
    streams = {name: make(corpus_folder / f"{name}.jsonl") for name, make in makers.items()}
    project.configure(max_seq_len=64, streams=streams).run_all()
    project.patch.setattr(
        unit, "split_positions", lambda count, n, without: split_positions(count, n + 5, without)
    )
    assert read_files(project.convert_into().out) == read_files(project.out)


@pytest.mark.usefixtures("impatient")
def test_records_that_kill_or_hang_are_set_aside(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit has two files. The 41st record of the first kills the process that encodes it; that
    of the second, at the same byte, does not. The 8th record of the second waits for ever.
    """
    encode = Pretraining.encode
    kills = "this one kills  "
    hangs = "this one hangs  "

    def failing(self: Pretraining, records: list[Any]) -> Any:
        texts = {text for (text,) in records}
        if kills in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        if hangs in texts:
            os.read(os.pipe()[0], 1)
        return encode(self, records)

    monkeypatch.setattr(Pretraining, "encode", failing)
    texts = [f"text number {n:04}" for n in range(100)]
    project.write_source([*texts[:40], kills, *texts[41:]])
    project.write_source([*texts[:7], hangs, *texts[8:]], "b.jsonl")
    with fail_after(120):
        answer = project.convert("--quarantine-crashes")
    assert answer.code == 0
    assert "quarantined: 2 crashed_worker" in answer.out
    first_hang = next(line for line in answer.err.splitlines() if "hung" in line)
    assert first_hang.startswith("web: a worker process hung (")
    assert "on the work unit of a.jsonl and 1 files more, the record" in first_hang
    places = [(bad["file"], bad["line"], bad["raw"][9:25]) for bad in project.bad]
    assert places == [("a.jsonl", 41, kills), ("b.jsonl", 8, hangs)]
    assert "up to date" in project.convert().out


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


def read_forever() -> None:
    """Read from a pipe to which nobody writes, as from a mount that does not answer."""
    os.read(os.pipe()[0], 1)


def loop_forever() -> None:
    while True:
        pass


def fail_first(fail: Any, deaths: int, attempt: Attempt, reporter: Reporter) -> Attempt:
    """Fail in the first attempts, without active records. Return the attempt that succeeds."""
    if attempt.deaths < deaths:
        fail()
    return attempt


def fail_on(records: set[int], fail: Any, attempt: Attempt, reporter: Reporter) -> list[int]:
    """Do a unit of 100 records, and fail if a piece contains one of `records`. Return the records
    that were done.
    """
    done = list[int]()
    for piece in report_records(100, attempt, reporter, size=72):
        if records.intersection(piece):
            fail()
        done += piece
    return done


@pytest.mark.usefixtures("impatient")
def test_a_worker_without_a_sign_of_life_is_reported_and_replaced_and_others_continue() -> None:
    sentences = list[str]()
    hanging = (partial(signal_self, signal.SIGSTOP), read_forever)
    tasks = [Call(fail_first, (hang_up, 1), "of a.jsonl") for hang_up in hanging]
    tasks += [make_call(fail_first, int, 0)] * 20
    with fail_after(60):
        attempts = dict(run_tasks(tasks, make_settings(2), say=sentences.append))
    tries = [(attempts[n].deaths, attempts[n].halvings) for n in range(22)]
    assert tries == [(1, 30)] * 2 + [(0, 0)] * 20
    assert len(sentences) == 2
    for sentence in sentences:
        assert "a worker process hung (no sign of life for " in sentence
        assert "it was stopped, or waits for a mount, and uses no processor time" in sentence
        assert "on the work unit of a.jsonl, while the worker was converting no record" in sentence


def hang_always(_: Attempt) -> None:
    """Store the output of a task: never."""
    read_forever()


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_hangs_twice_while_it_stores_is_reported_and_ends_the_run() -> None:
    sentences = list[str]()
    task = Call(fail_first, (int, 0), "of a.jsonl", hang_always)
    with (
        fail_after(60),
        pytest.raises(MdsmixError, match=r"worker processes hang .* \(but .* or storing\)"),
    ):
        list(run_tasks([task], make_settings(), say=sentences.append))
    (sentence,) = sentences
    assert "a worker process hung (no sign of life for " in sentence
    assert "on the work unit of a.jsonl, while the worker was converting no record" in sentence


def count_wakings(pid: int) -> int:
    """Return how often the main thread of a process has slept so far."""
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show it")
def test_a_worker_that_waits_never_wakes_up() -> None:
    """A thread of it that stores may hang. The ticks of a main thread that looks around each second
    would count as a sign of life, so this would never be noticed.
    """
    with closing(LocalEngine(make_settings())) as engine:
        list(engine.run([make_call(fail_first, int, 0)], lambda *_: None, print))
        (worker,) = engine.idle
        for _ in range(5):  # at first the worker may still be on its way to its wait
            before = count_wakings(worker.pid)
            time.sleep(1.2)
            if count_wakings(worker.pid) == before:
                return
        raise AssertionError("the worker wakes up at least once in 1.2 seconds")


def test_workers_run_under_a_python_that_was_compiled_for_an_older_linux(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    attempts = dict(run_tasks([make_call(fail_first, int, 0)] * 3, make_settings(2)))
    assert [attempts[number].deaths for number in range(3)] == [0, 0, 0]


@pytest.mark.usefixtures("impatient")
def test_a_record_with_an_endless_loop_is_found_and_set_aside() -> None:
    sentences = list[str]()
    task = make_call(fail_on, {5}, loop_forever)
    with fail_after(60):
        ((_, done),) = run_tasks([task], make_settings(set_aside=True), say=sentences.append)
    assert done == [*range(5), *range(6, 100)]
    assert len(sentences) == 3
    assert "the 100 records from byte 0 of a on" in sentences[0]
    assert "hung (not done with 72 bytes after " in sentences[1]
    assert "the record at byte 5 of a (9 bytes)" in sentences[1]
    assert "the record at byte 5 of a" in sentences[2]


def leave_records_active(dies: bool, attempt: Attempt, reporter: Reporter) -> None:
    """Return while records are active; or die without active records."""
    reporter.on_records(make_records(0))
    if dies:
        reporter.on_records(None)
        os._exit(3)


def test_a_dead_worker_is_replaced_and_its_task_tried_with_fewer_records() -> None:
    kill = partial(signal_self, signal.SIGKILL)
    terminate = partial(signal_self, signal.SIGTERM)
    failures = [(kill, 0), (kill, 1), (kill, 3), (terminate, 1), (partial(os._exit, 3), 1)]
    tasks = [make_call(fail_first, *failure) for failure in failures]
    results = sorted(run_tasks(tasks, make_settings(2)))
    halvings = [(attempt.deaths, attempt.halvings) for _, attempt in results]
    assert halvings == [(0, 0), (1, 4), (3, 30), (1, 4), (1, 4)]


def test_a_record_that_kills_is_named_if_it_is_not_set_aside() -> None:
    task = make_call(fail_on, {7}, partial(signal_self, signal.SIGKILL))
    with pytest.raises(MdsmixError) as error:
        list(run_tasks([task], make_settings(2)))
    assert "(signal SIGKILL, most likely for lack of memory)" in str(error.value)
    assert "the record at byte 7 of a (9 bytes)" in str(error.value)


def test_no_record_is_blamed_if_none_was_active_or_only_one_of_another_task() -> None:
    message = r"die \(exit code 3\) on the work unit number 1, while"
    with pytest.raises(MdsmixError, match=message):
        list(run_tasks([make_call(leave_records_active, True)], make_settings(1, set_aside=True)))
    dying = make_call(fail_first, partial(os._exit, 3), 1)
    tasks = [make_call(leave_records_active, False), dying]
    attempt = dict(run_tasks(tasks, make_settings(1)))[1]
    assert (attempt.deaths, attempt.died_at) == (1, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hang, "time", clock)
    return clock


def test_a_worker_that_works_or_waits_is_not_hung(clock: Clock) -> None:
    """It may wait for memory for a day. If the system gives no processor time (-1), only active
    records are limited. A silent store is given up after 123 s.
    """
    assert SILENT_SECONDS > 2 * 123
    ticks = itertools.count(1)
    day = 86_400
    rows: list[tuple[Callable[[], int], int | None, bool, float]] = [
        (lambda: 7, None, False, SILENT_SECONDS),
        (lambda: next(ticks), None, False, day),
        (lambda: next(ticks), 10 * SLOWEST, False, SILENT_SECONDS + 10),
        (lambda: -1, None, False, day),
        (lambda: -1, 0, False, SILENT_SECONDS),
        (lambda: 7, None, True, day),
    ]
    for read_ticks, size, waits, expected in rows:
        detector = HangDetector()
        start = clock.now
        while clock.now - start < day and not detector.check(read_ticks, size, waits):
            clock.sleep(1)
        assert abs(clock.now - start - expected) <= 2, (read_ticks(), size, waits)


def test_time_in_which_the_engine_was_stopped_does_not_count(clock: Clock) -> None:
    """After Ctrl-Z, and hours later `fg`, nobody has waited for a worker in between."""
    detector = HangDetector()
    for seconds in (1, 7200, 0.9, 7200):
        clock.sleep(seconds)
        assert detector.check(lambda: 7, 10, False) is None
    assert 3 < detector.unheard < 6


def test_a_message_a_task_and_processor_time_are_signs_of_life() -> None:
    engine_end, worker_end = multiprocessing.Pipe()
    worker = Worker(process=None, pipe=engine_end, limit=0)
    worker_end.send(("records", make_records(0)))
    task = QueuedTask(1, Attempt(), make_call(int))
    for act in (worker.receive, partial(worker.assign, task)):
        worker.hang_detector.silent = worker.hang_detector.unheard = 9.0
        act()
        assert worker.hang_detector.silent == worker.hang_detector.unheard == 0
    ticks = read_cpu_ticks(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert read_cpu_ticks(os.getpid()) > ticks >= 0
    assert read_cpu_ticks(2**22 + 1) == -1

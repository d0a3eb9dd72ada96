"""Whoever does a task and whenever it ends, its result is found under its number; what fails is told in its own words."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix.encode.backends import Unequal
from mdsmix.engines import workers as channel
from mdsmix.engines import workers as worker
from mdsmix.engines.local_engine import LocalEngine
from mdsmix.engines.memory import HEADROOM, MemoryBudget, resident
from mdsmix.engines.tasks import Attempt, End, InWork, Reporter
from mdsmix.engines.workers import WorkerChannel
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.storage import s3_client
from tests.alarm import SECONDS
from tests.tasks import call, in_work, run, settings, silent

CREWS = pytest.mark.parametrize("workers", [1, 2, 3, 9])


def square(number: int, seconds: float, attempt: Attempt, reporter: Reporter) -> tuple[int, int]:
    time.sleep(seconds)
    reporter.on_progress(number, 2 * number)
    return number * number, os.getpid()


def wait_for_a_store(attempt: Attempt, reporter: Reporter) -> None:
    """As a thread does that reads ahead, while the worker reports."""
    thread = threading.Thread(target=s3_client.tell, args=("here", "waiting for a store"))
    thread.start()
    for _ in range(100):
        reporter.on_progress(0, 0)
    thread.join()
    s3_client._told.discard("here")


def wait_for(file: Path, attempt: Attempt, reporter: Reporter) -> None:
    while not file.exists():
        time.sleep(0.01)


def fail(error: Exception, attempt: Attempt, reporter: Reporter) -> None:
    raise error


def fail_untransportably(attempt: Attempt, reporter: Reporter) -> None:
    raise Untransportable("one, ", "two")


def die_until(
    deaths: int, how: Callable[[], None], attempt: Attempt, reporter: Reporter
) -> Attempt:
    """Dies so often, then says how it was called."""
    if attempt.deaths < deaths:
        how()
    return attempt


def die_of(killers: set[int], attempt: Attempt, reporter: Reporter) -> list[tuple[int, int]]:
    """A unit of 100 records, of which some kill whoever has them in work; returns what was in work at once."""
    done = []
    for piece in in_work(100, attempt, reporter):
        if killers.intersection(piece):
            os.kill(os.getpid(), signal.SIGKILL)
        done.append((piece.start, piece.stop))
    reporter.on_records(None)
    return done


def die_storing(attempt: Attempt, reporter: Reporter) -> None:
    reporter.on_records(InWork(file="a", ordinal=0, shown="byte 0", length=9, records=1))
    reporter.on_records(None)
    os._exit(3)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def leave() -> None:
    os._exit(3)


def hold(size: int, attempt: Attempt, reporter: Reporter) -> tuple[float, float]:
    """Holds so much memory for a while; returns from when to when."""
    began = time.monotonic()
    held = b"x" * size
    time.sleep(0.15)
    del held
    return began, time.monotonic()


class Untransportable(Exception):
    """Two words in, one kept: it cannot be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@CREWS
def test_what_all_workers_wait_for_is_said_once(workers: int) -> None:
    """Also by a thread of a worker that reports in the meantime."""
    said = list[str]()
    tasks = [call(wait_for_a_store) for _ in range(8)]
    assert len(list(run(tasks, settings(workers), say=said.append))) == 8
    assert said == ["waiting for a store"]


@CREWS
def test_every_task_is_done_once_and_found_by_its_number(workers: int) -> None:
    heard = []
    assert list(run([], settings(workers))) == []
    tasks = [call(square, n, 0.05 if n % 3 == 0 else 0) for n in range(7)]
    found = list(run(tasks, settings(workers), lambda size, made: heard.append((size, made))))
    assert sorted((n, result[0]) for n, result in found) == [(n, n * n) for n in range(7)]
    assert sorted(heard) == [(n, 2 * n) for n in range(7)]
    assert os.getpid() not in {result[1] for _, result in found}


def test_a_slow_task_holds_up_no_other(tmp_path: Path) -> None:
    """The first one ends only when all others are done."""
    tasks = [call(wait_for, tmp_path / "all"), *(call(square, n, 0) for n in range(1, 5))]
    finished = run(tasks, settings(2))
    assert [n for n, _ in islice(finished, 4)] == [1, 2, 3, 4]
    (tmp_path / "all").touch()
    assert [n for n, _ in finished] == [0]


@CREWS
def test_an_error_keeps_its_class_and_its_words(workers: int) -> None:
    """Of one that cannot travel the words alone."""
    for error in (
        Unreachable("the store is gone"),
        MdsmixError("a sentence"),
        Unequal("fastokens 1", "a text"),
        KeyError("x"),
    ):
        with pytest.raises(type(error)) as caught:
            list(run([call(fail, error), call(square, 1, 0)], settings(workers)))
        assert str(caught.value) == str(error)
    tasks = [call(fail_untransportably), call(square, 1, 0)]
    with pytest.raises(RuntimeError, match="Untransportable: one, two"):
        list(run(tasks, settings(workers)))


@CREWS
def test_a_worker_that_dies_is_replaced_and_its_task_tried_with_half_the_records(
    workers: int,
) -> None:
    for how in (kill, terminate, leave):
        tasks = [call(die_until, deaths, how) for deaths in (0, 1, 3)]
        found = dict(run(tasks, settings(workers)))
        assert {n: (a.deaths, a.halvings) for n, a in found.items()} == {
            0: (0, 0),
            1: (1, 4),
            2: (3, 30),
        }


def test_a_record_that_kills_is_found_and_named() -> None:
    with pytest.raises(MdsmixError) as caught:
        list(run([call(die_of, {37})], settings(2)))
    assert "(signal SIGKILL, most likely for lack of memory)" in str(caught.value)
    assert "the record at byte 37 of a (9 bytes)" in str(caught.value)
    assert "--quarantine-crashes" in str(caught.value)


def test_records_that_kill_are_set_aside_where_that_is_asked_for() -> None:
    ((_, done),) = run([call(die_of, {0, 37, 38, 99})], settings(2, set_aside=True))
    assert [n for start, stop in done for n in range(start, stop)] == [
        n for n in range(100) if n not in {0, 37, 38, 99}
    ]


def test_no_record_is_blamed_where_none_was_in_work() -> None:
    with pytest.raises(
        MdsmixError, match=r"die \(exit code 3\) over the work unit number 1, while"
    ):
        list(run([call(die_storing)], settings(1, set_aside=True)))


@pytest.fixture
def _worn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker holds more than its share when its task is done."""
    monkeypatch.setattr(worker, "resident", lambda pid: 1 << 60)


SQUARES = [call(square, n, 0) for n in range(6)]


def test_a_worker_lives_as_long_as_it_holds_no_more_than_its_share() -> None:
    assert len({pid for _, (_, pid) in run(SQUARES, settings(1))}) == 1


@pytest.mark.usefixtures("_worn_at_once")
def test_a_worker_that_holds_more_ends_with_its_task() -> None:
    assert len({pid for _, (_, pid) in run(SQUARES, settings(1))}) == 6


def test_workers_wait_for_the_next_run_where_that_is_said() -> None:
    """Of a recipe's streams most may be small: 200 of them cost two workers."""
    keeping = LocalEngine(settings(2))
    pids = {pid for _ in range(5) for _, (_, pid) in keeping.run(SQUARES, silent, print)}
    assert len(pids) == len(children()) == 2
    os.kill(min(pids), signal.SIGKILL)  # one that dies while it waits is nobody's fault
    found = dict(keeping.run(SQUARES, silent, print))
    assert {n: square for n, (square, _) in found.items()} == {n: n * n for n in range(6)}
    keeping.close()
    assert children() == []


def test_a_task_whose_worker_died_is_tried_again_before_all_others() -> None:
    """What kills workers is known early, and not when all else is done."""
    pool = LocalEngine(settings(1))
    for n in range(3):
        pool.add(n, call(square, n, 0))
    number, attempt, task = pool.queue.popleft()
    dead: Any = SimpleNamespace(number=number, attempt=attempt, task=task, place=None)
    pool.workers.append(dead)
    pool._replace(dead, End(how="exit code 3"))
    assert [number for number, *_ in pool.queue] == [number, 1, 2]


def leave_a_place(attempt: Attempt, reporter: Reporter) -> None:
    reporter.on_records(InWork(file="a", ordinal=0, shown="byte 0", length=9, records=1))


def test_records_of_another_task_are_not_blamed() -> None:
    tasks = [call(leave_a_place), call(die_until, 1, kill)]
    again = dict(run(tasks, settings(1)))[1]
    assert (again.deaths, again.died_at) == (1, None)


def threads(attempt: Attempt, reporter: Reporter) -> str:
    return " ".join(os.environ[name] for name in channel.THREADS)


def test_a_worker_that_waited_shares_the_processors_with_as_many_others_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in channel.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(channel, "cpu_count", lambda: 4)
    with closing(LocalEngine(settings(2))) as engine:
        for tasks, each in ((2, "2 2"), (1, "4 4")):
            found = engine.run([call(threads)] * tasks, silent, print)
            assert {said for _, said in found} == {each}


def do_nothing(attempt: Attempt, reporter: Reporter) -> None:
    """A task that is done."""


@pytest.mark.usefixtures("_worn_at_once")
def test_workers_that_are_slow_to_end_are_waited_for_before_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Freeing gigabytes takes time, and whoever ends still holds them: beside two at work two may be at that."""
    end = os._exit
    monkeypatch.setattr(os, "_exit", lambda code: (time.sleep(0.2), end(code)))
    assert max(len(children()) for _ in run([call(do_nothing)] * 16, settings(2))) <= 5


@pytest.mark.usefixtures("_worn_at_once")
def test_a_run_of_any_length_holds_no_more_than_at_its_beginning() -> None:
    """Descriptors and children, zombies too, under a limit that leaves room for 24 descriptors: of each worker two were kept."""
    held, limits = opened(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 24, limits[1]))
    try:
        most = [(len(opened()), len(children())) for _ in run([call(do_nothing)] * 60, settings(2))]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(most) == 60
    assert max(number for number, _ in most) <= len(held) + 20
    assert max(number for _, number in most) <= 8
    assert (opened(), children()) == (held, [])


def opened() -> set[int]:
    """This process's descriptors, but for the one that lists them."""
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return {number for number in found if Path(f"/proc/self/fd/{number}").exists()}


STRANGERS: set[str] = set()
"Children of this process that were there before the test: a server of another test file, say."


@pytest.fixture(autouse=True)
def _strangers() -> None:
    STRANGERS.clear()
    STRANGERS.update(children())


def children() -> list[str]:
    """Processes that this one has started since the test began, ended ones that nobody has asked for included."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in found if pid not in STRANGERS]


def test_where_memory_is_tight_workers_take_turns() -> None:
    """200 MB fit once beside this process: the first worker shows it, and so no two are at work at once."""
    engine = LocalEngine(settings(3))
    room = (resident(os.getpid()) + 300_000_000) / HEADROOM
    engine.budget = MemoryBudget(int(room), _worst=1)
    tasks = [call(hold, 200_000_000)] * 4
    with closing(engine):
        spans = sorted(span for _, span in engine.run(tasks, silent, print))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert engine.peak > 200_000_000


def test_a_worker_that_is_to_wait_waits_before_its_next_records() -> None:
    ours, its = multiprocessing.Pipe()
    channel = WorkerChannel(its, os.getppid(), memory=9, share=1)
    channel.wait_for_room()
    ours.send(True)
    began = time.monotonic()
    threading.Timer(0.3, ours.send, [False]).start()
    channel.wait_for_room()
    assert time.monotonic() - began >= 0.29
    assert channel.is_tight()
    assert not WorkerChannel(its, os.getppid(), memory=9, share=1 << 50).is_tight()


def write_slowly(path: Path, attempt: Attempt, reporter: Reporter) -> None:
    """Half a file, and what is left of it once the worker is told to stop."""
    path.touch()
    try:
        time.sleep(60)
    except BaseException:
        path.unlink()
        raise


def test_whoever_is_stopped_takes_back_what_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_SECONDS", SECONDS)
    half = tmp_path / "half"
    results = run([call(write_slowly, half), call(wait_for, half)], settings(2))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert not half.exists()


def be_deaf(file: Path, attempt: Attempt, reporter: Reporter) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file.touch()
    time.sleep(60)


def test_whoever_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)
    deaf = tmp_path / "deaf"
    results = run([call(be_deaf, deaf), call(wait_for, deaf)], settings(2))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_a_worker_that_has_just_been_forked_leaves_its_parents_handlers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They clean up after the parent. The second worker is told to stop before it has handlers of its own."""
    work, begun, ran = worker.work, tmp_path / "begun", tmp_path / "ran"

    def begin(*arguments: Any) -> None:
        if begun.exists():
            time.sleep(0.5)
        begun.touch()
        work(*arguments)

    monkeypatch.setattr(worker, "work", begin)
    before = signal.signal(signal.SIGTERM, lambda *_: ran.touch())
    try:
        with pytest.raises(KeyError):
            list(run([call(fail, KeyError("x")), call(square, 1, 60)], settings(2)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not ran.exists()


def test_no_worker_outlives_a_run_that_ends_fails_or_is_given_up() -> None:
    list(run([call(square, n, 0) for n in range(4)], settings(2)))
    assert multiprocessing.active_children() == []
    with pytest.raises(KeyError):
        list(run([call(fail, KeyError("x")), call(square, 1, 60)], settings(2)))
    assert multiprocessing.active_children() == []
    results = run([call(square, n, 0.01) for n in range(50)], settings(2))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_only_linux_forks_and_no_process_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, method in (("darwin", "spawn"), ("freebsd14", "spawn"), ("linux", "fork")):
        monkeypatch.setattr(sys, "platform", platform)
        assert worker.start_method() == method
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    assert worker.start_method() == "spawn"


def test_spawned_workers_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "start_method", lambda: "spawn")
    found = dict(run([call(square, n, 0) for n in range(3)], settings(2)))
    assert {n: result for n, (result, _) in found.items()} == {0: 0, 1: 1, 2: 4}
    assert multiprocessing.active_children() == []

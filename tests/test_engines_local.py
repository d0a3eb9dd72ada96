"""Whoever does a task and whenever it ends, its result is found under its number; what fails is
told in its own words.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import pytest

from mdsmix.encode.backends import Unequal
from mdsmix.engines import workers
from mdsmix.engines.local_engine import LocalEngine
from mdsmix.engines.memory import HEADROOM, MemoryBudget, measure_rss
from mdsmix.engines.tasks import Attempt, Reporter
from mdsmix.engines.workers import WorkerChannel
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.storage import s3_client
from tests.alarm import WAIT_SECONDS, fail_after
from tests.converting import run_recipe, set_window_size, write_jsonl, write_recipe
from tests.tasks import (
    Call,
    ignore_progress,
    make_call,
    make_settings,
    run_tasks,
    wait_for_file,
    write_slowly,
)


@pytest.fixture(autouse=True)
def strangers() -> Iterator[set[str]]:
    """Children of this process from before the test. Whatever the test does, none of its own is
    left after it.
    """
    resource_tracker.ensure_running()  # what spawning starts, and leaves
    found = set(children())
    yield found
    assert children(found) == []


def children(strangers: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """Processes that this one has started, ended ones that nobody has asked for included."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in found if pid not in strangers]


def square(number: int, seconds: float, attempt: Attempt, reporter: Reporter) -> tuple[int, int]:
    time.sleep(seconds)
    reporter.on_progress(number, 2 * number)
    return number * number, os.getpid()


def wait_for_a_store(attempt: Attempt, reporter: Reporter) -> None:
    """As a thread does that reads ahead, while the worker reports."""
    thread = threading.Thread(target=s3_client.show_wait, args=("here", "waiting for a store"))
    thread.start()
    for _ in range(100):
        reporter.on_progress(0, 0)
    thread.join()
    s3_client._waited_for.discard("here")


def fail(kind: type[Exception], words: list[str], *_: object) -> None:
    raise kind(*words)


def hold(size: int, attempt: Attempt, reporter: Reporter) -> tuple[float, float]:
    """Holds so much memory for a while; returns from when to when."""
    began = time.monotonic()
    held = b"x" * size
    time.sleep(0.15)
    del held
    return began, time.monotonic()


def free_blocks(attempt: Attempt, reporter: Reporter) -> int:
    """Frees 300 MB, less than LIFE_BYTES, in blocks that glibc keeps; returns the bytes that it
    holds then.
    """
    held = [b"x" * (1 << 16) for _ in range(4600)]
    del held
    return measure_rss(os.getpid())


def begin_in(folder: Path, attempt: Attempt, reporter: Reporter) -> tuple[Path, int]:
    """Leaves a file for each task that has begun."""
    (folder / f"{len(list(folder.iterdir()))}").touch()
    return folder, attempt.deaths


def store_beside(dies: bool, made: tuple[Path, int]) -> tuple[bool, int]:
    """Stores the first task until a second one begins, for ten seconds at most; returns whether one
    did. Or dies then, the first time.
    """
    folder, deaths = made
    for _ in range(1000):
        if (folder / "1").exists():
            break
        time.sleep(0.01)
    if dies and not (folder / "2").exists():
        os._exit(3)
    return (folder / "1").exists(), deaths


def store_slowly(made: tuple[Path, int]) -> None:
    (made[0] / "storing").touch()
    time.sleep(0.5)
    (made[0] / "stored").touch()


class Untransportable(Exception):
    """Two words in, one kept: it cannot be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def test_every_task_is_done_once_and_what_several_wait_for_is_said_once() -> None:
    for crew in (1, 2, 9):
        assert list(run_tasks([], make_settings(crew))) == []
        said, heard = list[str](), list[tuple[int, int]]()
        squares = [make_call(square, n, 0.05 if n % 3 == 0 else 0) for n in range(7)]
        tasks = [*squares, *[make_call(wait_for_a_store)] * 4]
        found = list(
            run_tasks(tasks, make_settings(crew), lambda *of, to=heard: to.append(of), said.append)
        )
        assert sorted(n for n, _ in found) == [*range(11)], crew
        assert {n: r[0] for n, r in found if n < 7} == {n: n * n for n in range(7)}
        assert os.getpid() not in {result[1] for n, result in found if n < 7}
        assert sorted({*heard} - {(0, 0)}) == [(n, 2 * n) for n in range(1, 7)]
        assert said == ["waiting for a store"], crew


def test_an_error_keeps_its_class_and_its_words_and_one_that_cannot_travel_its_words() -> None:
    for kind, words in (
        (Unreachable, ["the store is gone"]),
        (MdsmixError, ["a sentence"]),
        (Unequal, ["fastokens 1", "a text"]),
        (KeyError, ["x"]),
    ):
        with pytest.raises(kind) as caught:
            list(run_tasks([make_call(fail, kind, words)], make_settings()))
        assert str(caught.value) == str(kind(*words))
    with pytest.raises(RuntimeError, match="Untransportable: one, two"):
        list(run_tasks([make_call(fail, Untransportable, ["one, ", "two"])], make_settings()))


def threads(attempt: Attempt, reporter: Reporter) -> tuple[int, int, set[str]]:
    return os.getpid(), attempt.deaths, {os.environ[name] for name in workers.THREADS}


def test_workers_stay_for_later_runs(strangers: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a recipe's streams most may be small: 200 of them cost two workers."""
    for name in workers.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(workers, "count_cpus", lambda: 4)
    with closing(LocalEngine(make_settings(2))) as engine:

        def pids(tasks: int, each: str) -> set[int]:
            found = [
                result
                for _, result in engine.run([make_call(threads)] * tasks, ignore_progress, print)
            ]
            assert len(found) == tasks
            assert all((deaths, said) == (0, {each}) for _, deaths, said in found)
            return {pid for pid, *_ in found}

        kept = set.union(*(pids(6, "2") for _ in range(5)))
        assert len(kept) == len(children(strangers)) == 2
        engine.idle[0].process.kill()  # one that dies while it waits is nobody's fault
        engine.idle[0].process.join()
        assert pids(6, "2")
        assert pids(1, "4")


def test_a_large_worker_that_waits_for_a_later_run_holds_nothing_that_it_freed() -> None:
    """The end of a run takes memory itself, to count repeats."""
    with closing(LocalEngine(make_settings(1))) as engine:
        ((_, full),) = engine.run([make_call(free_blocks)], ignore_progress, print)
        with fail_after(20):
            while full - measure_rss(engine.idle[0].pid) < 250_000_000:
                time.sleep(0.01)


def test_a_task_is_done_while_another_is_stored_and_both_again_after_a_death(
    tmp_path: Path,
) -> None:
    """Only the task in work is blamed."""
    for dies, deaths in ((False, [0, 0]), (True, [0, 1])):
        folder = tmp_path / str(dies)
        folder.mkdir()
        task = Call(begin_in, (folder,), store=partial(store_beside, dies))
        assert sorted(run_tasks([task] * 2, make_settings(1))) == [
            *enumerate((True, n) for n in deaths)
        ]
    full = partial(fail, Unreachable, ["the disk is full"])
    with pytest.raises(Unreachable, match="the disk is full"):
        list(run_tasks([Call(square, (3, 0), store=full)], make_settings(1)))


def test_worn_workers_take_no_task_more_and_a_run_of_any_length_holds_no_more(
    strangers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a while to end, as to free gigabytes does: at most two are at that, beside two at
    work. There is room for 24 more descriptors, and two of each worker were kept. A worker has
    begun its second task when the first is stored.
    """
    end, held = os._exit, opened()
    monkeypatch.setattr(os, "_exit", lambda code: time.sleep(0.02) or end(code))  # type: ignore[func-returns-value]
    monkeypatch.setattr(workers, "measure_rss", lambda pid: 1 << 60)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 24, limits[1]))
    most, pids = list[tuple[int, int]](), set[int]()
    try:
        for _, (_, pid) in run_tasks([make_call(square, 3, 0)] * 24, make_settings(2)):
            pids.add(pid)
            most.append((len(opened()), len(children(strangers))))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(most) == 24
    assert len(pids) >= 12
    assert max(number for number, _ in most) <= len(held) + 20
    assert max(number for _, number in most) <= 5
    assert opened() == held


def opened() -> set[int]:
    """This process's descriptors, but for the one that lists them."""
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return {number for number in found if Path(f"/proc/self/fd/{number}").exists()}


def test_where_memory_is_tight_workers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 MB fit once beside this process: the first worker shows it, and so no two are at work at
    once. Others that are at work already wait.
    """
    engine = LocalEngine(make_settings(3))
    room = (measure_rss(os.getpid()) + 300_000_000) / HEADROOM
    engine.budget = MemoryBudget(int(room), _worst=1)
    with closing(engine):
        spans = sorted(
            span
            for _, span in engine.run([make_call(hold, 200_000_000)] * 3, ignore_progress, print)
        )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert engine.peak > 200_000_000
    told = list[bool]()
    engine.workers = [SimpleNamespace(pause=told.append)] * 3  # type: ignore[list-item]
    monkeypatch.setattr(MemoryBudget, "allowed_workers", lambda budget, workers: 2)
    engine._assign_tasks()
    assert told == [False, False, True]


def test_a_worker_that_is_to_wait_waits_before_its_next_records() -> None:
    ours, its = multiprocessing.Pipe()
    channel, released = WorkerChannel(its, os.getppid(), memory=9, share=1), list[bool]()

    def release() -> None:
        released.append(True)
        ours.send(False)

    channel.wait_for_room()
    ours.send(True)
    threading.Timer(0.1, release).start()
    channel.wait_for_room()
    assert released
    assert channel.is_tight()
    assert not WorkerChannel(its, os.getppid(), memory=9, share=1 << 50).is_tight()


def stop(task: Call, begun: Path) -> None:
    """A run of it is stopped when this file is there."""
    results = run_tasks(
        [task, make_call(wait_for_file, begun.parent, begun.name)], make_settings(2)
    )
    next(results)
    results.close()  # type: ignore[attr-defined]


def test_what_a_run_that_is_stopped_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is half written is taken back; what is being stored is stored."""
    stop(Call(begin_in, (tmp_path,), store=store_slowly), tmp_path / "storing")
    assert (tmp_path / "stored").exists()
    for is_deaf, grace in ((False, WAIT_SECONDS), (True, 0.2)):
        monkeypatch.setattr(workers, "GRACE_SECONDS", grace)
        begun = tmp_path / str(is_deaf)
        stop(make_call(write_slowly, begun, is_deaf), begun)
        assert begun.exists() is is_deaf


def test_only_linux_forks_but_no_process_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for platform, method in (("darwin", "spawn"), ("freebsd14", "spawn"), ("linux", "fork")):
            patch.setattr(sys, "platform", platform)
            assert workers.choose_start_method() == method
        patch.setitem(sys.modules, "ray", SimpleNamespace())
        assert workers.choose_start_method() == "spawn"
    monkeypatch.setattr(workers, "choose_start_method", lambda: "spawn")
    ((_, (result, pid)),) = run_tasks([make_call(square, 3, 0)], make_settings(1))
    assert (result, pid == os.getpid()) == (9, False)


@pytest.mark.usefixtures("processes")
def test_spawned_workers_write_the_bytes_of_forked_ones(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the default start method, which is `forkserver` from Python 3.14 on. A function of
    the user's own is imported by each worker.
    """
    set_window_size(monkeypatch, 2_000)
    (tmp_path / "mine.py").write_text("def read(record):\n    return {'text': record['body']}\n")
    bodies = [{"body": f"{n} hens. " * 20} for n in range(60)]
    source = {"path": str(write_jsonl(tmp_path / "a.jsonl", bodies)), "shape": "mine.py:read"}
    stream = {"kind": "pretraining", "source": source}
    recipe = write_recipe(tmp_path, tokenizer_folder, max_seq_len=32, streams={"a": stream})
    written = []
    default = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        for method in (workers.choose_start_method(), "spawn"):
            monkeypatch.setattr(workers, "choose_start_method", lambda chosen=method: chosen)
            (outcome,) = run_recipe(recipe, f"local={tmp_path / method}", workers=2)
            assert outcome.units > 3
            folder = tmp_path / method / "a"
            files = [*folder.rglob("*.mds"), *folder.rglob("index.json")]
            written.append({p.relative_to(folder): p.read_bytes() for p in files})
    finally:
        multiprocessing.set_start_method(default, force=True)
    assert len(written[0]) > 1
    assert written[0] == written[1]

"""The local engine returns the result of each task under its number, whichever worker did it and
whenever it ended; an error of a task is raised with its own message.
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
from typing import Any
from unittest.mock import Mock

import pytest

from mdsmix.encode.backends import Unequal
from mdsmix.engines import workers
from mdsmix.engines.local_engine import LocalEngine
from mdsmix.engines.memory import HEADROOM, MemoryBudget, measure_rss
from mdsmix.engines.tasks import Attempt, Reporter
from mdsmix.engines.workers import WorkerChannel
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.storage import retries
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
    """Yield the children of this process from before the test. The test leaves none of its own."""
    resource_tracker.ensure_running()  # spawning starts it, and leaves it running
    pids = set(list_children())
    yield pids
    assert list_children(pids) == []


def list_children(strangers: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """Return the processes that this one has started, also ended ones that were not waited for."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in pids if pid not in strangers]


def square(number: int, seconds: float, attempt: Attempt, reporter: Reporter) -> tuple[int, int]:
    time.sleep(seconds)
    reporter.on_progress(number, 2 * number)
    return number * number, os.getpid()


def wait_for_a_store(attempt: Attempt, reporter: Reporter) -> None:
    """Show a notice from a thread, as one that reads ahead does, while the worker reports."""
    thread = threading.Thread(target=retries.show_wait, args=("here", "waiting for a store"))
    thread.start()
    for _ in range(100):
        reporter.on_progress(0, 0)
    thread.join()
    retries._waited_for.discard("here")


def fail(kind: type[Exception], words: list[str], *_: object) -> None:
    raise kind(*words)


def use_memory(size: int, attempt: Attempt, reporter: Reporter) -> tuple[float, float]:
    """Use so many bytes for a while; return from when to when."""
    start = time.monotonic()
    data = b"x" * size
    time.sleep(0.15)
    del data
    return start, time.monotonic()


def free_blocks(attempt: Attempt, reporter: Reporter) -> int:
    """Free 300 MB, less than LIFE_BYTES, in blocks that glibc keeps; return the resident bytes
    after that.
    """
    blocks = [b"x" * (1 << 16) for _ in range(4600)]
    del blocks
    return measure_rss(os.getpid())


def begin_in(folder: Path, attempt: Attempt, reporter: Reporter) -> tuple[Path, int]:
    """Create a file in the folder for each task that has begun."""
    (folder / f"{len(list(folder.iterdir()))}").touch()
    return folder, attempt.deaths


def store_until_next(dies: bool, result: tuple[Path, int]) -> tuple[bool, int]:
    """Store the first task until a second one begins, for ten seconds at most; return whether one
    did, and the deaths. If `dies`, the first worker dies then.
    """
    folder, deaths = result
    for _ in range(1000):
        if (folder / "1").exists():
            break
        time.sleep(0.01)
    if dies and not (folder / "2").exists():
        os._exit(3)
    return (folder / "1").exists(), deaths


def store_slowly(result: tuple[Path, int]) -> None:
    folder, _ = result
    (folder / "storing").touch()
    time.sleep(0.5)
    (folder / "stored").touch()


class Unpicklable(Exception):
    """It takes two arguments and keeps one, so it cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def test_every_task_is_done_once_and_a_notice_of_several_workers_is_shown_once() -> None:
    for count in (1, 2, 9):
        settings = make_settings(count)
        assert list(run_tasks([], settings)) == []
        progress = list[tuple[int, int]]()
        sentences = list[str]()
        squares = [make_call(square, n, 0.05 if n % 3 == 0 else 0) for n in range(7)]
        tasks = [*squares, *[make_call(wait_for_a_store)] * 4]

        def note_progress(size: int, tokens: int, progress: list[Any] = progress) -> None:
            progress.append((size, tokens))

        results = list(run_tasks(tasks, settings, note_progress, sentences.append))
        assert sorted(number for number, _ in results) == [*range(11)], count
        of_squares = {number: result for number, result in results if number < 7}
        assert {n: result[0] for n, result in of_squares.items()} == {n: n * n for n in range(7)}
        assert os.getpid() not in {pid for _, pid in of_squares.values()}
        assert sorted({*progress} - {(0, 0)}) == [(n, 2 * n) for n in range(1, 7)]
        assert sentences == ["waiting for a store"], count


def test_an_error_keeps_its_class_and_message_and_an_unpicklable_one_its_message() -> None:
    for kind, words in (
        (Unreachable, ["the store is gone"]),
        (MdsmixError, ["a sentence"]),
        (Unequal, ["fastokens 1", "a text"]),
        (KeyError, ["x"]),
    ):
        with pytest.raises(kind) as error:
            list(run_tasks([make_call(fail, kind, words)], make_settings()))
        assert str(error.value) == str(kind(*words))
    with pytest.raises(RuntimeError, match="Unpicklable: one, two"):
        list(run_tasks([make_call(fail, Unpicklable, ["one, ", "two"])], make_settings()))


def describe_worker(attempt: Attempt, reporter: Reporter) -> tuple[int, int, set[str]]:
    """Return the process id, the deaths of the attempt and the numbers of threads."""
    return os.getpid(), attempt.deaths, {os.environ[name] for name in workers.THREADS}


def test_workers_stay_for_later_runs(strangers: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Most streams of a recipe may be small: 200 of them need only two workers."""
    for name in workers.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(workers, "count_cpus", lambda: 4)
    with closing(LocalEngine(make_settings(2))) as engine:

        def run_and_list_pids(count: int, threads: str) -> set[int]:
            tasks = [make_call(describe_worker)] * count
            results = [result for _, result in engine.run(tasks, ignore_progress, print)]
            assert len(results) == count
            assert all(result[1:] == (0, {threads}) for result in results)
            return {pid for pid, *_ in results}

        pids = set.union(*(run_and_list_pids(6, "2") for _ in range(5)))
        assert len(pids) == len(list_children(strangers)) == 2
        engine.idle[0].process.kill()  # no task is blamed if an idle worker dies
        engine.idle[0].process.join()
        assert run_and_list_pids(6, "2")
        assert run_and_list_pids(1, "4")


def test_idle_workers_end_before_the_engine_is_closed(strangers: set[str]) -> None:
    """The memory of workers is freed while their run publishes. A run that follows has others."""
    with closing(LocalEngine(make_settings(2))) as engine:

        def run_and_list_pids() -> set[int]:
            results = engine.run([make_call(describe_worker)] * 6, ignore_progress, print)
            return {pid for _, (pid, *_) in results}

        def are_ended(pids: set[int]) -> bool:
            stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
            return all(stat.rpartition(")")[2].split()[0] == "Z" for stat in stats)

        pids = run_and_list_pids()
        assert not are_ended(pids)
        engine.begin_close()
        with fail_after(WAIT_SECONDS):
            while not are_ended(pids):
                time.sleep(0.01)
        assert not pids & run_and_list_pids()
        engine.begin_close()
        engine.begin_close()
        assert engine.idle == [], "a run that follows at once does not use them"


def test_a_large_idle_worker_returns_freed_memory() -> None:
    """The end of a run takes memory itself, to count repeats."""
    with closing(LocalEngine(make_settings(1))) as engine:
        ((_, full),) = engine.run([make_call(free_blocks)], ignore_progress, print)
        with fail_after(20):
            while full - measure_rss(engine.idle[0].pid) < 250_000_000:
                time.sleep(0.01)


def test_a_task_is_done_while_another_is_stored_and_both_are_retried_after_a_death(
    tmp_path: Path,
) -> None:
    """Only the task that was being done is blamed."""
    for dies, deaths in ((False, [0, 0]), (True, [0, 1])):
        folder = tmp_path / str(dies)
        folder.mkdir()
        task = Call(begin_in, (folder,), store=partial(store_until_next, dies))
        assert sorted(run_tasks([task] * 2, make_settings(1))) == [
            *enumerate((True, n) for n in deaths)
        ]
    full = partial(fail, Unreachable, ["the disk is full"])
    with pytest.raises(Unreachable, match="the disk is full"):
        list(run_tasks([Call(square, (3, 0), store=full)], make_settings(1)))


def test_workers_that_need_a_restart_get_no_more_tasks_and_leave_no_descriptors(
    strangers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a while to end, as a process that frees gigabytes does: at most two are ending
    while two are at work. There is room for 24 more descriptors; a worker that ended and kept two
    would exhaust it. A worker has begun its second task when the first is stored.
    """
    exit_process = os._exit
    descriptors = list_descriptors()

    def exit_slowly(code: int) -> None:
        time.sleep(0.02)
        exit_process(code)

    monkeypatch.setattr(os, "_exit", exit_slowly)
    monkeypatch.setattr(workers, "measure_rss", lambda pid: 1 << 60)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors) + 24, limits[1]))
    counts = list[tuple[int, int]]()
    "Descriptors and children after each task."
    pids = set[int]()
    try:
        for _, (_, pid) in run_tasks([make_call(square, 3, 0)] * 24, make_settings(2)):
            pids.add(pid)
            counts.append((len(list_descriptors()), len(list_children(strangers))))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(counts) == 24
    assert len(pids) >= 12
    assert max(open_files for open_files, _ in counts) <= len(descriptors) + 20
    assert max(children for _, children in counts) <= 5
    assert list_descriptors() == descriptors


def list_descriptors() -> set[int]:
    """Return this process's descriptors, except the one that lists them."""
    numbers = {int(name) for name in os.listdir("/proc/self/fd")}
    return {number for number in numbers if Path(f"/proc/self/fd/{number}").exists()}


def test_workers_take_turns_if_memory_is_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for 200 MB once besides this process: the first worker shows it, so no two are
    at work at once. Workers that are at work already wait.
    """
    engine = LocalEngine(make_settings(3))
    room = (measure_rss(os.getpid()) + 300_000_000) / HEADROOM
    engine.budget = MemoryBudget(int(room), _worst=1)
    with closing(engine):
        spans = sorted(
            span
            for _, span in engine.run(
                [make_call(use_memory, 200_000_000)] * 3, ignore_progress, print
            )
        )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert engine.peak > 200_000_000
    pauses = list[bool]()
    engine.workers = [Mock(pause=pauses.append, shared_bytes=0)] * 3
    monkeypatch.setattr(MemoryBudget, "allowed_workers", lambda budget, workers: 2)
    engine._assign_tasks()
    assert pauses == [False, False, True]


def test_a_paused_worker_waits_before_its_next_records() -> None:
    engine_end, worker_end = multiprocessing.Pipe()
    channel = WorkerChannel(worker_end, os.getppid(), memory=9, share=1)
    released = list[bool]()

    def release() -> None:
        released.append(True)
        engine_end.send(False)

    channel.wait_for_room()
    engine_end.send(True)
    threading.Timer(0.1, release).start()
    channel.wait_for_room()
    assert released
    assert channel.is_tight()
    assert not WorkerChannel(worker_end, os.getppid(), memory=9, share=1 << 50).is_tight()


def run_and_stop(task: Call, file: Path) -> None:
    """Run a task, and stop the run when this file exists."""
    waiting = make_call(wait_for_file, file.parent, file.name)
    results = run_tasks([task, waiting], make_settings(2))
    next(results)
    results.close()  # type: ignore[attr-defined]


def test_a_stopped_run_leaves_no_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written file is deleted; a task that is being stored is stored completely."""
    run_and_stop(Call(begin_in, (tmp_path,), store=store_slowly), tmp_path / "storing")
    assert (tmp_path / "stored").exists()
    for ignores_sigterm, grace in ((False, WAIT_SECONDS), (True, 0.2)):
        monkeypatch.setattr(workers, "GRACE_SECONDS", grace)
        file = tmp_path / str(ignores_sigterm)
        run_and_stop(make_call(write_slowly, file, ignores_sigterm), file)
        assert file.exists() is ignores_sigterm


def test_workers_are_forked_only_on_linux_and_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_spawned_workers_write_the_same_bytes_as_forked_ones(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default start method, which is `forkserver` from Python 3.14 on, does not matter. Each
    worker imports the user's own function.
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

"""A worker and its assistant: every part is answered once and in order, or by nobody."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from mdsmix.engines.assistants import (
    LEAST_NEW_SHARE,
    MOST_UNTAKEN,
    PipeToAssistant,
    assist,
    count_sharers,
    find_shared_bytes,
)
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.memory_pipe import MemoryPipe, can_create_memory_files
from mdsmix.engines.tasks import ActiveRecords, Attempt, Part, Reporter
from mdsmix.engines.workers import QueuedTask, Worker, WorkerChannel
from tests.alarm import fail_after
from tests.tasks import ignore_progress, make_call, make_records, make_settings


class Double:
    """A shared task that doubles numbers; a function does so."""

    name = "of numbers"

    def __init__(self, function: Callable[[Any], Any], size: int = 0) -> None:
        self.function = function
        self.shared_bytes = size

    def do(self, attempt: Attempt, reporter: Reporter) -> Any:
        raise AssertionError

    def open_assistant(self) -> Callable[[Any], Any]:
        return self.function


class Channel:
    """Records the active records of an assistant."""

    def __init__(self) -> None:
        self.active = list[ActiveRecords | None]()
        self.recalled = threading.Event()

    def on_records(self, records: ActiveRecords | None) -> None:
        self.active.append(records)

    def is_recalled(self) -> bool:
        return self.recalled.is_set()

    def wait_for_part(self, pipe: MemoryPipe) -> bool:
        while not self.recalled.is_set():
            if pipe.poll(0.01):
                return True
        return False


@pytest.fixture
def pipes() -> Iterator[tuple[MemoryPipe, MemoryPipe]]:
    before = os.listdir("/proc/self/fd")
    ends = socket.socketpair()
    first, second = (MemoryPipe(end.detach()) for end in ends)
    with fail_after(20):
        yield first, second
    first.close()
    second.close()
    assert os.listdir("/proc/self/fd") == before


def list_files_in_memory() -> list[str]:
    """Return the files in memory that this process has open or mapped."""
    maps = Path("/proc/self/maps").read_text()
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return [line for line in [*maps.splitlines(), *open_files] if "memfd:mdsmix" in line]


def test_objects_arrive_unchanged_and_leave_no_file(pipes: tuple[MemoryPipe, MemoryPipe]) -> None:
    """Nobody waits: many objects may be sent before the first one is received. Arrays that could be
    changed before can be changed after.
    """
    sender, receiver = pipes
    fixed = np.frombuffer(b"abc", np.uint8)
    messages = [
        {"lines": np.arange(3_000_000), "none": np.empty(0, np.uint16), "fixed": fixed},
        ("text", np.arange(7)[::2]),
        None,
    ]
    for message in messages:
        sender.send(message)
    sender.close()
    first, second, third = (receiver.receive() for _ in messages)
    assert {name: array.tolist() for name, array in first.items()} == {
        "lines": [*range(3_000_000)],
        "none": [],
        "fixed": [*b"abc"],
    }
    assert (first["lines"].flags.writeable, first["fixed"].flags.writeable) == (True, False)
    assert (second[0], second[1].tolist(), third) == ("text", [0, 2, 4, 6], None)
    assert receiver.poll()
    with pytest.raises(EOFError):
        receiver.receive()
    with pytest.raises(BrokenPipeError):
        receiver.send(1)
    assert list_files_in_memory() == []


def start_assistant(task: Double, pipe: MemoryPipe) -> tuple[Channel, threading.Thread]:
    channel = Channel()
    thread = threading.Thread(target=assist, args=(channel, task, pipe))
    thread.start()
    return channel, thread


def make_part(number: int) -> Part:
    return Part(make_records(number), number)


def test_parts_are_answered_in_order(pipes: tuple[MemoryPipe, MemoryPipe]) -> None:
    """An error is the answer to its part, and a part that is taken back has none. The assistant
    leaves when the worker closes its end.
    """
    near, far = pipes
    begins = threading.Event()
    goes_on = threading.Event()

    def double(number: int) -> int:
        begins.set()
        assert goes_on.wait(60)
        if number == 3:
            raise KeyError(number)
        return 2 * number

    channel, thread = start_assistant(Double(double), far)
    assistant = PipeToAssistant(near)
    for number in (1, 2):
        assistant.send(make_part(number))
    assert begins.wait(60)
    assert not assistant.has_answer()
    assistant.take_back()  # 2, which has not begun
    for number in (3, 4):
        assistant.send(make_part(number))
    assert assistant.unanswered == 3
    goes_on.set()
    assert assistant.receive() == 2
    with pytest.raises(KeyError):
        assistant.receive()
    assert assistant.receive() == 8
    assert assistant.unanswered == 0
    # It has begun part 5 when this is taken back: the late answer is not that of part 6.
    begins.clear()
    goes_on.clear()
    assistant.send(make_part(5))
    assert begins.wait(60)
    assistant.take_back()
    assistant.send(make_part(6))
    goes_on.set()
    assert assistant.receive() == 12
    assistant.close()
    thread.join()
    active = [records.ordinal for records in channel.active if records]
    assert active == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("leaves", ["recalled", "out of memory"])
def test_nobody_answers_the_parts_of_an_assistant_that_has_left(
    pipes: tuple[MemoryPipe, MemoryPipe], leaves: str
) -> None:
    near, far = pipes
    goes_on = threading.Event()

    def leave(number: int) -> int:
        assert goes_on.wait(60)
        if number == 2 and leaves == "out of memory":
            raise MemoryError
        if number == 2:
            channel.recalled.set()
        return number

    channel, thread = start_assistant(Double(leave), far)
    assistant = PipeToAssistant(near)
    for number in (1, 2, 3):
        assert assistant.send(make_part(number))
    goes_on.set()
    answers = [assistant.receive() for _ in range(3)]
    assert answers == [1, 2 if leaves == "recalled" else None, None]
    assert assistant.has_left
    assert not assistant.send(make_part(4))
    assert assistant.unanswered == 0
    thread.join()


def nest(levels: int) -> list[Any]:
    """Return nested lists. Python 3.11 can pickle 490 levels, later releases a few thousand."""
    nested = list[Any]()
    for _ in range(levels):
        nested = [nested]
    return nested


def test_a_part_or_answer_that_cannot_be_pickled_is_left_to_the_worker(
    pipes: tuple[MemoryPipe, MemoryPipe],
) -> None:
    """The assistant stays, and does the other parts."""
    near, far = pipes
    _, thread = start_assistant(Double(nest), far)
    assistant = PipeToAssistant(near)
    for unsent in (nest(100_000), lambda: 1, thread):
        assert not assistant.send(Part(make_records(1), unsent))
    assert assistant.unanswered == 0
    for levels in (1, 100_000, 2):
        assert assistant.send(make_part(levels))
    assert [assistant.receive() for _ in range(3)] == [nest(1), None, nest(2)]
    assert not assistant.has_left
    assistant.close()
    thread.join()


class Unreadable:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return float, ("not a number",)


@pytest.mark.parametrize("is_part", [True, False])
def test_an_assistance_ends_at_what_cannot_be_unpickled(
    pipes: tuple[MemoryPipe, MemoryPipe],
    is_part: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    near, far = pipes
    _, thread = start_assistant(Double(lambda _: Unreadable()), far)
    assistant = PipeToAssistant(near)
    content = Unreadable() if is_part else 1
    assert assistant.send(Part(make_records(1), content))
    assert assistant.receive() is None
    assert assistant.has_left
    thread.join()
    assert capfd.readouterr().err == ""


def test_only_large_tasks_have_work_for_several_workers() -> None:
    sizes = (0, LEAST_NEW_SHARE, 3 * LEAST_NEW_SHARE)
    assert [count_sharers(size, LEAST_NEW_SHARE) for size in sizes] == [1, 1, 3]
    assert find_shared_bytes(make_call(int)) == 0


def test_a_task_is_shared_from_the_beginning_only_if_memory_is_ample() -> None:
    """Too little memory for all sharers must not delay the workers that have tasks."""
    tasks = [Double(int, 3 * LEAST_NEW_SHARE), make_call(int)]
    cases = ((64, 8, 4), (64, 3, 3), (64, 2, 2), (64, 1, 2), (3, 8, 2), (1, 8, 2))
    for gigabytes, workers, expected in cases:
        pool = PoolSettings(workers=workers, memory=gigabytes << 30)
        assert LocalEngine(pool).count_useful_workers(tasks) == expected


@dataclass(frozen=True)
class Shared:
    """A task that sends a part to each of two assistants."""

    seconds: float
    "How long a part takes."
    waits: bool
    "Whether the task waits for the answers, and then for 0.5 s."
    waited: Path | None = None
    "A file that the task makes after it has waited."
    name: str = "of parts"
    shared_bytes: int = 3 * LEAST_NEW_SHARE

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], list[Any]]:
        while len(reporter.list_assistants()) < 2:
            reporter.wait_for_room()
        assistants = [*reporter.list_assistants()]
        for assistant in assistants:
            assert assistant.send(Part(make_records(1), self.seconds))
        if not self.waits:
            time.sleep(0.2)  # so long that the assistants begin
            return list[Any]
        answers = [assistant.receive() for assistant in assistants]
        time.sleep(0.5)
        if self.waited:
            self.waited.touch()
        return partial(list, answers)

    def open_assistant(self) -> Callable[[float], float]:
        return sleep_and_return


def sleep_and_return(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_assistants_that_are_in_a_part_when_a_run_ends_assist_once_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They report the end of the first assistance during the second one.

    At the end of the second task an assistant may be ordered to it once more: it has reported its
    end before the task has. Such an order does no harm, and is not counted.
    """
    waited = tmp_path / "waited"
    orders = list[int]()
    assist_worker = Worker.assist

    def count(worker: Worker, assisted: Worker) -> None:
        if not waited.exists():
            orders.append(worker.pid)
        assist_worker(worker, assisted)

    monkeypatch.setattr(Worker, "assist", count)
    with fail_after(60), closing(LocalEngine(make_settings(3))) as engine:
        results = list[Any]()
        for task in (Shared(1, waits=False), Shared(0.01, waits=True, waited=waited)):
            results += engine.run([task], ignore_progress, print)
        assert results == [(0, []), (0, [0.01, 0.01])]
        assert len(orders) == 4
        assert sorted(orders[:2]) == sorted(orders[2:])


def test_a_worker_that_takes_no_messages_gets_a_limited_number_of_assistants() -> None:
    """A full pipe would block the engine, for example during a record of minutes."""
    (pipe, worker_end), (assistant_pipe, assistant_end) = Pipe(), Pipe()
    process = Mock(pid=os.getpid())
    worker = Worker(process, pipe, limit=0)
    assistant = Worker(process, assistant_pipe, limit=0)
    engine = LocalEngine(make_settings(2))
    engine.workers = [worker]
    worker.assign(QueuedTask(0, Attempt(), Shared(1, waits=False)))
    with fail_after(20), pipe, worker_end, assistant_pipe, assistant_end:
        for _ in range(MOST_UNTAKEN):
            assert engine._find_busiest() is worker
            assistant.assist(worker)
        assert engine._find_busiest() is None
        channel = WorkerChannel(worker_end, os.getppid(), memory=9, share=1)
        channel.wait_for_room()
        for _ in range(MOST_UNTAKEN):
            assert pipe.poll(10)
            assert [*engine._handle_message(worker)] == []
        assert worker.untaken_assistants == 0
        assert engine._find_busiest() is worker


def test_a_process_is_started_only_for_a_large_share() -> None:
    """An engine on a node of Ray begins before it knows its tasks."""
    engine = LocalEngine(make_settings(2))
    pipe, worker_end = Pipe()
    with pipe, worker_end:
        worker = Worker(Mock(), pipe, limit=0)
        worker.assign(QueuedTask(0, Attempt(), Shared(1, waits=False)))
        engine.workers = [worker]
        worker.shared_bytes = 2 * LEAST_NEW_SHARE
        assert engine._find_busiest() is worker
        worker.shared_bytes -= 1
        assert engine._find_busiest() is None
        engine.idle = [Worker(Mock(), pipe, limit=0)]
        assert engine._find_busiest() is worker


def test_nothing_is_shared_if_the_system_refuses_files_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then no worker could send a part, and each assistant would be replaced by another one."""
    assert find_shared_bytes(Double(int, 7)) == 7
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=PermissionError))
    can_create_memory_files.cache_clear()
    assert find_shared_bytes(Double(int, 7)) == 0
    can_create_memory_files.cache_clear()

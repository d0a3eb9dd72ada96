"""Workers of a run on a node of a cluster ask one process; here a fork of this one counts, in the place of torch and transformers."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mdsmix.encode import processor_server

SIZES = [[100, 100], [20, 30]]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Of a short name, whatever the system's folder is called: a socket's path has 107 bytes at most."""
    with TemporaryDirectory(prefix="c-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Where a process that counts was started."""
    monkeypatch.setattr(processor_server, "PARENT", str(tmp_path))
    monkeypatch.delenv(processor_server.SHARED, raising=False)
    found, pids = list[Path](), list[int]()

    class Process:
        """Listens where it is told to."""

        poll = staticmethod(lambda: None)

        def __init__(self, command: list[str], **_: Any) -> None:
            found.append(Path(command[-1]))
            self.pid = os.fork()
            pids.append(self.pid)
            if not self.pid:
                os.closerange(3, 1024)  # of the lock among them, as Popen does
                processor_server.serve(command[-1], lambda sizes: [[h * w] for h, w in sizes])

    monkeypatch.setattr(processor_server.subprocess, "Popen", Process)
    yield found
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_workers_of_one_run_start_one_process_and_another_run_its_own(
    started: list[Path], tmp_path: Path
) -> None:
    for number in (1, 2):
        with processor_server.shared(), ThreadPoolExecutor(4) as workers:
            answers = workers.map(lambda _: processor_server.ask(tmp_path, SIZES), range(8))
            assert [*answers] == [[[10_000], [600]]] * 8
            assert len({at.parent for at in started}) == len(started) == number


def test_a_socket_that_has_its_name_and_takes_no_connection_yet_starts_no_second_process(
    started: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = processor_server.Listener

    def slowly(at: str, backlog: int) -> Any:
        with socket.socket(socket.AF_UNIX) as named:
            named.bind(at)
            time.sleep(0.3)
        os.unlink(at)
        return bind(at, backlog=backlog)

    monkeypatch.setattr(processor_server, "Listener", slowly)
    with processor_server.shared(), ThreadPoolExecutor(4) as workers:
        assert len([*workers.map(lambda _: processor_server.ask(tmp_path, SIZES), range(8))]) == 8
    assert len(started) == 1

"""Workers of a run on a node of a cluster ask one process; a plain one counts here, in the place of torch and transformers."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mdsmix.encode import transformers_process
from mdsmix.errors import MdsmixError, Unreachable

COUNTS = """\
import socket, time
from mdsmix.encode.transformers_process import serve
time.sleep(0.1)
serve(socket.socket(fileno=0), lambda asked: [h * w for h, w in asked["sizes"]])
"""
SIZES = {"sizes": [[100, 100], [20, 30]]}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets lie, of a short name: a socket's path has 107 bytes at most."""
    monkeypatch.delenv(transformers_process.SHARED, raising=False)
    start = transformers_process.subprocess.Popen

    def counting(command: list[str], **how: object) -> object:
        return start([command[0], "-c", COUNTS], **how)  # type: ignore[call-overload]

    monkeypatch.setattr(transformers_process.subprocess, "Popen", counting)
    with TemporaryDirectory(prefix="c-", dir="/tmp") as folder:
        monkeypatch.setattr(transformers_process, "PARENT", folder)
        yield Path(folder)


def test_workers_of_one_run_ask_one_process_and_another_run_its_own(home: Path) -> None:
    """The process takes connections only a while after it was started."""
    started = set[int]()
    for number in (1, 2):
        with (
            transformers_process.shared(),
            transformers_process.shared(),
            ThreadPoolExecutor(4) as workers,
        ):
            answers = workers.map(lambda _: transformers_process.ask(home, SIZES), range(8))
            assert [*answers] == [[10_000, 600]] * 8
            (pid,) = transformers_process.processes()
            started.add(pid)
            with pytest.raises(MdsmixError, match="the processor fails"):
                transformers_process.ask(home, {})
        assert len(started) == number
        with pytest.raises(ProcessLookupError):  # it ends with the run
            os.kill(pid, 0)
        assert [*home.iterdir(), *transformers_process.processes()] == []


def test_a_process_that_was_killed_is_one_sentence(home: Path) -> None:
    with transformers_process.shared():
        os.kill(*transformers_process.processes(), signal.SIGKILL)
        with pytest.raises(Unreachable, match="has ended, most likely for want of memory"):
            transformers_process.ask(home, SIZES)

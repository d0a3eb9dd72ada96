"""Processes of a node pass the barrier together, and none waits for ever."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest
from filelock import FileLock
from streaming.base.shared import SharedBarrier

from mdsmix.errors import Unreachable
from mdsmix.load import node_barrier
from mdsmix.load.node_barrier import NodeBarrier
from tests.preloaded import PreloadedPython
from tests.with_torch.load_streams import config, first_tokens, loaded, run_ranks, write_tokens

ROUNDS = 8
PROCESSES = 3


@pytest.fixture
def barrier(tmp_path: Path) -> NodeBarrier:
    name = f"{os.getpid()}_{tmp_path.name[-12:]}"
    barrier = NodeBarrier(SharedBarrier(str(tmp_path / "lock"), name))
    barrier.lock = FileLock(barrier.filelock_path)
    return barrier


def pass_rounds(barrier: NodeBarrier, process: int, folder: Path) -> None:
    """Pass the barrier ROUNDS times. Before each round the process writes a file, and after it the
    files of all processes are there.
    """
    barrier.lock = FileLock(barrier.filelock_path)
    for number in range(ROUNDS):
        time.sleep(0.002 * ((process + number) % PROCESSES))
        (folder / f"{number} {process}").touch()
        barrier(PROCESSES)
        assert len([*folder.glob(f"{number} *")]) == PROCESSES


def test_processes_pass_the_barrier_together(barrier: NodeBarrier, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=pass_rounds, args=(barrier, number, folder))
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * PROCESSES


def test_a_process_that_is_alone_takes_no_lock(barrier: NodeBarrier) -> None:
    del barrier.lock
    barrier(1)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_barrier, "SECONDS_TO_WARNING", 0.03)
    monkeypatch.setattr(node_barrier, "MOST_SECONDS", 0.1)


def _wait_in_vain(barrier: NodeBarrier, log: Path) -> None:
    barrier.lock = FileLock(barrier.filelock_path)
    logging.basicConfig(filename=log, force=True)
    with pytest.raises(Unreachable):
        barrier(3)


@pytest.mark.usefixtures("_short")
def test_one_of_the_processes_that_wait_warns(barrier: NodeBarrier, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    processes = [fork.Process(target=_wait_in_vain, args=(barrier, log)) for log in logs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    assert len(lines) == 1
    assert "has waited" in lines[0]


@pytest.mark.usefixtures("_short")
def test_a_wait_is_logged_once_and_ends_with_an_error(
    barrier: NodeBarrier, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(Unreachable) as error:
        barrier(3)
    assert "for 2 of the 3 processes that read it on this node" in str(error.value)
    assert len(caplog.records) == 1
    # It has left: the next two processes do not count it.
    with pytest.raises(Unreachable, match="for 1 of the 2 processes"):
        barrier(2)


READ_PASSES = """
import json, sys
from mdsmix.errors import Unreachable
from mdsmix.load import TokenIds, build_loader, node_barrier

tree, passes = json.loads(sys.argv[1])
loader = build_loader(tree, 2, ids=TokenIds(eos=0, pad=1))
rank = int(__import__("os").environ["RANK"])
try:
    for number in range(passes[rank]):
        if number:  # the ranks begin the first pass together, on a busy machine seconds apart
            node_barrier.MOST_SECONDS = 1.0
        print(sum(len(batch["input_ids"]) for batch in loader))
except Unreachable as error:
    print(error)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_does_not_wait_for_ever_for_one_that_has_ended(
    programs: PreloadedPython, tmp_path: Path, workers: int
) -> None:
    folder = write_tokens(tmp_path / "a", 16)
    tree = config({"a": {"local": str(folder)}}, "text", num_workers=workers)
    first, second = run_ranks(programs, READ_PASSES, json.dumps([tree, [2, 1]]))
    *counts, sentence = first.stdout.splitlines()
    assert counts == second.stdout.splitlines() == ["8"]
    # One worker of the first rank may give up before the other has begun, or after it has left.
    missing = {0: "1", 2: "[23]"}[workers]
    assert re.search(rf"for {missing} of the {2 * max(workers, 1)} processes", sentence)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_does_not_count_a_worker_that_was_killed(tmp_path: Path, persistent: bool) -> None:
    """Ctrl-C in a notebook kills workers that wait for each other."""
    folder = write_tokens(tmp_path / "a", 16)
    workers = {"num_workers": 2, "persistent_workers": persistent, "timeout": 20}
    loader = loaded({"a": {"local": str(folder)}}, **workers)
    for _ in range(2):
        reading = iter(loader)
        next(reading)
        loader.end()
        loader.dataset._shared_barrier.numbers[node_barrier.ENTERED] = 1
        assert sorted(first_tokens(loader)) == [10 + 8 * row for row in range(16)]

"""The lease of a stream: it has one holder at a time, a dead holder is noticed, and a living one is
respected, whatever the clocks show.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import asdict
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.errors import Unreachable
from mdsmix.shards import lease as module
from mdsmix.shards.lease import Holder, hold_lease
from mdsmix.storage import Location, locate
from mdsmix.storage.fork_locks import lease_lock
from mdsmix.storage.local import LocalPath
from tests.alarm import WAIT_SECONDS
from tests.clock import Clock

ANOTHER = Holder(host="another.host", pid=12, since="2031-01-01 00:00:00 UTC", token="another")


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return locate(tmp_path / "web" / "train")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def lease_file(folder: Location) -> Location:
    return folder / ".mdsmix" / "lease"


def write_lease_of_another(folder: Location, **differs: Any) -> None:
    lease_file(folder).write(orjson.dumps(asdict(ANOTHER) | differs))


def read_lease(folder: Location) -> dict[str, Any]:
    tree: dict[str, Any] = orjson.loads(lease_file(folder).read())
    return tree


def ignore(_: str) -> None:
    pass


def take_and_release(folder: Location) -> Holder:
    with hold_lease(folder, ignore):
        return Holder(**read_lease(folder))


def test_the_lease_is_released_however_the_run_ends(folder: Location) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), hold_lease(folder, ignore):
            raise error
        assert list(folder.list(recursive=True)) == []


def test_a_lease_whose_counter_does_not_change_is_taken_over(
    folder: Location, clock: Clock
) -> None:
    """A lease that cannot be read is taken over too."""
    for number, since in enumerate(("1970-01-01 00:00:00 UTC", "2099-01-01 00:00:00 UTC"), 1):
        write_lease_of_another(folder, since=since)
        messages: list[str] = []
        with hold_lease(folder, messages.append):
            assert read_lease(folder)["pid"] == os.getpid()
        assert clock.now == pytest.approx(number * module.STALE_BEATS * module.BEAT_SECONDS)
        assert len(messages) == 1
        assert "process 12 on another.host" in messages[0]
    for content in (b"", b"[]", b'{"pid": "x"}'):
        lease_file(folder).write(content)
        take_and_release(folder)
        assert lease_file(folder).stat() is None


def test_a_store_without_conditions_is_warned_of(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalPath, "try_conditions", lambda self: False)
    messages: list[str] = []
    with hold_lease(folder, messages.append):
        (message,) = messages
        assert "does not support conditional writes" in message


def test_a_slow_write_counts_from_its_beginning(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write may have been done at once, and only its answer was late: for other runs the
    counter has not changed since then.
    """
    now = [0.0]
    real_put = module.Revision.put

    def slow_put(revision: module.Revision, content: bytes) -> module.Revision | None:
        written = real_put(revision, content)
        now[0] += module.STALE_BEATS * module.BEAT_SECONDS / 2
        return written

    with hold_lease(folder, ignore) as lease:
        monkeypatch.setattr(module.Revision, "put", slow_put)
        monkeypatch.setattr(module, "_read_clock", lambda: now[0])
        assert lease.renew()
        write_lease_of_another(folder)
        assert not lease.is_held_recently()
    assert read_lease(folder)["token"] == "another", "the lease of another run is not released"
    lease_file(folder).delete()
    with hold_lease(folder, ignore) as lease:
        write_lease_of_another(folder)
        assert not lease.is_held_recently()


def test_a_run_that_lost_the_lease_learns_so_before_publishing_and_leaves_it_to_the_other(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion asks the store only if the lease may be lost: nobody takes it over in a moment."""
    ours = folder / "ours"
    theirs = folder / "theirs"
    ours.write(b"1")
    theirs.write(b"1")
    with hold_lease(folder, ignore) as lease:
        lease.confirm()
        write_lease_of_another(folder)
        assert lease.is_held_recently()
        lease.delete(ours)
        real_now = module._read_clock
        monkeypatch.setattr(module, "_read_clock", lambda: real_now() + 10.1)
        assert not lease.is_held_recently()
        lease.delete(theirs)
        for _ in range(2):
            with pytest.raises(Unreachable, match="taken over by another run"):
                lease.confirm()
    assert ours.stat() is None
    assert theirs.stat() is not None
    assert read_lease(folder)["token"] == "another"


def test_a_fork_waits_until_a_beat_has_ended(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_beating = threading.Event()
    may_go_on = threading.Event()
    real_put = module.Revision.put

    def blocking_put(revision: module.Revision, content: bytes) -> Any:
        if revision.stamp:
            is_beating.set()
            may_go_on.wait(WAIT_SECONDS)
        return real_put(revision, content)

    def check_in_child() -> None:
        assert may_go_on.is_set()
        assert lease_lock.acquire(timeout=60)

    monkeypatch.setattr(module.Revision, "put", blocking_put)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    with hold_lease(folder, ignore):
        assert is_beating.wait(WAIT_SECONDS)
        threading.Timer(0.2, may_go_on.set).start()
        child = get_context("fork").Process(target=check_in_child)
        child.start()
        child.join()
        assert child.exitcode == 0


FORK = """
import os, threading, time
from _thread import interrupt_main
if {is_interrupted}:
    import concurrent.futures.thread  # its handlers come first, so that ours are interrupted
    os.register_at_fork(after_in_parent=interrupt_main)
from mdsmix.storage.fork_locks import client_lock, lease_lock
import concurrent.futures.thread, logging

def renew():
    with lease_lock:
        has_begun.set()
        time.sleep(0.3)  # the fork begins, and waits for the lease's lock
        with client_lock:
            logging.getLogger("a store's client")
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(int).result()

def take():
    for lock in (lease_lock, client_lock):
        assert lock.acquire(timeout=20)
        lock.release()
    ended.append(True)

def end(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

has_begun = threading.Event()
ended = []
thread = threading.Thread(target=renew)
thread.start()
has_begun.wait()
child = None
try:
    child = os.fork()
    for _ in range(1000):
        pass
except KeyboardInterrupt:
    pass
if child == 0:
    take()
    ended.clear()
    end(take)
    os._exit(0 if ended else 1)
thread.join()
end(take)
print(os.wait()[1], ended)
"""


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_fork_waits_with_no_lock_that_a_beat_needs(is_interrupted: bool) -> None:
    """A beat may make a client, log and start threads. This is a process of its own, since tests
    import logging and pools before mdsmix. A Ctrl-C during the fork leaves no lock taken.
    """
    program = FORK.format(is_interrupted=is_interrupted)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert result.stdout == "0 [True]\n", result.stderr


def test_a_lease_whose_counter_rises_is_respected_and_a_released_one_is_free(
    folder: Location, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A released lease is free at once: nobody waits until it would have grown stale."""
    looks = count(1)
    real_read = module.Revision.read
    # The first two reads find a lease: after the refused write, and to watch its counter.
    last_look = 2 + module.STALE_BEATS * module.LOOKS_A_BEAT
    actions = {
        last_look: partial(write_lease_of_another, folder, beat=1),
        last_look + 5: lease_file(folder).delete,
    }

    def act_and_read(file: Location) -> Any:
        action = actions.get(next(looks))
        if action:
            action()
        return real_read(file)

    monkeypatch.setattr(module.Revision, "read", act_and_read)
    write_lease_of_another(folder)
    with pytest.raises(Unreachable, match=r"by process 12 on another\.host since 2031"):
        take_and_release(folder)
    assert read_lease(folder)["token"] == "another"
    started_at = clock.now
    take_and_release(folder)
    assert clock.now - started_at == pytest.approx(2 * module.BEAT_SECONDS / module.LOOKS_A_BEAT)

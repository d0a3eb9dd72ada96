"""One holder at a time, whose death is noticed and whose life is believed, whatever any
clock says.
"""

from __future__ import annotations

import os
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
from mdsmix.storage.local import LocalPath
from tests.alarm import SECONDS
from tests.clock import Clock

ELSEWHERE = Holder(host="another.host", pid=12, since="2031-01-01 00:00:00 UTC", token="another")


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return locate(tmp_path / "web" / "train")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def at(folder: Location) -> Location:
    return folder / ".mdsmix" / "lease"


def put_by_another(folder: Location, **differs: Any) -> None:
    at(folder).write(orjson.dumps(asdict(ELSEWHERE) | differs))


def found(folder: Location) -> dict[str, Any]:
    tree: dict[str, Any] = orjson.loads(at(folder).read())
    return tree


def silent(_: str) -> None:
    """Says nothing."""


def take(folder: Location) -> Holder:
    with hold_lease(folder, silent):
        return Holder(**found(folder))


def test_it_is_let_go_however_the_run_ends(folder: Location) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), hold_lease(folder, silent):
            raise error
        assert list(folder.list(recursive=True)) == []


def test_elsewhere_a_heart_that_stands_still_is_taken_over(folder: Location, clock: Clock) -> None:
    """So is what cannot be read."""
    for number, since in enumerate(("1970-01-01 00:00:00 UTC", "2099-01-01 00:00:00 UTC"), 1):
        put_by_another(folder, since=since)
        said: list[str] = []
        with hold_lease(folder, said.append):
            assert found(folder)["pid"] == os.getpid()
        assert clock.now == pytest.approx(number * module.STALE_BEATS * module.BEAT_SECONDS)
        assert len(said) == 1
        assert "process 12 on another.host" in said[0]
    for content in (b"", b"[]", b'{"pid": "x"}'):
        at(folder).write(content)
        take(folder)
        assert at(folder).stat() is None


def test_without_conditions_it_is_said(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalPath, "try_conditions", lambda self: False)
    said: list[str] = []
    with hold_lease(folder, said.append):
        assert ["keeps no conditions (If-Match, If-None-Match)" in each for each in said] == [True]


def test_a_slow_write_is_old(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have come at once and only the answer late: so long the counter stands still for
    others.
    """
    now, real = [0.0], module.Revision.put

    def put(seen: module.Revision, content: bytes) -> module.Revision | None:
        written = real(seen, content)
        now[0] += module.STALE_BEATS * module.BEAT_SECONDS / 2
        return written

    with hold_lease(folder, silent) as held:
        monkeypatch.setattr(module.Revision, "put", put)
        monkeypatch.setattr(module, "_now", lambda: now[0])
        assert held.renew()
        put_by_another(folder)
        assert not held.is_held_recently()
    assert found(folder)["token"] == "another", "what another holds is not let go"
    at(folder).delete()
    with hold_lease(folder, silent) as held:
        put_by_another(folder)
        assert not held.is_held_recently()


def test_who_lost_it_learns_so_before_publishing_and_leaves_it_to_the_other(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion asks only where the lease may be lost: nobody can have taken it in a moment."""
    ours, theirs = folder / "ours", folder / "theirs"
    for place in (ours, theirs):
        place.write(b"1")
    with hold_lease(folder, silent) as held:
        held.confirm()
        put_by_another(folder)
        assert held.is_held_recently()
        held.delete(ours)
        real = module._now
        monkeypatch.setattr(module, "_now", lambda: real() + 10.1)
        assert not held.is_held_recently()
        held.delete(theirs)
        for _ in range(2):
            with pytest.raises(Unreachable, match="taken over by another run"):
                held.confirm()
    assert [place.stat() is None for place in (ours, theirs)] == [True, False]
    assert found(folder)["token"] == "another"


def test_a_fork_waits_for_a_beat_to_end(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    is_beating, free = threading.Event(), threading.Event()
    real = module.Revision.put

    def slow(seen: module.Revision, content: bytes) -> Any:
        if seen.stamp:
            is_beating.set()
            free.wait(SECONDS)
        return real(seen, content)

    def beats_then() -> None:
        assert free.is_set()
        assert module._beating.acquire(timeout=60)

    monkeypatch.setattr(module.Revision, "put", slow)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    with hold_lease(folder, silent):
        assert is_beating.wait(SECONDS)
        threading.Timer(0.2, free.set).start()
        child = get_context("fork").Process(target=beats_then)
        child.start()
        child.join()
        assert child.exitcode == 0


def test_elsewhere_a_heart_that_beats_is_believed_and_a_lease_that_is_let_go_is_free(
    folder: Location, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nobody waits until its heart would have stood still for long."""
    looks, real = count(1), module.Revision.of
    last = 1 + module.STALE_BEATS * module.LOOKS_A_BEAT
    acts = {last: partial(put_by_another, folder, beat=1), last + 4: at(folder).delete}

    def look(place: Location) -> Any:
        acts.get(next(looks), int)()
        return real(place)

    monkeypatch.setattr(module.Revision, "of", look)
    put_by_another(folder)
    with pytest.raises(Unreachable, match=r"by process 12 on another\.host since 2031"):
        take(folder)
    assert found(folder)["token"] == "another"
    began = clock.now
    take(folder)
    assert clock.now - began == pytest.approx(2 * module.BEAT_SECONDS / module.LOOKS_A_BEAT)

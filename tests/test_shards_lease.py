"""One holder at a time, whose death is noticed and whose life is believed, whatever any clock says."""

import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.errors import Unreachable
from mdsmix.shards import lease as module
from mdsmix.shards.lease import Holder, lease
from mdsmix.storage import Location, locate
from mdsmix.storage.local import LocalPath
from tests.alarm import SECONDS
from tests.clock import Clock
from tests.converting import documents, mdsmix, run_recipe, write_jsonl, write_recipe

BEAT = 0.05
ELSEWHERE = Holder(
    host="another.host",
    pid=12,
    since="2031-01-01 00:00:00 UTC",
    token="another",
)


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


def put(folder: Location, holder: Holder) -> None:
    at(folder).write(orjson.dumps(asdict(holder)))


def found(folder: Location) -> dict[str, Any]:
    tree: dict[str, Any] = orjson.loads(at(folder).read())
    return tree


def silent(_: str) -> None:
    """Says nothing."""


def take(folder: Location) -> Holder:
    with lease(folder, silent):
        return Holder(**found(folder))


def at_look(patch: pytest.MonkeyPatch, number: int, work: Callable[[], object]) -> None:
    """Does this before the look of that number at a lease."""
    looks, real = count(1), module.Revision.of

    def look(place: Location) -> Any:
        if next(looks) == number:
            work()
        return real(place)

    patch.setattr(module.Revision, "of", look)


def slow(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every write of a lease takes so long, by the clock that it reads."""
    now, real = [0.0], module.Revision.put

    def put(seen: module.Revision, content: bytes) -> module.Revision | None:
        written = real(seen, content)
        now[0] += seconds
        return written

    patch.setattr(module.Revision, "put", put)
    patch.setattr(module, "_now", lambda: now[0])


LAST_LOOK = 1 + module.STALE_BEATS * module.LOOKS_A_BEAT
"The first finds a lease; so many later find its heart where it was, and it is taken over."


def test_it_is_let_go_however_the_run_ends(folder: Location) -> None:
    def run(error: type[BaseException]) -> None:
        with lease(folder, silent):
            assert at(folder).stat()
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            run(error)
        assert list(folder.list(recursive=True)) == []


def test_a_run_that_was_killed_is_taken_over(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if not child:
        try:
            with lease(folder, silent):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert found(folder)["pid"] == child
    monkeypatch.setattr(module, "BEAT_SECONDS", BEAT)
    assert take(folder).pid == os.getpid()


def test_elsewhere_a_heart_that_stands_still_is_taken_over(folder: Location, clock: Clock) -> None:
    """So is what cannot be read."""
    for number, since in enumerate(("1970-01-01 00:00:00 UTC", "2099-01-01 00:00:00 UTC"), 1):
        put(folder, replace(ELSEWHERE, since=since))
        said: list[str] = []
        with lease(folder, said.append):
            assert found(folder)["pid"] == os.getpid()
        assert clock.now == pytest.approx(number * module.STALE_BEATS * module.BEAT_SECONDS)
        assert len(said) == 1
        assert "process 12 on another.host" in said[0]
    for content in (b"", b"[]", b'{"pid": "x"}'):
        at(folder).write(content)
        take(folder)
        assert at(folder).stat() is None


def test_without_conditions_it_is_said(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalPath, "keeps_conditions", lambda self: False)
    said: list[str] = []
    with lease(folder, said.append) as held:
        held.confirm()
    assert len(said) == 1
    assert "keeps no conditions (If-Match, If-None-Match)" in said[0]


def test_what_a_slow_write_says_is_as_old_as_its_beginning(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have come at once and only the answer late: so long the counter stands still for others."""
    with lease(folder, silent) as held:
        slow(monkeypatch, module.STALE_BEATS * module.BEAT_SECONDS / 2)
        assert held.is_held()
        put(folder, ELSEWHERE)
        assert not held.is_held_still()
    assert found(folder)["token"] == "another", "what another holds is not let go"
    at(folder).delete()
    with lease(folder, silent) as held:
        put(folder, ELSEWHERE)
        assert not held.is_held_still()


def test_of_many_that_take_a_dead_lease_over_one_wins(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", BEAT)
    put(folder, ELSEWHERE)
    others_are_done = threading.Barrier(8)

    def run(_: int) -> bool:
        is_mine = False
        try:
            with lease(folder, silent):
                is_mine = True
                others_are_done.wait(SECONDS)
        except Unreachable:
            others_are_done.wait(SECONDS)
        return is_mine

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(run, range(8))) == 1


def test_who_lost_it_learns_so_before_publishing_and_leaves_it_to_the_other(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion asks only where the lease may be lost: nobody can have taken it in a moment."""
    ours, theirs = folder / "ours", folder / "theirs"
    for place in (ours, theirs):
        place.write(b"1")
    with lease(folder, silent) as held:
        held.confirm()
        put(folder, ELSEWHERE)
        assert held.is_held_still()
        held.delete(ours)
        real = module._now
        monkeypatch.setattr(module, "_now", lambda: real() + 10.1)
        assert not held.is_held_still()
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

    monkeypatch.setattr(module.Revision, "put", slow)
    monkeypatch.setattr(module, "BEAT_SECONDS", BEAT)
    with lease(folder, silent):
        assert is_beating.wait(SECONDS)
        threading.Timer(0.2, free.set).start()
        child = os.fork()
        if not child:
            went_well = False
            try:
                went_well = free.is_set() and module._beating.acquire(timeout=60)
            finally:
                os._exit(0 if went_well else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_two_converts_at_once(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The second ends with 4 and changes nothing; what is up to date asks for no lease and leaves none."""
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a long enough text " * 9}] * 5)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": documents(source)})
    target = locate(tmp_path / "out" / "web" / "train")

    def while_held(command: Callable[[], Any]) -> Any:
        with lease(target, silent), ThreadPoolExecutor(1) as pool:
            return pool.submit(command).result()

    answer = while_held(lambda: mdsmix("convert", recipe))
    assert (answer.code, answer.out) == (4, "")
    assert re.search(f"by process {os.getpid()} on .+ since 20.+ UTC", answer.err)
    assert answer.err.count("\n") == 2
    assert list(target.list()) == []
    run_recipe(recipe)
    assert at(target).stat() is None
    assert while_held(lambda: run_recipe(recipe))[0].state == "up to date"


def test_elsewhere_a_heart_that_beats_is_believed_and_a_lease_that_is_let_go_is_free(
    folder: Location, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nobody waits until its heart would have stood still for long."""
    put(folder, ELSEWHERE)
    with monkeypatch.context() as patch:
        at_look(patch, LAST_LOOK, lambda: put(folder, replace(ELSEWHERE, beat=1)))
        with pytest.raises(Unreachable, match=r"by process 12 on another\.host since 2031"):
            take(folder)
    assert found(folder)["token"] == "another"
    began = clock.now
    at_look(monkeypatch, 3, at(folder).delete)
    take(folder)
    assert clock.now - began == pytest.approx(2 * module.BEAT_SECONDS / module.LOOKS_A_BEAT)

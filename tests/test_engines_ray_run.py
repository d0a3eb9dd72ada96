"""What the driver of a Ray cluster decides when a try ends, is lost or hangs, by a Ray of this file; tests/ray has a real cluster."""

from __future__ import annotations

import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix import __version__
from mdsmix.engines import ray_engine, ray_run
from mdsmix.engines.attempts import ALONE, MOST_DEATHS, Attempt, Place
from mdsmix.engines.ray_engine import RayEngine, RaySettings
from mdsmix.engines.ray_nodes import Nodes
from mdsmix.engines.ray_run import RayRun
from mdsmix.engines.ray_worker import MEETING, Board, News, shim
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.storage import locate
from tests.tasks import call

MIB = 1 << 20
PLACE = Place(file="a", ordinal=0, shown="byte 0", length=9, records=8)


class RayError(Exception):
    pass


def kind(name: str, base: type[Exception] = RayError) -> Any:
    return type(name, (base,), {})


EXCEPTIONS = SimpleNamespace(
    RayError=RayError,
    RayTaskError=kind("RayTaskError"),
    NodeDiedError=kind("NodeDiedError"),
    ObjectLostError=kind("ObjectLostError"),
    LocalRayletDiedError=kind("LocalRayletDiedError"),
    OutOfMemoryError=kind("OutOfMemoryError"),
    WorkerCrashedError=kind("WorkerCrashedError"),
    RayActorError=kind("RayActorError"),
)


class FakeRay:
    """Answers by reference; an exception is raised."""

    def __init__(self) -> None:
        self.exceptions = EXCEPTIONS
        self.answers: dict[Any, Any] = {}
        self.told: list[News] = []
        self.cancelled: list[tuple[str, bool]] = []
        self.killed: list[Any] = []
        self.asked: dict[str, Any] = {}
        self.sent: list[tuple[Any, ...]] = []

    def remote(self, **asked: Any) -> Any:
        """A function's own options, and those of each task, are `asked` for; what goes with a task is `sent`."""
        self.asked |= asked
        handle = SimpleNamespace(remote=lambda *sent: self.sent.append(sent))
        handle.options = lambda **more: self.asked.update(more) or handle
        return lambda function: handle

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        if ref == "board":
            told, self.told = self.told, []
            return told
        answer = self.answers[ref]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(
        self, refs: list[str], num_returns: int, timeout: float
    ) -> tuple[list[str], list[str]]:
        """Only those that are cancelled by force end. Who ends a run waits for all of them."""
        assert num_returns == (1 if timeout == ray_run.PERIOD else len(refs))
        left = [ref for ref in refs if (ref, True) not in self.cancelled]
        return [ref for ref in refs if ref not in left], left

    def cancel(self, ref: str, force: bool = False, recursive: bool = True) -> None:
        self.cancelled.append((ref, force))


class Driver:
    """A run of some tasks at a cluster of the nodes n and m, all of whose tries are on their way as a0, a1, ..."""

    def __init__(self, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tasks: int = 1) -> None:
        self.ray, self.said, self.sizes = ray, list[str](), list[int]()
        self.attempts: list[Attempt] = []
        engine = self.engine = RayEngine(RaySettings(workers=tasks))
        self.alive(engine, monkeypatch, "n", "m")
        engine.share = 512 * MIB
        engine.board = SimpleNamespace(take=SimpleNamespace(remote=lambda: "board"))
        monkeypatch.setattr(engine, "send", self._send)
        self.run = RayRun(
            engine,
            [call(print, n) for n in range(tasks)],
            lambda size, tokens: self.sizes.append(size),
            self.said.append,
        )
        self.run.send()

    def alive(self, engine: RayEngine, patch: pytest.MonkeyPatch, *names: str) -> None:
        found = Nodes(
            here="n",
            cpus=dict.fromkeys(names, 1.0),
            memory=dict.fromkeys(names, 1536 * MIB),
            names={"n": "host-n", "m": "host-m"},
        )
        patch.setattr(ray_engine, "nodes", lambda: found)
        engine._looked = -1e9
        engine.current_nodes()

    def _send(self, task: Any, attempt: Attempt, name: str) -> str:
        self.attempts.append(attempt)
        return f"a{len(self.attempts) - 1}"

    def news(self, ref: str = "a0", **more: Any) -> News:
        name = next(name for name, run in self.run.running.items() if run.ref == ref)
        return News(execution=name, **{"node": "m", "place": PLACE, **more})

    def hear(self, *news: News) -> None:
        self.ray.told.extend(news)
        self.run.hear()

    def ends(self, answer: Any, ref: str = "a0") -> list[tuple[int, Any]]:
        """What is yielded of a try's end; what is to be sent again is."""
        self.ray.answers[ref] = answer
        run = next(run for run in self.run.running.values() if run.ref == ref)
        found = list(self.run.heed(run))
        self.run.send()
        return found


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def driver(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(ray, monkeypatch)


def test_an_answer_is_yielded_with_what_was_not_told_yet(driver: Driver) -> None:
    driver.hear(driver.news(size=3, said=("a",)))
    late = driver.news(size=2)
    assert driver.ends(("done", "it", driver.news(size=7, said=("a",)))) == [(0, "it")]
    driver.hear(late)
    assert driver.sizes == [3, 4]
    assert driver.said == ["on the node host-m: a"]
    assert not driver.run.running
    assert not driver.run.queue


def test_what_a_worker_refuses_or_raises_ends_the_run(driver: Driver) -> None:
    with pytest.raises(Unreachable, match=r"^a sentence$"):
        driver.ends(("refused", "a sentence", None))


def test_an_error_of_ours_is_raised_as_it_is(driver: Driver) -> None:
    with pytest.raises(MdsmixError, match=r"^our own$"):
        driver.ends(("failed", MdsmixError("our own"), driver.news()))


@pytest.mark.parametrize("reason", ["NodeDiedError", "ObjectLostError", "LocalRayletDiedError"])
def test_a_try_whose_node_was_lost_is_sent_again_as_it_was(driver: Driver, reason: str) -> None:
    driver.hear(driver.news())
    for n in range(MOST_DEATHS):
        driver.ends(getattr(EXCEPTIONS, reason)(), f"a{n}")
    assert driver.attempts == [Attempt()] * (MOST_DEATHS + 1)
    assert "a node was lost on host-m; the work unit " in driver.said[0]
    with pytest.raises(MdsmixError, match="nodes were lost one after the other over one work unit"):
        driver.ends(getattr(EXCEPTIONS, reason)(), f"a{MOST_DEATHS}")


def test_a_worker_that_crashed_goes_by_the_rules_of_deaths(driver: Driver) -> None:
    driver.hear(driver.news())
    driver.ends(EXCEPTIONS.WorkerCrashedError())
    assert [attempt.deaths for attempt in driver.attempts] == [0, 1]
    assert driver.attempts[1].halvings > 0
    assert driver.engine.share == 512 * MIB
    driver.ray.told.append(driver.news("a1"))  # the last that it said, which nobody has read
    driver.ends(EXCEPTIONS.WorkerCrashedError(), "a1")
    assert [attempt.died_at for attempt in driver.attempts] == [None, PLACE, PLACE]


def test_the_most_that_was_held_is_told(driver: Driver) -> None:
    """By all workers and this process together, at one time."""
    for held in (5 << 40, 1):
        driver.hear(driver.news(held=held))
        driver.run.watch()
        assert 5 << 40 < driver.engine.peak < 6 << 40


def test_a_worker_that_crashed_with_its_node_was_lost(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.hear(driver.news())
    driver.alive(driver.engine, monkeypatch, "n")
    driver.ends(EXCEPTIONS.WorkerCrashedError())
    assert driver.attempts == [Attempt()] * 2


def test_after_want_of_memory_each_asks_for_twice_as_much_and_no_more_than_a_node_has(
    driver: Driver,
) -> None:
    driver.hear(driver.news())
    driver.ends(EXCEPTIONS.OutOfMemoryError())
    assert driver.engine.share == 1024 * MIB
    assert driver.attempts[1].deaths == 1
    assert "ran out of memory" in driver.said[0]
    assert "asks for 1,024 MiB" in driver.said[0]
    driver.hear(driver.news("a1"))
    driver.ends(EXCEPTIONS.OutOfMemoryError(), "a1")
    assert driver.engine.share == 1536 * MIB


def test_another_trouble_of_ray_ends_the_run_with_its_words(driver: Driver) -> None:
    with pytest.raises(MdsmixError, match=r"Ray could not do the work unit .* \(no luck\)"):
        driver.ends(EXCEPTIONS.RayActorError("no luck"))
    assert not driver.run.queue


def test_of_a_lost_node_what_was_at_work_and_what_waits_is_done_again_and_nothing_else_of_it_counts(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a0 works on the lost node and a1 on the other one; a2 has told nothing."""
    driver = Driver(ray, monkeypatch, tasks=3)
    driver.hear(driver.news("a0"), driver.news("a1", node="n"))
    late = driver.news("a0", size=7)
    driver.alive(driver.engine, monkeypatch, "n")
    assert driver.engine.losses == 1
    driver.run.watch()
    assert [run.ref for run in driver.run.running.values()] == ["a1"]
    assert ray.cancelled == [("a2", False)]
    driver.run.send()
    assert driver.attempts == [Attempt()] * 5
    driver.run.watch()
    assert len(driver.run.running) == 3, "those that were sent after the loss stay"
    before = list(driver.sizes)
    driver.hear(late)
    assert driver.sizes == before
    assert [said for said in driver.said if "was lost" in said] == driver.said[:1]


def test_a_try_that_hangs_is_given_up_by_force_and_one_that_waits_is_not(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(ray, monkeypatch, tasks=2)
    driver.hear(driver.news("a0"))
    for run in driver.run.running.values():
        monkeypatch.setattr(type(run.pulse), "look", lambda *_: "no sign of life")
        break
    driver.run.watch()
    assert ray.cancelled == [("a0", True)]
    assert [run.ref for run in driver.run.running.values()] == ["a1"]
    assert "a worker on host-m hung (no sign of life) over the work unit" in driver.said[0]
    driver.run.send()
    assert (driver.attempts[2].deaths, driver.attempts[2].halvings) == (1, ALONE)


def test_no_more_is_on_its_way_than_asked_for_and_who_does_not_end_is_ended_by_force(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(ray, monkeypatch, tasks=9)
    assert len(driver.run.running) == 9
    for most, settings in ((4, RaySettings()), (2, RaySettings(workers=2))):
        driver.engine.settings = settings
        sent = RayRun(driver.engine, [call(print)] * 9, lambda *_: None, print)
        sent.send()
        assert len(sent.running) == most
        refs = [run.ref for run in sent.running.values()]
        ray.cancelled.clear()
        sent.end()
        asked = [(ref, False) for ref in refs] * ray_run.TIMES_ASKED
        assert ray.cancelled == [*asked, *((ref, True) for ref in refs)]


def test_a_worker_lives_while_its_main_thread_uses_time_or_its_records_change(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("mdsmix.engines.hang.time.monotonic", lambda: clock[0])
    (run,) = driver.run.running.values()
    assert run.hangs() is None
    run.hear(driver.news(used=1))

    def lives(seconds: int, **more: Any) -> bool:
        for n in range(seconds):
            clock[0] += 1
            run.hear(driver.news(**{key: value(n) for key, value in more.items()}))
            if run.hangs():
                return False
        return True

    assert lives(700, used=lambda n: n, place=lambda n: None)
    assert not lives(310, used=lambda n: 1, place=lambda n: None)


def test_a_worker_that_stands_still_before_it_has_loaded_mdsmix_is_found(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Ray carries to a node by its code tells the board before it imports mdsmix: here the import never ends."""
    clock = [0.0]
    monkeypatch.setattr("mdsmix.engines.hang.time.monotonic", lambda: clock[0])
    board, (name,) = Board(), driver.run.running
    handle = SimpleNamespace(begin=SimpleNamespace(remote=board.begin))
    driver.ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "m")  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mdsmix", None)
        assert shim()(__version__, b"", name, b"", handle)[0] == "refused"
    driver.hear(*board.take())
    for _ in range(310):
        clock[0] += 1
        driver.run.watch()
    assert driver.ray.cancelled == [("a0", True)]
    assert "a worker on host-m hung (no sign of life" in driver.said[0]


def test_a_head_that_does_not_answer_is_waited_for_and_then_a_sentence(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is not asked for its nodes meanwhile, and the count begins anew with each answer."""
    clock, answers = [1e6], [True]
    monkeypatch.setattr(ray_engine.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_engine, "head_answers", lambda: answers[0])
    driver.engine._is_connected = True
    driver.engine.current_nodes()
    before = driver.engine.nodes
    monkeypatch.setattr(ray_engine, "nodes", lambda: 1 / 0)
    answers[0] = False
    for _ in range(13):
        clock[0] += 3
        assert driver.engine.current_nodes() is before
    clock[0] += 3
    with pytest.raises(Unreachable, match="the head of the Ray cluster has not answered for 42 s; finished units are kept"):  # fmt: skip
        driver.engine.current_nodes()


def test_what_is_asked_of_ray_for_a_task_and_what_goes_with_it(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray itself tries nothing again, the memory that is asked for is what the task may hold, and the run's note is there as long
    as the run is."""
    for name in ray_engine.PLACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = Nodes(here="n", cpus={"n": 2.0}, memory={"n": 1024 * MIB}, names={"n": "host-n"})
    monkeypatch.setattr(ray_engine, "nodes", lambda: found)
    monkeypatch.setattr(ray_engine, "connected", lambda address, workers: nullcontext())
    monkeypatch.setattr(ray_engine, "board_at", lambda here: f"board at {here}")
    engine = RayEngine(RaySettings(meeting=locate(str(tmp_path))))
    engine._connect()
    engine.losses, engine.share = 1, 300 * MIB
    engine.send(call(print), Attempt(), "name")
    assert (ray.asked["max_retries"], ray.asked["num_cpus"]) == (0, 1)
    assert ray.asked["memory"] == 300 * MIB + 1
    (_, packed, name, packed_sent, board) = ray.sent[0]
    sent = pickle.loads(packed_sent)
    assert (sent.memory, sent.many, dict(sent.settings)) == (300 * MIB, False, {"S3_ENDPOINT_URL": "http://here"})  # fmt: skip
    assert (name, board, b"secret" in packed + packed_sent) == ("name", "board at n", False)
    (note,) = tmp_path.iterdir()
    assert MEETING.fullmatch(note.name)
    assert note.read_text() == sent.of
    engine.close()
    assert ray.killed == ["board at n"]
    assert list(tmp_path.iterdir()) == []

"""What the driver of a Ray cluster decides when a node answers, is lost or stands still, by a Ray of this file; and the process of a
node, without a Ray. tests/ray has a real cluster."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix import __version__
from mdsmix.engines import ray_engine, ray_node
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.ray_engine import MOST_LOSSES, RayEngine, RaySettings
from mdsmix.engines.ray_node import MEETING, STOP, Beat, NodeSettings, Supervisor
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.storage import locate
from tests.alarm import SECONDS
from tests.tasks import call, settings, silent

MIB = 1 << 20
Script = Callable[["Actor", list[bytes]], Any]


class RayError(Exception):
    pass


def works(actor: Actor, given: list[bytes]) -> Any:
    """A node that does each unit at once."""
    done = [("done", number, number * 10) for number, _ in map(pickle.loads, given)]
    return [pickle.dumps(each) for each in [("beat", Beat(size=len(done), peak=MIB)), *done]], ""


class Actor:
    """The supervisor of a node as the driver sees it: what it answers is scripted."""

    def __init__(self, ray: FakeRay, node: str) -> None:
        self.ray, self.node, self.given = ray, node, list[list[bytes]]()
        self.begin = SimpleNamespace(remote=self._begin)
        self.exchange = SimpleNamespace(remote=self._exchange)
        self.end = SimpleNamespace(remote=lambda message, seconds: self.ray.refer(message == STOP))

    def _begin(self, version: str, settings: bytes) -> Any:
        self.ray.begun.append((self.node, settings))
        return self.ray.refer(self.ray.versions.get(self.node, version))

    def _exchange(self, given: list[bytes], seconds: float) -> Any:
        self.given.append(given)
        return self.ray.refer(self.ray.scripts.get(self.node, works)(self, given))


class FakeRay:
    """A cluster of the nodes n, which is the driver's, and m. An answer that is an exception is raised, and None never comes."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.alive = {"n": 2, "m": 2}
        self.scripts: dict[str, Script] = {}
        self.versions: dict[str, str] = {}
        self.asked = list[dict[str, Any]]()
        self.begun = list[tuple[str, bytes]]()
        self.killed = list[str]()
        self._answers = dict[int, Any]()

    def refer(self, answer: Any) -> int:
        self._answers[len(self._answers)] = answer
        return len(self._answers) - 1

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": id,
                "Alive": True,
                "NodeManagerHostname": f"host-{id}",
                "Resources": {"CPU": cpus, "memory": 512 * MIB},
            }
            for id, cpus in self.alive.items()
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "n")

    def remote(self, **options: Any) -> Any:
        self.asked.append(options)
        made = lambda: Actor(self, options["scheduling_strategy"].node_id)  # noqa: E731
        return lambda cls: SimpleNamespace(remote=made)

    def wait(self, refs: list[int], num_returns: int = 1, timeout: float = 0) -> Any:
        return [ref for ref in refs if self._answers[ref] is not None], []

    def get(self, ref: int) -> Any:
        if isinstance(self._answers[ref], Exception):
            raise self._answers[ref]
        return self._answers[ref]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.node)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each look at the time takes a second, so that nodes are looked at again and again."""
    now = [1e6]

    def tick() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(ray_engine.time, "monotonic", tick)
    monkeypatch.setattr(ray_engine.time, "sleep", lambda _: None)
    return now


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> FakeRay:
    fake = FakeRay()
    strategy = SimpleNamespace(
        NodeAffinitySchedulingStrategy=lambda id, soft: SimpleNamespace(node_id=id, soft=soft)
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategy)
    monkeypatch.setattr(ray_engine, "connected", lambda address, workers: nullcontext())
    monkeypatch.setattr(ray_engine, "head_answers", lambda: True)
    return fake


def run(units: int, said: list[str] | None = None, **more: Any) -> list[tuple[int, Any]]:
    with closing(RayEngine(RaySettings(**more))) as engine:
        tell = said.append if said is not None else print
        return sorted(engine.run([call(print, n) for n in range(units)], silent, tell))


TEN = [(n, n * 10) for n in range(10)]


def test_a_node_has_a_unit_for_each_of_its_workers_and_one_that_waits(ray: FakeRay) -> None:
    most = list[int]()

    def noting(actor: Actor, given: list[bytes]) -> Any:
        most.append(len(given))
        return works(actor, given)

    ray.scripts = {"n": noting, "m": noting}
    assert run(10) == TEN
    assert max(most) == 3
    assert {options["num_cpus"] for options in ray.asked} == {2}
    assert ray.killed == ["n", "m"], "each is ended with the engine"


def test_where_nothing_is_to_do_ray_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, and most runs find all up to date."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(0) == []


def test_progress_peaks_and_sentences_of_nodes_are_passed_on(ray: FakeRay) -> None:
    ray.scripts["m"] = lambda actor, given: ([pickle.dumps(("beat", Beat(peak=5 * MIB, warnings=("W",)))), pickle.dumps(("say", "a store is slow"))], "") if not given else None  # fmt: skip
    ray.alive["k"] = 1
    said, sizes = list[str](), list[int]()
    engine = RayEngine(RaySettings())
    tasks = [call(print, n) for n in range(4)]
    found = engine.run(tasks, lambda size, _: sizes.append(size), said.append)
    assert next(found)[1] in {0, 10, 20, 30}
    assert engine.peak > 7 * MIB
    assert engine.warnings() == ["on the node host-m: W"]
    assert "on the node host-m: a store is slow" in said
    found.close()
    assert sum(sizes) >= 1


def once(way: Callable[[], Any]) -> Script:
    """A node that is lost as soon as it has units, and its successor works."""
    lost = list[int]()

    def script(actor: Actor, given: list[bytes]) -> Any:
        if not given or lost:
            return works(actor, given)
        lost.append(1)
        return way()

    return script


def test_units_of_a_lost_node_are_done_again_and_said_once(ray: FakeRay) -> None:
    ways = {
        "raised": lambda: RayError("the actor died\nfor a reason."),
        "ended": lambda: ([], "its process ended with exit code 1"),
        "silent": lambda: None,
        "gone": lambda: ray.alive.pop("m") and None,
    }
    for name, way in ways.items():
        ray.alive, ray.scripts, said = {"n": 2, "m": 2}, {"m": once(way)}, list[str]()
        assert run(10, said) == TEN, name
        (sentence,) = said
        assert sentence.startswith("the node host-m "), name
        assert "are done again" in sentence


def test_an_answer_of_a_unit_that_was_given_to_another_node_is_not_taken(ray: FakeRay) -> None:
    late = [pickle.dumps(("done", 0, "late"))]
    ray.scripts["m"] = lambda actor, given: (late + works(actor, given)[0], "")
    assert run(10) == TEN


def test_a_unit_over_which_nodes_are_lost_again_and_again_ends_the_run(ray: FakeRay) -> None:
    def dies(actor: Actor, given: list[bytes]) -> Any:
        return RayError("it died") if given else works(actor, given)

    ray.scripts = {"n": dies, "m": dies}
    said = list[str]()
    with pytest.raises(MdsmixError, match=f"{MOST_LOSSES + 1} nodes were lost .* over the work unit number 1"):  # fmt: skip
        run(1, said)
    assert len(said) == MOST_LOSSES


def test_supervisors_that_never_begin_end_the_run(ray: FakeRay) -> None:
    ray.scripts = {"n": lambda *_: ([], "its process ended with exit code 1")}
    del ray.alive["m"]
    with pytest.raises(MdsmixError, match="the last one host-n, which does no more"):
        run(1)


def test_where_the_node_of_the_driver_has_ended_one_sentence_says_so(ray: FakeRay) -> None:
    """Its GCS and other nodes are alive, and Ray raises nothing but for each actor."""
    ray.scripts["m"] = once(lambda: ray.alive.pop("n") and None)
    said = list[str]()
    with pytest.raises(Unreachable, match="Ray's node on this machine has ended") as error:
        run(10, said)
    assert (error.value.exit_code, said) == (4, [])


def test_a_head_that_does_not_answer_is_waited_for_and_then_a_sentence(
    ray: FakeRay, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, answers = RayEngine(RaySettings()), [True]
    monkeypatch.setattr(ray_engine, "head_answers", lambda: answers[0])
    clock[0] += 100
    assert engine.current_nodes()
    answers[0] = False
    for _ in range(13):
        clock[0] += 2
        assert engine.current_nodes() is None
    clock[0] += 2
    with pytest.raises(Unreachable, match=r"the head of the Ray cluster has not answered for 4\d s; finished units are kept"):  # fmt: skip
        engine.current_nodes()


@pytest.mark.parametrize(("version", "has"), [("", "has no mdsmix"), ("0.0.7", "has mdsmix 0.0.7")])
def test_a_node_with_another_mdsmix_or_none_ends_the_run(
    ray: FakeRay, version: str, has: str
) -> None:
    ray.versions["m"] = version
    with pytest.raises(Unreachable, match=f"the node host-m {has}, and this run is of mdsmix {__version__}: install"):  # fmt: skip
        run(10)


def test_an_error_of_a_unit_is_raised_with_its_node_where_there_are_several(ray: FakeRay) -> None:
    failed = [pickle.dumps(("failed", Unreachable("no answer")))]
    ray.scripts = dict.fromkeys("nm", lambda actor, given: (failed, "") if given else works(actor, given))  # fmt: skip
    for alive, sentence in (({"n": 1, "m": 1}, r"^on the node host-.: no answer$"), ({"n": 1}, r"^no answer$")):  # fmt: skip
        ray.alive = dict(alive)
        with pytest.raises(Unreachable, match=sentence):
            run(10)


def test_paths_of_one_machine_are_refused_where_there_are_more_also_for_the_next_stream(
    ray: FakeRay,
) -> None:
    with closing(RayEngine(RaySettings(local=["/here"]))) as engine:
        for _ in range(2):
            with pytest.raises(RecipeError, match=r"nodes beside this one \(host-m\), and /here is of this machine alone"):  # fmt: skip
                list(engine.run([call(print)], silent, print))
    del ray.alive["m"]
    assert run(10, local=["/here"]) == TEN


def test_what_a_node_is_told(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the store is and no credential; the cap of --memory; a note of the run, which is there as long as the run is."""
    for name in ray_engine.STORES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    pool = PoolSettings(workers=3, memory=300 * MIB)
    engine = RayEngine(RaySettings(pool=pool, meeting=locate(str(tmp_path))))
    list(engine.run([call(print)], silent, print))
    assert [options["num_cpus"] for options in ray.asked] == [2, 2], "what the node has"
    told: NodeSettings = pickle.loads(ray.begun[0][1])
    assert told.pool.workers == 3
    assert dict(told.environment) == {"S3_ENDPOINT_URL": "http://here"}
    assert b"secret" not in ray.begun[0][1]
    (note,) = tmp_path.iterdir()
    assert MEETING.fullmatch(note.name)
    assert told.meeting == locate(str(note))
    engine.close()
    assert list(tmp_path.iterdir()) == []


def node_settings(**more: Any) -> NodeSettings:
    given = {"pool": settings(2), "environment": {}, "meeting": None}
    return NodeSettings(**{**given, **more})


def tells_endpoint(attempt: Any, reporter: Any) -> Any:
    reporter.on_progress(7, 8)
    return os.environ["S3_ENDPOINT_URL"], os.environ["AWS_REGION"], os.getppid()


def messages(node: Any, wanted: str) -> Iterator[tuple[Any, ...]]:
    """Of a real process, up to a message of this kind."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found, ended = node.exchange([], 1.0)
        for message in map(pickle.loads, found):
            yield message
            if message[0] == wanted:
                return
        assert not ended, ended


def test_the_process_of_a_node_does_units_with_workers_and_ends_when_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node's own store stays its own."""
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://node")
    monkeypatch.delenv("AWS_REGION", raising=False)
    environment = {"S3_ENDPOINT_URL": "http://driver", "AWS_REGION": "eu"}
    node = ray_node.actor()()
    assert node.begin("0.0.7", b"") == __version__, "it is not started"
    assert node.begin(__version__, pickle.dumps(node_settings(environment=environment))) == __version__  # fmt: skip
    node.exchange([pickle.dumps((3, call(tells_endpoint)))], 0.0)
    found = list(messages(node, "done"))
    assert found[-1] == ("done", 3, ("http://node", "eu", node.process.pid))
    beats = [beat for kind, beat in found[:-1] if kind == "beat"]
    assert (sum(beat.size for beat in beats), sum(beat.tokens for beat in beats)) == (7, 8)
    assert beats[-1].peak > 10 * MIB
    node.end(STOP, 10.0)
    assert node.process.returncode == 0


def test_a_node_that_does_not_see_the_note_of_the_run_says_so(tmp_path: Path) -> None:
    node, meeting = ray_node.actor()(), tmp_path / "run-0"
    node.begin(__version__, pickle.dumps(node_settings(meeting=locate(str(meeting)))))
    ((_, error),) = messages(node, "failed")
    assert "does not see what this run has written" in str(error)
    meeting.write_text("")
    ray_node.refuse_elsewhere(locate(str(meeting)))


@pytest.mark.parametrize("how", ["silence", "end of the actor"])
def test_the_process_of_a_node_that_nobody_asks_ends(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends no actor whose node is lost."""
    ours, its = Pipe()
    ended = list[str]()
    engine = LocalEngine(settings(1))
    monkeypatch.setattr(engine, "step", lambda _: [])
    for name in ("stop", "close"):
        monkeypatch.setattr(engine, name, partial(ended.append, name))
    if how == "silence":
        monkeypatch.setattr(ray_node, "SILENT_SECONDS", 0.2)
    else:
        ours.close()
    working = threading.Thread(target=Supervisor(its, engine).work)
    working.start()
    working.join(SECONDS)
    assert ended == ["stop", "close"]

"""What the driver of a Ray cluster decides when a node answers, is lost or stands still, by a Ray of this file; and the supervisor of a
node, without a Ray. tests/ray has a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix import __version__
from mdsmix.engines import ray_cluster, ray_engine
from mdsmix.engines.local_engine import PoolSettings
from mdsmix.engines.ray_cluster import Supervisor
from mdsmix.engines.ray_engine import MOST_LOSSES, RayEngine
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from tests.alarm import SECONDS
from tests.tasks import call, settings, silent

MIB = 1 << 20
Units = Sequence[tuple[int, Any]]
Script = Callable[["Actor", Units], Any]


class RayError(Exception):
    pass


def works(actor: Actor, given: Units) -> Any:
    """A node that does each unit at once."""
    done = [("done", number, number * 10) for number, _ in given]
    return [("progress", len(done), 0), *done]


class Actor:
    """The supervisor of a node as the driver sees it: what it answers is scripted."""

    def __init__(self, ray: FakeRay, node: str) -> None:
        self.ray, self.node = ray, node
        self.exchange = SimpleNamespace(remote=self._exchange)
        self.end = SimpleNamespace(remote=lambda: self.ray.refer(True))

    def _exchange(self, given: Units, seconds: float) -> Any:
        return self.ray.refer(self.ray.scripts.get(self.node, works)(self, given))


class FakeRay:
    """A cluster of the nodes n, which is the driver's, and m. An answer that is an exception is raised, and None never comes."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.alive = {"n": 2, "m": 2}
        self.scripts: dict[str, Script] = {}
        self.asked = list[dict[str, Any]]()
        self.begun = list[tuple[Any, ...]]()
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

        def made(*told: Any) -> Actor:
            self.begun.append(told)
            return Actor(self, options["scheduling_strategy"].node_id)

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
    return fake


def engine_of(pool: PoolSettings = settings(0), local: Sequence[str] = ()) -> RayEngine:  # noqa: B008
    return RayEngine("", pool, local)


def run(units: int, said: list[str] | None = None, **more: Any) -> list[tuple[int, Any]]:
    with closing(engine_of(**more)) as engine:
        tell = said.append if said is not None else print
        return sorted(engine.run([call(print, n) for n in range(units)], silent, tell))


TEN = [(n, n * 10) for n in range(10)]


def test_a_node_has_a_unit_for_each_of_its_workers_and_one_that_waits(ray: FakeRay) -> None:
    most = list[int]()

    def noting(actor: Actor, given: Units) -> Any:
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


def test_progress_and_sentences_of_nodes_are_passed_on(ray: FakeRay) -> None:
    """A sentence that several nodes say is said once."""
    for node in "mn":
        ray.scripts[node] = lambda *of: [("say", "a store is slow"), *works(*of)]
    said, sizes = list[str](), list[int]()
    tasks = [call(print, n) for n in range(4)]
    with closing(engine_of()) as engine:
        assert len(list(engine.run(tasks, lambda size, _: sizes.append(size), said.append))) == 4
    assert said == ["a store is slow"]
    assert sum(sizes) == 4


def once(way: Callable[[], Any]) -> Script:
    """A node that is lost as soon as it has units, and its successor works."""
    lost = list[int]()

    def script(actor: Actor, given: Units) -> Any:
        if not given or lost:
            return works(actor, given)
        lost.append(1)
        return way()

    return script


def test_units_of_a_lost_node_are_done_again_and_said_once(ray: FakeRay) -> None:
    ways = {
        "raised": lambda: RayError("the actor died\nfor a reason."),
        "gone": lambda: ray.alive.pop("m") and None,
    }
    for name, way in ways.items():
        ray.alive, ray.scripts, said = {"n": 2, "m": 2}, {"m": once(way)}, list[str]()
        assert run(10, said) == TEN, name
        (sentence,) = said
        assert sentence.startswith("the node host-m "), name
        assert "are done again" in sentence


def test_an_answer_of_a_unit_that_was_given_to_another_node_is_not_taken(ray: FakeRay) -> None:
    ray.scripts["m"] = lambda actor, given: [("done", 0, "late"), *works(actor, given)]
    assert run(10) == TEN


def test_a_unit_over_which_nodes_are_lost_again_and_again_ends_the_run(ray: FakeRay) -> None:
    def dies(actor: Actor, given: Units) -> Any:
        return RayError("it died") if given else works(actor, given)

    ray.scripts = {"n": dies, "m": dies}
    said = list[str]()
    with pytest.raises(MdsmixError, match=f"{MOST_LOSSES + 1} nodes were lost .* over the work unit number 1"):  # fmt: skip
        run(1, said)
    assert len(said) == MOST_LOSSES


def test_supervisors_that_ended_while_nothing_was_to_do_are_started_again(
    ray: FakeRay, clock: list[float]
) -> None:
    """Between two streams hours may pass in which nobody asks them."""
    ray.alive = dict.fromkeys("nabcdefg", 1)
    with closing(engine_of()) as engine:
        for _ in range(2):
            assert sorted(engine.run([call(print, n) for n in range(10)], silent, print)) == TEN
            clock[0] += 1000


def test_supervisors_that_never_begin_end_the_run(ray: FakeRay) -> None:
    ray.scripts = {"n": lambda *_: RayError("No module named 'mdsmix'")}
    del ray.alive["m"]
    with pytest.raises(MdsmixError, match=r"the last one host-n, which was lost \(No module named"):
        run(1)


def test_where_the_node_of_the_driver_has_ended_one_sentence_says_so(ray: FakeRay) -> None:
    """Its GCS and other nodes are alive, and Ray raises nothing but for each actor."""
    ray.scripts["m"] = once(lambda: ray.alive.pop("n") and None)
    said = list[str]()
    with pytest.raises(Unreachable, match="Ray's node on this machine has ended") as error:
        run(10, said)
    assert (error.value.exit_code, said) == (4, [])


def test_an_error_of_a_unit_is_raised_with_its_node_where_there_are_several(ray: FakeRay) -> None:
    failed = [("failed", Unreachable("no answer"))]
    ray.scripts = dict.fromkeys("nm", lambda actor, given: failed if given else works(actor, given))
    for alive, sentence in (({"n": 1, "m": 1}, r"^on the node host-.: no answer$"), ({"n": 1}, r"^no answer$")):  # fmt: skip
        ray.alive = dict(alive)
        with pytest.raises(Unreachable, match=sentence):
            run(10)


def test_paths_of_one_machine_are_refused_where_there_are_more_also_for_the_next_stream(
    ray: FakeRay,
) -> None:
    with closing(engine_of(local=["/here"])) as engine:
        for _ in range(2):
            with pytest.raises(RecipeError, match=r"nodes beside this one \(host-m\), and /here is of this machine alone"):  # fmt: skip
                list(engine.run([call(print)], silent, print))
    del ray.alive["m"]
    assert run(10, local=["/here"]) == TEN


def test_what_a_node_is_told(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store is and no credential; the cap of --memory."""
    for name in ray_engine.STORES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    pool = PoolSettings(workers=3, memory=300 * MIB)
    run(1, pool=pool)
    assert [options["num_cpus"] for options in ray.asked] == [2, 2], "what the node has"
    assert ray.begun[0] == (__version__, pool, {"S3_ENDPOINT_URL": "http://here"})


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    """Starts one in this process, which is not to end where nobody asks any more."""
    monkeypatch.setattr(ray_cluster.signal, "alarm", lambda _: None)
    monkeypatch.setitem(vars(sys.modules["__main__"]), "__file__", "here")
    with ExitStack() as ends:

        def start(version: str = __version__, **environment: str) -> Supervisor:
            supervisor = Supervisor(version, settings(2), environment)
            ends.callback(supervisor.end)
            return supervisor

        yield start


def tells_endpoint(attempt: Any, reporter: Any) -> Any:
    reporter.on_progress(7, 8)
    return os.environ["S3_ENDPOINT_URL"], os.environ["AWS_REGION"], os.getppid()


def fails(attempt: Any, reporter: Any) -> Any:
    raise ValueError("a reason")


def test_a_supervisor_does_units_with_workers_and_tells_what_they_say(
    node: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's own store stays its own."""
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://node")
    monkeypatch.delenv("AWS_REGION", raising=False)
    supervisor = node(S3_ENDPOINT_URL="http://driver", AWS_REGION="eu")
    assert supervisor.exchange([], 0.0) == []
    *told, last = supervisor.exchange([(3, call(tells_endpoint))], SECONDS)
    assert last == ("done", 3, ("http://node", "eu", os.getpid()))
    assert told == [("progress", 7, 8)]
    what, error = supervisor.exchange([(4, call(fails))], SECONDS)[-1]
    assert (what, str(error)) == ("failed", "a reason")
    supervisor.end()
    assert (supervisor.engine.workers, supervisor.engine.idle) == ([], [])


def test_a_node_with_another_mdsmix_says_so(node: Callable[..., Supervisor]) -> None:
    ((_, error),) = node("0.0.7").exchange([(3, call(tells_endpoint))], 0.0)
    assert f"has mdsmix {__version__}, and this run is of mdsmix 0.0.7: install" in str(error)


def test_a_supervisor_that_nobody_asks_ends() -> None:
    """Ray ends no actor whose node is lost."""
    program = "from mdsmix.engines import ray_cluster as node; from tests.tasks import settings; import time; node.SILENT_SECONDS = 1; node.Supervisor(node.__version__, settings(), {}).exchange([], 0.0); time.sleep(600)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -14

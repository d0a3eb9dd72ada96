"""What the driver of a Ray cluster decides when a node answers, is lost or stands still, by a Ray of this file; and the supervisor of a
node, without a Ray. tests/ray has a real cluster."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix import __version__
from mdsmix.engines import ray_engine
from mdsmix.engines.local_engine import PoolSettings
from mdsmix.engines.ray_cluster import Supervisor
from mdsmix.engines.ray_engine import MOST_LOSSES, RayEngine
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from tests.alarm import SECONDS
from tests.tasks import call, settings, silent

MIB = 1 << 20
Units = Sequence[tuple[int, Any]]
Script = Callable[[Units], Any]
"What a supervisor answers to the units that it is given: an exception is raised, and None never comes."


class RayError(Exception):
    pass


def works(given: Units) -> Any:
    """A node that does each unit at once."""
    done = [("done", number, number * 10) for number, _ in given]
    return [("progress", len(done), 0), *done]


@dataclass
class FakeRay:
    """A cluster of the nodes n, which is the driver's, and m, with their processors. An answer is its own reference."""

    alive: dict[str, int] = field(default_factory=lambda: {"n": 2, "m": 2})
    scripts: dict[str, Script] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    begun: list[tuple[Any, ...]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    @property
    def exceptions(self) -> Any:
        return SimpleNamespace(RayError=RayError)

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
        node = options["scheduling_strategy"]

        def made(*told: Any) -> Any:
            self.begun.append(told)
            exchange = lambda given, _: Answer(self.scripts.get(node, works)(given))  # noqa: E731
            return SimpleNamespace(
                node=node,
                exchange=SimpleNamespace(remote=exchange),
                end=SimpleNamespace(remote=lambda: Answer(True)),
            )

        return lambda cls: SimpleNamespace(remote=made)

    def wait(self, answers: list[Answer], num_returns: int = 1, timeout: float = 0) -> Any:
        return [answer for answer in answers if answer.said is not None], []

    def get(self, answer: Answer) -> Any:
        if isinstance(answer.said, Exception):
            raise answer.said
        return answer.said

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.node)


@dataclass(eq=False)
class Answer:
    said: Any


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Each look at the time takes a second, so that nodes are looked at again and again."""
    fake, seconds = FakeRay(), itertools.count(10**6)
    time = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda seconds: None)
    monkeypatch.setattr(ray_engine, "time", time)
    strategy = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda id, soft: id)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategy)
    monkeypatch.setattr(ray_engine, "connected", lambda address, workers: nullcontext())
    return fake


def run(
    units: int,
    said: list[str] | None = None,
    pool: PoolSettings | None = None,
    local: Sequence[str] = (),
    sizes: list[int] | None = None,
) -> list[tuple[int, Any]]:
    with closing(RayEngine("", pool or settings(0), local)) as engine:
        tell = print if said is None else said.append
        on_progress = silent if sizes is None else lambda size, _: sizes.append(size)
        return sorted(engine.run([call(print, n) for n in range(units)], on_progress, tell))


TEN = [(n, n * 10) for n in range(10)]


def test_a_node_has_a_unit_for_each_of_its_workers_and_one_that_waits(ray: FakeRay) -> None:
    """Progress is passed on, and a sentence that several nodes say, once."""
    most, said, sizes = list[int](), list[str](), list[int]()

    def noting(given: Units) -> Any:
        most.append(len(given))
        return [("say", "a store is slow"), *works(given)]

    ray.scripts = {"n": noting, "m": noting}
    assert run(10, said, sizes=sizes) == TEN
    assert max(most) == 3
    assert (said, sum(sizes)) == (["a store is slow"], 10)
    assert {options["num_cpus"] for options in ray.asked} == {2}
    assert ray.killed == ["n", "m"], "each is ended with the engine"


def test_where_nothing_is_to_do_ray_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, and most runs find all up to date."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(0) == []


def once(way: Callable[[], Any]) -> Script:
    """A node that is lost as soon as it has units, and its successor works."""
    lost = list[int]()

    def script(given: Units) -> Any:
        if not given or lost:
            return works(given)
        lost.append(1)
        return way()

    return script


def test_units_of_a_lost_node_are_done_again_and_said_once(ray: FakeRay) -> None:
    for name, way in (
        ("raised", lambda: RayError("the actor died\nfor a reason.")),
        ("gone", lambda: ray.alive.pop("m") and None),
    ):
        ray.alive, ray.scripts, said = {"n": 2, "m": 2}, {"m": once(way)}, list[str]()
        assert run(10, said) == TEN, name
        (sentence,) = said
        assert sentence.startswith("the node host-m was lost"), name
        assert ("(for a reason);" in sentence) is (name == "raised")
        assert "are done again" in sentence


def test_an_answer_of_a_unit_that_was_given_to_another_node_is_not_taken(ray: FakeRay) -> None:
    ray.scripts["m"] = lambda given: [("done", 0, "late"), *works(given)]
    assert run(10) == TEN


def test_what_is_lost_again_and_again_ends_the_run(ray: FakeRay) -> None:
    """A unit, and supervisors that never begin."""
    said = list[str]()
    ray.scripts = dict.fromkeys("nm", lambda given: RayError("died") if given else works(given))
    over = f"{MOST_LOSSES + 1} nodes were lost .* over the work unit number 1"
    with pytest.raises(MdsmixError, match=over):
        run(1, said)
    assert len(said) == MOST_LOSSES
    ray.scripts = {"n": lambda given: RayError("No module named 'mdsmix'")}
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
    ray.scripts = dict.fromkeys("nm", lambda given: failed if given else works(given))
    for alive, said in (("nm", "^on the node host-.: no answer$"), ("n", "^no answer$")):
        ray.alive = dict.fromkeys(alive, 1)
        with pytest.raises(Unreachable, match=said):
            run(10)


def test_paths_of_one_machine_are_refused_where_there_are_more_also_for_the_next_stream(
    ray: FakeRay,
) -> None:
    said = r"nodes beside this one \(host-m\), and /here is of this machine alone"
    with closing(RayEngine("", settings(0), ["/here"])) as engine:
        for _ in range(2):
            with pytest.raises(RecipeError, match=said):
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
    monkeypatch.setattr("mdsmix.engines.ray_cluster.signal.alarm", lambda _: None)
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
    """The node's own store stays its own. Another mdsmix is refused."""
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
    ((_, error),) = node("0.0.7").exchange([(3, call(tells_endpoint))], 0.0)
    assert f"has mdsmix {__version__}, and this run is of mdsmix 0.0.7: install" in str(error)


def test_a_supervisor_that_nobody_asks_ends() -> None:
    """Ray ends no actor whose node is lost."""
    program = (
        "from mdsmix.engines import ray_cluster as node; from tests.tasks import settings; import time; "
        "node.SILENT_SECONDS = 1; node.Supervisor(node.__version__, settings(), {}).exchange([], 0.0); time.sleep(600)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -14

"""Joining a Ray cluster; what its driver decides when a node answers, is lost or stands still; and
the supervisor of a node: by a Ray of this file. tests/ray has a real cluster.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mdsmix import __version__
from mdsmix.engines import ray_cluster, ray_engine
from mdsmix.engines.local_engine import PoolSettings
from mdsmix.engines.ray_cluster import Supervisor, parse_engine
from mdsmix.engines.ray_engine import MOST_LOSSES, RayEngine
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.storage import store_addresses
from mdsmix.storage.s3 import S3Path
from tests.alarm import WAIT_SECONDS
from tests.converting import Web
from tests.tasks import ignore_progress, make_call, make_settings

Units = Sequence[tuple[int, Any]]
Script = Callable[[Units], Any]
"""What a supervisor answers to the units that it is given: an exception is raised, and None never
comes.
"""
RayError = type("RayError", (Exception,), {})


def test_where_the_cluster_is_and_what_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: object())
    for own in ("", "10.0.0.5:6379"):
        monkeypatch.setenv("RAY_ADDRESS", own)
        found = [parse_engine(said) for said in ("local", "ray", "ray://auto", "ray://h:6379")]
        assert found == [None, own, "auto", "h:6379"]
    for said in ("", "Ray", "ray://", "ray:10.0.0.5", "slurm", "dask://h:1"):
        with pytest.raises(RecipeError, match=f"^--engine {said} is not an engine: write `local`"):
            parse_engine(said)


def test_without_ray_a_sentence_names_the_extra(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is not imported for nothing: it takes seconds, and most runs find all up to date."""
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    web.holds(["A document."])
    for more, said in (((), "pip install 'mdsmix[ray]'"), (("--part", "1/2"), "and --engine out")):
        answer = web.convert("--engine", "ray", *more)
        assert (answer.code, answer.out, said in answer.err) == (2, "", True)
    assert not web.out.exists()
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(0) == []


def test_a_cluster_that_wants_a_token_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how. And no other one is started."""
    refused = ConnectionError("Failed to connect to Ray cluster at h:1")
    refused.__cause__ = RuntimeError("RPC error: InvalidAuthToken: a token is missing")
    rays_own = type("AuthenticationError", (Exception,), {})  # none of Python's errors
    for error in (refused, rays_own("Token authentication is enabled, no token found")):
        ray = mock.Mock(init=mock.Mock(side_effect=error), is_initialized=bool)
        monkeypatch.setitem(sys.modules, "ray", ray)
        said = r"\(it requires a token: .*RAY_AUTH_MODE=token"
        with pytest.raises(Unreachable, match=said), ray_cluster.connect_to_cluster("auto", None):
            pass
        assert ray.shutdown.called


def test_clusters_of_one_process_have_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reads a token once in a process: with another one a second cluster never starts. The
    third one is not up in time.
    """
    tokens = list[str | None]()

    def init(**_: Any) -> None:
        tokens.append(os.environ.get("RAY_AUTH_TOKEN"))
        if len(tokens) > 2:
            raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    for _ in range(2):
        ray_cluster._start_cluster("a", 1)
    assert len(set(tokens)) == 1
    assert tokens[0]
    late = r"could not be started on this machine \(The current node"
    with pytest.raises(Unreachable, match=late):
        ray_cluster._start_cluster("a", 1)


def works(given: Units) -> Any:
    """A node that does each unit at once."""
    done = [("done", number, number * 10) for number, _ in given]
    return [("progress", len(done), 0), *done]


class FakeRay:
    """A cluster of the nodes n, which is the driver's, and m, with their processors. An answer is
    called for what it says.
    """

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self) -> None:
        self.alive, self.scripts = {"n": 2, "m": 2}, dict[str, Script]()
        self.begun, self.killed = list[tuple[Any, ...]](), list[str]()

    def nodes(self) -> list[dict[str, Any]]:
        names = ("NodeID", "Alive", "NodeManagerHostname", "Resources")
        known = ((id, True, f"host-{id}", {"CPU": cpus}) for id, cpus in self.alive.items())
        return [dict(zip(names, each, strict=True)) for each in known]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "n")

    def remote(self, num_cpus: int, scheduling_strategy: str) -> Any:
        def answer(given: Units, _: float) -> Callable[[], Any]:
            said = self.scripts.get(scheduling_strategy, works)(given)
            return lambda: said

        def begin(*told: Any) -> Any:
            self.begun.append((num_cpus, *told))
            exchange, end = (SimpleNamespace(remote=method) for method in (answer, lambda: bool))
            return SimpleNamespace(node=scheduling_strategy, exchange=exchange, end=end)

        return lambda cls: SimpleNamespace(remote=begin)

    def wait(self, answers: list[Any], num_returns: int = 1, timeout: float = 0) -> Any:
        return [answer for answer in answers if answer() is not None], []

    def get(self, answer: Any) -> Any:
        if isinstance(answer(), Exception):
            raise answer()
        return answer()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.node)


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
    monkeypatch.setattr(ray_engine, "connect_to_cluster", lambda address, workers: nullcontext())
    return fake


def run(
    units: int, say: Any = print, heard: Any = ignore_progress, **more: Any
) -> list[tuple[int, Any]]:
    arguments = {"pool": make_settings(0), "environment": {}} | more
    with closing(RayEngine("", **arguments)) as engine:
        return sorted(engine.run([make_call(print, n) for n in range(units)], heard, say))


TEN = [(n, n * 10) for n in range(10)]


def test_a_node_has_a_unit_for_each_of_its_workers_and_one_that_waits(ray: FakeRay) -> None:
    """Progress is passed on, and a sentence that several nodes say, once."""
    most, said, sizes = list[int](), list[str](), list[int]()

    def noting(given: Units) -> Any:
        most.append(len(given))
        return [("say", "a store is slow"), *works(given)]

    ray.scripts = {"n": noting, "m": noting}
    assert run(10, said.append, lambda size, _: sizes.append(size)) == TEN
    assert (max(most), said, sum(sizes)) == (3, ["a store is slow"], 10)
    ray.alive = {"n": 16}
    run(40)
    assert max(most) == 16 + 16 // 8 + 1, "a worker does a unit while it stores the last one"
    assert ray.killed == ["n", "m", "n"], "each is ended with the engine"


def once(way: Callable[[], Any]) -> Script:
    """A node that is lost as soon as it has units, and its successor works."""
    ways = [way]
    return lambda given: ways.pop()() if given and ways else works(given)


def test_units_of_a_lost_node_are_done_again_and_said_once(ray: FakeRay) -> None:
    died = RayError("the actor died\nfor a reason.")
    ways = {"raised": lambda: died, "gone": lambda: ray.alive.pop("m") and None}
    for name, way in ways.items():
        ray.alive, ray.scripts, said = {"n": 2, "m": 2}, {"m": once(way)}, list[str]()
        assert run(10, said.append) == TEN, name
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
        run(1, said.append)
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
        run(10, said.append)
    assert (error.value.exit_code, said) == (4, [])


def test_an_error_of_a_unit_is_raised_with_its_node_where_there_are_several(ray: FakeRay) -> None:
    failed = [("failed", Unreachable("no answer"))]
    ray.scripts = dict.fromkeys("nm", lambda given: failed if given else works(given))
    for alive, said in (("nm", "^on the node host-.: no answer$"), ("n", "^no answer$")):
        ray.alive = dict.fromkeys(alive, 1)
        with pytest.raises(Unreachable, match=said):
            run(10)


def test_paths_of_one_machine_are_refused_where_there_are_more_nodes(ray: FakeRay) -> None:
    said = r"has further nodes \(host-m\), and only this machine has /here"
    with closing(RayEngine("", make_settings(0), {}, ["/here"])) as engine:
        for _ in range(2):
            with pytest.raises(RecipeError, match=said):
                list(engine.run([make_call(print)], ignore_progress, print))
    del ray.alive["m"]
    assert run(10, local=["/here"]) == TEN


def test_what_a_node_is_told(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store is and no credential; the cap of --memory."""
    for name in S3Path.address_variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = {"S3_ENDPOINT_URL": "http://here"}
    assert store_addresses() == store
    pool = PoolSettings(workers=3, memory=300 << 20)
    run(1, pool=pool, environment=store)
    run(1, environment=store)
    told = [(2, __version__, each, store) for each in (pool, make_settings(2))]
    assert ray.begun[::2] == told, "processors that the node has"


def tells_or_fails(name: str, attempt: Any, reporter: Any) -> Any:
    reporter.on_progress(7, 8)
    return os.environ[name], os.environ["AWS_REGION"], os.getppid()


def test_a_supervisor_does_units_and_tells_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in this process, which is not to end. The node's own store stays its own. Another
    mdsmix is refused.
    """
    monkeypatch.setattr("mdsmix.engines.ray_cluster.signal.alarm", lambda _: None)
    monkeypatch.setitem(vars(sys.modules["__main__"]), "__file__", "here")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://node")
    monkeypatch.delenv("AWS_REGION", raising=False)
    driver = {"S3_ENDPOINT_URL": "http://driver", "AWS_REGION": "eu"}
    supervisor = Supervisor(__version__, make_settings(2), driver)
    try:
        assert supervisor.exchange([], 0.0) == []
        told = supervisor.exchange(
            [(3, make_call(tells_or_fails, "S3_ENDPOINT_URL"))], WAIT_SECONDS
        )
        assert told == [("progress", 7, 8), ("done", 3, ("http://node", "eu", os.getpid()))]
        what, error = supervisor.exchange(
            [(4, make_call(tells_or_fails, "no name"))], WAIT_SECONDS
        )[-1]
        assert (what, str(error)) == ("failed", "'no name'")
    finally:
        supervisor.end()
    assert (supervisor.engine.workers, supervisor.engine.idle) == ([], [])
    ((_, error),) = Supervisor("0.0.7", make_settings(2), {}).exchange([(3, make_call(print))], 0.0)
    assert f"has mdsmix {__version__}, and this run uses mdsmix 0.0.7: install" in str(error)


def test_a_supervisor_that_nobody_asks_ends() -> None:
    """Ray ends no actor whose node is lost."""
    program = (
        "from mdsmix.engines import ray_cluster as node; from tests.tasks import make_settings; import time; "
        "node.SILENT_SECONDS = 1; node.Supervisor(node.__version__, make_settings(), {}).exchange([], 0.0); time.sleep(600)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -14

"""Joining a Ray cluster, the decisions of its driver when a node answers or is lost, and the
supervisor of a node. The Ray here is a fake one of this file; tests/ray has a real cluster.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
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
from tests.converting import Project
from tests.tasks import ignore_progress, make_call, make_settings

Units = Sequence[tuple[int, Any]]
Script = Callable[[Units], Any]
"""The answer of a supervisor to the units that it gets: an exception is raised, and None means that
it never answers.
"""
RayError = type("RayError", (Exception,), {})


def test_the_option_engine_is_parsed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: object())
    for default in ("", "10.0.0.5:6379"):
        monkeypatch.setenv("RAY_ADDRESS", default)
        engines = ("local", "ray", "ray://auto", "ray://h:6379")
        assert list(map(parse_engine, engines)) == [None, default, "auto", "h:6379"]
    for engine in ("", "Ray", "ray://", "ray:10.0.0.5", "slurm", "dask://h:1"):
        message = f"^--engine {engine} is not an engine: write `local`"
        with pytest.raises(RecipeError, match=message):
            parse_engine(engine)


def test_without_ray_the_message_names_the_extra_to_install(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is not imported needlessly: it takes seconds, and in most runs all is up to date."""
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    project.write_source(["A document."])
    for options, words in (
        ((), "pip install 'mdsmix[ray]'"),
        (("--part", "1/2"), "cannot be combined with --finish"),
    ):
        answer = project.convert("--engine", "ray", *options)
        assert (answer.code, answer.out) == (2, "")
        assert words in answer.err
    assert not project.out.exists()
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(0) == []


def test_a_cluster_that_requires_a_token_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says how to set one, and no other cluster is started."""
    refused = ConnectionError("Failed to connect to Ray cluster at h:1")
    refused.__cause__ = RuntimeError("RPC error: InvalidAuthToken: a token is missing")
    error_of_ray = type("AuthenticationError", (Exception,), {})
    for error in (refused, error_of_ray("Token authentication is enabled, no token found")):
        ray = mock.Mock(init=mock.Mock(side_effect=error), is_initialized=bool)
        monkeypatch.setitem(sys.modules, "ray", ray)
        message = r"\(the cluster requires a token: .*RAY_AUTH_MODE=token"
        with (
            pytest.raises(Unreachable, match=message),
            ray_cluster.connect_to_cluster("auto", None),
        ):
            pass
        assert ray.shutdown.called


def test_clusters_of_one_process_have_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reads a token once in a process: with another one a second cluster never starts. Here
    the third one does not start in time.
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
    message = r"could not be started on this machine \(The current node"
    with pytest.raises(Unreachable, match=message):
        ray_cluster._start_cluster("a", 1)


def test_a_signal_while_a_cluster_starts_or_stops_leaves_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A notebook's kernel goes on after an Interrupt, with the processes that Ray has forgotten."""
    steps = list[str]()

    def do(step: str, **_: Any) -> None:
        steps.append(f"{step} begins")
        signal.raise_signal(signal.SIGINT)
        steps.append(f"{step} ends")

    init = partial(do, "init")
    shutdown = partial(do, "shutdown")
    ray = SimpleNamespace(init=init, shutdown=shutdown, is_initialized=bool)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(KeyboardInterrupt), ray_cluster.connect_to_cluster("", 1):
        raise AssertionError("the conversion has begun")
    assert steps == ["init begins", "init ends", "shutdown begins", "shutdown ends"]


def do_units(units: Units) -> Any:
    """Answer as a node that does each unit at once."""
    done = [("done", number, number * 10) for number, _ in units]
    return [("progress", len(done), 0), *done]


class FakeRay:
    """A cluster of the nodes n, which is the driver's, and m, with their processors. An answer is a
    function that returns the messages.
    """

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self) -> None:
        self.alive = {"n": 2, "m": 2}
        self.scripts = dict[str, Script]()
        self.begun = list[tuple[Any, ...]]()
        "Processors and arguments of each supervisor that was started."
        self.killed = list[str]()

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": id,
                "Alive": True,
                "NodeManagerHostname": f"host-{id}",
                "Resources": {"CPU": processors},
            }
            for id, processors in self.alive.items()
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "n")

    def remote(self, num_cpus: int, scheduling_strategy: str) -> Any:
        def answer(units: Units, _: float) -> Callable[[], Any]:
            messages = self.scripts.get(scheduling_strategy, do_units)(units)
            return lambda: messages

        def begin(*arguments: Any) -> Any:
            self.begun.append((num_cpus, *arguments))
            return SimpleNamespace(
                node=scheduling_strategy,
                exchange=SimpleNamespace(remote=answer),
                end=SimpleNamespace(remote=lambda: bool),
            )

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
    """Replace Ray by a fake one. Each reading of the time takes a second, so that nodes are checked
    again and again.
    """
    fake = FakeRay()
    seconds = itertools.count(10**6)
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


def test_a_node_gets_a_unit_for_each_worker_and_one_that_waits(ray: FakeRay) -> None:
    """Progress is passed on; a sentence of several nodes is shown once."""
    counts = list[int]()
    sentences = list[str]()
    sizes = list[int]()

    def count_and_do(units: Units) -> Any:
        counts.append(len(units))
        return [("say", "a store is slow"), *do_units(units)]

    ray.scripts = {"n": count_and_do, "m": count_and_do}
    assert run(10, sentences.append, lambda size, _: sizes.append(size)) == TEN
    assert (max(counts), sentences, sum(sizes)) == (3, ["a store is slow"], 10)
    ray.alive = {"n": 16}
    run(40)
    assert max(counts) == 16 + 16 // 8 + 1, "a worker does a unit while it stores the last one"
    assert ray.killed == ["n", "m", "n"], "each is ended with the engine"


def lose_once(loss: Callable[[], Any]) -> Script:
    """Answer as a node that is lost as soon as it has units, and whose successor works."""
    losses = [loss]

    def answer(units: Units) -> Any:
        return losses.pop()() if units and losses else do_units(units)

    return answer


def test_units_of_a_lost_node_are_done_again_and_reported_once(ray: FakeRay) -> None:
    died = RayError("the actor died\nfor a reason.")
    losses = {"raised": lambda: died, "gone": lambda: ray.alive.pop("m") and None}
    for name, loss in losses.items():
        ray.alive = {"n": 2, "m": 2}
        ray.scripts = {"m": lose_once(loss)}
        sentences = list[str]()
        assert run(10, sentences.append) == TEN, name
        (sentence,) = sentences
        assert sentence.startswith("the node host-m was lost"), name
        assert ("(for a reason);" in sentence) is (name == "raised")
        assert "are done again" in sentence


def test_a_late_answer_for_a_unit_of_another_node_is_ignored(ray: FakeRay) -> None:
    ray.scripts["m"] = lambda units: [("done", 0, "late"), *do_units(units)]
    assert run(10) == TEN


def test_a_unit_that_is_lost_again_and_again_ends_the_run(ray: FakeRay) -> None:
    """So do supervisors that never begin."""
    sentences = list[str]()
    ray.scripts = dict.fromkeys("nm", lambda units: RayError("died") if units else do_units(units))
    message = f"{MOST_LOSSES + 1} nodes were lost .* they had the work unit number 1"
    with pytest.raises(MdsmixError, match=message):
        run(1, sentences.append)
    assert len(sentences) == MOST_LOSSES
    ray.scripts = {"n": lambda units: RayError("No module named 'mdsmix'")}
    del ray.alive["m"]
    with pytest.raises(
        MdsmixError, match=r"The last one, the node host-n, was lost \(No module named"
    ):
        run(1)


def test_a_run_ends_with_a_message_if_the_node_of_its_driver_has_ended(ray: FakeRay) -> None:
    """Its GCS and other nodes are alive, and Ray raises an error only for each actor."""
    ray.scripts["m"] = lose_once(lambda: ray.alive.pop("n") and None)
    sentences = list[str]()
    with pytest.raises(Unreachable, match="the Ray node on this machine has ended") as error:
        run(10, sentences.append)
    assert (error.value.exit_code, sentences) == (4, [])


def test_the_error_of_a_unit_names_its_node_if_there_are_several(ray: FakeRay) -> None:
    failed = [("failed", Unreachable("no answer"))]
    ray.scripts = dict.fromkeys("nm", lambda units: failed if units else do_units(units))
    for alive, message in (("nm", "^on the node host-.: no answer$"), ("n", "^no answer$")):
        ray.alive = dict.fromkeys(alive, 1)
        with pytest.raises(Unreachable, match=message):
            run(10)


def test_paths_of_one_machine_are_refused_if_there_are_more_nodes(ray: FakeRay) -> None:
    message = r"has other nodes \(host-m\), and only this machine has /here"
    with closing(RayEngine("", make_settings(0), {}, ["/here"])) as engine:
        for _ in range(2):
            with pytest.raises(RecipeError, match=message):
                list(engine.run([make_call(print)], ignore_progress, print))
    del ray.alive["m"]
    assert run(10, local=["/here"]) == TEN


def test_a_node_gets_settings_and_addresses_of_stores_but_no_credentials(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in S3Path.address_variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = {"S3_ENDPOINT_URL": "http://here"}
    assert store_addresses() == store
    pool = PoolSettings(workers=3, memory=300 << 20)
    run(1, pool=pool, environment=store)
    run(1, environment=store)
    arguments = [(2, __version__, settings, store) for settings in (pool, make_settings(2))]
    assert ray.begun[::2] == arguments, "the node has two processors"


def read_environment(name: str, attempt: Any, reporter: Any) -> Any:
    reporter.on_progress(7, 8)
    return os.environ[name], os.environ["AWS_REGION"], os.getppid()


def test_a_supervisor_does_units_and_passes_on_their_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs in this process, which must not end. Variables of the node take precedence. Another
    version of mdsmix is refused.
    """
    monkeypatch.setattr("mdsmix.engines.ray_cluster.signal.alarm", lambda _: None)
    monkeypatch.setitem(vars(sys.modules["__main__"]), "__file__", "here")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://node")
    monkeypatch.delenv("AWS_REGION", raising=False)
    driver = {"S3_ENDPOINT_URL": "http://driver", "AWS_REGION": "eu"}
    supervisor = Supervisor(__version__, make_settings(2), driver)
    try:
        assert supervisor.exchange([], 0.0) == []
        unit = (3, make_call(read_environment, "S3_ENDPOINT_URL"))
        messages = supervisor.exchange([unit], WAIT_SECONDS)
        assert messages == [("progress", 7, 8), ("done", 3, ("http://node", "eu", os.getpid()))]
        unit = (4, make_call(read_environment, "no name"))
        kind, error = supervisor.exchange([unit], WAIT_SECONDS)[-1]
        assert (kind, str(error)) == ("failed", "'no name'")
    finally:
        supervisor.end()
    assert (supervisor.engine.workers, supervisor.engine.idle) == ([], [])
    ((_, error),) = Supervisor("0.0.7", make_settings(2), {}).exchange([(3, make_call(print))], 0.0)
    assert f"has mdsmix {__version__}, and this run uses mdsmix 0.0.7: install" in str(error)


def test_a_supervisor_that_gets_no_more_calls_ends() -> None:
    """Ray does not end the actors of a lost node."""
    program = (
        "from mdsmix.engines import ray_cluster as node; "
        "from tests.tasks import make_settings; import time; node.SILENT_SECONDS = 1; "
        "node.Supervisor(node.__version__, make_settings(), {}).exchange([], 0.0); time.sleep(600)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -14

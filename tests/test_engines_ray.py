"""What of Ray's engine is decided without Ray; tests/ray has a real cluster."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix.engines import ray_cluster, ray_nodes, ray_worker
from mdsmix.engines.attempts import Attempt, Place
from mdsmix.engines.memory import AMPLE_BYTES, HEADROOM
from mdsmix.engines.ray_cluster import address_of
from mdsmix.engines.ray_nodes import Nodes, refuse_unshared
from mdsmix.engines.ray_worker import Board, News, RayReporter, Sent
from mdsmix.engines.tasks import TaskQueue
from mdsmix.errors import Denied, RecipeError, Unreachable
from mdsmix.storage import locate
from tests.alarm import SECONDS
from tests.converting import documents, mdsmix, write_jsonl, write_recipe
from tests.tasks import call

GIB = 1 << 30
PLACE = Place(file="a", ordinal=3, shown="byte 3", length=9, records=1)


@pytest.fixture
def has_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: object())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("has_ray")
def test_where_the_cluster_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [address_of(said) for said in ("local", "ray", "ray://auto", "ray://h:6379")] == [None, "", "auto", "h:6379"]  # fmt: skip
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert [address_of(said) for said in ("local", "ray", "ray://auto")] == [None, "10.0.0.5:6379", "auto"]  # fmt: skip


@pytest.mark.usefixtures("has_ray")
@pytest.mark.parametrize("said", ["", "Ray", "ray://", "ray:10.0.0.5", "slurm", "dask://h:1"])
def test_another_engine_is_refused(said: str) -> None:
    with pytest.raises(RecipeError, match=f"^--engine {said} is none: `local` is "):
        address_of(said)


def test_without_ray_a_sentence_names_the_extra(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    web = write_jsonl(tmp_path / "a.jsonl", [{"text": "A document. " * 9}])
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": documents(web)})
    answer = mdsmix("convert", recipe, "--engine", "ray")
    assert (answer.code, answer.out) == (2, "")
    assert "pip install 'mdsmix[ray]'" in answer.err
    assert not (tmp_path / "out").exists()
    part = mdsmix("convert", recipe, "--engine", "ray", "--part", "1/2")
    assert (part.code, "leave --engine out" in part.err) == (2, True)


@pytest.mark.parametrize("address", ["nonsense", "h:port"])
def test_an_address_of_no_cluster_is_told(address: str) -> None:
    with pytest.raises(RecipeError, match="is no address of a Ray cluster"):
        ray_cluster._refuse_deaf(address)


def test_an_address_at_which_nobody_listens_is_told_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(Unreachable, match=rf"no Ray cluster can be joined at {address} \(Connection refused\)"):  # fmt: skip
            ray_cluster._refuse_deaf(address)
    ray_cluster._refuse_deaf("auto")


@pytest.mark.parametrize(
    ("answer", "is_ray"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"", False),
        (b"\0\0\x18\4" + b"\0" * 29, True),
    ],
)
def test_who_listens_and_speaks_no_grpc_is_told(answer: bytes, is_ray: bool) -> None:
    """The port of Ray's dashboard is one that is easily taken for the cluster's."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(100)
                peer.sendall(answer)

        speaker = threading.Thread(target=speak)
        speaker.start()
        refused = pytest.raises(Unreachable, match="not Ray's port, 6379 as a rule")
        with nullcontext() if is_ray else refused:
            ray_cluster._refuse_deaf(f"127.0.0.1:{server.getsockname()[1]}")
        speaker.join()


class AuthenticationError(Exception):
    """Like Ray's own, which is none of Python's errors."""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            ConnectionError("Failed to connect to Ray cluster at h:1"),
            RuntimeError("RPC error: InvalidAuthToken: Authentication token is missing"),
        ),
        (AuthenticationError("Token authentication is enabled but no token was found."), None),
    ],
)
def test_a_cluster_that_cannot_be_joined_starts_no_other_and_one_that_wants_a_token_says_how(
    error: Exception, cause: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts a cluster of this machine where its context is asked for and nothing was joined: a minute, for nothing."""

    def refuse(**_: Any) -> None:
        raise error from cause

    ended = list[str]()
    ray = SimpleNamespace(init=refuse, is_initialized=bool, shutdown=lambda: ended.append("ray"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(Unreachable, match=r"\(it asks for a token: .*RAY_AUTH_MODE=token"), ray_cluster.connected("auto", None):  # fmt: skip
        pass
    assert ended


@pytest.mark.parametrize(("command", "code"), [("--version", 0), ("--nonsense", 2)])
def test_a_head_that_has_gone_when_all_is_done_changes_no_exit_code(
    command: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, ended = threading.Event(), list[int]()
    ray = SimpleNamespace(is_initialized=lambda: True, shutdown=hangs.wait)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_cluster, "head_answers", bool)
    monkeypatch.setattr(ray_cluster, "SHUTDOWN_SECONDS", 0.01)
    monkeypatch.setattr(ray_cluster, "_stuck", threading.Event())
    monkeypatch.setattr(ray_cluster.atexit, "register", lambda *_: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    ray_cluster._leave(is_own=False)
    assert mdsmix(command).code == code
    assert ended == [code]
    hangs.set()


class Started:
    """A Ray that notes the token of each cluster that is started; the third one is not up in time."""

    def __init__(self) -> None:
        self.tokens = list[str | None]()

    def init(self, **_: Any) -> None:
        self.tokens.append(os.environ.get("RAY_AUTH_TOKEN"))
        if len(self.tokens) > 2:
            raise Exception("The current node timed out during startup.")  # as Ray does


def test_clusters_of_one_process_have_one_token_and_one_that_is_late_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray reads a token once in a process: with another one a second cluster never starts."""
    for name in ray_cluster.TOKENS:
        monkeypatch.delenv(name, raising=False)
    ray = Started()
    monkeypatch.setitem(sys.modules, "ray", ray)
    for _ in range(2):
        ray_cluster._start("a", 1)
    assert len(set(ray.tokens)) == 1
    assert ray.tokens[0]
    with pytest.raises(Unreachable, match=r"could not be started on this machine \(The current node"):  # fmt: skip
        ray_cluster._start("a", 1)
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_a_worker_that_is_asked_to_stop_again_takes_back_what_it_has_written_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_worker, "node_id", lambda: "n")
    monkeypatch.setattr(ray_worker, "_telling", lambda board: lambda news, sure: None)
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    sent = Sent(memory=GIB, settings={}, meeting=None, of="", many=False)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ray_worker.do(pickle.dumps((call(stop_twice, tmp_path), Attempt())), "a", sent, None)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is before


def stop_twice(folder: Path, attempt: Attempt, reporter: Any) -> None:
    half = folder / "half"
    try:
        half.touch()
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.raise_signal(signal.SIGINT)
        half.unlink()


def found(*cpus_and_memory: tuple[float, int]) -> Nodes:
    """Nodes n0, n1, ...; the driver's is n0."""
    names = [f"n{n}" for n in range(len(cpus_and_memory))]
    each = list(zip(names, cpus_and_memory, strict=True))
    return Nodes(
        here="n0",
        cpus={name: cpus for name, (cpus, _) in each if cpus},
        memory={name: memory for name, (cpus, memory) in each if cpus},
        names={name: f"host-{name}" for name in names},
    )


@pytest.mark.parametrize(
    ("nodes", "cap", "share"),
    [
        (found((4, 64 * GIB)), None, AMPLE_BYTES),
        (found((4, 64 * GIB)), 16 * GIB, int(4 * GIB * HEADROOM)),
        (found((4, 64 * GIB), (8, 4 * GIB)), None, int(GIB / 2 * HEADROOM)),
        (found((4, 2 * GIB)), 64 * GIB, int(GIB / 2 * HEADROOM)),
        (found((64, 2 * GIB)), None, 256 << 20),
        (found((0, GIB)), None, AMPLE_BYTES),
    ],
)
def test_a_task_asks_for_what_every_node_can_give_to_each_processor(
    nodes: Nodes, cap: int | None, share: int
) -> None:
    assert nodes.share(cap) == share


def test_only_nodes_that_live_and_have_a_processor_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(name: str, cpus: float, is_alive: bool = True) -> dict[str, Any]:
        resources = {"CPU": cpus, "memory": 7.0} if cpus else {}
        return {"NodeID": name, "Alive": is_alive, "Resources": resources, "NodeManagerHostname": f"host-{name}"}  # fmt: skip

    here = SimpleNamespace(get_node_id=lambda: "a")
    every = [node("a", 2.0), node("b", 4.0, False), node("c", 0.0), node("d", 0.5)]
    fake = SimpleNamespace(nodes=lambda: every, get_runtime_context=lambda: here)
    monkeypatch.setitem(sys.modules, "ray", fake)
    seen = ray_nodes.nodes()
    assert (seen.here, seen.cpus, seen.memory, seen.slots) == ("a", {"a": 2.0}, {"a": 7}, 2)
    assert seen.names["b"] == "host-b", "of what is lost a sentence names the host"


def test_paths_of_one_machine_are_refused_where_there_are_more() -> None:
    refuse_unshared(found((2, GIB)), ["/data"])
    refuse_unshared(found((0, GIB), (2, GIB)), [])
    with pytest.raises(RecipeError, match=r"\(host-n1\), and /data is a path of this machine.*shared: true"):  # fmt: skip
        refuse_unshared(found((0, GIB), (2, GIB)), ["/data"])


def test_a_task_whose_node_was_lost_is_tried_as_before() -> None:
    queue = TaskQueue([call(print, n) for n in range(3)], set_aside=False)
    number, attempt, _ = queue.take()
    queue.give_back(number, attempt)
    assert queue.take()[:2] == (0, Attempt())


def news(execution: str = "a", **more: Any) -> News:
    return News(execution=execution, node="n", **more)


def test_a_board_adds_up_what_nobody_has_read() -> None:
    board = Board()
    for told in (
        news(size=3, said=("a",)),
        news("b", tokens=1),
        news(size=4, tokens=2, place=PLACE, said=("b",)),
    ):
        board.tell(told)
    whole = news(size=7, tokens=2, place=PLACE, said=("a", "b"))
    assert board.take() == [whole, news("b", tokens=1)]
    assert board.take() == []


@pytest.mark.parametrize("sure", [False, True])
def test_after_a_death_each_piece_is_told_before_it_is_touched(sure: bool) -> None:
    told: list[tuple[Place | None, int, bool]] = []
    reporter = RayReporter(lambda n, s: told.append((n.place, n.size, s)), news(), 1 << 50, sure)
    reporter.on_progress(2, 1)
    reporter.on_progress(3, 1)
    reporter.on_records(PLACE)
    assert told == ([(PLACE, 5, True)] if sure else [])
    assert reporter.news().size == (0 if sure else 5)
    assert (reporter.whole().size, reporter.whole().tokens) == (5, 2)
    assert not reporter.is_tight()
    assert RayReporter(print, news(), 1, sure).is_tight()


def test_a_thread_tells_where_a_task_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "BEAT_SECONDS", 0.01)
    told, third = [], threading.Event()

    def tell(news: News, sure: bool) -> None:
        told.append(news)
        if len(told) > 2:
            third.set()

    reporter = RayReporter(tell, news(), 1 << 50, sure=False)
    with reporter.beating():
        reporter.on_progress(5, 1)
        assert third.wait(SECONDS)
    assert sum(each.size for each in told) == 5
    assert all(each.held > 0 for each in told)
    assert "board" not in [thread.name for thread in threading.enumerate()]


def test_a_worker_refuses_to_write_where_the_driver_did_not(tmp_path: Path) -> None:
    meeting = locate(str(tmp_path / "a"))
    for content in (None, b"another run"):
        if content:
            meeting.write(content)
        with pytest.raises(Unreachable, match=f"does not see what this run has written to {tmp_path}"):  # fmt: skip
            ray_worker._refuse_elsewhere(meeting, "this run")
    meeting.write(b"this run")
    ray_worker._refuse_elsewhere(meeting, "this run")


def test_what_could_not_be_reached_is_told_with_its_node() -> None:
    host = socket.gethostname()
    for kind in (Unreachable, Denied):
        placed = ray_worker._placed(kind("a is gone"))
        assert (type(placed), str(placed)) == (kind, f"on the node {host}: a is gone")
    other = RecipeError("a")
    assert ray_worker._placed(other) is other


def test_a_node_keeps_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://own")
    monkeypatch.setenv("AWS_REGION", "")  # so that it is taken back
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    monkeypatch.setattr(ray_worker, "node_id", lambda: "n")
    monkeypatch.setattr(ray_worker, "_telling", lambda board: lambda news, sure: None)
    settings = {"S3_ENDPOINT_URL": "http://driver", "AWS_REGION": "moon"}
    sent = Sent(memory=GIB, settings=settings, meeting=None, of="", many=True)
    packed = pickle.dumps((call(where), Attempt()))
    said, value, _ = ray_worker.do(packed, "a", sent, None)
    assert (said, value) == ("done", ("http://own", "moon"))
    said, error, _ = ray_worker.do(pickle.dumps((call(gone), Attempt())), "a", sent, None)
    assert (said, str(error)) == ("failed", f"on the node {socket.gethostname()}: gone")


def where(attempt: Attempt, reporter: Any) -> tuple[str, str]:
    return os.environ["S3_ENDPOINT_URL"], os.environ["AWS_REGION"]


def gone(attempt: Attempt, reporter: Any) -> None:
    raise Unreachable("gone")


def test_a_worker_tells_where_it_is_before_it_looks_for_the_meeting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A mount that does not answer is a silence that the driver hears only of a worker that it has heard of."""
    told = threading.Event()
    monkeypatch.setattr(ray_worker, "node_id", lambda: "n")
    monkeypatch.setattr(ray_worker, "_telling", lambda board: lambda news, sure: told.set())
    monkeypatch.setattr(ray_worker, "_refuse_elsewhere", lambda meeting, of: elsewhere(told))
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    sent = Sent(memory=GIB, settings={}, meeting=locate(str(tmp_path)), of="a", many=False)
    said, error, _ = ray_worker.do(pickle.dumps((call(gone), Attempt())), "a", sent, None)
    assert (said, str(error)) == ("failed", "elsewhere")


def elsewhere(told: threading.Event) -> None:
    assert told.wait(SECONDS)
    raise Unreachable("elsewhere")


@pytest.mark.parametrize("deaths", [0, 1])
def test_a_try_after_a_death_is_told_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    told = list[Place | None]()
    monkeypatch.setattr(ray_worker, "node_id", lambda: "n")
    monkeypatch.setattr(
        ray_worker,
        "_telling",
        lambda board: lambda news, sure: told.append(news.place) if sure else None,
    )
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    sent = Sent(memory=GIB, settings={}, meeting=None, of="", many=False)
    ray_worker.do(pickle.dumps((call(touch), Attempt(deaths=deaths))), "a", sent, None)
    assert told == [PLACE] * deaths


def touch(attempt: Attempt, reporter: Any) -> None:
    reporter.on_records(PLACE)

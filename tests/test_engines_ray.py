"""Joining a Ray cluster, by a Ray of this file; tests/ray has a real one."""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix.engines import ray_cluster
from mdsmix.engines.ray_cluster import address_of
from mdsmix.errors import RecipeError, Unreachable
from tests.converting import documents, mdsmix, write_jsonl, write_recipe


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
    assert (part.code, "and --engine out" in part.err) == (2, True)


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
    """Ray waits for the head where it is to end a connection: nobody asks it to."""
    ended = list[int]()
    ray = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_cluster, "head_answers", bool)
    monkeypatch.setattr(ray_cluster, "_headless", threading.Event())
    monkeypatch.setattr(ray_cluster.atexit, "register", lambda *_: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    ray_cluster._leave(is_own=False)
    assert mdsmix(command).code == code
    assert ended == [code]


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

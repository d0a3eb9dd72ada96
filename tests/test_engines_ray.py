"""Joining a Ray cluster, by a Ray of this file; tests/ray has a real one."""

from __future__ import annotations

import os
import sys
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

    def refuse(**_: Any) -> None:
        raise error from cause

    ended = list[str]()
    ray = SimpleNamespace(init=refuse, is_initialized=bool, shutdown=lambda: ended.append("ray"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(Unreachable, match=r"\(it asks for a token: .*RAY_AUTH_MODE=token"), ray_cluster.connected("auto", None):  # fmt: skip
        pass
    assert ended


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
    monkeypatch.setattr(os, "environ", {})
    ray = Started()
    monkeypatch.setitem(sys.modules, "ray", ray)
    for _ in range(2):
        ray_cluster._start("a", 1)
    assert len(set(ray.tokens)) == 1
    assert ray.tokens[0]
    with pytest.raises(Unreachable, match=r"could not be started on this machine \(The current node"):  # fmt: skip
        ray_cluster._start("a", 1)

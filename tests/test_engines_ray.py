"""Joining a Ray cluster, by a Ray of this file; tests/ray has a real one."""

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


def test_where_the_cluster_is_and_what_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: object())
    for known, own in (("", ""), ("10.0.0.5:6379", "10.0.0.5:6379")):
        monkeypatch.setenv("RAY_ADDRESS", known)
        found = [address_of(said) for said in ("local", "ray", "ray://auto", "ray://h:6379")]
        assert found == [None, own, "auto", "h:6379"]
    for said in ("", "Ray", "ray://", "ray:10.0.0.5", "slurm", "dask://h:1"):
        with pytest.raises(RecipeError, match=f"^--engine {said} is none: `local` is "):
            address_of(said)


def test_without_ray_a_sentence_names_the_extra(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    web = write_jsonl(tmp_path / "a.jsonl", [{"text": "A document."}])
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": documents(web)})
    for more, said in (((), "pip install 'mdsmix[ray]'"), (("--part", "1/2"), "and --engine out")):
        answer = mdsmix("convert", recipe, "--engine", "ray", *more)
        assert (answer.code, answer.out, said in answer.err) == (2, "", True)
    assert not (tmp_path / "out").exists()


class AuthenticationError(Exception):
    """Like Ray's own, which is none of Python's errors."""


def test_a_cluster_that_wants_a_token_is_not_joined_and_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no other one is started."""
    inner = RuntimeError("RPC error: InvalidAuthToken: Authentication token is missing")
    for error, cause in (
        (ConnectionError("Failed to connect to Ray cluster at h:1"), inner),
        (AuthenticationError("Token authentication is enabled but no token was found."), None),
    ):
        ended = list[str]()

        def refuse(error: Exception = error, cause: Any = cause, **_: Any) -> None:
            raise error from cause

        ray = SimpleNamespace(init=refuse, is_initialized=bool, shutdown=lambda: ended.append(""))  # noqa: B023
        monkeypatch.setitem(sys.modules, "ray", ray)
        said = r"\(it asks for a token: .*RAY_AUTH_MODE=token"
        with pytest.raises(Unreachable, match=said), ray_cluster.connected("auto", None):
            pass
        assert ended


def test_clusters_of_one_process_have_one_token_and_one_that_is_late_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray reads a token once in a process: with another one a second cluster never starts. The third one is not up in time."""
    tokens = list[str | None]()

    def init(**_: Any) -> None:
        tokens.append(os.environ.get("RAY_AUTH_TOKEN"))
        if len(tokens) > 2:
            raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    for _ in range(2):
        ray_cluster._start("a", 1)
    assert len(set(tokens)) == 1
    assert tokens[0]
    late = r"could not be started on this machine \(The current node"
    with pytest.raises(Unreachable, match=late):
        ray_cluster._start("a", 1)

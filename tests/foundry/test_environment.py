"""mdsmix installed beside LLM-Foundry, with the transformers and the Streaming that it pins: the same bytes, read by both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.converting import write_recipe
from tests.foundry.conftest import SCRIPTS, Foundry
from tests.foundry.steps import converted
from tests.foundry.test_train import LOADER, streams


@pytest.fixture(scope="module")
def settings(corpus_folder: Path) -> dict[str, Any]:
    listed = streams(corpus_folder)
    return {"streams": listed, "max_seq_len": 128, "train_loader": LOADER}


@pytest.fixture(scope="module")
def here(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, settings: dict[str, Any]
) -> Path:
    """The mix converted in this environment."""
    return converted(tmp_path_factory.mktemp("here"), tokenizer_folder, **settings).parent / "out"


def test_both_environments_write_the_same_bytes_and_the_real_loader_draws_from_them(
    foundry_python: Path,
    here: Path,
    settings: dict[str, Any],
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    recipe = write_recipe(tmp_path, tokenizer_folder, **settings)
    # A cache of its own: the tokenizer is to be read by Foundry's transformers, not found in a snapshot.
    environment = os.environ | {"MDSMIX_CACHE": str(tmp_path / "cache")}
    for command in (["convert", recipe], ["render-yaml", recipe, "-o", "o.yaml", "--validate"]):
        done = subprocess.run(
            [foundry_python.with_name("mdsmix"), *command],
            env=environment,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    assert "(2, 128), (2, 128)" in done.stderr
    ours, theirs = published(here), published(tmp_path / "out")
    assert len([name for name in ours if name.endswith(".mds")]) >= 5
    assert ours == theirs


def published(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of all that readers read: shards, index and manifest, of every stream."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("*/*/*") if p.is_file()}


def test_streaming_of_both_environments_draws_the_same_samples(
    here: Path, foundry: Foundry
) -> None:
    listed = {
        name: {"local": str(here / name), "split": "train", "repeat": repeat}
        for name, repeat in {"web": 0.5, "docs": 1, "faq": 1, "chat": 2}.items()
    }
    theirs = foundry("samples.drawn", streams=listed)
    command = [sys.executable, SCRIPTS / "samples.py", json.dumps(listed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours = json.loads(done.stdout.splitlines()[-1])
    assert theirs["version"].startswith("0.12.")
    assert theirs | {"version": ""} == ours | {"version": ""}
    assert ours["samples"] > 600

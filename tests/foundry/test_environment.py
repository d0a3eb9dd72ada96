"""mdsmix installed beside LLM-Foundry, with the transformers and the Streaming that it pins: the same bytes, and the real loader draws from them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.converting import write_recipe
from tests.foundry.steps import converted
from tests.foundry.test_train import LOADER, streams


def test_both_environments_write_the_same_bytes_and_the_real_loader_draws_from_them(
    foundry_python: Path, corpus_folder: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    settings = {"streams": streams(corpus_folder), "max_seq_len": 128, "train_loader": LOADER}
    converted(tmp_path / "ours", tokenizer_folder, **settings)
    (tmp_path / "theirs").mkdir()
    recipe = write_recipe(tmp_path / "theirs", tokenizer_folder, **settings)
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
    ours, theirs = (published(tmp_path / side / "out") for side in ("ours", "theirs"))
    assert len([name for name in ours if name.endswith(".mds")]) >= 5
    assert ours == theirs


def published(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of all that readers read: shards, index and manifest, of every stream."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("*/*/*") if p.is_file()}

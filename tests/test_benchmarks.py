"""What `make bench` times runs, and does the same work; how fast it is no test can say."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import outputs
from benchmarks.contenders import HERE
from tests.converting import documents, run_recipe, token_rows, write_recipe


def _script(name: str, *arguments: object) -> str:
    command = [sys.executable, HERE / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_worker_is_ready_without_transformers(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing them takes 2.5 s, the start of a worker 0.1; here they cannot be imported at all."""
    (tmp_path / "transformers.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert float(_script("worker_start.py", tokenizer_folder)) > 0


def test_the_ceiling_writes_the_rows_that_mdsmix_writes(
    tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path
) -> None:
    source, out = corpus_folder / "docs.jsonl", tmp_path / "ceiling"
    out.mkdir()
    _script("ceiling.py", source, tokenizer_folder / "tokenizer.json", out, 16)
    (ours,) = run_recipe(write_recipe(tmp_path, tokenizer_folder, streams={"s": documents(source)}))
    assert token_rows(out) == token_rows(ours.target)
    assert 0 <= outputs.mdsmix(Path(ours.target)) - outputs.mds_rows(out) < 16

"""What `make bench` times runs, and does the same work; how fast it is no test can say."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import outputs
from benchmarks.contenders import HERE
from benchmarks.synthetic import stream
from mdsmix.shards.index import read_index
from mdsmix.storage import locate
from tests.converting import documents, mdsmix, run_recipe, token_rows, write_recipe


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


BESIDE = """
import os, subprocess, sys, time
from pathlib import Path
from benchmarks.measure import measure
server = subprocess.Popen([sys.executable, "-c", "x = bytes(300 << 20); import time; time.sleep(600)"])
left = "import time; time.sleep(0.7)"
command = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {left!r}])"
began = time.monotonic()
run = measure([sys.executable, "-c", command], os.environ, Path(sys.argv[1]), memory=True)
print(time.monotonic() - began > 0.7, server.poll() is None, 0 < run.peak < 200 << 20)
server.kill()
"""


def test_what_a_command_leaves_behind_is_waited_for_and_a_server_beside_it_is_not_nor_counted(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", BESIDE, tmp_path / "log"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE.parent)
    assert done.stdout.split() == ["True"] * 3


def test_a_synthetic_stream_is_a_stream_of_so_many_samples_and_no_two_shards_alike(
    tmp_path: Path,
) -> None:
    folder = stream(tmp_path / "s", 1_003, 40)
    index = read_index(locate(str(folder)))
    assert (index.samples, len(index.shards)) == (1_003, 40)
    assert len({file.basename for file in index.files}) == 40
    assert len(token_rows(folder)) == 1_003
    said = mdsmix("verify", folder)
    assert said.code == 0, said.err

"""A run of any length holds a bounded number of descriptors and processes, and goes on where one before it ended."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdsmix.engines import local_engine as local
from mdsmix.engines import workers as worker
from tests.converting import documents, files, run_recipe, windows, write_jsonl, write_recipe

UNITS = 40


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """So many units that each wear a worker out, and room for 30 descriptors."""
    windows(monkeypatch, 600)
    monkeypatch.setattr(worker, "resident", lambda pid: 1 << 60)
    texts = [{"text": f"Document {n}: " + "the quick brown fox " * 30} for n in range(UNITS)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Is filled with the workers that were started."""
    started, start = list[Any](), local.start_worker

    def starting(*given: Any) -> Any:
        started.append(start(*given))
        return started[-1]

    monkeypatch.setattr(local, "start_worker", starting)
    return started


@pytest.fixture
def _few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_few_descriptors")
def test_a_run_of_more_units_than_descriptors_ends_and_one_after_it_wears_nobody_out(
    recipe: Path, tmp_path: Path, starts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run knows no source by its stamp, and so has to hash every unit to find that it is done."""
    outcome = run_recipe(recipe, workers=2)[0]
    assert outcome.units >= UNITS
    assert len(starts) >= UNITS
    published = files(tmp_path / "out")
    starts.clear()
    monkeypatch.setattr(worker, "resident", lambda pid: 0)
    shutil.rmtree(Path(os.environ["MDSMIX_CACHE"]) / "seen")
    again = run_recipe(recipe, workers=2)[0]
    assert (again.done, len(starts)) == (0, 2)
    assert files(tmp_path / "out") == published


def test_many_streams_are_done_by_the_same_workers(
    tmp_path: Path, tokenizer_folder: Path, starts: list[Any]
) -> None:
    """A worker costs 0.2 s until its tokenizer is warm: each of 200 small streams forked one."""
    names = [f"s{number}" for number in range(30)]
    for name in names:
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"of {name}, the {n}"} for n in range(9)])
    streams = {name: documents(tmp_path / f"{name}.jsonl") for name in names}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    assert [outcome.done for outcome in run_recipe(recipe, workers=2)] == [1] * 30
    assert len(starts) == 1
    starts.clear()
    assert [outcome.done for outcome in run_recipe(recipe, workers=2)] == [0] * 30
    assert starts == []

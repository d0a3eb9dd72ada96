"""A run of any length holds a bounded number of descriptors and processes, and goes on where one before it ended."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdsmix.engines import local_engine as local
from mdsmix.engines import workers as worker
from tests.converting import Web, documents, files, run_recipe, windows

UNITS = 32


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
    """Room for 30."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_few_descriptors")
def test_a_run_of_more_units_than_descriptors_ends_and_one_after_it_wears_nobody_out(
    web: Web, starts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unit wears a worker out. The second run knows no source by its stamp, so it hashes every unit to find that it is done."""
    windows(monkeypatch, 600)
    monkeypatch.setattr(worker, "resident", lambda pid: 1 << 60)
    web.holds(f"Document {n}: " + "the quick brown fox " * 30 for n in range(UNITS))
    assert web.run(workers=2).units >= UNITS
    assert len(starts) >= UNITS
    published = files(web.out)
    starts.clear()
    monkeypatch.setattr(worker, "resident", lambda pid: 0)
    shutil.rmtree(Path(os.environ["MDSMIX_CACHE"]) / "seen")
    assert (web.run(workers=2).done, len(starts)) == (0, 2)
    assert files(web.out) == published


def test_many_streams_are_done_by_the_same_workers(web: Web, starts: list[Any]) -> None:
    """A worker costs 0.2 s until its tokenizer is warm: each of 200 small streams forked one."""
    names = [f"s{number}" for number in range(12)]
    for name in names:
        web.holds((f"of {name}, the {n}" for n in range(9)), f"{name}.jsonl")
    web.says(streams={name: documents(f"{name}.jsonl") for name in names})
    for done, started in ((1, 1), (0, 0)):
        assert [each.done for each in run_recipe(web.recipe, workers=2)] == [done] * 12
        assert len(starts) == started
        starts.clear()

"""Timing of loaders: which batches are counted, and that no file or process is left over, even if
a measurement fails.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mdsmix.bench import speed
from mdsmix.bench.loader_bench import LoaderSetting
from mdsmix.bench.speed import time_pass
from tests.clock import Clock
from tests.converting import mdsmix, run_ok
from tests.with_torch.load_streams import config, write_tokens

ROWS = 4


class Loader:
    """Batches of 4 rows. Each takes `making` seconds, except the first `ready`, which are ready."""

    def __init__(self, clock: Clock, batches: int, making: float, ready: int = 0) -> None:
        self.clock = clock
        self.batches = batches
        self.making = making
        self.ready = ready
        self.batch_size = ROWS

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.batches):
            if number >= self.ready:
                self.clock.sleep(self.making)
            yield {"attention_mask": torch.ones(ROWS, 3, dtype=torch.int64)}


def test_a_step_waits_as_long_as_a_batch_takes_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that were ready are not counted: 5 of 13 come at once, and would make the loader look
    twice as fast.
    """
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    alone = LoaderSetting(0)
    ahead = LoaderSetting(2, 2)
    loader = Loader(clock, 1000, 1 / 64)
    measured = time_pass(loader, alone, "warm", step=1 / 256, seconds=0.5, most_batches=None)
    assert (measured.first, measured.wait, measured.samples) == (1 / 64, 1 / 64, 64 * ROWS)
    # Half of the time each, and between them the batches that are ready.
    assert measured.batches == 1 + 13 + alone.ready + 16
    loader = Loader(clock, 13, 0.02, ready=ahead.ready)
    measured = time_pass(loader, ahead, "warm", step=0.0, seconds=60, most_batches=None)
    assert measured.samples / ROWS == pytest.approx(50)
    assert measured.batches <= 13


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files. Its name is short: a worker of torch opens a socket
    below it, whose path has at most 107 characters; with a longer path the loader waits forever.
    """
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_no_cache_is_left_over_or_touched(
    temporary: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    """One stream has a remote folder, so that cold and warm passes are measured; its local folder
    is the user's own cache. The other has none.
    """
    project = str(write_tokens(tmp_path / "web", 200, size_limit=2000))
    docs = str(write_tokens(tmp_path / "docs", 200, size_limit=2000))
    mixed = {"web": {"remote": project, "local": str(tmp_path / "cache")}, "docs": {"local": docs}}
    tree = config(mixed, "text", shuffle=True) | {"tokenizer": {"name": str(tokenizer_folder)}}
    train = tmp_path / "train.yaml"
    tuned = tmp_path / "tuned"
    train.write_text(json.dumps(tree))
    short = ("--seconds", 0.2, "--step-ms", 5, "--workers", "0,1", "--prefetch", 2, "--batch", 4)
    answer = run_ok("bench", train, *short, "-o", tuned, "--json")
    report = json.loads(answer.out)
    caches = [(row["workers"], row["cache"]) for row in report["rows"]][:4]
    assert caches == [(0, "cold"), (0, "warm"), (1, "cold"), (1, "warm")]
    assert all(row["samples_per_second"] > 0 for row in report["rows"])
    assert tuned.read_text().splitlines() == report["overrides"]
    assert report["overrides"][0] in ("train_loader.num_workers=0", "train_loader.num_workers=1")
    assert f"the {report['waits']} waits" in report["verdict"]
    assert not (tmp_path / "cache").exists(), "the user's own cache is neither read nor made"
    assert list(temporary.glob("mdsmix-bench-*")) == []
    answer = mdsmix("bench", train, "--batch", 300, "--workers", "0", "--seconds", 0.2)
    assert answer.code == 2
    assert "is too small to measure: bench a larger mix" in answer.err.strip().splitlines()[-1]

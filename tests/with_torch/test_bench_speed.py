"""Loaders timed: what is counted and what is not, and that nothing is left behind, whatever
happens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mdsmix.bench import LoaderSetting, speed
from mdsmix.bench.speed import timed
from tests.clock import Clock
from tests.converting import done, mdsmix
from tests.with_torch.load_streams import config, write_tokens

ROWS = 4


class Loader:
    """Batches of 4 rows that take `making` seconds each, but the first `ready`, which lie there."""

    def __init__(self, clock: Clock, batches: int, making: float, ready: int = 0) -> None:
        self.clock, self.batches, self.making, self.ready = clock, batches, making, ready
        self.batch_size = ROWS

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.batches):
            if number >= self.ready:
                self.clock.sleep(self.making)
            yield {"attention_mask": torch.ones(ROWS, 3, dtype=torch.int64)}


def test_a_step_waits_as_long_as_a_batch_takes_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that lay ready count for nothing: 5 of 13 come at once, and would make the loader
    look twice as fast.
    """
    monkeypatch.setattr(speed, "time", clock := Clock())
    alone, ahead, loader = LoaderSetting(0), LoaderSetting(2, 2), Loader(clock, 1000, 1 / 64)
    found = timed(loader, alone, "warm", step=1 / 256, seconds=0.5, most=None)
    assert (found.first, found.wait, found.samples) == (1 / 64, 1 / 64, 64 * ROWS)
    # Half of the time each, and between them what lies ready.
    assert found.batches == 1 + 13 + alone.ready + 16
    loader = Loader(clock, 13, 0.02, ready=ahead.ready)
    found = timed(loader, ahead, "warm", step=0.0, seconds=60, most=None)
    assert found.samples / ROWS == pytest.approx(50)
    assert found.batches <= 13


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files. Its name is short: a worker of torch opens a socket
    below it, whose path has 107 characters at most, and where it is longer the loader waits for
    ever.
    """
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_nothing_is_left(temporary: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    """Cold and warm are measured of a stream with a remote folder, whose local folder nobody may
    touch, and of one without.
    """
    web, docs = (str(write_tokens(tmp_path / n, 200, size_limit=2000)) for n in ("web", "docs"))
    mixed = {"web": {"remote": web, "local": str(tmp_path / "cache")}, "docs": {"local": docs}}
    tree = config(mixed, "text", shuffle=True) | {"tokenizer": {"name": str(tokenizer_folder)}}
    train, tuned = tmp_path / "train.yaml", tmp_path / "tuned"
    train.write_text(json.dumps(tree))
    short = ("--seconds", 0.2, "--step-ms", 5, "--workers", "0,1", "--prefetch", 2, "--batch", 4)
    said = done("bench", train, *short, "-o", tuned, "--json")
    report = json.loads(said.out)
    caches = [(row["workers"], row["cache"]) for row in report["rows"]][:4]
    assert caches == [(0, "cold"), (0, "warm"), (1, "cold"), (1, "warm")]
    assert all(row["samples_per_second"] > 0 for row in report["rows"])
    assert tuned.read_text().splitlines() == report["overrides"]
    assert report["overrides"][0] in ("train_loader.num_workers=0", "train_loader.num_workers=1")
    assert f"the {report['waits']} waits" in report["verdict"]
    assert not (tmp_path / "cache").exists(), "the user's own cache is neither read nor made"
    assert list(temporary.glob("mdsmix-bench-*")) == []
    said = mdsmix("bench", train, "--batch", 300, "--workers", "0", "--seconds", 0.2)
    assert said.code == 2
    assert "is too small to measure: bench a larger mix" in said.err.strip().splitlines()[-1]

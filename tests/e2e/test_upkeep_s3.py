"""Verify, repair, gc and the lease at a real store: the same answers as on a disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.errors import Unreachable
from mdsmix.shards import lease as lease_module
from mdsmix.shards.index import read_index
from mdsmix.shards.lease import lease
from mdsmix.storage import Location, locate
from tests.alarm import SECONDS
from tests.converting import (
    documents,
    lying_at,
    mdsmix,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.test_shards_lease import BEAT, ELSEWHERE, LAST_LOOK, Clock, at_look

TEXTS = [{"text": f"Document {n} is about the number {n}. " * 3} for n in range(60)]


@pytest.fixture
def root(bucket: str) -> Location:
    return locate(f"s3://{bucket}/a folder/ü")


@pytest.fixture
def recipe(
    bucket: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    windows(monkeypatch, 1500)
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, {"text": 5}])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    settings: dict[str, Any] = {"remote": f"s3://{bucket}/mix", "streams": streams}
    return write_recipe(tmp_path, tokenizer_folder, **settings)


@pytest.fixture
def published(bucket: str, recipe: Path) -> Location:
    run_recipe(recipe)
    return locate(f"s3://{bucket}/mix/web/train")


def shards(folder: Location) -> list[Location]:
    return [folder / shard.stored.basename for shard in read_index(folder).shards]


def flip(place: Location) -> None:
    data = bytearray(place.read())
    data[-1] ^= 0x55
    place.write(data)


def test_of_many_that_create_one_does(root: Location) -> None:
    together = threading.Barrier(4)

    def create(number: int) -> bool:
        together.wait(SECONDS)
        return (root / "a").create(b"%d" % number) is not None

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(create, range(4))) == 1


def test_a_stream_is_verified_repaired_and_verified(published: Location, recipe: Path) -> None:
    before = lying_at(published)
    answer = mdsmix("verify", published)
    assert (answer.code, answer.out.endswith("bytes: whole\n")) == (0, True)
    flipped, gone = shards(published)[0], shards(published)[2]
    flip(flipped)
    gone.delete()
    answer = mdsmix("verify", published, "--json")
    assert answer.code == 3
    assert {f["file"] for f in json.loads(answer.out)["faults"]} == {flipped.name, gone.name}
    assert mdsmix("verify", published, "--quick").out.count("fault ") == 1
    answer = mdsmix("repair", published.parent, "--recipe", recipe, "--workers", "1")
    assert answer.code == 0
    assert "repaired, 2 of " in answer.out
    assert lying_at(published) == before
    assert mdsmix("verify", published).code == 0


def test_the_lease_is_refused_while_its_heart_beats_and_taken_over_when_it_stops(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(lease_module, "time", clock)
    at = root / ".mdsmix" / "lease"
    at.write(orjson.dumps(asdict(ELSEWHERE)))
    beat = orjson.dumps(asdict(replace(ELSEWHERE, beat=1)))
    with monkeypatch.context() as patch:
        at_look(patch, LAST_LOOK, lambda: at.write(beat))
        with pytest.raises(Unreachable, match=r"by process 12 on another\.host since 2031"):
            lease(root, lambda _: None).__enter__()
    assert clock.now == pytest.approx(lease_module.STALE_BEATS * lease_module.BEAT_SECONDS)
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", BEAT)
    with lease(root, lambda _: None) as held:
        held.confirm()
        deadline = time.monotonic() + SECONDS
        while orjson.loads(at.read())["beat"] < 3:
            assert time.monotonic() < deadline
            time.sleep(BEAT)
        at.write(beat)
        with pytest.raises(Unreachable, match="taken over by another run"):
            held.confirm()
    assert at.read() == beat, "what another holds is not let go"


def test_a_run_that_was_killed_is_gone_on_with(recipe: Path, bucket: str, tmp_path: Path) -> None:
    """Two in earnest: the second watches until the heart of the first has stood still for long, and does the work."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS * 2000)
    code = (
        "import sys; from mdsmix.cli.main import run; sys.argv = ['mdsmix', *sys.argv[1:]]; run()"
    )
    command = [sys.executable, "-c", code, "convert", str(recipe), "--workers", "1"]
    first = subprocess.Popen(command, env=os.environ, start_new_session=True)
    at = locate(f"s3://{bucket}/mix/web/train/.mdsmix/lease")
    deadline = time.monotonic() + SECONDS
    while not at.stat():
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert at.stat()
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    answer = mdsmix("convert", recipe, "--workers", "1")
    assert (answer.code, f"held by process {first.pid} on " in answer.err) == (0, True)
    assert at.stat() is None

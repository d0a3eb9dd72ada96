"""Verify, repair, the lease and a run that was overtaken at a real store: the same answers as on a disk."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import orjson
import pytest

from mdsmix.errors import Unreachable
from mdsmix.shards import lease as lease_module
from mdsmix.shards.index import read_index
from mdsmix.shards.lease import lease
from mdsmix.storage import Location, locate
from tests.alarm import SECONDS
from tests.clock import Clock
from tests.converting import (
    documents,
    lying_at,
    mdsmix,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.stalled import stalled_everywhere
from tests.test_shards_lease import BEAT, ELSEWHERE, LAST_LOOK, at_look

TEXTS = [{"text": f"Document {n} is about the number {n}. " * 3} for n in range(60)]


@pytest.fixture
def root(bucket: str) -> Location:
    return locate(f"s3://{bucket}/a folder/ü")


@pytest.fixture
def recipe(bucket: str, tmp_path: Path, tokenizer_folder: Path) -> Path:
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, remote=f"s3://{bucket}/mix", streams=streams)


def test_of_many_that_create_one_does(root: Location) -> None:
    together = threading.Barrier(4)

    def create(number: int) -> bool:
        together.wait(SECONDS)
        return (root / "a").create(b"%d" % number) is not None

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(create, range(4))) == 1


def test_a_run_that_stands_still_at_any_step_publishes_nothing_over_a_newer_one(
    recipe: Path, bucket: str
) -> None:
    stalled_everywhere(recipe, locate(f"s3://{bucket}/mix/web/train"), "replace")


def test_a_stream_is_verified_repaired_and_verified(
    recipe: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 1500)
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, {"text": 5}])
    run_recipe(recipe)
    published = locate(f"s3://{bucket}/mix/web/train")
    before = lying_at(published)
    shards = [published / shard.stored.basename for shard in read_index(published).shards]
    flipped, gone, content = shards[0], shards[2], shards[0].read()
    flipped.write(content[:-1] + bytes([content[-1] ^ 0x55]))
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

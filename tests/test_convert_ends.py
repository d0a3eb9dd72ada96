"""A run may end anywhere, killed or by a power cut: the old stream is there or the new one, whole, and the same command again
makes what it would have made.

Every state that a run leaves behind one of its system calls is looked at. From some the run is started again:
its last six, and as many before and power cuts as `MDSMIX_TEST_ENDS` says (2); `MDSMIX_TEST_SEED` says which.
"""

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert.stored import UnitResult
from mdsmix.convert.unit import UnitTask
from mdsmix.engines.tasks import Attempt
from mdsmix.shards import lease as lease_module
from tests.converting import Web, lying_at, mdsmix, windows
from tests.here import Here
from tests.order import VERSION, current_of, faults
from tests.power import ends, lay_down
from tests.recording import TEMPORARY, Disk

ENDS = int(os.environ.get("MDSMIX_TEST_ENDS", "2"))
SEED = int(os.environ.get("MDSMIX_TEST_SEED", "0"))
TEXTS = [f"Document {n} is about the number {n}. " for n in range(30)]
SPLIT = "web/train"
LEFT = re.compile(rf"{TEMPORARY.pattern}|/\.mdsmix/lease$")
"A half-made file; and where the run had done all, its lease."
CHANGES = ("rename", "link", "unlink")
REPLACE, VERSIONED = "publish=replace", "publish=versioned"
WAYS = {
    "first": (None, REPLACE),
    "in place": (REPLACE, REPLACE),
    "versions": (VERSIONED, VERSIONED),
    "to versions": (REPLACE, VERSIONED),
    "from versions": (VERSIONED, REPLACE),
}
"How the stream was published, and how it is when the run ends."


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    windows(monkeypatch, 400)


def convert(web: Web, way: str, version: int = 0) -> None:
    """Writes the sources of a version first, where one is given. One record is bad; b.jsonl stays as it is."""
    if version:
        web.holds([{"text": version}, *(f"{text}{version}" for text in TEXTS)])
        web.holds(TEXTS[:20], "b.jsonl")
    answer = web.convert(way, "--workers", "1")
    assert answer.code == 0, answer


def gc(out: Path, *options: str) -> None:
    assert mdsmix("gc", out / "web", "--older-than", "0s", "--delete", *options).code == 0


@pytest.mark.parametrize("way", WAYS)
def test_wherever_a_conversion_ends_the_old_stream_stays_or_the_new_one_is_there(
    web: Web, way: str
) -> None:
    (before, after), out = WAYS[way], web.out
    if before:
        convert(web, before, 1)
    old, disk = lying_at(out), Disk(out, web.folder / "recorded")
    with disk.recording():
        convert(web, after, 2)
    new = lying_at(out)
    killed, cut = ends(disk, old, SEED, each=8)
    assert len(killed) > 20
    assert len(cut) > 20
    for end in (*killed, *cut):
        assert not faults(end.state), end.call
        reads = current_of(end.state, SPLIT)
        assert not reads or end.state[reads] in (*old.values(), *new.values())
        # A stream in place has its card before its index, and the card names no version.
        assert reads or not before or way == "from versions", end.call
        versions = {name for name in old if VERSION.match(name.rpartition("/")[0])}
        assert all(end.state.get(name) == old[name] for name in versions), end.call

    web.patch.setattr(lease_module, "BEAT_SECONDS", 0.01)
    rng, named = random.Random(SEED), [end for end in killed if end.call.what in CHANGES]
    chosen = [*named[-6:], *rng.sample(named[:-6], ENDS), *rng.sample(cut, ENDS)]
    for end in chosen:
        shutil.rmtree(out)
        lay_down(end.state, out)
        convert(web, after)
        left = lying_at(out).items()
        assert {name: content for name, content in left if not LEFT.search(name)} == new, end.call


def test_wherever_gc_ends_nothing_that_is_left_lacks_a_shard(web: Web) -> None:
    for way, version in ((REPLACE, 1), (REPLACE, 2), (VERSIONED, 3), (VERSIONED, 4)):
        convert(web, way, version)
    before, disk = lying_at(web.out), Disk(web.out, web.folder / "recorded")
    with disk.recording():
        gc(web.out, "--keep", "1")
    killed, cut = ends(disk, before, SEED, each=16)
    assert len(killed) > 5
    assert len(cut) > 2
    for end in (*killed, *cut):
        assert not faults(end.state), end.call
        assert current_of(end.state, SPLIT) == current_of(before, SPLIT)


def test_after_a_death_a_unit_takes_over_windows_whose_shards_lie_there(web: Web) -> None:
    """Every second unit has lost a shard by then."""
    encode_window, counts, done = UnitTask._encode, list[int](), list[int]()

    def counted(task: UnitTask, number: int, *rest: Any) -> Any:
        done.append(number)
        return encode_window(task, number, *rest)

    def twice(engine: Here, task: UnitTask) -> UnitResult:
        first = task.do(Attempt(), engine)()
        if is_lost := len(counts) % 2:
            (task.job.folder / first.records[0].shards[0].stored.basename).delete()
        done.clear()
        again = task.do(Attempt(deaths=1), engine)()
        assert again.records == first.records
        counts.append(len(done))
        assert len(done) == is_lost
        return again

    web.patch.setattr(UnitTask, "_encode", counted)
    web.patch.setattr(Here, "do", twice)
    convert(web, REPLACE, 1)
    assert set(counts) == {0, 1}

"""Killed anywhere, same bytes: SIGKILL of the whole process tree, and the same command again.

Three targets share the writes of a publication: before and after each of them a run is killed once.
`MDSMIX_TEST_KILLS` asks for as many at random moments (`make soak`: 100), `MDSMIX_TEST_SEED` says
at which. A machine that goes away says SIGTERM and waits: the run ends in order, and another
machine goes on. One that stands still for a while is overtaken.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zstandard

from mdsmix.shards.index import read_index
from mdsmix.shards.published import find_current
from mdsmix.storage import Location, locate
from tests.converting import Web, documents, done, lying_at, manifest_of, pairs, write_jsonl
from tests.killed_run import Run, Write
from tests.paused_run import stalled_everywhere

KILLS = int(os.environ.get("MDSMIX_TEST_KILLS", "0"))
SEED = int(os.environ.get("MDSMIX_TEST_SEED", "0"))
WINDOW = 4_000
STREAMS = ("web", "faq")
SHARD = re.compile(r"[0-9a-f]{32}(-\d+)?\.mds(\.zstd)?")
RECORD = re.compile(r"\.mdsmix/([0-9a-f]{32})-[0-9a-f]{8}\.unit")
LEFT_BEHIND = re.compile(r"\.[0-9a-f]{16}\.tmp$|/\.mdsmix/lease$")
"By a run that was killed in a write, or between its last write and letting go."
SAID = re.compile(r"(?m)^(\w+): (?:up to date|\d+ of \d+ work units converted)(?:, (\d+) reused)?")

PUBLISHING = (".mds", ".jsonl.zst", "mdsmix.manifest", "index.json")
"The leftovers part, the released bad records, the manifest, the index."
SIDES = ("before", "after")


def write_sources(folder: Path, version: int) -> None:
    """About six units a stream; version 2 is longer, another in its middle, and has other bad
    records.
    """
    sentence = "the quick brown fox jumps over the lazy dog, number {} of version {}"
    texts = [{"text": sentence.format(n, version if n > 100 else 1) * (n % 3)} for n in range(150)]
    write_jsonl(folder / "a.jsonl", [*texts, {"text": version}, *texts[: 10 * version]])
    packed = b"".join(json.dumps(text).encode() + b"\n" for text in texts[:90])
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(packed))
    asked = [{"prompt": f"What is {n}?", "response": f"It is {n + version}"} for n in range(300)]
    write_jsonl(folder / "c.jsonl", [*asked, {"prompt": "a question without an answer"}])


@dataclass
class Runs:
    """One recipe, run again and again: into a folder or into a bucket."""

    recipe: Path
    key: str
    root: str
    number: int
    replacing: str = ".index"
    "What is written only where an older stream is replaced."
    settings: tuple[str, ...] = ()
    late: int = 0
    """Records of killed workers that a store may have taken and not stored when they are looked
    for: one of each.
    """

    def arguments(self, target: str) -> list[str]:
        place = f"{self.key}={self.root}/{target}"
        return [str(self.recipe), place, *self.settings, "--workers", "2"]

    def start(self, target: str, end: Write | None = None) -> Run:
        return Run(self.arguments(target), WINDOW, self.recipe.parent / "writes.log", end)

    def folder(self, target: str, stream: str) -> Location:
        return locate(f"{self.root}/{target}/{stream}/train")

    def copy(self, source: str, target: str) -> None:
        for name, content in lying_at(f"{self.root}/{source}").items():
            locate(f"{self.root}/{target}/{name}").write(content)

    def content(self, target: str) -> dict[str, bytes]:
        """All that lies there but what a killed write may leave behind."""
        found = lying_at(f"{self.root}/{target}")
        return {name: content for name, content in found.items() if not LEFT_BEHIND.search(name)}


@pytest.fixture(params=["disk", "versions", "store"])
def runs(request: pytest.FixtureRequest, web: Web) -> Runs:
    web.windows(WINDOW)
    sources = [web.folder / name for name in ("a.jsonl", "b.jsonl.zst")]
    web.says(streams={"web": documents(sources), "faq": pairs(web.folder / "c.jsonl")})
    drop = "streams.web.duplicates=drop"  # its sources hold some, in one another and in themselves
    if request.param == "store":
        bucket = request.getfixturevalue("bucket")
        return Runs(web.recipe, "remote", f"s3://{bucket}", 2, settings=(drop,), late=2)
    if request.param == "disk":
        return Runs(web.recipe, "local", str(web.out), 0)
    settings = ("publish=versioned", drop)
    return Runs(web.recipe, "local", str(web.out), 1, ".replaced", settings)


def assert_readable(folder: Location) -> None:
    """What a reader finds at any moment: an index whose shards are all there, or none yet."""
    if place := find_current(folder):
        for shard in read_index(place).shards:
            stat = (place / shard.stored.basename).stat()
            assert SHARD.fullmatch(shard.stored.basename)
            assert stat.size == shard.stored.bytes


def recorded(runs: Runs, target: str) -> dict[str, set[str]]:
    """The keys of the finished units of each stream."""
    lists = {stream: runs.folder(target, stream).list(recursive=True) for stream in STREAMS}
    return {s: {m[1] for name, _ in lists[s] if (m := RECORD.fullmatch(name))} for s in STREAMS}


def again(runs: Runs, target: str, expected: dict[str, bytes]) -> int:
    """The same command again, in this process: it finishes what was begun, does nothing twice, and
    says so. How many units it reused.
    """
    before = recorded(runs, target)
    answer = done("convert", *runs.arguments(target)[:-1], "1")
    said = {stream: int(count or 0) for stream, count in SAID.findall(answer.out)}
    assert said.keys() == {*STREAMS}, answer.out
    for stream, reused in said.items():
        parts = manifest_of(runs.folder(target, stream)).parts
        kept = before[stream] & {part.key for part in parts}
        if f"{stream}: up to date, {runs.folder(target, stream)}" in answer.out:
            assert not reused, answer.out
        else:
            assert 0 <= reused - len(kept) <= runs.late, answer.out
    assert runs.content(target) == expected
    return sum(said.values())


Life = tuple[bool, list[Write | float]]
"""Whether an older stream is replaced, and the moments at which runs are killed, one after the
other.
"""


def lives(runs: Runs) -> Iterator[Life]:
    """Each third write of the first stream's publication, in order, and a moment in the midst of
    the work.
    """
    what = (*PUBLISHING[:-1], runs.replacing, PUBLISHING[-1])
    writes = [Write("main", each, side) for each in what for side in SIDES]
    is_old = runs.number < 2
    midst = Write("worker", "record", "after", 1 if is_old else 4)
    yield is_old, [midst, *writes[runs.number :: 3]]


def random_lives(rng: random.Random, replacing: str) -> Iterator[Life]:
    """In each a moment of an undisturbed run's time, mostly, and a write. The earlier come first,
    mostly.
    """
    writes = [(what, side) for what in (*PUBLISHING, replacing) for side in SIDES]
    while True:
        for what, side in rng.sample(writes, len(writes)):
            by_write = Write("main", what, side, 1 if what == ".mds" else rng.randint(1, 2))
            by_time = [0.8 * rng.random()] * (
                rng.random() < 0.75
            )  # one that goes on is sooner done
            yield what == replacing or rng.random() < 0.5, [*by_time, by_write]


def kill(runs: Runs, target: str, moment: Write | float, length: float) -> bool:
    """Whether the run was killed at this moment; it may have been done before."""
    run = runs.start(target, moment if isinstance(moment, Write) else None)
    if isinstance(moment, float):
        run.await_write()
        time.sleep(moment * length)
        run.kill()
    return run.was_killed()


def undisturbed(runs: Runs, target: str) -> tuple[float, dict[str, bytes]]:
    """How long a run takes from its first write, and all that it publishes."""
    run = runs.start(target)
    began = run.await_write()
    assert not run.was_killed()
    return time.monotonic() - began, runs.content(target)


def test_killed_anywhere_same_bytes(runs: Runs, tmp_path: Path) -> None:
    expected, kills, reused = {}, 0, 0
    write_sources(tmp_path, 1)
    undisturbed(runs, "old")
    write_sources(tmp_path, 2)
    coming = random_lives(random.Random(SEED), runs.replacing) if KILLS else lives(runs)
    for number, (is_old, moments) in enumerate(coming):
        if KILLS and kills >= KILLS:
            break
        target, whole = str(number), f"expected {is_old}"
        if is_old:
            runs.copy("old", target)
        if is_old not in expected:
            runs.copy("old" if is_old else "nothing", whole)
            expected[is_old] = undisturbed(runs, whole)
        length, published = expected[is_old]
        for moment in moments:
            print(f"MDSMIX_TEST_SEED={SEED}: kill {kills + 1}, {is_old}, {moment}")
            kills += kill(runs, target, moment, length)
            for stream in STREAMS:
                assert_readable(runs.folder(target, stream))
        reused += again(runs, target, published)
    assert len([name for name in published if RECORD.search(name)]) > 8
    assert kills >= (KILLS or len(moments))
    assert reused > KILLS or is_old, "where hardly a unit is left to be done"
    for stream in STREAMS:
        done("verify", runs.folder(target, stream))


@pytest.mark.parametrize(("place", "group"), [("disk", True), ("store", False)])
def test_a_run_that_is_terminated_ends_in_order_and_another_machine_goes_on(
    place: str, group: bool, web: Web, bucket: str
) -> None:
    """A scheduler tells all processes of a job, a container's only the first. Clouds give 30 s."""
    web.windows(WINDOW)
    web.holds(f"Document {n} is about the number {n}. " * 9 for n in range(600))
    late = Write("worker", "record", "stall", 30)  # of 53 units: the run is not done by then
    key, out = ("remote", f"s3://{bucket}/out") if place == "store" else ("local", str(web.out))
    run = Runs(web.says(local=None).recipe, key, out, 0).start("", late)
    # Two workers have begun to write so many records, so at most two of them are not written yet.
    began = run.await_write("worker record", 5)
    code, said = run.terminated(group)
    assert (code, time.monotonic() - began < 30) == (143, True), said
    assert said.splitlines()[-1].startswith("interrupted: nothing was half published")
    assert run.left() == []
    left = lying_at(out)
    assert not [name for name in left if name.endswith((".tmp", "lease", "index.json"))]

    web.patch.setenv("MDSMIX_CACHE", str(web.folder / "another machine"))
    outcome = web.run(f"{key}={out}")
    records = [name for name in left if name.endswith(".unit")]
    assert 3 <= len(records) == outcome.reused < outcome.units, sorted(left)
    assert lying_at(out) == lying_at(web.anew().out)


def test_a_run_that_stands_still_publishes_nothing_over_a_newer_one(web: Web, bucket: str) -> None:
    web.says(remote=f"s3://{bucket}/mix")
    stalled_everywhere(web.recipe, locate(f"s3://{bucket}/mix/web/train"), "replace")

"""A killed run that is started again publishes the same bytes, wherever it was killed.

Three targets share the writes of a publication: a run is killed once before and once after each of
them. `MDSMIX_TEST_KILLS` sets a number of kills at random moments instead (`make soak`: 100), and
`MDSMIX_TEST_SEED` their seed. A machine that shuts down sends SIGTERM and waits: the run ends in
order, and another machine continues. A run that pauses for a while is overtaken.
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
from typing import NamedTuple

import pytest
import zstandard

from mdsmix.shards.index import read_index
from mdsmix.shards.published import find_current
from mdsmix.storage import Location, locate
from tests.converting import (
    Project,
    documents,
    manifest_of,
    pairs,
    read_location,
    run_ok,
    write_jsonl,
)
from tests.killed_run import Run, Write
from tests.paused_run import assert_paused_run_publishes_nothing

KILLS = int(os.environ.get("MDSMIX_TEST_KILLS", "0"))
SEED = int(os.environ.get("MDSMIX_TEST_SEED", "0"))
WINDOW = 4_000
STREAMS = ("web", "faq")
SHARD = re.compile(r"[0-9a-f]{32}(-\d+)?\.mds(\.zstd)?")
RECORD = re.compile(r"\.mdsmix/([0-9a-f]{32})-[0-9a-f]{8}\.unit")
LEFTOVERS = re.compile(r"\.[0-9a-f]{16}\.tmp$|/\.mdsmix/lease$")
"Files of a run that was killed during a write, or before it released its lease."
OUTCOME = re.compile(
    r"(?m)^(\w+): (?:up to date|published(?=, \d+ of \d+ work)|\d+ of \d+ work units converted)"
    r"(?:, (\d+) (?:of \d+ work units )?reused)?"
)

PUBLISHING = (".mds", ".jsonl.zst", "mdsmix.manifest", "index.json")
"The last shards, of leftovers; the published bad records; the manifest; the index."
SIDES = ("before", "after")


def write_sources(folder: Path, version: int) -> None:
    """Write sources of about six units a stream. Version 2 is longer, differs in the middle, and
    has other bad records.
    """
    sentence = "the quick brown fox jumps over the lazy dog, number {} of version {}"
    texts = [{"text": sentence.format(n, version if n > 100 else 1) * (n % 3)} for n in range(150)]
    write_jsonl(folder / "a.jsonl", [*texts, {"text": version}, *texts[: 10 * version]])
    packed = b"".join(json.dumps(text).encode() + b"\n" for text in texts[:90])
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(packed))
    pairs = [{"prompt": f"What is {n}?", "response": f"It is {n + version}"} for n in range(300)]
    write_jsonl(folder / "c.jsonl", [*pairs, {"prompt": "a question without an answer"}])


@dataclass
class Runs:
    """One recipe, run many times: into a folder or into a bucket."""

    recipe: Path
    key: str
    root: str
    number: int
    replacing: str = ".index"
    "The kind of file that is written only if an older stream is replaced."
    settings: tuple[str, ...] = ()
    late: int = 0
    """The most records that a store may have received from killed workers, but not stored when
    they are listed: one per worker.
    """

    def arguments(self, target: str) -> list[str]:
        out = f"{self.key}={self.root}/{target}"
        return [str(self.recipe), out, *self.settings, "--workers", "2"]

    def start(self, target: str, end: Write | None = None, log: str = "writes.log") -> Run:
        return Run(self.arguments(target), WINDOW, self.recipe.parent / log, end)

    def folder(self, target: str, stream: str) -> Location:
        return locate(f"{self.root}/{target}/{stream}/train")

    def copy(self, source: str, target: str) -> None:
        for name, content in read_location(f"{self.root}/{source}").items():
            locate(f"{self.root}/{target}/{name}").write(content)

    def content(self, target: str) -> dict[str, bytes]:
        """Return all files of a target, except for those that a killed write may leave."""
        files = read_location(f"{self.root}/{target}")
        return {name: content for name, content in files.items() if not LEFTOVERS.search(name)}


@pytest.fixture(params=["disk", "versions", "store"])
def runs(request: pytest.FixtureRequest, project: Project) -> Runs:
    project.set_window_size(WINDOW)
    sources = [project.folder / name for name in ("a.jsonl", "b.jsonl.zst")]
    project.configure(streams={"web": documents(sources), "faq": pairs(project.folder / "c.jsonl")})
    drop = "streams.web.duplicates=drop"  # its sources have some, within a file and across files
    if request.param == "store":
        bucket = request.getfixturevalue("bucket")
        return Runs(project.recipe, "remote", f"s3://{bucket}", 2, settings=(drop,), late=2)
    if request.param == "disk":
        return Runs(project.recipe, "local", str(project.out), 0)
    settings = ("publish=versioned", drop)
    return Runs(project.recipe, "local", str(project.out), 1, ".replaced", settings)


def assert_readable(folder: Location) -> None:
    """Assert that a reader finds an index whose shards all exist, or no index."""
    version = find_current(folder)
    if version:
        for shard in read_index(version).shards:
            stat = (version / shard.stored.basename).stat()
            assert SHARD.fullmatch(shard.stored.basename)
            assert stat.size == shard.stored.bytes


def list_unit_keys(runs: Runs, target: str) -> dict[str, set[str]]:
    """Return the keys of the finished units of each stream."""
    keys = dict[str, set[str]]()
    for stream in STREAMS:
        names = [name for name, _ in runs.folder(target, stream).list(recursive=True)]
        keys[stream] = {match[1] for match in map(RECORD.fullmatch, names) if match}
    return keys


def run_again(runs: Runs, target: str, expected: dict[str, bytes]) -> int:
    """Run the same command again in this process, and assert that it completes the target and
    converts no finished unit again. Return the number of units that it reused, by its output.
    """
    finished = list_unit_keys(runs, target)
    answer = run_ok("convert", *runs.arguments(target)[:-1], "1")
    reused = {stream: int(count or 0) for stream, count in OUTCOME.findall(answer.out)}
    assert reused.keys() == {*STREAMS}, answer.out
    for stream, count in reused.items():
        parts = manifest_of(runs.folder(target, stream)).parts
        reusable = finished[stream] & {part.key for part in parts}
        if f"{stream}: up to date, {runs.folder(target, stream)}" in answer.out:
            assert not count, answer.out
        else:
            assert 0 <= count - len(reusable) <= runs.late, answer.out
    assert runs.content(target) == expected
    return sum(reused.values())


class Life(NamedTuple):
    """What happens to a target before the last run completes it."""

    is_old: bool
    "Whether an older stream is replaced."
    kills: list[Write | float]
    """The moments at which runs are killed, one run after the other: a write, or a share of the
    time that a run takes.
    """


def plan_lives(runs: Runs) -> Iterator[Life]:
    """Yield one life: a kill during the work, then at each third moment of the first stream's
    publication, in order.
    """
    kinds = (*PUBLISHING[:-1], runs.replacing, PUBLISHING[-1])
    writes = [Write("main", kind, side) for kind in kinds for side in SIDES]
    is_old = runs.number < 2
    during_work = Write("worker", "record", "after", 1 if is_old else 4)
    yield Life(is_old, [during_work, *writes[runs.number :: 3]])


def plan_random_lives(rng: random.Random, replacing: str) -> Iterator[Life]:
    """Yield lives with a kill at a write, and mostly one at a random time before it. An earlier
    time is likelier, since a run that continues has less to do.
    """
    writes = [(kind, side) for kind in (*PUBLISHING, replacing) for side in SIDES]
    while True:
        for kind, side in rng.sample(writes, len(writes)):
            write = Write("main", kind, side, 1 if kind == ".mds" else rng.randint(1, 2))
            time_share = 0.8 * rng.random()
            kills = [time_share, write] if rng.random() < 0.75 else [write]
            is_old = kind == replacing or rng.random() < 0.5
            yield Life(is_old, kills)


def kill_run(runs: Runs, target: str, moment: Write | float, seconds: float) -> bool:
    """Run, and kill the run at a moment. Return whether it was killed: it may have ended before.

    Args:
        seconds: how long a run takes.
    """
    run = runs.start(target, moment if isinstance(moment, Write) else None)
    if isinstance(moment, float):
        run.await_write()
        time.sleep(moment * seconds)
        run.kill()
    return run.was_killed()


def run_undisturbed(runs: Runs, target: str) -> tuple[float, dict[str, bytes]]:
    """Run, and return the seconds from its first write to its end and the files of the target."""
    run = runs.start(target)
    began = run.await_write()
    assert not run.was_killed()
    return time.monotonic() - began, runs.content(target)


def test_a_killed_run_that_is_started_again_publishes_the_same_bytes(
    runs: Runs, tmp_path: Path
) -> None:
    expected = dict[bool, tuple[float, dict[str, bytes]]]()
    kills = 0
    reused = 0
    write_sources(tmp_path, 1)
    run_undisturbed(runs, "old")
    write_sources(tmp_path, 2)
    lives = plan_random_lives(random.Random(SEED), runs.replacing) if KILLS else plan_lives(runs)
    for number, life in enumerate(lives):
        if KILLS and kills >= KILLS:
            break
        target = str(number)
        if life.is_old:
            runs.copy("old", target)
        if life.is_old not in expected:
            undisturbed = f"expected {life.is_old}"
            runs.copy("old" if life.is_old else "nothing", undisturbed)
            expected[life.is_old] = run_undisturbed(runs, undisturbed)
        seconds, published = expected[life.is_old]
        for moment in life.kills:
            print(f"MDSMIX_TEST_SEED={SEED}: kill {kills + 1}, {life.is_old}, {moment}")
            kills += kill_run(runs, target, moment, seconds)
            for stream in STREAMS:
                assert_readable(runs.folder(target, stream))
        reused += run_again(runs, target, published)
    assert len([name for name in published if RECORD.search(name)]) > 8
    assert kills >= (KILLS or len(life.kills))
    assert reused > KILLS or life.is_old, "then hardly a unit is left to be converted"
    for stream in STREAMS:
        run_ok("verify", runs.folder(target, stream))


@pytest.mark.parametrize(("place", "group"), [("disk", True), ("store", False)])
def test_a_terminated_run_ends_in_order_and_another_machine_continues(
    place: str, group: bool, project: Project, bucket: str
) -> None:
    """A scheduler signals all processes of a job, a container only the first. Clouds wait 30 s."""
    project.set_window_size(WINDOW)
    project.write_source(f"Document {n} is about the number {n}. " * 9 for n in range(600))
    stall = Write("worker", "record", "stall", 30)  # of 53 units: the run cannot end
    key, out = ("remote", f"s3://{bucket}/out") if place == "store" else ("local", str(project.out))
    run = Runs(project.configure(local=None).recipe, key, out, 0).start("", stall)
    # Five records were begun by two workers, so at least three are written.
    began = run.await_write("worker record", 5)
    code, output = run.terminate(group)
    assert (code, time.monotonic() - began < 30) == (143, True), output
    assert output.splitlines()[-1].startswith("interrupted: nothing was half published")
    assert not run.has_processes()
    remaining = read_location(out)
    assert not [name for name in remaining if name.endswith((".tmp", "lease", "index.json"))]

    project.patch.setenv("MDSMIX_CACHE", str(project.folder / "another machine"))
    outcome = project.run(f"{key}={out}")
    records = [name for name in remaining if name.endswith(".unit")]
    assert 3 <= len(records) == outcome.reused < outcome.units, sorted(remaining)
    assert read_location(out) == read_location(project.convert_into().out)


def test_a_paused_run_publishes_nothing_over_a_newer_one(project: Project, bucket: str) -> None:
    project.configure(remote=f"s3://{bucket}/mix")
    assert_paused_run_publishes_nothing(
        project.recipe, locate(f"s3://{bucket}/mix/web/train"), "replace"
    )

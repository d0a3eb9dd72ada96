"""Same input and recipe, same bytes; a second run does nothing; a stream that fails ends no other.
Full and read-only disks, clocks that jump, files that change while they are read: a sentence, or
the right bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zstandard

from mdsmix.conversion import unit
from mdsmix.conversion.gc import KEEP_SECONDS, find_garbage
from mdsmix.engines import local_engine
from mdsmix.storage import locate
from tests.converting import (
    Project,
    RecordingWatcher,
    assert_refused,
    documents,
    read_files,
    read_times,
    read_token_rows,
    run_ok,
)
from tests.e2e.test_killed import assert_readable
from tests.small_disk import SmallDisk, in_a_process

TEXTS = [f"Document {n}: " + "the quick brown fox " * (n % 7) for n in range(24)]


@pytest.fixture
def project(project: Project) -> Project:
    """Units of 600 bytes: a plain file, and a compressed one that is one unit of many windows."""
    project.set_window_size(600)
    plain = project.write_source(TEXTS, "data/a.jsonl")
    (project.folder / "data/b.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()[900:]))
    return project.configure(documents("data/*"))


@pytest.fixture
def three(project: Project) -> Project:
    """Files of documents, which are one unit."""
    project.set_window_size(1 << 20)
    for n in range(3):
        project.write_source(TEXTS[n::3], f"three/{n}.jsonl")
    return project.configure(documents("three/*.jsonl"))


def test_a_second_run_converts_nothing_and_touches_no_file(three: Project) -> None:
    """Sources that were touched cost a hash and nothing else."""
    three.set_window_size(300)
    three.write_source([{"text": 1}, "good"], "three/bad.jsonl")
    told = RecordingWatcher()
    first = three.run(watcher=told)
    assert first.reused == 0
    assert first.done == first.units > 5
    size = sum(path.stat().st_size for path in (three.folder / "three").iterdir())
    assert (told.began, told.sizes, told.bad) == ([("web", size)], size, 1)
    before, told = read_times(three.train), RecordingWatcher()
    second = three.run(watcher=told)
    assert (second.done, second.new_tokens, second.state) == (0, 0, "up to date")
    assert (second.manifest, told) == (first.manifest, RecordingWatcher())
    for path in (three.folder / "three").iterdir():
        os.utime(path)
    assert (three.run(watcher=told).done, told.tokens) == (0, 0)
    assert three.run().state == "up to date"
    assert read_times(three.train) == before


def test_a_first_look_reads_the_first_records_and_leaves_the_stream_alone(three: Project) -> None:
    """How much of the second file is read follows from how much the first one held."""
    three.run()
    before, whole = read_times(three.out), three.rows
    look = three.run(limit=15)
    assert look.target == str(three.out / "web" / "limit-15")
    assert look.manifest.records.read == 15
    assert before.items() <= read_times(three.out).items()
    assert read_token_rows(look.target) == whole[: look.manifest.totals.samples]
    three.set_window_size(200)
    lines = (three.folder / "three/0.jsonl").read_bytes().splitlines(keepends=True)
    for kept in (lines, lines[:3]):
        (three.folder / "three/0.jsonl").write_bytes(b"".join(kept))
        assert three.run(limit=15).manifest.records.read == 15


@pytest.mark.usefixtures("processes")
def test_streams_are_done_by_the_same_workers(three: Project) -> None:
    """A worker costs 0.2 s until its tokenizer is warm: each of 200 small streams forked one."""
    three.configure(streams={name: documents(f"three/{name}.jsonl") for name in "012"})
    with mock.patch.object(local_engine, "start_worker", wraps=local_engine.start_worker) as start:
        for units in (1, 0):
            assert [each.done for each in three.run_all(workers=2).values()] == [units] * 3
            assert start.call_count == 1


def test_a_stream_that_fails_ends_no_other(project: Project) -> None:
    """All have their turn, each failure is a sentence, and the exit code is the gravest one's."""
    (project.folder / "damaged.jsonl.gz").write_bytes(b"\x1f\x8b\x08 no gzip")
    of = {"bad": project.write_source([{"body": 1}], "bad.jsonl"), "damaged": "damaged.jsonl.gz"}
    of["good"] = project.write_source(["a document"], "good.jsonl")
    project.configure(
        streams={name: documents(path, layout="document") for name, path in of.items()}
    )
    answer = project.convert()
    first, second = answer.err.strip().splitlines()[-2:]
    assert (answer.code, first.partition(" sample")[0]) == (
        4,
        "error: stream bad: its source gives no",
    )
    assert second.startswith("error: ")
    assert "damaged.jsonl.gz" in second
    assert "good: 1 of 1 work units converted" in answer.out
    assert (project.out / "good/train/index.json").exists()
    alone = project.convert("--only", "bad", *["--only", "good"] * 2)
    assert (alone.code, alone.out.count("good: up to date")) == (5, 1)


@pytest.fixture
def whole(project: Project) -> dict[str, bytes]:
    """What an undisturbed run publishes."""
    return read_files(project.convert_into(name="whole").out)


@pytest.mark.parametrize("mounted", [True, False])
def test_a_disk_that_is_full_at_any_time(
    project: Project, whole: dict[str, bytes], mounted: bool
) -> None:
    """One sentence, nothing half; with room again the same command finishes with the same bytes."""
    # One file of each kind, named after what it is and not by its hash; the tokenizer is the
    # largest, and comes first.
    kinds = {re.sub("[0-9a-f]{32,}", "", name): len(content) for name, content in whole.items()}
    sizes = {size for name, size in kinds.items() if not name.startswith("tokenizer-")}
    limits = [*(size - 1 for size in sorted(sizes)[::3]), 1 << 20]
    first = sum(len(content) for name, content in whole.items() if name.startswith("tokenizer-"))
    rooms = range(first - 8_000, 1 << 30, 40_000) if mounted else limits

    def fill() -> None:
        for number, room in enumerate(rooms):
            out = project.folder / f"{number}"
            if not mounted:
                (ready,) = (project.folder / "whole").glob("tokenizer-*")
                shutil.copytree(ready, out / ready.name)
            disk = SmallDisk(out, room, mounted=mounted)
            command = (f"local={out}", "--workers", number % 2 + 1)
            answer = project.convert(*command)
            assert not [name for name in read_files(out) if name.endswith((".tmp", "lease"))]
            if not answer.code:
                break
            full = "the disk is full" if disk.is_mounted else "a file may not be this large here"
            assert_refused(answer, 4, full)
            if (out / "web/train/index.json").exists():
                assert_readable(locate(out / "web/train"))
            disk.grow()
            assert project.convert_ok(*command).err == "", "no lease is waited for"
            assert read_files(out) == whole
        assert read_files(out) == whole
        assert number > 2

    in_a_process(fill)


def test_an_output_that_is_read_only(project: Project, whole: dict[str, bytes]) -> None:

    def publish_and_refuse() -> None:
        disk = SmallDisk(project.out, 64 << 20)
        project.convert_ok()
        disk.refuse_writes()
        assert "web: up to date" in project.convert_ok().out
        run_ok("verify", project.out / "web")
        project.write_source(TEXTS, "data/c.jsonl")
        assert_refused(
            project.convert(), 4, "is read-only" if disk.is_mounted else "permission denied"
        )
        assert read_files(project.out) == whole

    in_a_process(publish_and_refuse)


def test_a_cache_that_is_full_costs_a_reading(project: Project, whole: dict[str, bytes]) -> None:
    """What mdsmix remembers of sources and backends is disposable; of the tokenizer it has a
    snapshot already.
    """
    known, cache = Path(os.environ["MDSMIX_CACHE"]) / "tokenizers", project.folder / "cache"

    def convert() -> None:
        is_mounted = SmallDisk(cache, 8 << 20).is_mounted
        shutil.copytree(known, cache / "tokenizers")
        if is_mounted:
            with pytest.raises(OSError, match="No space"):
                (cache / "filler").write_bytes(bytes(8 << 20))
        else:
            for name in ("seen", "backends"):
                (cache / name).touch()
        project.patch.setenv("MDSMIX_CACHE", str(cache))
        for _ in range(2):
            answer = project.convert_ok()
            assert answer.err == ""
            assert read_files(project.out) == whole
        assert "up to date" in answer.out
        kept = [path for path in (cache / "seen").glob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in kept) == 0

    in_a_process(convert)


def test_a_clock_that_jumps_moves_nothing(project: Project, whole: dict[str, bytes]) -> None:
    jumps, now = count(1), time.time()
    project.patch.setattr(time, "time", lambda: now + (-1) ** next(jumps) * 1e9)
    assert 0 <= project.run().seconds < 1e6
    assert read_files(project.out) == whole
    project.patch.setattr(time, "time", lambda: now - 1e9)
    assert find_garbage(locate(project.train), KEEP_SECONDS) == []


@pytest.mark.parametrize("change", ["append", "edit", "cut", "replace"])
def test_what_changes_when_read_is_not_kept(
    project: Project, whole: dict[str, bytes], change: str
) -> None:
    """Not even for its first windows, which are finished before the last one is read: the old
    content may come back.
    """
    name, really = "a.jsonl" if change in ("append", "edit") else "b.jsonl.zst", unit.read_batches
    path, other = project.folder / "data" / name, project.folder / "other"
    before = path.read_bytes()
    after = {
        "append": before + b'{"text": "a line that came late"}\n',
        "edit": before.replace(b"quick", b"QUICK"),
        "cut": before[: len(before) // 2],
        "replace": zstandard.compress(b'{"text": "another text"}\n' * 30),
    }

    def read_and_change(part: Any, *settings: Any) -> Any:
        for number, batch in enumerate(really(part, *settings)):
            yield batch
            if part.name.endswith(name) and not number:
                other.write_bytes(after[change])
                if change == "replace":
                    other.replace(path)
                else:
                    shutil.copyfile(other, path)  # in place

    with project.patch.context() as patch:
        patch.setattr(unit, "read_batches", read_and_change)
        assert_refused(project.convert(), 4, f"{name} was changed while it was being read")
    assert not (project.train / "index.json").exists()
    path.write_bytes(before)
    project.run()
    assert read_files(project.out) == whole

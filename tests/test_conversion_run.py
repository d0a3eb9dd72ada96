"""The same input and recipe give the same bytes, a second run does nothing, and a stream that fails
does not end the others. Full and read-only disks, jumping clocks, and files that change while they
are read lead to an error in one sentence, or to the right bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import zstandard

from mdsmix.conversion import run, unit
from mdsmix.conversion.gc import KEEP_SECONDS, find_garbage
from mdsmix.conversion.planning import ArrayPart, Options
from mdsmix.conversion.run import make_engine
from mdsmix.engines import local_engine
from mdsmix.engines.memory import count_cpus
from mdsmix.kinds import open_recipe
from mdsmix.storage import locate
from tests.alarm import WAIT_SECONDS, fail_after
from tests.converting import (
    Project,
    RecordingWatcher,
    assert_refused,
    chats,
    documents,
    pairs,
    read_files,
    read_times,
    read_token_rows,
    run_ok,
)
from tests.e2e.test_killed import assert_readable
from tests.small_disk import SmallDisk, run_in_process

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
    """Three files of documents, which are one unit together."""
    project.set_window_size(1 << 20)
    for n in range(3):
        project.write_source(TEXTS[n::3], f"three/{n}.jsonl")
    return project.configure(documents("three/*.jsonl"))


def test_a_second_run_converts_nothing_and_touches_no_file(three: Project) -> None:
    """Sources with a new modification time are hashed and nothing else."""
    three.set_window_size(300)
    three.write_source([{"text": 1}, "good"], "three/bad.jsonl")
    watcher = RecordingWatcher()
    first = three.run(watcher=watcher)
    assert first.reused == 0
    assert first.done == first.units > 5
    size = sum(path.stat().st_size for path in (three.folder / "three").iterdir())
    assert (watcher.began, watcher.sizes, watcher.bad) == ([("web", size)], size, 1)
    before = read_times(three.train)
    watcher = RecordingWatcher()
    second = three.run(watcher=watcher)
    assert (second.done, second.new_tokens, second.state) == (0, 0, "up to date")
    assert (second.manifest, watcher) == (first.manifest, RecordingWatcher())
    for path in (three.folder / "three").iterdir():
        os.utime(path)
    assert (three.run(watcher=watcher).done, watcher.tokens) == (0, 0)
    assert three.run().state == "up to date"
    assert read_times(three.train) == before


@pytest.mark.parametrize("options", [{}, {"part": ArrayPart(1, 1)}])
def test_workers_end_while_the_last_stream_is_published(
    three: Project, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The other streams have the same workers."""
    three.set_window_size(300)
    three.configure(streams={name: documents("three/*.jsonl") for name in ("a", "b", "c")})
    workers = list[set[int]]()

    def count_workers(function: Any, *arguments: Any) -> Any:
        at_work = {process.pid for process in multiprocessing.active_children()}
        with fail_after(WAIT_SECONDS):
            while len(workers) == 2 and multiprocessing.active_children():
                time.sleep(0.01)
        workers.append(at_work)
        return function(*arguments)

    for name in ("publish", "write_part_note"):
        monkeypatch.setattr(run, name, partial(count_workers, getattr(run, name)))
    recipe = open_recipe(three.recipe, [])
    settings = Options(workers=2, **options)
    do = run.convert_part if options else run.convert
    assert len(list(do(recipe, settings, RecordingWatcher()))) == 3
    assert workers[0] == workers[1] >= workers[2]
    assert len(workers[0]) == 2


def test_limit_reads_the_first_records_and_leaves_the_stream_alone(three: Project) -> None:
    """How much of the second file is read depends on how many records the first one has."""
    three.run()
    before = read_times(three.out)
    rows = three.rows
    limited = three.run(limit=15)
    assert limited.target == str(three.out / "web" / "limit-15")
    assert limited.manifest.records.read == 15
    assert before.items() <= read_times(three.out).items()
    assert read_token_rows(limited.target) == rows[: limited.manifest.totals.samples]
    three.set_window_size(200)
    lines = (three.folder / "three/0.jsonl").read_bytes().splitlines(keepends=True)
    for first_lines in (lines, lines[:3]):
        (three.folder / "three/0.jsonl").write_bytes(b"".join(first_lines))
        assert three.run(limit=15).manifest.records.read == 15


@pytest.mark.usefixtures("processes")
def test_streams_share_workers(three: Project) -> None:
    """A worker takes 0.2 s until its tokenizer is warm. Once, 200 small streams forked 200."""
    three.configure(streams={name: documents(f"three/{name}.jsonl") for name in "012"})
    with mock.patch.object(local_engine, "start_worker", wraps=local_engine.start_worker) as start:
        for units in (1, 0):
            assert [outcome.done for outcome in three.run_all(workers=2).values()] == [units] * 3
            assert start.call_count == 1


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("source", "root", "endpoint", "more"),
    [
        ("/data", "/mix", "", 0),
        ("/data", "s3://bucket/mix", "http://store.example:9000", 1),
        ("s3://bucket/data", "/mix", "https://s3.eu-west-1.amazonaws.com", 1),
        ("hf://datasets/org/name", "/mix", "", 1),
        ("s3://bucket/data", "s3://bucket/mix", "http://127.0.0.1:9000", 0),
        ("s3://bucket/data", "/mix", "http://localhost:9000", 0),
        ("s3://bucket/data", "/mix", "http://[::1]:9000", 0),
        ("s3://bucket/data", "/mix", "http://127.0.0.1.example:9000", 1),
        ("hf://datasets/org/name", "s3://bucket/mix", "http://localhost:9000", 1),
    ],
)
def test_a_store_on_another_machine_gets_one_worker_more(
    source: str, root: str, endpoint: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store on this machine needs the processors itself."""
    monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    job = SimpleNamespace(processor=None, root=locate(root), images_root=None)
    files = [SimpleNamespace(location=locate(f"{source}/a.jsonl"))]
    plans: Any = [SimpleNamespace(job=job, files=files)]
    made: Any = make_engine(mock.Mock(), plans, Options(), mock.Mock())
    assert made.settings.workers == count_cpus() + more


def test_any_number_of_workers_writes_the_same_bytes(three: Project) -> None:
    """Each stream has more units than workers, and a bad record in one of them. With five workers
    one is killed while it converts.
    """
    turns = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]
    records = [
        {"text": text, "prompt": text, "response": text, "messages": turns} for text in TEXTS
    ]
    three.write_source([*records[:17], {"text": 1}, *records], "all/a.jsonl")
    streams = {
        "rows": documents("all/a.jsonl"),
        "packed": pairs("all/a.jsonl", pack=True),
        "chats": chats("all/a.jsonl"),
    }
    three.set_window_size(900)
    # The tokenizer is trained on this Python's docstrings; that of 3.12 needs more ids for it.
    three.configure(streams=streams, max_seq_len=32)
    encode = unit.UnitTask._encode
    killed = three.folder / "killed"

    def die_once(task: unit.UnitTask, number: int, *arguments: Any) -> Any:
        with suppress(FileExistsError):
            if task.unit.start:
                killed.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return encode(task, number, *arguments)

    written = dict[int, dict[str, bytes]]()
    for workers in (1, 2, 5):
        if workers == 5:
            three.patch.setattr(unit.UnitTask, "_encode", die_once)
        out = three.folder / f"by-{workers}"
        outcomes = three.run_all(f"local={out}", workers=workers)
        assert all(outcome.units > 8 for outcome in outcomes.values())
        assert all(outcome.manifest.records.bad == 1 for outcome in outcomes.values())
        written[workers] = read_files(out)
    assert killed.exists()
    assert written[1] == written[2] == written[5]


def test_a_stream_that_fails_does_not_end_the_others(project: Project) -> None:
    """All are converted in turn, each error is a sentence, and the exit code is the gravest."""
    (project.folder / "damaged.jsonl.gz").write_bytes(b"\x1f\x8b\x08 no gzip")
    paths = {"bad": project.write_source([{"body": 1}], "bad.jsonl"), "damaged": "damaged.jsonl.gz"}
    paths["good"] = project.write_source(["a document"], "good.jsonl")
    project.configure(
        streams={name: documents(path, layout="document") for name, path in paths.items()}
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
def expected(project: Project) -> dict[str, bytes]:
    """The files that an undisturbed run publishes."""
    return read_files(project.convert_into(name="whole").out)


@pytest.mark.parametrize("mounted", [True, False])
def test_a_disk_may_be_full_at_any_time(
    project: Project, expected: dict[str, bytes], mounted: bool
) -> None:
    """The error is one sentence and no file is partial. With space again, the same command finishes
    with the same bytes.
    """
    # One file of each kind; names without their hashes. The tokenizer is the largest file and is
    # written first.
    kinds = {re.sub("[0-9a-f]{32,}", "", name): len(content) for name, content in expected.items()}
    sizes = {size for name, size in kinds.items() if not name.startswith("tokenizer-")}
    limits = [*(size - 1 for size in sorted(sizes)[::3]), 1 << 20]
    first = sum(len(content) for name, content in expected.items() if name.startswith("tokenizer-"))
    free_sizes = range(first - 8_000, 1 << 30, 40_000) if mounted else limits

    def fill() -> None:
        for number, free_size in enumerate(free_sizes):
            out = project.folder / f"{number}"
            if not mounted:
                (tokenizer,) = (project.folder / "whole").glob("tokenizer-*")
                shutil.copytree(tokenizer, out / tokenizer.name)
            disk = SmallDisk(out, free_size, mounted=mounted)
            command = (f"local={out}", "--workers", number % 2 + 1)
            answer = project.convert(*command)
            assert not [name for name in read_files(out) if name.endswith((".tmp", "lease"))]
            if not answer.code:
                break
            message = "the disk is full" if disk.is_mounted else "a file may not be this large here"
            assert_refused(answer, 4, message)
            if (out / "web/train/index.json").exists():
                assert_readable(locate(out / "web/train"))
            disk.grow()
            assert project.convert_ok(*command).err == "", "it waits for no lease"
            assert read_files(out) == expected
        assert read_files(out) == expected
        assert number > 2

    run_in_process(fill)


def test_a_read_only_output_can_be_used_until_something_is_written(
    project: Project, expected: dict[str, bytes]
) -> None:
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
        assert read_files(project.out) == expected

    run_in_process(publish_and_refuse)


def test_with_a_full_cache_sources_are_read_again(
    project: Project, expected: dict[str, bytes]
) -> None:
    """The cache of sources and backends is not needed. The tokenizer is in the cache already."""
    tokenizers = Path(os.environ["MDSMIX_CACHE"]) / "tokenizers"
    cache = project.folder / "cache"

    def convert() -> None:
        is_mounted = SmallDisk(cache, 8 << 20).is_mounted
        shutil.copytree(tokenizers, cache / "tokenizers")
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
            assert read_files(project.out) == expected
        assert "work units reused" in answer.out
        stored = [path for path in (cache / "seen").glob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in stored) == 0

    run_in_process(convert)


def test_a_jumping_clock_changes_nothing(project: Project, expected: dict[str, bytes]) -> None:
    jumps, now = count(1), time.time()
    project.patch.setattr(time, "time", lambda: now + (-1) ** next(jumps) * 1e9)
    assert 0 <= project.run().seconds < 1e6
    assert read_files(project.out) == expected
    project.patch.setattr(time, "time", lambda: now - 1e9)
    assert find_garbage(locate(project.train), KEEP_SECONDS) == []


@pytest.mark.parametrize("change", ["append", "edit", "cut", "replace"])
def test_a_source_that_changes_while_it_is_read_is_not_published(
    project: Project, expected: dict[str, bytes], change: str
) -> None:
    """Its first windows are finished before the last one is read, but are not reused either: the
    old content may come back.
    """
    name = "a.jsonl" if change in ("append", "edit") else "b.jsonl.zst"
    read_batches = unit.read_batches
    path = project.folder / "data" / name
    other = project.folder / "other"
    before = path.read_bytes()
    after = {
        "append": before + b'{"text": "a line that came late"}\n',
        "edit": before.replace(b"quick", b"QUICK"),
        "cut": before[: len(before) // 2],
        "replace": zstandard.compress(b'{"text": "another text"}\n' * 30),
    }

    def read_and_change(work_unit: Any, *settings: Any) -> Any:
        for number, batch in enumerate(read_batches(work_unit, *settings)):
            yield batch
            if work_unit.name.endswith(name) and not number:
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
    assert read_files(project.out) == expected

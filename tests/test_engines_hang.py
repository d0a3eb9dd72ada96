"""A worker of which nothing will come is noticed, told of and replaced; one that only takes long is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdsmix.engines import hang
from mdsmix.engines.tasks import Attempt, InWork, Reporter
from mdsmix.errors import MdsmixError
from mdsmix.kinds.pretraining import Pretraining
from tests.alarm import at_most
from tests.converting import (
    documents,
    mdsmix,
    write_jsonl,
    write_recipe,
)
from tests.tasks import Call, call, in_work, run, settings

pytestmark = pytest.mark.usefixtures("processes")

SILENT = 0.6


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "SILENT_SECONDS", SILENT)
    monkeypatch.setattr(hang, "LOOK_SECONDS", 0.05)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop() -> None:
    while True:
        pass


def read_what_never_comes() -> None:
    """What a mount that does not answer looks like: the read does not return."""
    os.read(os.pipe()[0], 1)


def hang_once(how: Any, attempt: Attempt, reporter: Reporter) -> tuple[int, int]:
    """Hangs while nothing is in work."""
    if not attempt.deaths:
        how()
    return attempt.deaths, attempt.halvings


def hang_at(stuck: int, how: Any, attempt: Attempt, reporter: Reporter) -> list[int]:
    """A unit of 8 records, one of which hangs whoever has it in work."""
    done = list[int]()
    for piece in in_work(8, attempt, reporter, size=72):
        if stuck in piece:
            how()
        done += piece
    reporter.on_records(None)
    return done


@pytest.mark.parametrize(
    ("how", "why"),
    [(stop, "it was stopped, or waits"), (read_what_never_comes, "uses no processor time")],
)
def test_a_worker_without_a_sign_of_life_is_told_of_and_replaced(how: Any, why: str) -> None:
    said: list[str] = []
    with at_most(30):
        ((_, result),) = run([Call(hang_once, (how,), "of a.jsonl")], settings(), say=said.append)
    assert result == (1, 30)
    (sentence,) = said
    assert "a worker process hung (no sign of life for " in sentence
    assert why in sentence
    assert "over the work unit of a.jsonl, while no record was in work" in sentence


def test_an_endless_loop_over_a_record_is_found_and_named() -> None:
    said: list[str] = []
    with at_most(60), pytest.raises(MdsmixError) as caught:
        list(run([Call(hang_at, (5, loop), "of a")], settings(), say=said.append))
    assert "worker processes hang (not done with 72 bytes after " in str(caught.value)
    assert "the record at byte 5 of a (9 bytes)" in str(caught.value)
    assert "the 8 records from byte 0 of a on" in said[0]
    assert "the record at byte 5 of a" in said[1]


def test_a_record_that_hangs_workers_is_set_aside_where_that_is_asked_for() -> None:
    with at_most(60):
        ((_, done),) = run([call(hang_at, 5, loop)], settings(set_aside=True))
    assert done == [0, 1, 2, 3, 4, 6, 7]


def test_the_others_go_on(tmp_path: Path) -> None:
    with at_most(30):
        tasks = [call(hang_once, stop), *[call(hang_once, int)] * 20]
        assert sorted(n for n, _ in run(tasks, settings(2))) == [*range(21)]


def work_in_silence(seconds: float, attempt: Attempt, reporter: Reporter) -> int:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return attempt.deaths


def take_long(size: int, attempt: Attempt, reporter: Reporter) -> int:
    """Longer than the patience with an endless loop, over many bytes."""
    reporter.on_records(InWork(file="a", ordinal=0, shown="byte 0", length=9, records=1, size=size))
    work_in_silence(3 * SILENT, attempt, reporter)
    reporter.on_records(None)
    return attempt.deaths


def tell_now_and_then(attempt: Attempt, reporter: Reporter) -> int:
    for _ in range(8):
        time.sleep(SILENT / 3)
        reporter.on_progress(1, 1)
    return attempt.deaths


@pytest.mark.parametrize(
    "task",
    [call(work_in_silence, 3 * SILENT), call(take_long, 60_000_000), call(tell_now_and_then)],
)
def test_who_works_or_tells_is_left_alone(task: Any) -> None:
    said: list[str] = []
    with at_most(60):
        assert list(run([task], settings(), say=said.append)) == [(0, 0)]
    assert said == []


def test_who_waits_for_room_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = hang.Pulse()
    for _ in range(8):
        time.sleep(SILENT / 4)
        assert pulse.look(lambda: hang.used_by(os.getppid()), None, waits=True) is None
    assert pulse.silent <= SILENT / 2


def test_a_run_that_stood_still_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, and hours later `fg`: what passed between two looks was not waited."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pulse = hang.Pulse()
    for step in (1, 7200, 0.06):
        clock[0] += step
        assert pulse.look(lambda: 7, 10, False) is None
    for _ in range(20):
        clock[0] += 0.06
        why = pulse.look(lambda: 7, 10, False)
    assert why is not None


def test_where_the_system_tells_nothing_only_records_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pulse = hang.Pulse()
    gone = partial(hang.used_by, 2**22 + 1)
    for _ in range(100):
        clock[0] += 0.1
        assert pulse.look(gone, None, False) is None
    clock[0] += 0.1
    assert "not done with 10 bytes" in str(pulse.look(gone, 10, False))


def test_the_patience_is_longer_than_a_silent_store_lasts() -> None:
    """In a process of its own, where nothing is patched."""
    code = "from mdsmix.engines.hang import SILENT_SECONDS; print(SILENT_SECONDS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 2 * 123


@pytest.fixture
def stuck(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source of which the 8th record's encoding waits for ever."""
    encode = Pretraining.encode

    def encoding(self: Pretraining, records: list[Any]) -> Any:
        if any(record.text == "stuck" for record in records):
            read_what_never_comes()
        return encode(self, records)

    monkeypatch.setattr(Pretraining, "encode", encoding)
    texts = ["stuck" if n == 7 else f"text number {n:04}" for n in range(30)]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


def test_a_conversion_names_the_stream_the_unit_and_the_record(stuck: Path) -> None:
    with at_most(120):
        answer = mdsmix("convert", stuck)
    *said, error = answer.err.splitlines()
    offset = 7 * len('{"text":"text number 0000"}\n')
    assert answer.code == 1
    assert error.startswith("error: worker processes hang (")
    assert f"the record at byte {offset} of a.jsonl" in error
    first = next(line for line in said if "hung" in line)
    assert first.startswith("web: a worker process hung (")
    assert "over the work unit of a.jsonl, the 30 records from byte 0 of a.jsonl on" in first

"""Progress goes to stderr: plain lines, few of them, where it is no terminal, bars where it is."""

from __future__ import annotations

import io
import os
import sys

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from mdsmix.report import progress
from mdsmix.report.progress import Bars, PlainLines, watching


def test_a_reader_of_stderr_that_is_gone_ends_no_conversion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    gone = os.fdopen(writing, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", gone)
        with watching() as watcher:
            watcher.say("a line")
            watcher.say("another one")
    with pytest.raises(BrokenPipeError):
        gone.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_log_gets_a_line_every_half_minute(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PlainLines()
    lines.begin("web", 1_000_000)
    for _ in range(8):
        clock[0] += 12
        lines.on_progress(100_000, 50_000)
    assert said(capsys) == [f"web: {n}%, 0.0 MB/s, 0.00 M tokens/s" for n in (30, 60)]


def test_of_several_streams_the_share_of_all_is_told_too(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """The second begins when the first is done, though it held less than was thought; the third is up to date."""
    lines = PlainLines()
    lines.expect({"web": 600, "docs": 300, "known": 0, "chat": 100})
    for stream, size, steps in (
        ("web", 600, [(30, 3), (30, 297)]),
        ("docs", 300, [(60, 150)]),
        ("chat", 100, [(60, 500)]),
    ):
        lines.begin(stream, size)
        for seconds, done in steps:
            clock[0] += seconds
            lines.on_progress(done, 10)
    assert [line.split("; ")[1] for line in said(capsys)] == [
        f"all streams: {share}%, about {minutes} min left"
        for share, minutes in ((0, 166), (30, 2), (75, 1), (100, 1))
    ]


def test_of_each_stream_what_is_bad_is_told_and_never_more_than_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How much compressed sources hold is only guessed before; their uncompressed bytes are told."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    lines = PlainLines()
    lines.begin("web", 10)
    lines.on_bad(1_200)
    lines.on_bad(34)
    lines.on_progress(40, 5)
    lines.begin("empty", 0)
    lines.on_progress(0, 0)
    web, empty = said(capsys)
    assert web.startswith("web: 100%,")
    assert web.endswith("tokens/s, 1,234 quarantined")
    assert empty.startswith("empty: 0%,")
    assert empty.endswith("tokens/s")


def test_what_is_to_be_known_now_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with watching() as watcher:
        watcher.say("web: a [sentence]")
    assert capsys.readouterr().err == "web: a [sentence]\n"


def test_a_bar_for_each_stream_with_rate() -> None:
    out = io.StringIO()
    columns = (TextColumn("{task.description} {task.completed} {task.fields[rate]}"),)
    with Progress(*columns, console=Console(file=out, width=120)) as shown:
        bars = Bars(shown)
        bars.expect({"web": 60, "docs": 50})
        bars.begin("web", 100)
        bars.on_progress(60, 10)
        bars.begin("docs", 50)
        bars.on_progress(20, 10)
        bars.on_progress(5, 10)
        bars.say("docs: a [sentence]")
        assert [(task.description, task.completed) for task in shown.tasks] == [("all streams", 85), ("web", 60), ("docs", 25)]  # fmt: skip
    assert "docs: a [sentence]" in out.getvalue()
    assert "M tokens/s" in out.getvalue()

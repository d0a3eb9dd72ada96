"""Progress goes to stderr: plain lines, few of them, where it is no terminal, bars where it is."""

from __future__ import annotations

import io
import os
import sys

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from mdsmix.report import progress
from mdsmix.report.progress import Bar, PlainLines, watching


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
    lines.begin("web", 100_000_000)
    for _ in range(8):
        clock[0] += 12
        lines.on_progress(10_000_000, 6_000_000)
    assert said(capsys) == [f"web: {n}%, 0.8 MB/s, 0.50 M tokens/s, about {left} min left" for n, left in ((30, 1), (60, 1))]  # fmt: skip


def test_of_several_streams_the_share_of_all_is_told_and_of_one_that_nobody_expected_its_own(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PlainLines()
    lines.expect({"web": 600, "docs": 300, "known": 0, "chat": 100})
    for stream, seconds, done in (
        ("web", 60, 3),
        ("web", 60, 597),
        ("docs", 60, 300),
        ("chat", 60, 500),
        ("other", 60, 500),
    ):
        lines.begin(stream, 1000)
        clock[0] += seconds
        lines.on_progress(done, 10)
    told = [(line.split(",")[0], line.split(", ")[3]) for line in said(capsys)]
    shares = ("web: 0% of 4", 332), ("web: 60% of 4", 1), ("docs: 90% of 4", 0), ("chat: 100% of 4", 0)  # fmt: skip
    wanted = [(f"{share} streams", f"about {left} min left") for share, left in shares]
    assert told == [*wanted, ("other: 50%", "about 1 min left")]


def test_what_is_bad_is_told_and_never_more_than_the_whole(
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
    assert "tokens/s, 1,234 quarantined, about 0 min" in web
    assert empty.startswith("empty: 0%,")
    assert "quarantined" not in empty


def test_what_is_to_be_known_now_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with watching() as watcher:
        watcher.say("web: a [sentence]")
    assert capsys.readouterr().err == "web: a [sentence]\n"


def test_a_bar_for_all_streams_with_the_name_of_the_present_one_and_a_rate() -> None:
    out = io.StringIO()
    columns = (TextColumn("{task.description} {task.completed} {task.fields[rate]}"),)
    with Progress(*columns, console=Console(file=out, width=120)) as shown:
        bar = Bar(shown)
        bar.expect({"web": 60, "docs": 50})
        bar.begin("web", 100)
        bar.on_progress(60, 10)
        bar.begin("docs", 50)
        bar.on_progress(20, 10)
        bar.on_progress(5, 10)
        bar.say("docs: a [sentence]")
        assert [(t.description, t.completed, t.total) for t in shown.tasks] == [("docs", 85, 110)]
    assert "docs: a [sentence]" in out.getvalue()
    assert "M tokens/s" in out.getvalue()

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


def test_a_log_gets_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = PlainLines()
    lines.begin("web", 1_000_000)
    for _ in range(8):
        now[0] += 12
        lines.on_progress(100_000, 50_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "web: 30%, 0.0 MB/s, 0.00 M tokens/s",
        "web: 60%, 0.0 MB/s, 0.00 M tokens/s",
    ]


def test_what_was_quarantined_so_far_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of this stream."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    lines = PlainLines()
    lines.begin("web", 10)
    lines.on_bad(1_200)
    lines.on_bad(34)
    lines.on_progress(5, 5)
    lines.begin("docs", 10)
    lines.on_progress(5, 5)
    web, docs = capsys.readouterr().err.splitlines()
    assert web.endswith("tokens/s, 1,234 quarantined")
    assert docs.endswith("tokens/s")


def test_of_several_streams_the_share_of_all_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second begins when the first is done, though it held less than was thought; the third is up to date."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = PlainLines()
    lines.expect({"web": 600, "docs": 300, "known": 0, "chat": 100})
    lines.begin("web", 600)
    now[0] += 30
    lines.on_progress(3, 10)
    now[0] += 30
    lines.on_progress(297, 10)
    lines.begin("docs", 300)
    now[0] += 60
    lines.on_progress(150, 10)
    lines.begin("chat", 100)
    now[0] += 60
    lines.on_progress(500, 10)
    assert [line.split("; ")[1] for line in capsys.readouterr().err.splitlines()] == [
        "all streams: 0%, about 166 min left",
        "all streams: 30%, about 2 min left",
        "all streams: 75%, about 1 min left",
        "all streams: 100%, about 1 min left",
    ]


def test_compressed_sources_never_pass_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How much they hold is only guessed before, their uncompressed bytes are what is told."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    lines = PlainLines()
    lines.begin("web", 10)
    lines.on_progress(40, 5)
    lines.begin("empty", 0)
    lines.on_progress(0, 0)
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "web: 100%",
        "empty: 0%",
    ]


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

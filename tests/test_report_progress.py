"""Progress goes to stderr: plain lines, few of them, where it is no terminal, bars where it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from mdsmix.report import progress
from mdsmix.report.progress import Bars, PlainLines, watching


def test_a_log_gets_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = PlainLines()
    lines.begin("web", 1_000_000)
    for _ in range(8):
        now[0] += 4
        lines.on_progress(100_000, 50_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "web: 30%, 0.0 MB/s, 0.01 M tokens/s",
        "web: 60%, 0.0 MB/s, 0.01 M tokens/s",
    ]


def test_compressed_sources_never_pass_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their stored size is what is known before, their uncompressed bytes are what is told."""
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
        bars.begin("web", 100)
        bars.on_progress(60, 10)
        bars.begin("docs", 50)
        bars.on_progress(20, 10)
        bars.on_progress(5, 10)
        bars.say("docs: a [sentence]")
        assert [(task.description, task.completed) for task in shown.tasks] == [("web", 60), ("docs", 25)]  # fmt: skip
    assert "docs: a [sentence]" in out.getvalue()
    assert "M tokens/s" in out.getvalue()

"""Progress goes to stderr: plain lines, few of them, where it is no terminal, bars where it is."""

import io
import os
import sys

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from mdsmix.report import progress
from mdsmix.report.progress import Bar, PlainLines, watching


def test_what_is_said_is_a_line_and_a_reader_that_is_gone_ends_no_conversion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    with watching() as watcher:
        watcher.say("web: a [sentence]")
    with watching(quiet=True) as watcher:
        watcher.on_step("no news")
        watcher.say("a warning")
    assert capsys.readouterr().err == "web: a [sentence]\na warning\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with watching() as shown, watching(quiet=True) as silent:
        assert (type(shown), type(silent)) == (Bar, PlainLines)


def told(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    lines: PlainLines,
    steps: list[tuple[str, int, float, int]],
) -> list[str]:
    """What is printed of the steps (stream, its size, seconds, bytes done), with 6 M tokens each."""
    now, last = [100.0], ""
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for stream, size, seconds, done in steps:
        if stream != last:
            lines.begin(last := stream, size)
        now[0] += seconds
        lines.on_progress(done, 6_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_log_gets_a_line_every_half_minute_with_the_share_of_all_streams(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    steps = [("web", 100_000_000, 12.0, 10_000_000)] * 8
    assert told(capsys, monkeypatch, PlainLines(), steps) == [
        f"web: {n}%, 0.8 MB/s, 0.50 M tokens/s, about {left} min left" for n, left in ((30, 1), (60, 1))
    ]  # fmt: skip
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    several = PlainLines()
    several.expect({"web": 600, "docs": 300, "known": 0, "chat": 100})
    steps = [("web", 1000, 60, 3), ("web", 1000, 60, 597), ("docs", 1000, 60, 300)]
    steps += [("chat", 1000, 60, 500), ("nobody expected it", 1000, 60, 500)]
    lines = told(capsys, monkeypatch, several, steps)
    assert [(line.split(",")[0], line.split(", ")[3]) for line in lines] == [
        ("web: 0% of 4 streams", "about 332 min left"),
        ("web: 60% of 4 streams", "about 1 min left"),
        ("docs: 90% of 4 streams", "about 0 min left"),
        ("chat: 100% of 4 streams", "about 0 min left"),
        ("nobody expected it: 50%", "about 1 min left"),
    ]


def test_a_bar_for_all_streams_with_the_name_of_the_present_one_and_a_rate() -> None:
    out = io.StringIO()
    columns = (TextColumn("{task.description} {task.completed} {task.fields[rate]}"),)
    with Progress(*columns, console=Console(file=out, width=120)) as shown:
        bar = Bar(shown)
        bar.expect({"web": 60, "docs": 50})
        for stream, size, *steps in (("web", 100, 60), ("docs", 50, 20, 5)):
            bar.begin(stream, size)
            for done in steps:
                bar.on_progress(done, 10)
        bar.say("docs: a [sentence]")
        assert [(t.description, t.completed, t.total) for t in shown.tasks] == [("docs", 85, 110)]
    assert "docs: a [sentence]" in out.getvalue()
    assert "M tokens/s" in out.getvalue()

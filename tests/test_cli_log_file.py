"""`--log-file` has every line that a command prints for people, each with its time, also with a bar
on the terminal, with --quiet and with --json.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mdsmix.report import log_file, progress
from tests.converting import documents, mdsmix, run_ok, set_window_size, write_jsonl, write_recipe

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d)  (\d+:\d\d:\d\d)  (.*)")
LONG_COMMANDS = ("convert", "verify", "check", "leaks", "report", "gc", "mix", "repair", "bench")


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = [{"text": f"document {n} " * 30} for n in range(40)]
    source = write_jsonl(tmp_path / "web.jsonl", [*texts, {"text": 5}])
    set_window_size(monkeypatch, 4000)
    return write_recipe(tmp_path, tokenizer_folder, streams={"web": documents(source)})


def read_log(path: str = "run.log") -> list[str]:
    """Return the lines without their times, which must be now, one after the other."""
    times = list[datetime]()
    texts = list[str]()
    for line in Path(path).read_text().splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        times.append(datetime.fromisoformat(match[1]))
        texts.append(match[3])
    assert times == sorted(times)
    assert datetime.now().astimezone() - times[0] < timedelta(minutes=10)
    return texts


def test_a_conversion_is_logged_with_its_command_progress_table_and_end(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    monkeypatch.setenv("S3_SECRET_TEST_KEY_SECRET", "a-secret-of-many-letters")
    words = ("convert", recipe, "--workers", "1", "--log-file", "run.log")
    answer = run_ok(*words, "--max-bad", "100%")
    lines = read_log()
    assert lines[0].endswith(
        "mdsmix convert recipe.yaml --workers 1".replace("recipe.yaml", str(recipe))
        + " --log-file run.log --max-bad 100%"
    )
    assert lines[-1] == "ended with exit code 0"
    # What was printed is in the log: without folds it is the same text.
    shown = [line.rstrip() for line in answer.out.splitlines() if line.strip()]
    assert [line for line in lines if line in shown] == shown
    rates = [line for line in lines if re.match(r"web: \d+%, .*min left", line)]
    assert len(rates) > 1
    # On stderr the lines of progress have their times too.
    printed = [line for line in answer.err.splitlines() if "min left" in line]
    assert [LINE.fullmatch(line)[3] for line in printed] == rates  # type: ignore[index]
    # The next command continues the file, and its error is in it.
    assert mdsmix("verify", "gone", "--log-file", "run.log").code == 4
    more = read_log()
    assert more[: len(lines)] == lines
    assert more[-2].startswith("error: ")
    assert more[-1] == "ended with exit code 4"
    # The value of a credential is not written.
    mdsmix("verify", "a-secret-of-many-letters", "--log-file", "run.log", "--quick")
    assert "verify <S3_SECRET_TEST_KEY_SECRET> --log" in Path("run.log").read_text()


def test_the_log_is_the_same_with_a_bar_with_quiet_and_with_json(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures such as seconds differ, so only words are compared."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    logs = list[list[str]]()
    for number, options in enumerate(((), ("--quiet",), ("--json",), ("bar",))):
        out = f"local={recipe.parent / f'out{number}'}"
        if options == ("bar",):
            monkeypatch.setattr("sys.stderr.isatty", lambda: True)
            monkeypatch.setattr(progress, "sys", _Terminal)
            options = ()
        name = f"{number}.log"
        answer = run_ok("convert", recipe, out, "--workers", 1, "--log-file", name, *options)
        if options == ("--quiet",):
            assert "min left" not in answer.err
        lines = read_log(name)[1:]
        words = [re.sub(r"out\d|[\d.,]+|─+| {2,}", " ", line) for line in lines]
        logs.append([re.sub(" +", " ", line) for line in words if "reading the tok" not in line])
    assert logs[0] == logs[1] == logs[2] == logs[3]
    assert any("min left" in line for line in logs[3])


def test_a_log_has_whole_lines_without_colors(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the environment makes a pipe count as a terminal, as some CI systems do."""
    run_ok("convert", recipe, "--workers", 1)
    monkeypatch.setenv("COLUMNS", "40")
    logs = list[list[str]]()
    for number in range(2):
        log = f"{number}.log"
        run_ok("check", recipe, "--log-file", log)
        run_ok("leaks", recipe, "--eval", recipe.parent / "out/web/train", "--log-file", log)
        logs.append([line for line in read_log(log) if not line.startswith("process ")])
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert logs[0] == logs[1]


class _Terminal:
    """A `sys` whose stderr is a terminal."""

    class stderr:  # noqa: N801
        @staticmethod
        def isatty() -> bool:
            return True

    modules: ClassVar[dict[str, Any]] = {}


def test_every_long_command_has_a_log(recipe: Path) -> None:
    run_ok("convert", recipe, "--workers", 1)
    published = recipe.parent / "out/web/train"
    words: dict[str, tuple[object, ...]] = {
        "verify": (recipe,),
        "check": (recipe, "--deep"),
        "gc": (recipe,),
        "report": (recipe, "--no-preview"),
        "repair": (published, "--recipe", recipe),
        "mix": (recipe, "--out", recipe.parent / "mixed"),
        "leaks": (recipe, "--eval", published),
    }
    for name, arguments in words.items():
        log = f"{name}.log"
        answer = mdsmix(name, *arguments, "--log-file", log)
        assert answer.code in (0, 3), answer.err
        lines = read_log(log)
        assert lines[-1] == f"ended with exit code {answer.code}"
        shown = {line.strip() for line in answer.out.splitlines() if "─" not in line}
        assert shown - {""} <= {line.strip() for line in lines}, name
    for name in LONG_COMMANDS:
        assert "--log-file" in mdsmix(name, "--help").out


def test_a_file_that_is_no_log_is_refused_and_keeps_its_bytes(recipe: Path) -> None:
    for path in (recipe, Path("web.jsonl")):
        before = path.read_bytes()
        answer = mdsmix("check", recipe, "--log-file", path, "--json")
        assert answer.code == 2
        assert f"--log-file {path} is a file that is not a log" in answer.err
        assert path.read_bytes() == before
    # An empty file becomes a log, and a log is continued.
    Path("run.log").touch()
    for _ in range(2):
        mdsmix("convert", recipe, "--dry-run", "--log-file", "run.log")
    assert read_log().count("ended with exit code 0") == 2


def test_a_log_that_cannot_be_written(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, reason in (
        ("no/run.log", "No such file"),
        (".", "Is a directory"),
        ("s3://b/l", "URL"),
    ):
        answer = mdsmix("convert", recipe, "--log-file", path)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith(f"error: --log-file {path} ")
        assert reason in answer.err
    # A full disk ends the log, not the work.
    run_ok("convert", recipe, "--workers", 1)
    answer = run_ok("verify", recipe, "--log-file", "/dev/full")
    assert answer.err.count("WARNING: the log /dev/full cannot be written any more (No space") == 1
    assert "whole" in answer.out
    assert not log_file.is_logging()

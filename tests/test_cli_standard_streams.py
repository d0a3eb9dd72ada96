"""Standard streams that cannot be written, as on a full disk, end no command as a defect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mdsmix.cli.standard_streams import open_standard_streams
from mdsmix.errors import Unreachable
from tests.published import CONCAT, TOKEN_ROW, publish

FULL = (
    "error: cannot write stdout: the disk is full; free some space and run the same command again\n"
)
IS_UNBUFFERED = pytest.mark.parametrize("is_unbuffered", [False, True])


def run_with_full(streams: str, *words: str, is_unbuffered: bool = False) -> tuple[int, str, str]:
    """Run the command with these streams full, such as `stdout stderr`. Return its exit code, and
    what it wrote to the others.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONUNBUFFERED": "1" if is_unbuffered else ""}
    with Path("/dev/full").open("w") as full:
        pipes |= dict.fromkeys(streams.split(), full.fileno())
        command = [sys.executable, "-m", "mdsmix", *words]
        done = subprocess.run(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
    return done.returncode, done.stdout or "", done.stderr or ""


@IS_UNBUFFERED
def test_a_full_stdout_is_one_sentence_and_exit_code_four(
    is_unbuffered: bool, tmp_path: Path
) -> None:
    """What typer prints, what mdsmix prints, and the document of --json."""
    publish(tmp_path, CONCAT, [TOKEN_ROW])
    for words in (["--version"], ["inspect", str(tmp_path)], ["inspect", str(tmp_path), "--json"]):
        answer = run_with_full("stdout", *words, is_unbuffered=is_unbuffered)
        assert answer == (4, "", FULL), words


def test_a_stdout_that_was_opened_for_reading_says_how_to_redirect_it() -> None:
    command = f"{sys.executable} -m mdsmix --version 1</dev/null"
    done = subprocess.run(["sh", "-c", command], text=True, capture_output=True)
    assert done.returncode == 4
    assert done.stderr.startswith("error: cannot write stdout: it was opened for reading. ")
    assert done.stderr.count("\n") == 1


def test_the_error_of_the_command_is_printed_too() -> None:
    code, _, errors = run_with_full("stdout", "check", "none.yaml", "--json")
    assert code == 4
    assert errors == f"error: none.yaml: no such file; name a YAML file.\n{FULL}"


@IS_UNBUFFERED
def test_a_full_stderr_changes_no_result_and_no_exit_code(is_unbuffered: bool) -> None:
    """A conversion whose log fills a disk goes on."""
    code, out, _ = run_with_full("stderr", "--version", is_unbuffered=is_unbuffered)
    assert (code, out.startswith("mdsmix ")) == (0, True)
    answer = run_with_full("stderr", "check", "none.yaml", is_unbuffered=is_unbuffered)
    assert answer == (2, "", "")
    answer = run_with_full("stdout stderr", "--version", is_unbuffered=is_unbuffered)
    assert answer == (4, "", "")


def test_the_streams_are_like_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", encoding="latin-1", errors="replace") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "__stdout__", full)
        open_standard_streams()
        stream = sys.stdout
        assert stream is not full
        assert (stream.fileno(), stream.name) == (full.fileno(), full.name)
        assert (stream.encoding, stream.errors) == ("latin-1", "replace")
        assert stream.line_buffering == full.line_buffering
        print("lost", file=stream)
        with pytest.raises(Unreachable, match="cannot write stdout"):
            stream.flush()
        print("dropped", file=stream, flush=True)


def test_a_stream_that_a_program_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        open_standard_streams()
        assert sys.stdout is file

"""The root: help and version on stdout, one sentence on stderr for what goes wrong, and the documented exit codes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer.main

from mdsmix import __version__, kinds
from mdsmix.cli import main
from mdsmix.errors import MdsmixError, MixRefused, RecipeError, TooManyBadRecords, Unreachable
from tests.converting import Answer, mdsmix
from tests.published import CONCAT, TOKEN_ROW, publish

COMMANDS = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Answer:
    def fail() -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    return mdsmix()


def test_help_names_every_command_and_every_exit_code() -> None:
    for arguments in ((), ("--help",), ("-h",)):
        answer = mdsmix(*arguments)
        assert all(command in answer.out + answer.err for command in COMMANDS)
    assert all(f"{code} " in answer.out for code in range(6))
    assert "--install-completion" in answer.out
    assert mdsmix("--version") == Answer(0, f"mdsmix {__version__}\n", "")


@pytest.mark.parametrize("example", main.EXAMPLES.values())
def test_every_command_explains_itself_and_understands_its_example(example: str) -> None:
    name, *arguments = shlex.split(example)
    command = COMMANDS[name]
    assert command.make_context(name, arguments)
    assert command.epilog == f"Example: mdsmix {example}"
    answer = mdsmix(name, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert f"mdsmix {name}" in answer.out
    for option in command.params:
        assert all(name in answer.out for name in option.opts if name.startswith("-"))
        assert option.help, f"{option.name} says nothing"


def test_every_command_has_an_example() -> None:
    assert COMMANDS.keys() == {each.split()[0] for each in main.EXAMPLES.values()}


def test_wrong_usage_ends_with_two_and_says_so_on_stderr() -> None:
    for arguments in (["convrt"], ["convert", "a.yaml", "--limit", "0"], ["inspect", "--no-such"]):
        answer = mdsmix(*arguments)
        assert (answer.code, answer.out) == (2, "")
        assert "Error" in answer.err


def test_a_file_that_is_no_recipe_is_told_what_it_is(tmp_path: Path) -> None:
    data = "is a file of data, not a recipe: `mdsmix init"
    for name, text, said in (
        ("foundry.yaml", "model: {name: mpt}\ntrain_loader: {name: text}\n", "is a training YAML"),
        ("lines.jsonl", '{"text": "a"}\n{"text": "b"}\n', data),
        ("line.jsonl", '{"text": "a"}\n', data),
        ("table.csv", "text,b\n1,2\n", data),
    ):
        (path := tmp_path / name).write_text(text)
        answer = mdsmix("convert", str(path))
        assert (answer.code, answer.out) == (2, ""), name
        assert answer.err.startswith(f"error: {path} {said}"), name


def test_each_kind_of_error_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds_of_error = (MdsmixError, RecipeError, MixRefused, Unreachable, TooManyBadRecords)
    for code, kind in enumerate(kinds_of_error, start=1):
        assert raising(monkeypatch, kind("x.")) == Answer(code, "", "error: x.\n")


def test_a_defect_is_one_sentence_and_its_traceback_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MDSMIX_DEBUG", raising=False)
    answer = raising(monkeypatch, ZeroDivisionError("a line\nand another"))
    assert answer.code == 1
    assert answer.err.count("\n") == 1
    assert "mdsmix itself failed (ZeroDivisionError: a line)" in answer.err
    monkeypatch.setenv("MDSMIX_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        raising(monkeypatch, ZeroDivisionError("a line"))


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_says_what_is_kept(
    by: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(by)

    monkeypatch.setattr(kinds, "open_recipe", interrupt)
    answer = mdsmix("convert", "a.yaml")
    assert (answer.code, answer.out) == (code, "")
    assert answer.err == f"{main.KEPT}\n"


def test_an_interruption_while_a_command_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = raising(monkeypatch, KeyboardInterrupt())
    assert (answer.code, answer.err) == (130, f"{main.KEPT}\n")


def test_starting_up_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, mdsmix.cli.main; print(*{n.partition('.')[0] for n in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "streaming", "transformers", "tokenizers", "boto3", "numpy", "omegaconf"}
    assert not heavy & set(done.stdout.split())


def completed(words: str) -> list[str]:
    """What a bash is told of the last word."""
    place = str(len(words.split(" ")) - 1)
    asked = {"_MDSMIX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    script = Path(sys.executable).with_name("mdsmix")
    done = subprocess.run([script], env=os.environ | asked, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_commands_and_options_and_is_left_the_files() -> None:
    """It completes paths itself where it is told nothing, folder by folder; any word that it is told would end that."""
    for words, told in (
        ("qu", ["quarantine"]),
        ("inspect --lo", ["--longest"]),
        ("convert --only ", []),
        ("convert mi", []),
        ("check mi", []),
    ):
        assert completed(f"mdsmix {words}") == told


def test_windows_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no fcntl, so a run would end in a traceback."""
    monkeypatch.setattr(sys, "platform", "win32")
    answer = mdsmix("convert", "recipe.yaml")
    assert (answer.code, answer.out) == (4, "")
    assert answer.err.splitlines() == [
        "error: mdsmix runs on Linux, and on macOS, not on Windows itself: run it in WSL, where the same commands work."
    ]


@pytest.mark.parametrize("command", ["--version", "inspect"])
def test_a_reader_that_is_gone_is_no_failure_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """What typer prints, and what rich does: `mdsmix inspect ... | head` is not "mdsmix itself failed"."""
    publish(tmp_path, CONCAT, [TOKEN_ROW])
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "argv", ["mdsmix", command, *([str(tmp_path)] * (command == "inspect"))])  # fmt: skip
    with os.fdopen(writing, "w", closefd=True) as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        with pytest.raises(SystemExit) as end:
            main.run()
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            gone.close()
    assert end.value.code == 141


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_standard_stream_that_is_closed_is_no_failure_of_ours(
    monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """`mdsmix ... >&-`, as daemons start what they start: Python then has None in its place."""
    monkeypatch.setattr(sys, "argv", ["mdsmix", "--version"])
    monkeypatch.setattr(sys, closed, None)
    with pytest.raises(SystemExit) as end:
        main.run()
    print("a line", file=getattr(sys, closed))
    assert end.value.code == 0
    assert getattr(sys, closed).name == os.devnull

"""The root: help and version on stdout, one sentence on stderr for what goes wrong, and the
documented exit codes.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mdsmix import __version__, api, kinds
from mdsmix.cli import commands, main
from mdsmix.errors import MdsmixError, MixRefused, RecipeError, TooManyBadRecords, Unreachable
from tests.converting import Answer, mdsmix
from tests.published import CONCAT, TOKEN_ROW, publish

COMMANDS = typer.main.get_command(commands.make_app()).commands  # type: ignore[attr-defined]


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Answer:
    def fail(prog_name: str, standalone_mode: bool) -> None:
        raise error

    monkeypatch.setattr(commands, "make_app", lambda **_: fail)
    return mdsmix()


def test_help_names_commands_options_and_codes_and_wrong_usage_ends_with_two() -> None:
    for arguments in ((), ("--help",), ("-h",)):
        answer = mdsmix(*arguments)
        assert all(command in answer.out + answer.err for command in COMMANDS)
    assert all(f"{code} " in answer.out for code in range(6))
    assert "--install-completion" in answer.out
    assert mdsmix("--version") == Answer(0, f"mdsmix {__version__}\n", "")
    assert commands.EXAMPLES.keys() == COMMANDS.keys()
    for name, example in commands.EXAMPLES.items():
        assert example.split()[0] == name
        command = COMMANDS[name]
        assert command.make_context(name, shlex.split(example)[1:])
        assert command.epilog == f"Example: mdsmix {example}"
        answer = mdsmix(name, "--help")
        assert (answer.code, answer.err) == (0, "")
        assert f"mdsmix {name}" in answer.out
        for option in command.params:
            assert all(word in answer.out for word in option.opts if word.startswith("-"))
            assert option.help, f"{name}: {option.name} says nothing"
    for arguments in (["convrt"], ["convert", "a.yaml", "--limit", "0"], ["inspect", "--no-such"]):
        answer = mdsmix(*arguments)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("error: ")
        assert answer.err.count("\n") == 1
    assert "Did you mean 'convert'" in mdsmix("convrt").err
    assert mdsmix("--", "convert", "--help").out == mdsmix("convert", "--help").out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "init a.jsonl",
            "Missing option '--tokenizer' (The model's tokenizer: a folder or a hub name). "
            "See `mdsmix init",
        ),
        (
            "bench --gpus 1",
            "Missing argument 'TRAIN.yaml' (A rendered YAML or a config of LLM-"
            "Foundry). See `mdsmix bench",
        ),
        ("plan a.yaml --batch x", "--batch x is not a whole number of 1 or more. See `mdsmix plan"),
        ("plan a.yaml --batch 0", "--batch 0 is not a whole number of 1 or more. See `mdsmix plan"),
        ("inspect a -n -1", "--samples -1 is not a whole number of 0 or more. See `mdsmix inspect"),
        ("bench a --step-ms 0", "--step-ms 0.0 is not a number of 0.1 or more. See `mdsmix bench"),
        ("convert a --no-such", "No such option: --no-such. See `mdsmix convert"),
        ("check", ""),
    ],
)
def test_wrong_words_are_one_sentence(words: str, sentence: str) -> None:
    """A command without its arguments shows its help, and no error."""
    answer = mdsmix(*words.split())
    assert answer.code == 2
    assert answer.err == (f"error: {sentence} --help`.\n" if sentence else "")


def test_help_has_every_command_in_one_of_four_groups() -> None:
    grouped = [name for group in commands.GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(COMMANDS)
    assert [group.partition(":")[0] for group in commands.GROUPS] == [
        "Prepare",
        "Look",
        "Train",
        "Keep",
    ]
    lines = mdsmix("--help").out.splitlines()
    heads = [line.strip("╭╮─ ") for line in lines if line.startswith("╭")]
    assert heads == ["Options", *commands.GROUPS]
    # A sentence is folded by the width of the terminal, not where the code folds it.
    assert any("credentials, permissions, clock" in line for line in lines)


def test_a_message_names_what_a_file_is_if_it_is_not_a_recipe(tmp_path: Path) -> None:
    """A file of data is recognised by every command. Otherwise the message would quote its first
    lines as wrong YAML.
    """
    data = "is a data file, not a recipe: `mdsmix init"
    others = ("check", "plan", "report", "inspect", "verify", "quarantine", "preview")
    for name, text, words in (
        ("foundry.yaml", "model: {name: mpt}\ntrain_loader: {name: text}\n", "is a training YAML"),
        ("lines.jsonl", '{"text": "a"}\n{"text": "b"}\n', data),
        ("line.jsonl", '{"text": "a"}\n', data),
        ("table.csv", "text,b\n1,2\n", data),
    ):
        (path := tmp_path / name).write_text(text)
        for command in ("convert", *(others if name == "lines.jsonl" else ())):
            answer = mdsmix(command, path)
            assert (answer.code, answer.out) == (2, ""), (command, name)
            assert answer.err.startswith(f"error: {path} {words}"), (command, name)
    # A training YAML is one whatever its name.
    answer = mdsmix("check", (tmp_path / "foundry.yaml").rename(tmp_path / "foundry.txt"))
    assert (answer.code, "a data file" in answer.err) == (3, False)


def test_an_error_has_its_exit_code_and_a_defect_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds_of_error = (MdsmixError, RecipeError, MixRefused, Unreachable, TooManyBadRecords)
    for code, kind in enumerate(kinds_of_error, start=1):
        assert raising(monkeypatch, kind("x.")) == Answer(code, "", "error: x.\n")
    monkeypatch.delenv("MDSMIX_DEBUG", raising=False)
    answer = raising(monkeypatch, ZeroDivisionError("a line\nand another"))
    assert (answer.code, answer.err.count("\n")) == (1, 1)
    assert "mdsmix itself failed (ZeroDivisionError: a line)" in answer.err
    monkeypatch.setenv("MDSMIX_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        raising(monkeypatch, ZeroDivisionError("a line"))


def raise_interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_an_interruption_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for signal_number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        monkeypatch.setattr(
            kinds,
            "open_recipe",
            lambda *_, signal_number=signal_number: signal.raise_signal(signal_number),
        )
        assert mdsmix("convert", "a.yaml") == Answer(code, "", f"{main.KEPT}\n")
    # In an import of the conversion it ends the command without more imports: another import of
    # numpy would fail.
    with monkeypatch.context() as patch:
        patch.setattr(api, "convert", raise_interrupt)
        patch.setitem(sys.modules, "mdsmix.report.conversions", None)
        assert mdsmix("convert", "a.yaml") == Answer(130, "", f"{main.KEPT}\n")
    # While a command is imported it is no traceback either.
    assert raising(monkeypatch, KeyboardInterrupt()) == Answer(130, "", f"{main.KEPT}\n")


def test_windows_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no fcntl, so a run would end in a traceback."""
    monkeypatch.setattr(sys, "platform", "win32")
    message = (
        "error: mdsmix runs on Linux and macOS, not on Windows itself: run it in WSL, where the "
        "same commands work.\n"
    )
    assert mdsmix("convert", "recipe.yaml") == Answer(4, "", message)


def with_stream(name: str, stream: Any, *arguments: str) -> tuple[Any, Any]:
    """Run the command with this standard stream. Return its exit code, and what the attribute of
    `sys` is afterwards.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mdsmix", *arguments])
        patch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as end:
            main.run()
        return end.value.code, getattr(sys, name)


def test_a_stream_that_is_gone_or_closed_is_no_failure_of_ours(tmp_path: Path) -> None:
    """What typer prints, and what rich does: `mdsmix inspect ... | head` is not "mdsmix itself
    failed". And `mdsmix ... >&-`, as daemons start what they start: Python then has None in its
    place.
    """
    publish(tmp_path, CONCAT, [TOKEN_ROW])
    for arguments in (("--version",), ("inspect", str(tmp_path))):
        reading, writing = os.pipe()
        os.close(reading)
        gone = os.fdopen(writing, "w")
        assert with_stream("stdout", gone, *arguments)[0] == 141
        with suppress(BrokenPipeError):
            gone.close()
    for closed in ("stdout", "stderr"):
        code, there = with_stream(closed, None, "--version")
        print("a line", file=there)
        assert (code, there.name) == (0, os.devnull)

"""With --json stdout is one valid document, whatever happens; an error is an object in it, and
still a sentence on stderr.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mdsmix import errors, kinds
from mdsmix.cli import commands, main
from tests.converting import Answer, documents, mdsmix, run_ok, write_jsonl, write_recipe

COMMANDS = typer.main.get_command(commands.make_app()).commands  # type: ignore[attr-defined]
WITH_JSON = [
    name
    for name, command in COMMANDS.items()
    if any("--json" in parameter.opts for parameter in command.params)
]


def required_words(name: str, file: object) -> list[str]:
    """Return arguments and options without which the command does not begin, all of them `file`."""
    words = list[str]()
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "argument" and (parameter.required or name == "init"):
            words.append(str(file))
        elif parameter.required:
            words += [max(parameter.opts, key=len), str(file)]
    return words


def error_of(answer: Answer) -> Any:
    """Return the error of the one document on stdout, which must have the exit code."""
    tree = json.loads(answer.out)
    assert tree["error"]["exit_code"] == answer.code, answer
    return tree["error"]


@pytest.mark.parametrize("name", WITH_JSON)
def test_every_command_gives_an_error_as_json(name: str, tmp_path: Path) -> None:
    """A missing file, a file of another sort than expected, an unknown option, and a missing
    argument.
    """
    (odd := tmp_path / "odd.yaml").write_text("a: [")
    # `example` makes a folder, and cannot where a file is.
    files = (odd, odd / "folder") if name == "example" else (odd, tmp_path / "gone.yaml")
    for file in files:
        answer = mdsmix(name, *required_words(name, file), "--json")
        error = error_of(answer)
        assert answer.code in (2, 4)
        known = getattr(errors, error["class"])
        assert issubclass(known, errors.MdsmixError)
        assert known.exit_code == answer.code
        assert f"error: {error['message']}" in answer.err.splitlines()
    for words in (["--no-such"], []):
        answer = mdsmix(name, "--json", *words)
        error = error_of(answer)
        assert (answer.code, error["class"]) == (2, "UsageError")
        assert error["message"].split()[0] in answer.err
    assert mdsmix(name, *required_words(name, files[1])).out == ""


def test_the_error_is_part_of_the_document_that_a_command_gave(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "word " * 40}] * 4)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"no": 1}] * 4)
    recipe = write_recipe(
        tmp_path,
        tokenizer_folder,
        max_bad="0%",
        streams={"good": documents(good), "bad": documents(bad), "worse": documents(bad)},
    )
    # One stream is published, two are not.
    answer = mdsmix("convert", recipe, "--json", "--workers", 1)
    tree = json.loads(answer.out)
    assert [row["stream"] for row in tree["rows"]] == ["good"]
    error = error_of(answer)
    assert (error["class"], answer.code) == ("SeveralFailed", 5)
    assert [each["class"] for each in error["errors"]] == ["TooManyBadRecords"] * 2
    lines = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: {each['message']}" for each in error["errors"]]
    # Streams of a recipe: each has its error, and the document has those that failed.
    answer = mdsmix("inspect", recipe, "--json")
    tree = json.loads(answer.out)
    assert ["error" in stream for stream in tree["streams"]] == [False, True, True]
    assert [each["class"] for each in error_of(answer)["errors"]] == ["NotPublished"] * 2
    # A page without one of the streams.
    page = tmp_path / "page.html"
    answer = mdsmix("report", recipe, "-o", page, "--no-preview", "--json")
    tree = json.loads(answer.out)
    assert tree["wrote"] == str(page)
    assert tree["problems"]
    assert error_of(answer)["exit_code"] == 4
    # Without --json nothing changes.
    assert '"error"' not in mdsmix("inspect", recipe).out


def test_a_refused_mix_gives_its_findings_and_the_error(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """`check` itself does not fail if it refuses a mix: its document has the verdict."""
    source = write_jsonl(tmp_path / "web.jsonl", [{"text": "word " * 40}] * 4)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": documents(source)})
    run_ok("convert", recipe, "--workers", 1)
    for name in ("check", "render-yaml", "plan"):
        answer = mdsmix(name, recipe, "max_seq_len=8", "--json")
        tree = json.loads(answer.out)
        assert answer.code == 3
        assert [each["id"] for each in tree["findings"] if each["severity"] == "error"]
        if name == "check":
            assert "error" not in tree
        else:
            assert error_of(answer)["class"] == "MixRefused"
            assert f"error: {tree['error']['message']}" in answer.err.splitlines()


def test_an_interruption_and_a_defect_are_errors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for signal_number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        monkeypatch.setattr(
            kinds,
            "open_recipe",
            lambda *_, signal_number=signal_number: signal.raise_signal(signal_number),
        )
        answer = mdsmix("convert", "a.yaml", "--json")
        assert error_of(answer) == {
            "class": "Interrupted",
            "message": main.KEPT,
            "exit_code": code,
        }
    monkeypatch.delenv("MDSMIX_DEBUG", raising=False)
    monkeypatch.setattr(kinds, "open_recipe", lambda *_: 1 / 0)
    answer = mdsmix("convert", "a.yaml", "--json")
    error = error_of(answer)
    assert (answer.code, error["class"]) == (1, "ZeroDivisionError")
    assert answer.err == f"error: {error['message']}\n"
    # The words after `--` are no options, and --json of one command is not that of the next.
    assert mdsmix("convert", "--", "a.yaml", "--json").out == ""
    assert mdsmix("convert", "a.yaml").out == ""

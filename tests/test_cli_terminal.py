"""Nothing that is shown steers a terminal: names of files, folders and fields, records, tokens and templates may come from anyone."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.report.show import print_findings
from mdsmix.training.findings import Finding
from tests.converting import Answer, documents, mdsmix, pairs, write_jsonl, write_recipe
from tests.corpus import train_tokenizer

HOSTILE = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r:smile:[bold]"
"Sets the window's title, clears the screen, turns red, changes the direction, begins the line anew."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a hostile special token, in a folder of a hostile name."""
    folder = train_tokenizer(tmp_path_factory.mktemp("plain"), documents_n=5)
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    (end,) = [token for token in tree["added_tokens"] if token["content"] == "<|im_end|>"]
    end["content"] = HOSTILE
    tree["model"]["vocab"][HOSTILE] = tree["model"]["vocab"].pop("<|im_end|>", 3)
    path.write_text(json.dumps(tree))
    hostile = tmp_path_factory.mktemp("hostile") / f"tokenizer {HOSTILE}"
    shutil.copytree(folder, hostile)
    return hostile


@pytest.fixture
def recipe(tmp_path: Path, tokenizer: Path) -> Path:
    """Hostile everywhere: folder, files, field names, fields that nothing reads, bad records and texts."""
    home = tmp_path / f"data {HOSTILE}"
    texts = [{"text": f"Number {n} {HOSTILE}", HOSTILE: "more"} for n in range(20)]
    write_jsonl(home / f"docs {HOSTILE}.jsonl", [*texts, {"text": {HOSTILE: 1}}, {HOSTILE: 1}])
    write_jsonl(home / f"faq {HOSTILE}.jsonl", [{HOSTILE: "Which?", "answer": "This."}])
    faq = pairs("faq*.jsonl")
    faq["source"] |= {"prompt": HOSTILE, "response": "answer"}
    streams = {"docs": documents("docs*.jsonl", layout="document"), "faq": faq}
    return write_recipe(home, tokenizer, streams=streams, max_seq_len=64, special_tokens_in_text="allow")  # fmt: skip


def is_safe(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def safe(*arguments: object, code: int = 0) -> Answer:
    answer = mdsmix(*arguments)
    assert answer.code == code, answer.err
    assert is_safe(answer.out), ascii(answer.out)
    assert is_safe(answer.err), ascii(answer.err)
    return answer


def test_no_command_hands_on_what_steers_a_terminal(recipe: Path) -> None:
    home = recipe.parent
    docs = home / "out/docs"
    safe("convert", recipe, "--dry-run")
    said = safe("convert", recipe)
    assert "fields not read: x\\x1b]0;owned" in said.out
    for command in ("inspect", "verify", "gc", "quarantine"):
        for arguments in ((recipe,), (docs,), (recipe, "--json")):
            assert "\\x1b" in safe(command, *arguments).out or "--json" in arguments
    for command, *more in (("convert",), ("check",), ("mix", "--out", home / "mixed")):
        safe(command, recipe, *more)
        safe(command, recipe, *more, "--json")
    safe("repair", docs, "--recipe", recipe)
    assert "x\\x1b]0;owned" in safe("inspect", docs).out


def test_on_a_terminal_only_our_own_colours_are_sent_and_a_finding_stays_in_its_line(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    said = dict.fromkeys(("message", "why", "fix"), HOSTILE)
    finding = Finding(id="x", severity="note", streams=("a\nnote fine",), **said)
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda answer=is_terminal: answer)
        print_findings([finding])
        out = without_colours(capsys.readouterr().out)
        assert is_safe(out)
        assert "a\\nnote fine" in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for arguments in (("convert", recipe), ("inspect", recipe), ("quarantine", recipe)):
        answer = mdsmix(*arguments)
        assert answer.code == 0
        assert is_safe(without_colours(answer.out)), ascii(answer.out)
    assert ":smile:[bold]" in answer.out, "neither an emoji nor markup"

"""Tab offers the streams and loaders of the file on the command line, and never prints an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.converting import mdsmix

RECIPE = """
tokenizer: ./tokenizer
local: ./mix
streams:
  web: {kind: pretraining, source: {path: web.jsonl}, holdout: 1%}
  web-chat: {kind: finetuning, source: {path: chat.jsonl}}
  old: {kind: pretraining, remote: s3://bucket/old, split: val}
  quiz: {kind: pretraining, source: {path: quiz.jsonl}, split: test}
"""
TRAIN = """
train_loader: {name: text}
eval_loader: [{label: quiz, name: text}, {label: code, name: text}]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "train.yaml").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """Return what bash is offered after Tab at the end of the line."""
    words = line.split()
    incomplete = not line.endswith(" ")
    monkeypatch.setenv("_MDSMIX_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - incomplete))
    answer = mdsmix()
    assert (answer.code, answer.err) == (0, ""), line
    return answer.out.split()


def test_streams_and_loaders_are_offered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = ["web", "web-chat", "quiz"]
    places = ["mix/web/train", "mix/web/eval", "mix/web-chat/train", "s3://bucket/old/val"]
    places.append("mix/quiz/test")
    for line, words in (
        ("mdsmix convert recipe.yaml --only ", converted),
        ("mdsmix convert recipe.yaml --only w", ["web", "web-chat"]),
        ("mdsmix convert --json recipe.yaml max_seq_len=8 --only web --only q", ["quiz"]),
        ("mdsmix repair --recipe recipe.yaml ", places),
        ("mdsmix repair --recipe recipe.yaml s3:", ["s3://bucket/old/val"]),
        ("mdsmix leaks recipe.yaml --eval mix/q", ["mix/quiz/test"]),
        ("mdsmix bench train.yaml --loader e", ["eval_loader.quiz", "eval_loader.code"]),
        ("mdsmix bench train.yaml --loader ", ["train_loader", "eval_loader.quiz"]),
    ):
        assert offered(monkeypatch, line)[: len(words)] == words, line
    monkeypatch.chdir(home / "sub")
    line = "mdsmix repair --recipe ../recipe.yaml "
    assert offered(monkeypatch, line)[0] == "../mix/web/train"


def test_a_file_that_cannot_be_read_offers_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = (b"\xff\xfe", b"streams: [", b"streams: [1, 2]", b"streams: {a: b}", b"- 1", b"")
    for content in (*contents, b"streams: {a: {local: '${b}/c'}}\n", b"x" * (1 << 21)):
        (home / "recipe.yaml").write_bytes(content)
        for line in ("convert recipe.yaml --only ", "repair --recipe recipe.yaml "):
            assert offered(monkeypatch, f"mdsmix {line}") == [], content[:40]
    for line in ("convert --only ", "convert gone.yaml --only ", "convert sub --only "):
        assert offered(monkeypatch, f"mdsmix {line}") == [], line


def test_completion_imports_nothing_heavy(home: Path) -> None:
    script = (
        "import atexit, sys\n"
        "heavy = {'numpy', 'omegaconf', 'orjson', 'pyarrow', 'tokenizers', 'torch', 'boto3'}\n"
        "atexit.register(lambda: print(sorted(heavy & {*sys.modules}), file=sys.stderr))\n"
        "sys.argv = ['mdsmix']\n"
        "from mdsmix.cli.main import run\n"
        "run()\n"
    )
    words = "mdsmix convert recipe.yaml --only "
    shell = {"_MDSMIX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | shell,
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert (done.stdout.split(), done.stderr.strip()) == (["web", "web-chat", "quiz"], "[]")

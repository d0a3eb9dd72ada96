"""A tokenizer is looked at without torch, and gives what it gives with torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mdsmix.encode import transformers_process
from mdsmix.encode.transformers_process import take


def test_an_error_without_words_is_told_by_its_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise KeyError

    for name in transformers_process.WITHOUT:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(transformers_process, "take", fail)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"name": "x", "kwargs": {}}'))
    transformers_process.main()
    assert json.loads(capsys.readouterr().out) == [{}, "KeyError()"]


def test_a_snapshot_is_taken_without_torch_and_is_the_same(tokenizer_folder: Path) -> None:
    """torch would be imported for nothing: 11 s and 900 MB more, where a tokenizer is used for the first time."""
    program = (
        "import sys; from mdsmix.encode import transformers_process; transformers_process.main(); "
        "sys.exit('torch' in sys.modules)"
    )
    asked = json.dumps(
        {
            "name": str(tokenizer_folder),
            "kwargs": {"bos_token": "<|im_start|>"},
        }
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=asked, capture_output=True, text=True, check=True
    )
    said = take(str(tokenizer_folder), {"bos_token": "<|im_start|>"})
    assert json.loads(done.stdout) == [said, ""]

"""The arena: commands run inside of it with hostile input, and what they did outside of their
output folder is seen.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mdsmix.recipe.read import SECRET_NAME
from tests.alarm import fail_after
from tests.converting import Answer, documents, mdsmix, write_recipe

MEMORY = 384 << 20
"""Bytes that this process may grow by while a command runs: a line is kept up to 256 MiB, and bombs
unfold to more.
"""
REFUSALS = {2, 3, 4, 5}
"The exit codes of the README, but for 0 and for 1, which says that mdsmix itself failed."


@dataclass(frozen=True)
class Arena:
    """A folder `out`, where commands may write, in a folder where they may not."""

    home: Path
    tokenizer: Path

    @property
    def out(self) -> Path:
        return self.home / "out"

    def recipe(self, source: object = "a.jsonl", **settings: Any) -> Path:
        """Of a stream `web` of documents unless the settings say otherwise."""
        settings = {"streams": {"web": documents(source)}, "tokenizer": self.tokenizer} | settings
        return write_recipe(self.home, settings.pop("tokenizer"), **settings)

    def convert(self, recipe: object, *settings: str) -> Path:
        """Where the stream `web` is published."""
        answer = self.run("convert", recipe, *settings)
        assert answer.code == 0, answer.err
        return self.out / "web" / "train"

    def run(self, *arguments: object) -> Answer:
        """The command's answer, after a look at everything that no command may do."""
        before, memory = self._outside(), _peak()
        with fail_after(20):
            answer = mdsmix(*arguments)
        assert self._outside() == before, "something outside of the output folder was changed"
        if sys.platform == "linux":
            assert _peak() - memory < MEMORY
        assert answer.code in REFUSALS | {0}, answer
        assert "Traceback" not in answer.err
        assert sum(line.startswith("error: ") for line in answer.err.splitlines()) <= 1
        for value in (v for n, v in os.environ.items() if SECRET_NAME.search(n) and len(v) > 11):
            assert value not in answer.out + answer.err
        return answer

    def refused(self, *arguments: object) -> str:
        """The one sentence with which the command refuses, or the report of what it was asked to
        look at.
        """
        answer = self.run(*arguments)
        assert answer.code in REFUSALS, answer
        if answer.code == 3 and not answer.err:
            return answer.out
        *_, last = answer.err.splitlines()
        assert last.startswith("error: ")
        assert len(last) < 1000
        return last

    def _outside(self) -> dict[Path, tuple[object, ...]]:
        """Every file and folder around `out`: what a command may neither make, change nor take
        away.
        """
        around = (p for p in self.home.parent.rglob("*") if self.out not in (p, *p.parents))
        found = {path: (path.lstat(), path.is_dir()) for path in around}
        return {
            path: (at.st_mode, at.st_ino, *(() if is_folder else (at.st_size, at.st_mtime_ns)))
            for path, (at, is_folder) in found.items()
        }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture
def arena(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    """An arena of this test's own, with something of value beside it."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "precious.jsonl").write_text('{"text": "not yours"}\n')
    monkeypatch.chdir(home)
    return Arena(home, tokenizer_folder)

"""The arena: a folder in which commands run with hostile input. Every change outside of their
output folder is noticed.
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
"""Bytes by which this process may grow during a command: a line is kept up to 256 MiB, and bombs
are larger when decompressed.
"""
REFUSALS = {2, 3, 4, 5}
"The exit codes of the README, except for 0 and 1; 1 means that mdsmix itself failed."


@dataclass(frozen=True)
class Arena:
    """A folder `out` into which commands may write, in a folder into which they may not."""

    home: Path
    tokenizer: Path

    @property
    def out(self) -> Path:
        return self.home / "out"

    def recipe(self, source: object = "a.jsonl", **settings: Any) -> Path:
        """Write a recipe of a stream `web` of documents, unless the settings override it."""
        settings = {"streams": {"web": documents(source)}, "tokenizer": self.tokenizer} | settings
        return write_recipe(self.home, settings.pop("tokenizer"), **settings)

    def convert(self, recipe: object, *settings: str) -> Path:
        """Convert, and return the folder in which the stream `web` is published."""
        answer = self.run("convert", recipe, *settings)
        assert answer.code == 0, answer.err
        return self.out / "web" / "train"

    def run(self, *arguments: object) -> Answer:
        """Run a command, and assert that it did nothing that no command may do."""
        before = self._list_outside()
        memory = _measure_peak()
        with fail_after(20):
            answer = mdsmix(*arguments)
        assert self._list_outside() == before, "something outside of the output folder was changed"
        if sys.platform == "linux":
            assert _measure_peak() - memory < MEMORY
        assert answer.code in REFUSALS | {0}, answer
        assert "Traceback" not in answer.err
        assert sum(line.startswith("error: ") for line in answer.err.splitlines()) <= 1
        for value in (v for n, v in os.environ.items() if SECRET_NAME.search(n) and len(v) > 11):
            assert value not in answer.out + answer.err
        return answer

    def refused(self, *arguments: object) -> str:
        """Run a command that must refuse. Return its one sentence, or the report of a command that
        checks something.
        """
        answer = self.run(*arguments)
        assert answer.code in REFUSALS, answer
        if answer.code == 3 and not answer.err:
            return answer.out
        *_, last = answer.err.splitlines()
        assert last.startswith("error: ")
        assert len(last) < 1000
        return last

    def _list_outside(self) -> dict[Path, tuple[object, ...]]:
        """Return the state of every file and folder outside of `out`, which no command may create,
        change or delete.
        """
        states = dict[Path, tuple[object, ...]]()
        for path in self.home.parent.rglob("*"):
            if self.out in (path, *path.parents):
                continue
            stat = path.lstat()
            states[path] = (stat.st_mode, stat.st_ino)
            if not path.is_dir():
                states[path] += (stat.st_size, stat.st_mtime_ns)
        return states


def _measure_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture
def arena(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    """A new arena, with a file next to it that must not be touched."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "precious.jsonl").write_text('{"text": "not yours"}\n')
    monkeypatch.chdir(home)
    return Arena(home, tokenizer_folder)

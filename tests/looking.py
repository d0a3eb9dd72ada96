"""First looks at tokenizers without the start of a process that imports transformers, which takes 2.5 s of processor time:
one such process stands by, and each look is a fork of it.

Run as `python -m tests.looking`: a line of JSON on stdin names a folder that holds `asked` and the environment of the look; when
`out` and `err` are written there, its exit code comes back on stdout.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mdsmix.encode import snapshot, tokenizer

BY_IMPORT = re.compile("HF_.*|HOME|XDG_CACHE_HOME")
"The variables that are read when the libraries are imported: a look with others has a process of its own."


class Looker:
    """The process, started by the first look."""

    def __init__(self) -> None:
        self._started, self._pid, self._lock = _by_import(), os.getpid(), threading.Lock()
        self._process: Any = None

    def look(self, asked: str) -> subprocess.CompletedProcess[str]:
        """As `tokenizer._look`."""
        if (_by_import(), os.getpid()) != (self._started, self._pid):
            return _LOOK(asked)
        with self._lock:
            return self._look(asked)

    def _look(self, asked: str) -> subprocess.CompletedProcess[str]:
        if not self._process:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.looking"],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        with TemporaryDirectory() as place:
            (Path(place) / "asked").write_text(asked)
            order = {"place": place, "cwd": os.getcwd(), "environment": dict(os.environ)}
            print(json.dumps(order), file=self._process.stdin, flush=True)
            code = int(self._process.stdout.readline())
            said = [(Path(place) / name).read_text() for name in ("out", "err")]
        return subprocess.CompletedProcess([], code, *said)

    def close(self) -> None:
        if self._process:
            self._process.communicate()


_LOOK = tokenizer._look


@contextmanager
def standing_by() -> Iterator[None]:
    """First looks of this process are forks of one that is ready."""
    looker = Looker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_look", looker.look)
        yield
    looker.close()


def _by_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if BY_IMPORT.fullmatch(name)}


def _look_forked(place: Path, cwd: str, environment: dict[str, str]) -> int:
    """The exit code of a forked process that does what `python -m mdsmix.encode.snapshot` does."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        for name, mode, standard in (("asked", "r", 0), ("out", "w", 1), ("err", "w", 2)):
            with (place / name).open(mode) as file:
                os.dup2(file.fileno(), standard)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        snapshot.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    os.environ.update(snapshot.WITHOUT)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    gc.freeze()
    orders = os.fdopen(os.dup(0))
    for line in orders:
        order = json.loads(line)
        print(_look_forked(Path(order["place"]), order["cwd"], order["environment"]), flush=True)


if __name__ == "__main__":
    main()

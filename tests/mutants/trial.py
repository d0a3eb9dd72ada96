"""One run of tests in a copy of the tree, bounded in time and memory: a mutant may run, or allocate, without end."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY_KIB = 16 << 20
"Address space of one process: torch and the MinIO reserve a few GiB of it without using them."
SCRATCH = ".scratch"
SILENCE = 120
"Seconds in which no test begins, after which a run counts as hung: the longest test takes 20 s of an idle machine."
LIBRARIES = (
    *("numpy", "orjson", "hypothesis", "tokenizers"),
    *("fastokens", "boto3", "zstandard", "typer.testing"),
)
TORCH = ("torch", "streaming", "transformers")


@dataclass(frozen=True)
class Outcome:
    verdict: str
    "`passed`, `failed` or `hung`."
    by: str
    "Which test; empty where it passed, or where none had begun."
    seconds: float


def copy_tree(root: Path, copy: Path) -> Path:
    """What git knows or would add: the developer's own tree is never touched."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    return copy


def cold_run(copy: Path, arguments: Sequence[str], limit: float, under: Sequence[str]) -> Outcome:
    """pytest as a command of its own, `under` another module of Python's."""
    started = time.monotonic()
    with _started(copy, [*under, "-m", "pytest", *_options(copy), *arguments]) as process:
        try:
            output = process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            output = None
        finally:
            _end(process.pid)
    shutil.rmtree(copy / SCRATCH, ignore_errors=True)
    seconds = time.monotonic() - started
    if process.returncode in (0, 5):
        return Outcome("passed", "", seconds)
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output or "", re.MULTILINE)
    return Outcome("failed" if output else "hung", named[1] if named else "", seconds)


class Warm:
    """Runs in forks of a process that has imported the libraries, torch too if it is to; see warm.py."""

    def __init__(self, copy: Path, with_torch: bool) -> None:
        libraries = LIBRARIES + TORCH if with_torch else LIBRARIES
        self._copy = copy
        self._process = _started(copy, ["-m", "tests.mutants.warm", *libraries])

    def run(self, arguments: Sequence[str], limit: float = SILENCE) -> Outcome:
        """pytest until the first failure, or until no test has begun for so long; what it started ends with it."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        log, notes = self._copy / ".log", self._copy / ".notes"
        notes.write_text("")
        line = {"arguments": [*_options(self._copy), *arguments], "output": str(log)}
        print(json.dumps(line | {"notes": str(notes)}), file=asked, flush=True)
        group = int(answers.readline())
        started = heard = time.monotonic()
        noted, is_over = 0, False
        while not is_over and time.monotonic() < heard + limit:
            is_over = bool(select.select([answers], [], [], 1)[0])
            if noted != (noted := notes.stat().st_size):
                heard = time.monotonic()
        _end(group)
        code = int(answers.readline())
        shutil.rmtree(self._copy / SCRATCH, ignore_errors=True)
        return _outcome(code, is_over, notes.read_text(), time.monotonic() - started)

    def close(self) -> None:
        _end(self._process.pid)
        self._process.communicate()


def _options(copy: Path) -> list[str]:
    return [
        *["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"],
        f"--basetemp={copy / SCRATCH}",
    ]


def _started(copy: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Python in the copy. PYTHONPATH reaches subprocesses too, before the developer's editable install; no stale byte code
    is read, since none is written."""
    own = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        ["sh", "-c", f'ulimit -v {MEMORY_KIB}; exec "$@"', "sh", sys.executable, *arguments],
        cwd=copy,
        env=os.environ | own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _outcome(code: int, is_over: bool, notes: str, seconds: float) -> Outcome:
    """pytest ends with 0, or with 5 where it was given no test; a broken import or a dead process is a failure."""
    if is_over and code in (0, 5):
        return Outcome("passed", "", seconds)
    what, _, test = notes.rstrip().rpartition("\n")[2].partition(" ")
    if not is_over:
        return Outcome("hung", test, seconds)
    return Outcome("failed", test if what == "failed" else "", seconds)

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
LIBRARIES = (
    *("numpy", "orjson", "hypothesis", "tokenizers"),
    *("fastokens", "boto3", "zstandard", "typer.testing"),
)
TORCH = ("torch", "streaming", "transformers")


@dataclass(frozen=True)
class Outcome:
    """`passed`, `failed` (by which test) or `hung`."""

    verdict: str
    by: str
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
    return Outcome(*_verdict(process.returncode, output), time.monotonic() - started)


class Warm:
    """Runs in forks of a process that has imported the libraries, torch too if it is to; see warm.py."""

    def __init__(self, copy: Path, with_torch: bool) -> None:
        libraries = LIBRARIES + TORCH if with_torch else LIBRARIES
        self._copy = copy
        self._process = _started(copy, ["-m", "tests.mutants.warm", *libraries])

    def run(self, arguments: Sequence[str], limit: float) -> Outcome:
        """pytest until the first failure; what it started ends with it."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        log = self._copy / ".log"
        line = {"arguments": [*_options(self._copy), *arguments], "output": str(log)}
        print(json.dumps(line), file=asked, flush=True)
        group = int(answers.readline())
        started = time.monotonic()
        is_over, _, _ = select.select([answers], [], [], limit)
        _end(group)
        code = int(answers.readline())
        shutil.rmtree(self._copy / SCRATCH, ignore_errors=True)
        output = log.read_text(errors="replace") if is_over else None
        return Outcome(*_verdict(code, output), time.monotonic() - started)

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


def _verdict(code: int, output: str | None) -> tuple[str, str]:
    """pytest ends with 0, or with 5 where it was given no test; a broken import or a dead process is a failure."""
    if output is None:
        return "hung", "the time limit"
    if code in (0, 5):
        return "passed", ""
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return "failed", named[1] if named else f"exit code {code}"

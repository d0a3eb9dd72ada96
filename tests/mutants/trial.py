"""One run of tests in a copy of the tree, bounded in time and memory: a mutant may run, or allocate, without end."""

from __future__ import annotations

import os
import re
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


def pytest_run(
    copy: Path, arguments: Sequence[str], limit: float, under: Sequence[str] = ()
) -> Outcome:
    """pytest on the arguments, until the first failure."""
    scratch = copy / ".scratch"
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={scratch}"]
    command = [sys.executable, *(under or ["-B"]), "-m", "pytest", *options, *arguments]
    started = time.monotonic()
    with subprocess.Popen(
        ["sh", "-c", f'ulimit -v {MEMORY_KIB}; exec "$@"', "sh", *command],
        cwd=copy,
        env=_environment(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        output = _output(process, limit)
    shutil.rmtree(scratch, ignore_errors=True)
    return Outcome(*_verdict(process.returncode, output), time.monotonic() - started)


def _environment(copy: Path) -> dict[str, str]:
    """PYTHONPATH reaches subprocesses too, before the developer's editable install; no stale byte code is read."""
    own = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {"MDSMIX_CACHE": str(copy / ".cache")}


def _output(process: subprocess.Popen[str], limit: float) -> str | None:
    """None where the limit ended it; what it started ends with it."""
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _verdict(code: int, output: str | None) -> tuple[str, str]:
    """pytest ends with 0, or with 5 where it was given no test; a broken import or a dead process is a failure."""
    if output is None:
        return "hung", "the time limit"
    if code in (0, 5):
        return "passed", ""
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return "failed", named[1] if named else f"exit code {code}"

"""Commands of a page, run where its reader would run them, and what a terminal would show.

Those of mdsmix run in this process, which costs some milliseconds; all else, and what is piped, is bash's.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdsmix.cli.main import run

ROOT = Path(__file__).parents[2]
PIPED = re.compile(r"[|<>;$`]|&&|\|\|")
AS_COMMAND = "import sys; sys.argv[0] = 'mdsmix'; from mdsmix.cli.main import run; run()"


@dataclass(frozen=True)
class Printed:
    """stdout and stderr as they came."""

    code: int
    text: str


def do(command: str) -> Printed:
    """In the folder in which this process stands."""
    if _is_ours(command):
        return _here(shlex.split(command, comments=True)[1:])
    return _by_bash(command)


def _is_ours(command: str) -> bool:
    words = shlex.split(command, comments=True)
    return words[:1] == ["mdsmix"] and not PIPED.search(
        re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", command)
    )


def _here(arguments: list[str]) -> Printed:
    said, before = io.StringIO(), sys.argv
    sys.argv = ["mdsmix", *arguments]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                run()
                code: Any = 0
            except SystemExit as end:
                code = end.code
    finally:
        sys.argv = before
    return Printed(int(code or 0), said.getvalue())


def _by_bash(command: str) -> Printed:
    found = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"CHECKOUT": str(ROOT)},
        timeout=300,
        check=False,
    )
    return Printed(found.returncode, found.stdout)


def command_folder(place: Path) -> Path:
    """A folder for PATH with the commands that readers have: mdsmix, python."""
    for name, what in {
        "mdsmix": f"{sys.executable} -c {shlex.quote(AS_COMMAND)}",
        "python": sys.executable,
    }.items():
        script = place / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}:$PYTHONPATH exec {what} "$@"\n')
        script.chmod(0o755)
    return place

"""The file of `--log-file`: every line that a command prints for people, with its time.

The lines come from the progress, from tables and from errors, whose callers do not pass a log on.
So the log is a setting of the process, as `storage.notices` is. With a bar on the terminal, with
`--quiet` and with `--json` the file has the same lines.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from mdsmix.errors import RecipeError
from mdsmix.messages import make_printable


class LogFile:
    """A log that is open for writing. Lines are appended, one write for each line, so that several
    jobs may share the file.
    """

    def __init__(self, path: str) -> None:
        """Open the file. Raises RecipeError if it cannot be written, or is not a log of mdsmix."""
        if "://" in path:
            raise RecipeError(
                f"--log-file {path} is a URL, but a log is written only to a local file: name one."
            )
        try:
            is_other_file = not _may_continue(Path(path))
        except OSError:
            is_other_file = False  # to open it for writing names the cause
        if is_other_file:
            raise RecipeError(
                f"--log-file {path} is a file that is not a log of mdsmix, such as a recipe or "
                "data, and lines of a log would spoil it; name a new file or an earlier log."
            )
        try:
            # It stays open until the command ends.
            self._file: TextIO | None = Path(path).open(  # noqa: SIM115
                "a", buffering=1, encoding="utf-8", errors="backslashreplace"
            )
        except OSError as error:
            raise RecipeError(
                f"--log-file {path} cannot be written: {error.strerror}; name a file in a folder "
                "that exists and can be written."
            ) from None
        self._path = make_printable(path)
        self._start = time.monotonic()

    def write(self, line: str) -> None:
        """Write a line with the time and the time since the command began."""
        if self._file is None:
            return
        stamp = make_stamp(time.monotonic() - self._start)
        try:
            self._file.write(f"{stamp}  {make_printable(line.rstrip())}\n")
        except OSError as error:  # such as a full disk: the work goes on without a log
            self._file = None
            with suppress(BrokenPipeError):
                print(
                    f"WARNING: the log {self._path} cannot be written any more "
                    f"({error.strerror}): the command goes on without it",
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _may_continue(path: Path) -> bool:
    """Check whether a log may be written there: nothing, an empty file, a device or a log."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        start = file.read(64)
    return not start or bool(STAMP.match(start))


STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d  \d+:\d\d:\d\d  ")
"The start of each line of a log, as `make_stamp` writes it."

_log: LogFile | None = None


def open_log(path: str, words: list[str]) -> None:
    """Begin the log with a line on the command. Raises RecipeError if it cannot be written.

    Args:
        path: the file; an existing one is continued.
        words: the words of the command line.
    """
    from mdsmix.recipe.read import mask_secrets

    global _log
    _log = LogFile(path)
    _log.write(mask_secrets(f"process {os.getpid()}: {' '.join(words)}"))


def write_log(*lines: str) -> None:
    """Write lines into the log, if there is one."""
    if _log is not None:
        for line in lines:
            _log.write(line)


def is_logging() -> bool:
    """Check whether there is a log."""
    return _log is not None


def close_log(code: int) -> None:
    """End the log with a line on the exit code."""
    global _log
    if _log is not None:
        _log.write(f"ended with exit code {code}")
        _log.close()
        _log = None


def make_stamp(seconds: float) -> str:
    """Return the local time with its offset, and the time since the work began:
    `2026-11-29T12:52:26+00:00  0:03:30`.
    """
    whole = int(seconds)
    local_time = datetime.now().astimezone().isoformat(timespec="seconds")
    return f"{local_time}  {whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"

"""Standard output and standard error of a command, if they are closed or cannot be written."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def open_standard_streams() -> None:
    """Make sys.stdout and sys.stderr streams that a command may write to.

    - One that the shell closed (`>&-`), which Python sets to None, becomes /dev/null.
    - If stdout cannot be written, such as on a full disk, a write raises Unreachable.
    - What cannot be written to stderr is dropped: a conversion must not end since its notices fill
      a disk.
    - A closed pipe raises BrokenPipeError for both, as usual.
    """
    for name, file_type in (("stdout", _Output), ("stderr", _Notices)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):  # not one that a program set, such as a test
            setattr(sys, name, _open_again(stream, file_type))


def _open_again(stream: TextIO, file_type: type[_Output]) -> TextIO:
    """Return a stream like this one of Python, whose bytes a `file_type` writes."""
    file = file_type(stream.fileno(), "w", closefd=False)
    file.name = stream.name
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        # With PYTHONUNBUFFERED=1 Python writes through.
        line_buffering=bool(stream.line_buffering) or stream.write_through,  # type: ignore[attr-defined]
    )


class _Output(io.FileIO):
    """The file of stdout."""

    name: Any
    has_failed = False
    """Whether bytes could not be written. Later ones are dropped: Python keeps what it could not
    write, and would try again and fail again when it ends.
    """

    def write(self, data: Any) -> int:
        """Write bytes. Return how many were written or dropped.

        Raises Unreachable the first time that it fails.
        """
        if self.has_failed:
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.has_failed = True
            self.report(error)
            return len(data)

    def report(self, error: OSError) -> None:
        """Raise Unreachable."""
        from mdsmix.errors import Unreachable
        from mdsmix.storage.local import explain_errors

        if error.errno == errno.EBADF:  # as after `1</dev/null`
            raise Unreachable(
                "cannot write stdout: it was opened for reading. Redirect it with > (not <), or "
                "close it with >&- if the output is not needed."
            ) from error
        with explain_errors("write", "stdout"):
            raise error


class _Notices(_Output):
    """The file of stderr."""

    def report(self, error: OSError) -> None:
        """Report nothing: the user cannot see it."""

"""Ends the process of a command without freeing its memory."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress


def end_process(code: int) -> None:
    """End the process as Python does, but leave its memory to the system: Python would free all
    objects one by one, which takes 22 ms after a conversion or a check. Threads are waited for and
    exit handlers are run. As in a worker, a file that a function of the user has left open is not
    flushed.

    Return if output cannot be written, since Python then says so at its own end. Return too if
    torch is imported: its libraries end more than memory.

    Args:
        code: the exit code.
    """
    if "torch" in sys.modules:
        return
    with suppress(OSError):
        _flush_output()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush_output()  # that of threads and exit handlers
        os._exit(code)


def _flush_output() -> None:
    sys.stdout.flush()
    sys.stderr.flush()

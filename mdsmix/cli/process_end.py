"""Ends the process of a command without freeing its memory."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress

from mdsmix.cli.stop_signals import INTERRUPTED, TERMINATED


def end_process(code: int) -> None:
    """End the process as Python does, but leave its memory to the system: Python would free all
    objects one by one, which takes 22 ms after a conversion or a check. Threads are waited for,
    except after Ctrl-C or SIGTERM, since a thread may wait for a silent store, and except those
    that only open a tokenizer: 3 s for Gemma 3, if a wrong option ends the command. Exit handlers
    are run. As in a worker, a file that a function of the user has left open is not flushed.

    Return if Python must end the process itself:
    - if output cannot be written, since Python says so, or is closed
    - if torch is imported, since its libraries end more than memory
    - under a profiler or a debugger, which goes on after the command

    Args:
        code: the exit code.
    """
    if "torch" in sys.modules or _is_observed():
        return
    with suppress(OSError, ValueError):
        _flush_output()
        if code not in (INTERRUPTED, TERMINATED) and _must_wait():
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush_output()  # that of threads and exit handlers
        os._exit(code)


def _must_wait() -> bool:
    """Return whether a thread runs that must end before the process does."""
    for thread in threading.enumerate():
        is_main = thread is threading.main_thread()
        may_be_left = thread.daemon or getattr(thread, "can_be_left", False)
        if not is_main and not may_be_left:
            return True
    return False


def _is_observed() -> bool:
    """Return whether a profiler or a debugger runs this process's code."""
    if sys.getprofile() or sys.gettrace():
        return True
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    return monitoring is not None and any(map(monitoring.get_tool, range(6)))


def _flush_output() -> None:
    """Flush stdout and stderr.

    Raises OSError if one cannot be written, and ValueError if it is closed.
    """
    sys.stdout.flush()
    sys.stderr.flush()

"""Lets Ctrl-C and SIGTERM end a command with an exit code and no traceback, at whatever moment they
come.

Python's own handler raises KeyboardInterrupt at whatever line the main thread is. That fails in
three places:
- outside the block that turns exceptions into exit codes: before the command, and after its end
- in an import: Python's locks of modules may lose the exception, and half a module may stay, as of
  numpy, which cannot be imported again
- in a weakref callback or a `__del__`: Python prints "Exception ignored", and goes on
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mdsmix.interrupts import find_importer

INTERRUPTED = 130
"The exit code for Ctrl-C, the same as typer's."
TERMINATED = 143
"The exit code for SIGTERM, which a scheduler sends. Workers stop, and the lease is released."
IMPORT_SECONDS = 0.5
"After so many seconds an import is broken off: that of torch takes seconds."


class _State:
    """What a signal does in this process."""

    is_command_running = False
    "Whether a signal raises an exception. Otherwise it is noted."
    is_over = False
    "Whether nothing is left but the end of the process, so that a signal ends it at once."
    noted: int | None = None
    "A signal that came while no command was running."
    raised: int | None = None
    "The signal whose exception was raised, or will be raised after an import."


_state = _State()


def note_stop_signals() -> dict[int, Any]:
    """Let SIGINT and SIGTERM be noted from now on, until `raise_stop_signals` raises them. The
    second one ends the process at once. A signal that is ignored stays so, as SIGINT in a
    background job of a shell. In another thread than the main one nothing is changed.

    Return the handlers of before, by signal.
    """
    earlier = dict[int, Any]()
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler == signal.SIG_IGN:
            continue
        try:
            signal.signal(number, _handle)
        except ValueError:  # not in the main thread
            break
        earlier[number] = handler
    return earlier


@contextmanager
def raise_stop_signals() -> Iterator[None]:
    """Raise SIGINT as KeyboardInterrupt and SIGTERM as SystemExit in the `with` block; in an import
    when it has ended, or after IMPORT_SECONDS. A signal that was noted before is raised at once.
    """
    earlier = note_stop_signals()
    hook = sys.unraisablehook
    sys.unraisablehook = _raise_lost_exception
    try:
        _state.is_command_running = True
        if _state.noted:
            _raise(_state.noted)
        yield
    finally:
        _state.is_command_running = False
        _state.noted = _state.raised = None
        sys.unraisablehook = hook
        for number, handler in earlier.items():
            signal.signal(number, handler)


def end_at_stop_signals() -> None:
    """Let a signal end the process at once from now on. The command has ended, and Python waits for
    threads, such as one that opens a large tokenizer.
    """
    _state.is_over = True


def _handle(number: int, frame: FrameType | None) -> None:
    """Raise the exception of a signal now or after an import, or note the signal, by `_state`."""
    if _state.is_command_running:
        importer = find_importer(frame)
        # The second signal breaks an import off, which may wait for a disk for ever.
        if importer and not _state.raised:
            _raise_at_next_line(number, importer)
        else:
            _raise(number)
    elif _state.is_over or _state.noted:
        os._exit(128 + number)
    else:
        _state.noted = number


def _raise(number: int) -> None:
    """Raise the exception of a signal."""
    _state.raised = number
    if number == signal.SIGTERM:
        raise SystemExit(TERMINATED)
    raise KeyboardInterrupt


def _raise_at_next_line(number: int, frame: FrameType) -> None:
    """Raise the exception of a signal when this frame of the main thread runs its next line, as a
    debugger stops there. If that takes longer than IMPORT_SECONDS, raise it in whatever function
    is called next, but not in those of Python that have locks of modules.
    """
    deadline = time.monotonic() + IMPORT_SECONDS

    def trace_call(called: FrameType, *_: object) -> None:
        if time.monotonic() > deadline and not called.f_code.co_filename.startswith("<frozen"):
            _raise(number)

    _state.raised = number
    frame.f_trace = lambda *_: _raise(number)
    sys.settrace(trace_call)


def _raise_lost_exception(unraisable: Any) -> None:
    """Raise the exception of a signal again that came in a callback, outside of the callback.
    Report other errors as Python does.
    """
    if _state.raised and isinstance(unraisable.exc_value, (KeyboardInterrupt, SystemExit)):
        frame = sys._getframe(1)
        _raise_at_next_line(_state.raised, find_importer(frame) or frame)
    else:
        sys.__unraisablehook__(unraisable)

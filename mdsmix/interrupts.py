"""Delays Ctrl-C and other signals where an exception at any line would leave a process or a file
that nobody ends or deletes, or half a module.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

DELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Ctrl-C (a notebook's Interrupt), the end that a scheduler asks for, and the time limit of a
scheduler such as Airflow. Python turns each into an exception, if a handler is set.
"""
IMPORTS = "<frozen importlib._bootstrap>"
"The file name of Python's functions that import a module."


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay the handlers of the signals in DELAYED (Ctrl-C, SIGTERM and SIGALRM) until the end of
    the `with` block.

    A handler raises an exception at whatever line the main thread is. A worker process that was
    just started, and is in no list yet, would then stay for the life of a notebook's kernel. So
    such lines are in a block, which takes a few seconds at most.

    Other threads get no signals, so there nothing is changed. A signal without a handler of Python
    has its effect at once.
    """
    if _is_other_thread():
        yield
        return
    delayed = list[int]()
    handlers = dict[int, Any]()
    for number in DELAYED:
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, lambda late, _: delayed.append(late))
    try:
        yield
    finally:
        for changed, handler in handlers.items():
            signal.signal(changed, handler)
        for late in dict.fromkeys(delayed):
            signal.raise_signal(late)


def keep_imports_whole(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of the Python API, so that a Ctrl-C that comes in an import is raised
    after the import. The second Ctrl-C is raised at once.

    A notebook's kernel goes on after it, and torch and numpy cannot be imported again if half of
    their modules are there. On the command line, or if a program has set a handler of its own,
    nothing is changed. An import that has called the function does not count: a module of the user
    may convert while it is imported.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or _is_other_thread():
            return function(*args, **kwargs)
        signal.signal(signal.SIGINT, _raise_after_import)
        try:
            return function(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    return run


def _raise_after_import(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt now, or when the outermost import in a function that
    `keep_imports_whole` decorates has ended.
    """
    importer = find_importer(frame, until=__file__)
    if importer is None or importer.f_trace is _raise_in_trace:
        raise KeyboardInterrupt
    importer.f_trace = _raise_in_trace
    sys.settrace(lambda *_: None)


def _raise_in_trace(*_: object) -> None:
    """Raise KeyboardInterrupt at the next line of a frame, as its trace function."""
    raise KeyboardInterrupt


def find_importer(frame: FrameType | None, until: str = "") -> FrameType | None:
    """Return the frame with the outermost import statement among `frame` and those that called it;
    None if none of them imports a module.

    Args:
        frame: the frame that is executed.
        until: the path of a file. Its frames and those that called them are left out.
    """
    importer = None
    while frame and frame.f_code.co_filename != until:
        if frame.f_code.co_filename == IMPORTS:
            importer = frame.f_back
        frame = frame.f_back
    return importer


def _is_other_thread() -> bool:
    """Return whether this is not the main thread, which alone may set handlers."""
    return threading.current_thread() is not threading.main_thread()

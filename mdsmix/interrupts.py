"""Delays Ctrl-C and other signals where an exception at any line would leave a process or a file
that nobody ends or deletes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Ctrl-C (a notebook's Interrupt), the end that a scheduler asks for, and the time limit of a
scheduler such as Airflow. Python turns each into an exception, if a handler is set.
"""


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
    if threading.current_thread() is not threading.main_thread():
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

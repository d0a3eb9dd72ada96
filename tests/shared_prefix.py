"""Keeps the shared memory of Streaming's datasets apart: Streaming numbers the datasets of all
processes of a machine, and its numbers may collide.
"""

from __future__ import annotations

import os
from itertools import count

from streaming.base.shared import prefix


def count_apart() -> None:
    """Make this process and its forks count from a number of their own.

    Streaming takes the first free number, and if two processes look for it at once, one of them
    fails. With numbers of its own a process is independent of other processes and of what a killed
    run has left.
    """
    first = 1000 * os.getpid()
    prefix._each_prefix_int = lambda: count(first)

"""Keeps the shared memory of Streaming's datasets apart: Streaming numbers the datasets of all
processes of a machine, and its numbers may collide.
"""

from __future__ import annotations

import os
from itertools import count

from streaming.base import util
from streaming.base.shared import prefix


def count_apart() -> None:
    """Make this process and its forks count from a number of their own.

    Streaming takes the first free number, and if two processes look for it at once, one of them
    fails. With numbers of its own a process is independent of other processes and of what a killed
    run has left. LLM-Foundry's `train` removes the memory of all numbers from 0 on, whoever uses
    them; here it looks at numbers that nobody uses.
    """
    first = 1000 * os.getpid()
    prefix._each_prefix_int = lambda: count(first)
    util._get_path = lambda number, name: prefix._get_path(first + 999 + number, name)

"""Keeps the shared memory of Streaming's datasets apart: Streaming numbers the datasets of all
processes of a machine, and its numbers may collide.
"""

from __future__ import annotations

import os
from itertools import count

from streaming.base import util
from streaming.base.shared import prefix

NUMBERS = 1000
"How many numbers a run has."
FIRST_OF_PORTS = 10_000_000
"More than any pid."


def count_apart() -> None:
    """Make this process and its forks count from numbers of their own.

    Streaming takes the first free number, and if two processes look for it at once, one of them
    fails. Ranks of one run look one after the other, and fail if the memory of an earlier run goes
    away in between. With numbers of its own a process is independent of other processes and of
    what a killed run has left. LLM-Foundry's `train` removes the memory of all numbers from 0 on,
    whoever uses them; here it looks at numbers that nobody uses.
    """
    prefix._each_prefix_int = lambda: count(find_first_number())
    util._get_path = lambda number, name: prefix._get_path(
        find_first_number() + NUMBERS - 1 + number, name
    )


def find_first_number() -> int:
    """Return the first number of this run: ranks have a port in common, others have their pid."""
    port = os.environ.get("MASTER_PORT")
    return NUMBERS * (FIRST_OF_PORTS + int(port) if port else os.getpid())

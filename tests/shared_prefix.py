"""Streaming keeps what its datasets share apart by numbers, for all processes of a machine."""

from __future__ import annotations

import os
from itertools import count

from streaming.base.shared import prefix


def count_apart() -> None:
    """Streaming takes the first number that is free, and of two processes that look at once one
    fails: this one and its forks count from a number of their own on, whoever runs beside them and
    whatever a killed run has left.
    """
    first = 1000 * os.getpid()
    prefix._each_prefix_int = lambda: count(first)

"""Sentences that a store shows to the user while a request waits.

The code that waits may run in any thread, and its callers do not pass it a function that shows
sentences. So this function is a setting of the process. It prints to stderr, unless
`redirect_notices` sets another function, as a progress bar and a worker process do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mdsmix.messages import Say, make_printable


def _print_to_stderr(sentence: str) -> None:
    print(make_printable(sentence), file=sys.stderr, flush=True)


_functions: list[Say] = [_print_to_stderr]
"""The functions that are set, the newest last. Two conversions in two threads may end in any
order.
"""


def show_notice(sentence: str) -> None:
    """Show a sentence to the user now: on stderr, or by the function that `redirect_notices` has
    set last.
    """
    _functions[-1](sentence)


@contextmanager
def redirect_notices(say: Say) -> Iterator[None]:
    """Let `show_notice` call `say` during the `with` block, instead of printing to stderr.

    Args:
        say: called with each sentence, by any thread.
    """
    _functions.append(say)
    try:
        yield
    finally:
        _functions.remove(say)

"""Sentences that a store shows to the user while a request waits.

The code that waits is deep below the command, in any thread, and its callers have no function for
sentences at hand. So the function is a setting of the process: stderr, unless `redirect_notices`
sets another one, as a progress bar and a worker process do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mdsmix.messages import Say, make_printable


def _print_to_stderr(sentence: str) -> None:
    print(make_printable(sentence), file=sys.stderr, flush=True)


_say: Say = _print_to_stderr


def show_notice(sentence: str) -> None:
    """Show a sentence to the user now."""
    _say(sentence)


@contextmanager
def redirect_notices(say: Say) -> Iterator[None]:
    """Make `say` the function that shows notices within the block. Any thread may call it."""
    global _say
    previous = _say
    _say = say
    try:
        yield
    finally:
        _say = previous

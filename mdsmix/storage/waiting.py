"""Says that a store is being waited for: a request may be asked again for a minute and a half, and nothing else moves meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mdsmix.words import printable

AFTER = 5.0
"Seconds of failures in a row before it is said: a server that restarts quickly is no news."


def _to_stderr(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr, flush=True)


_say: Callable[[str], None] = _to_stderr
_told: set[str] = set()
"Endpoints of which it was said since they last answered."


def tell(endpoint: str, sentence: str) -> None:
    """Says the sentence once for all requests that wait for this endpoint."""
    if endpoint not in _told:
        _told.add(endpoint)
        _say(sentence)


def answered(endpoint: str) -> None:
    """The next wait for this endpoint is said again."""
    _told.discard(endpoint)


def say_by(say: Callable[[str], None]) -> Callable[[str], None]:
    """Has `say` called from now on, from whatever thread waits; returns what was called before."""
    global _say
    before, _say = _say, say
    return before


@contextmanager
def said_by(say: Callable[[str], None]) -> Iterator[None]:
    """Has `say` called within the block, where something is drawn on the terminal."""
    before = say_by(say)
    try:
        yield
    finally:
        say_by(before)

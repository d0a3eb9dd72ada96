"""What many workers have to say at one moment: all of them wait for one store."""

from __future__ import annotations

import time
from collections.abc import Callable

from mdsmix.engines.base import Say

SAID_AGAIN = 60.0
"Seconds within which the same sentence of another worker is not repeated."


def said_once(say: Say) -> Callable[[str, str], None]:
    """Says where a worker is and its sentence, unless another one has just said the same of itself."""
    said: dict[str, float] = {}

    def saying(where: str, sentence: str) -> None:
        now = time.monotonic()
        if now - said.get(sentence, -SAID_AGAIN) >= SAID_AGAIN:
            said[sentence] = now
            say(where + sentence)

    return saying

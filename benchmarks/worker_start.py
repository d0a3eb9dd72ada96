"""Prints the seconds from the call of mdsmix's engine until its slower worker has the tokenizer open.

python worker_start.py TOKENIZER
"""

from __future__ import annotations

import sys
import time
from functools import partial

from mdsmix.encode.backends import open_backend
from mdsmix.encode.tokenizer import Tokenizer, open_tokenizer
from mdsmix.engines import local as engine
from mdsmix.engines.attempts import Attempt
from mdsmix.engines.limits import default_cap
from mdsmix.engines.memory import Watch
from mdsmix.recipe.spec import TokenizerSpec


def ready(tokenizer: Tokenizer, attempt: Attempt, line: engine.Line) -> float:
    """The clock is the same for all processes of a machine."""
    open_backend(tokenizer).encode(["ready"], False)
    return time.monotonic()


def main() -> None:
    tokenizer = open_tokenizer(TokenizerSpec(name=sys.argv[1]))
    crew = engine.Crew(workers=2, watch=Watch(default_cap()))
    began = time.monotonic()
    tasks = [partial(ready, tokenizer)] * 2
    print(max(at for _, at in engine.run(tasks, crew, lambda size, tokens: None)) - began)


if __name__ == "__main__":
    main()

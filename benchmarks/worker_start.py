"""Prints the seconds from the call of mdsmix's engine until the slower of two workers has opened
its tokenizer.

python worker_start.py TOKENIZER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from mdsmix.encode.backends import open_backend
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.memory import choose_memory_cap
from mdsmix.engines.tasks import Attempt, Reporter
from mdsmix.recipe.spec import TokenizerSpec
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class Ready:
    tokenizer: Tokenizer
    name: str = "no work"

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], float]:
        """Open the tokenizer. The clock is the same for all processes of a machine."""
        open_backend(self.tokenizer).encode(["ready"], False)
        ready = time.monotonic()
        return lambda: ready


def main() -> None:
    tasks = [Ready(open_tokenizer(TokenizerSpec(name=sys.argv[1])))] * 2
    began = time.monotonic()
    with closing(LocalEngine(PoolSettings(workers=2, memory=choose_memory_cap()))) as engine:
        ready = [moment for _, moment in engine.run(tasks, lambda size, tokens: None, print)]
        print(max(ready) - began)


if __name__ == "__main__":
    main()

"""The tokenizer alone: no conversion with this tokenizer can take less time.

The texts are read into memory first, together with the UTF-8 form that Python caches. Then two
processes open the tokenizer, encode one half each, in batches of 8 MB, and write nothing. Processes
are new in each round, so no text is in the tokenizer's cache of words.

    python -m benchmarks.bare ROUNDS SOURCE TOKENIZER FIELD ...    # prints the median seconds
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import ForkContext
from pathlib import Path
from statistics import median

import orjson
from fastokens import Tokenizer

from mdsmix.record import is_encodable

BATCH = 8 << 20
PROCESSES = 2


def main(rounds: int, source: str, tokenizer: str, *fields: str) -> None:
    os.environ.update(RAYON_NUM_THREADS="1", FASTOKENS_BPE_THREADS="1")
    batches = [*_batches(Path(source), fields)]
    fork = multiprocessing.get_context("fork")
    shares = [batches[number::PROCESSES] for number in range(PROCESSES)]
    print(median(_run(fork, tokenizer, shares) for _ in range(rounds)))


def _run(fork: ForkContext, tokenizer: str, shares: list[list[list[str]]]) -> float:
    """Encode each share in a process of its own. Return the seconds until the last one ends."""
    processes = [fork.Process(target=_encode, args=(tokenizer, share)) for share in shares]
    begin = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes), "an encoding process failed"
    return time.monotonic() - begin


def _batches(folder: Path, fields: tuple[str, ...]) -> Iterator[list[str]]:
    texts, size = list[str](), 0
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as lines:
            for line in lines:
                record = orjson.loads(line)
                texts += filter(is_encodable, map(record.get, fields))
                size += len(line)
                if size >= BATCH:
                    yield texts
                    texts, size = [], 0
    yield texts


def _encode(tokenizer: str, batches: list[list[str]]) -> None:
    model = Tokenizer.from_file(tokenizer)
    for texts in batches:
        model.encode_batch_flat(texts, add_special_tokens=False, split_special_tokens=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

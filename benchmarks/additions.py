"""What mdsmix adds to reading, tokenizing and writing: a conversion with each addition switched
off, in turn with a whole one.

    python -m benchmarks.additions [--megabytes N] [--rounds N]

CPU seconds of two workers on the wide corpus, each beside those of a whole conversion just before,
the medians of the rounds: the machine's own drift is as large as an addition. Together the
additions are to cost less than a tenth.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

import xxhash

from benchmarks import corpus
from benchmarks.contenders import HERE, Place, write_recipe
from benchmarks.measure import measure
from benchmarks.rounds import MB, environment
from mdsmix.cli.main import run
from mdsmix.encode import backends
from mdsmix.kinds import membership, read_records
from mdsmix.shapes import shape

MOST = 0.10
NONE = bytes(membership.SIZE)
"In place of a fingerprint."


def _nothing(*_: Any, **__: Any) -> None:
    """In place of an addition."""


class _NoHash:
    """In place of the hash of a window."""

    update = _nothing

    def hexdigest(self) -> str:
        return "0" * 32


OFF: dict[str, tuple[Any, str, Any]] = {
    "fingerprints of records": (membership, "fingerprints", lambda records: [NONE] * len(records)),
    "hashes of windows and files": (xxhash, "xxh3_128", _NoHash),
    "comparison with the reference tokenizer": (backends.CheckedBackend, "check", _nothing),
    "texts without a UTF-8 form": (shape, "is_encodable", lambda text: True),
    "fields that are not read": (read_records.Diagnostics, "count_unread_fields", _nothing),
    "fsync": (os, "fsync", _nothing),
}
"What is replaced, and by what."
ALL = "all of them"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.additions", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--without", choices=["", *OFF, ALL], help=argparse.SUPPRESS)
    parser.add_argument("--recipe", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.recipe:
        _convert(arguments.without, arguments.recipe)
    else:
        sys.exit(_measure(arguments.work, arguments.megabytes * MB, arguments.rounds))


def _convert(without: str, recipe: str) -> None:
    for name, (place, attribute, other) in OFF.items():
        assert hasattr(place, attribute), f"{name} are no longer {attribute}"
        if without in (name, ALL):
            setattr(place, attribute, other)
    sys.argv = ["mdsmix", "convert", recipe, "--workers", "2"]
    run()


def _measure(work: Path, size: int, rounds: int) -> int:
    """1 where the additions cost more than a tenth together."""
    place = Place(work=work, foundry=Path(os.devnull), others=Path(os.devnull))
    corpus.tokenizer(work)
    out, source = work / "out", corpus.source(work, "words", size)

    def seconds(without: str) -> float:
        shutil.rmtree(out, ignore_errors=True)
        recipe = write_recipe(place, {"words": source}, out)
        command = [sys.executable, "-m", "benchmarks.additions", "--without", without]
        return measure([*command, "--recipe", recipe], environment(place), work / "log").cpu

    def saved(without: str) -> float:
        whole = seconds("")
        return 1 - seconds(without) / whole

    shares = {name: median(saved(name) for _ in range(rounds)) for name in [*OFF, ALL]}
    for name, share in shares.items():
        print(f"{name}: {share:.1%}, of {size / MB:,.0f} MB")
    return int(shares[ALL] > MOST)


if __name__ == "__main__":
    main()

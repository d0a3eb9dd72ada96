"""The cost of each feature that mdsmix adds to reading, tokenizing and writing: conversions with a
feature switched off, in turn with complete ones.

    python -m benchmarks.additions [--megabytes N] [--rounds N]

The CPU seconds of two workers on the wide corpus are compared with those of a complete conversion
just before, since the machine's own drift is as large as the cost of one feature. The medians of
the rounds are printed. Together the features must cost less than a tenth. A cost below zero is
noise, and does not count as reached.
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
from benchmarks.contenders import HERE, Setup, write_recipe
from benchmarks.measure import measure
from benchmarks.rounds import MB, environment
from mdsmix.cli.main import run
from mdsmix.encode import backends
from mdsmix.kinds import membership, read_records
from mdsmix.shapes import shape

MOST = 0.10
EMPTY = bytes(membership.SIZE)
"Replaces a fingerprint."


def _nothing(*_: Any, **__: Any) -> None:
    """Replace a feature that is switched off."""


class _NoHash:
    """Replaces the hash of a window."""

    update = _nothing

    def hexdigest(self) -> str:
        return "0" * 32


OFF: dict[str, tuple[Any, str, Any]] = {
    "fingerprints of records": (membership, "fingerprints", lambda records: [EMPTY] * len(records)),
    "hashes of windows and files": (xxhash, "xxh3_128", _NoHash),
    "comparison with the reference tokenizer": (backends.CheckedBackend, "check", _nothing),
    "texts without a UTF-8 form": (shape, "is_encodable", lambda text: True),
    "fields that are not read": (read_records.Diagnostics, "count_unread_fields", _nothing),
    "fsync": (os, "fsync", _nothing),
}
"Feature -> (object, attribute, replacement)."
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
    for name, (owner, attribute, replacement) in OFF.items():
        assert hasattr(owner, attribute), f"{name}: {attribute} does not exist any more"
        if without in (name, ALL):
            setattr(owner, attribute, replacement)
    sys.argv = ["mdsmix", "convert", recipe, "--workers", "2"]
    run()


def _measure(work: Path, size: int, rounds: int) -> int:
    """Return the exit code: 0 if the features together cost a tenth or less, and not less than
    nothing.
    """
    setup = Setup(work=work, foundry=Path(os.devnull), peers=Path(os.devnull))
    corpus.tokenizer(work)
    output, source = work / "out", corpus.source(work, "words", size)

    def seconds(without: str) -> float:
        shutil.rmtree(output, ignore_errors=True)
        recipe = write_recipe(setup, {"words": source}, output)
        command = [sys.executable, "-m", "benchmarks.additions", "--without", without]
        return measure([*command, "--recipe", recipe], environment(setup), work / "log").cpu

    def saved(without: str) -> float:
        whole = seconds("")
        return 1 - seconds(without) / whole

    shares = {name: median(saved(name) for _ in range(rounds)) for name in [*OFF, ALL]}
    for name, share in shares.items():
        print(f"{name}: {share:.1%}, of {size / MB:,.0f} MB")
    return int(not 0 <= shares[ALL] <= MOST)


if __name__ == "__main__":
    main()

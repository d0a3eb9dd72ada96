"""The side-by-side: every contender in turn, round after round, and RESULTS.md from it.

python -m benchmarks [--quick] [--only NAME] [--rounds N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import corpus, report
from benchmarks.contenders import HERE, Place, contenders
from benchmarks.figures import figures
from benchmarks.rounds import FULL, QUICK, attempt, entries, timed, warm_up

ROOT = HERE.parent


def main() -> None:
    arguments = _arguments()
    place = Place(work=arguments.work, foundry=arguments.foundry, others=arguments.others)
    plan = QUICK if arguments.quick else FULL
    chosen = [c for c in contenders() if arguments.only in f"{c.kind} {c.name}"]
    corpus.tokenizer(place.work)
    found = entries(place, plan, [c for c in chosen if c.is_here(place)])
    for entry in found:
        _say(f"warming up {entry.contender.kind}: {entry.contender.name}")
        attempt(warm_up, place, entry)
    for number in range(arguments.rounds or plan.rounds):
        for entry in found:
            _say(f"round {number + 1} {entry.contender.kind}: {entry.contender.name}")
            attempt(timed, place, entry)
    missing = [c for c in chosen if not c.is_here(place)]
    command = "make bench BENCH=--quick" if arguments.quick else "make bench"
    text = report.text(place, found, missing, figures(place, found), command)
    arguments.results.write_text(text)
    _say(text)


def _say(line: str) -> None:
    print(line, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller corpora, one round")
    parser.add_argument("--only", default="", metavar="NAME", help="contenders that are so named")
    parser.add_argument("--rounds", type=int, help="timed runs of each contender")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="corpora and outputs")
    parser.add_argument("--foundry", type=Path, default=ROOT / ".venv-foundry")
    parser.add_argument("--others", type=Path, default=ROOT / ".venv-bench")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()

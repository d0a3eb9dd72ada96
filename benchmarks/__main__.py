"""The comparison of all tools: runs every contender in turn, round by round, and writes RESULTS.md.

python -m benchmarks [--quick] [--only NAME ...] [--rounds N] [--slow MB]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks import corpus, drawing, report
from benchmarks.contenders import HERE, Setup, contenders
from benchmarks.figures import Figure, figures, memory_figures
from benchmarks.loader_figures import loader_figures
from benchmarks.rounds import FULL, MB, QUICK, Entry, attempt, entries, timed, warm_up
from benchmarks.store import store_figures
from benchmarks.versions import OLD, version_figures
from benchmarks.vocabularies import vocabulary_figures

ROOT = HERE.parent
BEGAN = time.monotonic()


def main() -> None:
    arguments = _arguments()
    setup = Setup(work=arguments.work, foundry=arguments.foundry, peers=arguments.others)
    plan = QUICK if arguments.quick else FULL
    plan = plan if arguments.slow is None else replace(plan, slow=arguments.slow * MB)
    names = arguments.only or [""]
    chosen = [c for c in contenders() if any(name in f"{c.kind} {c.name}" for name in names)]
    corpus.tokenizer(setup.work)
    tested = entries(setup, plan, [c for c in chosen if c.is_here(setup)])
    for entry in tested:
        attempt(warm_up, setup, entry)
        _say(f"warm, {_name(entry)}: peak {entry.peak / MB:,.0f} MB {entry.fault}")
    rounds = arguments.rounds or plan.rounds
    for number in range(rounds):
        for entry in tested:
            attempt(partial(timed, rounds=rounds), setup, entry)
            _say(f"round {number + 1}, {_name(entry)}: {_last(entry)}")
    missing = [c for c in chosen if not c.is_here(setup)]
    command = "make bench BENCH=--quick" if arguments.quick else "make bench"
    results = partial(report.text, setup, tested, missing, command=command)
    text = results(figures=[])
    arguments.results.write_text(text)
    is_quick = arguments.quick
    measured = list[Figure]()
    for figure in chain(
        figures(setup, tested),
        vocabulary_figures(setup, 200 * MB, rounds=1 if is_quick else 3),
        store_figures(setup, (200 if is_quick else 500) * MB, rounds=1 if is_quick else 3),
        loader_figures(setup, is_quick),
        version_figures(setup, OLD) if OLD.exists() else (),
        memory_figures(setup, plan, tested),
    ):
        measured.append(figure)
        _say(f"{figure.what}: {figure.value:.2f} {figure.unit}")
        text = results(figures=measured)
        arguments.results.write_text(text)  # a bench that is stopped keeps its figures
    if arguments.results == HERE / "RESULTS.md":
        drawing.PICTURE.write_text(drawing.draw_picture(text))
    print(text)


def _name(entry: Entry) -> str:
    return f"{entry.contender.kind}: {entry.contender.name}, {entry.bytes / MB:,.0f} MB"


def _last(entry: Entry) -> str:
    """Describe the last run, for whoever watches and for a bench that stops before it writes."""
    run = entry.runs[-1] if entry.runs and not entry.failed else None
    return f"{run.wall:.1f} s, {run.cpu:.1f} s of CPU" if run else entry.fault


def _say(line: str) -> None:
    """Print a line after the minutes since the start, which show where a bench takes its time."""
    minutes, seconds = divmod(int(time.monotonic() - BEGAN), 60)
    print(f"{minutes:02}:{seconds:02} {line}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller corpora, one round")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="contenders with this in their name"
    )
    parser.add_argument("--rounds", type=int, help="timed runs of each contender")
    parser.add_argument(
        "--slow", type=int, help="MB for the slow tools; 0: as many as for the fast"
    )
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="corpora and outputs")
    parser.add_argument("--foundry", type=Path, default=ROOT / ".venv-foundry")
    parser.add_argument("--others", type=Path, default=ROOT / ".venv-bench")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()

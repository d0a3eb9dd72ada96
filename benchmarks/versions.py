"""Compares the commands with those of another commit, which has an environment of its own.

    make .old/.ready                        # commit 59285eb5 and its environment, in .old
    .venv/bin/python -m benchmarks.versions [--rounds N] [--only NAME ...]

Both commits run in turn on the same files, in both orders, with compiled modules and caches of
tokenizers of their own. A figure is the quotient of their medians, of wall seconds and of CPU
seconds.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import corpus
from benchmarks.contenders import HERE, Setup, write_recipe
from benchmarks.figures import Figure
from benchmarks.measure import Run, measure
from benchmarks.rounds import MB, environment

ROUNDS = 6
OLD = HERE.parent / ".old"
"The checkout of the other commit."


@dataclass(frozen=True, slots=True)
class Case:
    """A command that both commits run."""

    what: str
    kind: str
    "A key of contenders.STREAMS."
    megabytes: int
    goal: float
    "The largest quotient of wall seconds that reaches the goal."
    unchanged: str = ""
    "The command that runs on a finished conversion. Empty: a conversion to a new folder."


CASES = (
    Case("`convert` of 200 MB of many words", "words", 200, 0.8),
    Case("`convert` of 133 MB of pairs", "pairs", 133, 0.77),
    Case("`convert` of 102 MB of chats", "chats", 102, 0.71),
    Case("unchanged `convert` of 200 MB", "words", 200, 0.65, "convert"),
    Case("`check` of 200 MB", "words", 200, 0.65, "check"),
    Case("`render-yaml` of 200 MB", "words", 200, 0.65, "render-yaml"),
)


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit with its environment."""

    command: Path
    "Its `mdsmix`."
    setup: Setup
    "Its work folder contains the corpora of both commits, but only its own outputs and caches."

    def run(self, case: Case, sources: Path) -> Run:
        output = self.setup.work / case.kind
        if not case.unchanged:
            shutil.rmtree(output, ignore_errors=True)
        recipe = write_recipe(self.setup, {case.kind: sources}, output)
        # `python -m` of a child would find the modules of the current folder first.
        argv: list[str | Path] = ["env", "-C", self.setup.work, self.command]
        argv += [case.unchanged or "convert", recipe]
        if case.unchanged == "render-yaml":
            argv += ["-o", self.setup.work / "train.yaml"]
        return measure(argv, environment(self.setup), self.setup.work / "log")


def version_figures(
    setup: Setup, old: Path, rounds: int = ROUNDS, cases: Sequence[Case] = CASES
) -> Iterator[Figure]:
    """Yield the seconds of each case over those of the commit in the checkout `old`."""
    for root in (HERE.parent, old):
        compileall.compile_dir(root / "mdsmix", quiet=2)
    commits = [
        _open_commit(setup, "new", setup.mdsmix),
        _open_commit(setup, "old", old / ".venv/bin/mdsmix"),
    ]
    for case in cases:
        sources = corpus.source(setup.work, case.kind, case.megabytes * MB)
        runs = [list[Run](), list[Run]()]
        # The first round fills the caches and does not count. The order changes from round to
        # round: of the same code, the command that ran first took up to 5 % longer.
        for number in range(1 + rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                runs[which].append(commits[which].run(case, sources))
        of_new, of_old = (runs_of_commit[1:] for runs_of_commit in runs)
        what = f"{case.what}: seconds over those of {_name_commit(old)}"
        yield compare(what, case.goal, of_new, of_old)


def compare(what: str, goal: float, of_new: Sequence[Run], of_old: Sequence[Run]) -> Figure:
    """Divide the medians of two commits."""
    wall = median(run.wall for run in of_old)
    ratio = median(run.wall for run in of_new) / wall
    cpu = median(run.cpu for run in of_new) / median(run.cpu for run in of_old)
    return Figure(what, ratio, f"x ({wall:.2f} s; CPU {cpu:.2f} x)", goal)


def _open_commit(setup: Setup, name: str, command: Path) -> Commit:
    work = setup.work / "versions" / name
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = work / "tokenizer"
    if not tokenizer.exists():
        shutil.copytree(setup.tokenizer, tokenizer)
    return Commit(command, replace(setup, work=work))


def _name_commit(root: Path) -> str:
    """Return the first characters of the commit that a worktree has checked out."""
    folder = Path((root / ".git").read_text().split()[1])
    return (folder / "HEAD").read_text()[:8]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--old", type=Path, default=OLD)
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench")
    arguments = parser.parse_args()
    setup = Setup(work=arguments.work, foundry=Path(os.devnull), peers=Path(os.devnull))
    corpus.tokenizer(setup.work)
    cases = [case for case in CASES if any(name in case.what for name in arguments.only)]
    for figure in version_figures(setup, arguments.old, arguments.rounds, cases):
        print(f"{figure.what}: {figure.value:.3f} {figure.unit} (<= {figure.goal})", flush=True)


if __name__ == "__main__":
    main()

"""Runs contenders on their corpora in turn: A B C, A B C, ..., so that other load on the machine
affects all of them alike.

Before the rounds each contender runs once on its corpus, to measure memory; a fast one, whose peak
is compared with a goal, first on a few records, to compile bytecode. In a round a slow tool runs on
the few records, to measure its start-up (`STARTS` times at least in all rounds together), and then
every tool on its corpus. The tokens of every output are counted, and the output is deleted.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import corpus, outputs
from benchmarks.contenders import Contender, Setup, write_recipe
from benchmarks.measure import Run, measure
from benchmarks.start_up import STARTS, find_start_up_fault, subtract_start_up

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of the corpora and the number of rounds."""

    documents: int
    "Bytes of each corpus of documents for the fast tools."
    grown: int
    "Bytes of the larger corpus of many words, on which memory must not grow."
    finetuning: int
    "Bytes of pairs and of chats for mdsmix."
    slow: int
    "Bytes for the slow tools; 0: the whole corpus of the fast tools."
    rounds: int

    def source(self, setup: Setup, contender: Contender) -> Path:
        size = self.documents if contender.kind in ("documents", "words") else self.finetuning
        if contender.is_fast or not self.slow:
            return corpus.source(setup.work, contender.kind, size)
        files = 2 if contender.kind == "documents" else 1
        return corpus.source(setup.work, contender.kind, self.slow * contender.enlarged, files)


FULL = Plan(documents=2000 * MB, grown=10_000 * MB, finetuning=530 * MB, slow=25 * MB, rounds=3)
QUICK = Plan(documents=515 * MB, grown=1030 * MB, finetuning=265 * MB, slow=12 * MB, rounds=1)


@dataclass(slots=True, kw_only=True)
class Entry:
    """A contender on its corpus, with its measurements."""

    contender: Contender
    source: Path
    expected: int
    "The number of tokens that its output must have."
    command: Sequence[str | Path] = ()
    peak: int = 0
    tokens: int = 0
    starts: list[Run] = field(default_factory=list)
    "Runs of a slow tool on a few records."
    runs: list[Run] = field(default_factory=list)
    failed: str = ""
    "The last line of a command that failed; it is not run again."

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.source.glob("*.jsonl"))

    @property
    def fault(self) -> str:
        """The reason why there are no figures; empty if there are some."""
        if self.failed:
            return f"FAILED: {self.failed}"
        if not 0 <= self.expected - self.tokens <= self.contender.may_lose:
            return f"WRONG: {self.tokens:,} tokens, not {self.expected:,}"
        return find_start_up_fault(self.runs, self.starts) if self.starts else ""

    @property
    def wall(self) -> float:
        """Median seconds, without the start-up of a slow tool."""
        return median(self.walls)

    @property
    def cpu(self) -> float:
        """Median CPU seconds, without the start-up of a slow tool."""
        return median(run.cpu for run in self._net)

    @property
    def walls(self) -> list[float]:
        """Seconds of each run, without the start-up of a slow tool."""
        return [run.wall for run in self._net]

    @property
    def _net(self) -> list[Run]:
        return subtract_start_up(self.runs, self.starts) if self.starts else self.runs


def entries(setup: Setup, plan: Plan, chosen: list[Contender]) -> list[Entry]:
    """Write the corpora, and count the tokens of each with mdsmix, once."""
    prepared = []
    expected = dict[Path, int]()
    for contender in chosen:
        source = plan.source(setup, contender)
        if source not in expected:
            expected[source] = _expected(setup, contender.kind, source)
        prepared.append(Entry(contender=contender, source=source, expected=expected[source]))
    return prepared


def published(setup: Setup, kind: str, source: Path) -> Path:
    """Convert the corpus without measuring the time, and keep the output. Return the recipe."""
    output = setup.work / "kept" / source.name
    output.parent.mkdir(parents=True, exist_ok=True)
    recipe = write_recipe(setup, {kind: source}, output)
    log = setup.work / "log"
    measure([setup.mdsmix, "convert", recipe, "--reencode"], environment(setup), log)
    return recipe


def _expected(setup: Setup, kind: str, source: Path) -> int:
    return outputs.mdsmix(published(setup, kind, source).with_suffix(""))


def attempt(step: Callable[[Setup, Entry], None], setup: Setup, entry: Entry) -> None:
    """Run a step, and record a failure: the other tools are measured all the same."""
    try:
        if not entry.failed:
            step(setup, entry)
    except RuntimeError as error:
        entry.failed = str(error).strip().splitlines()[-1]


def warm_up(setup: Setup, entry: Entry) -> None:
    """Measure memory, and let Python compile its bytecode."""
    if entry.contender.is_fast:
        _run(setup, entry, corpus.head(setup.work, entry.source))
    run, entry.tokens = _run(setup, entry, entry.source, memory=True)
    entry.peak = run.peak


def timed(setup: Setup, entry: Entry, rounds: int) -> None:
    """Measure one of `rounds` runs, and the start-up before it if it is to be subtracted."""
    if not entry.contender.is_fast:
        few = corpus.head(setup.work, entry.source)
        for _ in range(math.ceil(STARTS / rounds)):
            start, _ = _run(setup, entry, few)
            entry.starts.append(start)
    run, tokens = _run(setup, entry, entry.source)
    entry.runs.append(run)
    entry.tokens = min(tokens, entry.tokens)


def _run(setup: Setup, entry: Entry, source: Path, memory: bool = False) -> tuple[Run, int]:
    """Return the cost and the number of tokens written."""
    output = setup.work / "out"
    for leftover in (output, setup.work / "hf"):
        shutil.rmtree(leftover, ignore_errors=True)
    output.mkdir()
    contender = entry.contender
    entry.command = contender.command(setup, contender.reads(setup.work, source), output)
    run = measure(entry.command, environment(setup), setup.work / "log", memory)
    return run, contender.count(output)


def environment(setup: Setup) -> dict[str, str]:
    """Return this process's environment without variables that stop Python from caching bytecode or
    that select other packages.
    """
    dropped = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV"}
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    caches = {"MDSMIX_CACHE": setup.work / "cache", "HF_HOME": setup.work / "hf"}
    return variables | {name: str(path) for name, path in caches.items()} | {"HF_HUB_OFFLINE": "1"}

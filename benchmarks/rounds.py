"""Contenders on their corpora, in turn: A B C, A B C, ..., so that what disturbs the machine
disturbs all alike.

Before the rounds each one runs once on a few records, for its bytecode, and once on its corpus with
its memory watched. In a round it runs on the few records, which is its start-up, and then on its
corpus. Every output is counted and thrown away.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import corpus, outputs
from benchmarks.contenders import Contender, Place, write_recipe
from benchmarks.measure import Run, measure

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    documents: int
    "Bytes of each corpus of documents for the fast tools."
    grown: int
    "Bytes of many words on which memory must not have grown."
    finetuning: int
    "Bytes of pairs and of chats for mdsmix."
    slow: int
    "Bytes for the slow tools; 0: all of what the fast ones get."
    rounds: int

    def source(self, place: Place, contender: Contender) -> Path:
        size = self.documents if contender.kind in ("documents", "words") else self.finetuning
        if contender.is_fast or not self.slow:
            return corpus.source(place.work, contender.kind, size)
        files = 2 if contender.kind == "documents" else 1
        return corpus.source(place.work, contender.kind, self.slow, files)


FULL = Plan(documents=2000 * MB, grown=10_000 * MB, finetuning=530 * MB, slow=25 * MB, rounds=3)
QUICK = Plan(documents=515 * MB, grown=1030 * MB, finetuning=265 * MB, slow=6 * MB, rounds=1)


@dataclass(slots=True, kw_only=True)
class Entry:
    """A contender on its corpus, and what was measured."""

    contender: Contender
    source: Path
    expected: int
    "The tokens that its output must hold."
    command: Sequence[str | Path] = ()
    peak: int = 0
    tokens: int = 0
    starts: list[Run] = field(default_factory=list)
    "On a few records; one for each of the runs, and just before it."
    runs: list[Run] = field(default_factory=list)
    failed: str = ""
    "The last words of a command that ended with an error; it is not run again."

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.source.glob("*.jsonl"))

    @property
    def fault(self) -> str:
        """Why it gets no figures, if it gets none."""
        if self.failed:
            return f"FAILED: {self.failed}"
        if 0 <= self.expected - self.tokens <= self.contender.may_lose:
            return ""
        return f"WRONG: {self.tokens:,} tokens, not {self.expected:,}"

    @property
    def wall(self) -> float:
        """Median seconds, without the start-up of a slow tool."""
        return self._median(lambda run: run.wall)

    @property
    def cpu(self) -> float:
        """Median CPU seconds, without the start-up of a slow tool."""
        return self._median(lambda run: run.cpu)

    @property
    def walls(self) -> list[float]:
        """Seconds of each run, without the start-up of a slow tool."""
        return self._each(lambda run: run.wall)

    def _median(self, cost: Callable[[Run], float]) -> float:
        return median(self._each(cost))

    def _each(self, cost: Callable[[Run], float]) -> list[float]:
        share = 0 if self.contender.is_fast else 1
        both = zip(self.runs, self.starts, strict=True)
        return [cost(run) - share * cost(start) for run, start in both]


def entries(place: Place, plan: Plan, chosen: list[Contender]) -> list[Entry]:
    """Makes the corpora, and lets mdsmix say how many tokens each holds."""
    found = []
    for contender in chosen:
        source = plan.source(place, contender)
        found.append(
            Entry(
                contender=contender,
                source=source,
                expected=_expected(place, contender.kind, source),
            )
        )
    return found


def published(place: Place, kind: str, source: Path) -> Path:
    """The recipe of an untimed conversion that is kept, made where it is not there yet."""
    out = place.work / "kept" / source.name
    out.parent.mkdir(parents=True, exist_ok=True)
    recipe = write_recipe(place, {kind: source}, out)
    log = place.work / "log"
    measure([place.mdsmix, "convert", recipe, "--reencode"], environment(place), log)
    return recipe


def _expected(place: Place, kind: str, source: Path) -> int:
    return outputs.mdsmix(published(place, kind, source).with_suffix(""))


def attempt(step: Callable[[Place, Entry], None], place: Place, entry: Entry) -> None:
    """One tool that fails does not cost the others their measurements."""
    try:
        if not entry.failed:
            step(place, entry)
    except RuntimeError as error:
        entry.failed = str(error).strip().splitlines()[-1]


def warm_up(place: Place, entry: Entry) -> None:
    """Measures memory, and compiles what Python wants to compile."""
    _run(place, entry, corpus.head(place.work, entry.source))
    run, entry.tokens = _run(place, entry, entry.source, memory=True)
    entry.peak = run.peak


def timed(place: Place, entry: Entry) -> None:
    start, _ = _run(place, entry, corpus.head(place.work, entry.source))
    run, tokens = _run(place, entry, entry.source)
    entry.starts.append(start)
    entry.runs.append(run)
    entry.tokens = min(tokens, entry.tokens)


def _run(place: Place, entry: Entry, source: Path, memory: bool = False) -> tuple[Run, int]:
    """(what it cost, the tokens that it wrote)"""
    out = place.work / "out"
    for leftover in (out, place.work / "hf"):
        shutil.rmtree(leftover, ignore_errors=True)
    out.mkdir()
    contender = entry.contender
    entry.command = contender.command(place, contender.reads(place.work, source), out)
    run = measure(entry.command, environment(place), place.work / "log", memory)
    return run, contender.count(out)


def environment(place: Place) -> dict[str, str]:
    """This process's, without what would hinder Python from keeping bytecode or lead it to other
    packages.
    """
    dropped = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    caches = {"MDSMIX_CACHE": place.work / "cache", "HF_HOME": place.work / "hf"}
    return kept | {name: str(path) for name, path in caches.items()} | {"HF_HUB_OFFLINE": "1"}

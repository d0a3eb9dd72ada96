"""The small figures: times that must be short, and memory that must not grow with the corpus."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import orjson

from benchmarks import corpus
from benchmarks.contenders import HERE, Setup, write_recipe
from benchmarks.drawing import OURS
from benchmarks.measure import measure
from benchmarks.rounds import MB, Entry, Plan, environment
from tests.corpus import chats, docstrings, questions

REPEATS = 5
ALONE_ROUNDS = 3
"Rounds of the tokenizer alone. The texts are read once, which takes most of the time."


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number and its goal."""

    what: str
    value: float
    unit: str
    goal: float
    "The largest value that reaches the goal."


def figures(setup: Setup, entries: list[Entry]) -> Iterator[Figure]:
    yield from _compare_with_tokenizer(setup, entries)
    yield from _start_up(setup)
    yield from _second_runs(setup, entries)


def _compare_with_tokenizer(setup: Setup, entries: list[Entry]) -> Iterator[Figure]:
    """Divide the seconds of a conversion by those of the tokenizer alone, which two processes run
    on texts in memory.
    """
    for entry in entries:
        kind = entry.contender.kind
        if entry.contender.name == OURS and kind != "chats" and not entry.fault:
            fields = ["prompt", "response"] if kind == "pairs" else ["text"]
            argv = [sys.executable, HERE / "bare.py", str(ALONE_ROUNDS), entry.source]
            alone = _run_script(setup, [*argv, setup.tokenizer / "tokenizer.json", *fields])
            what = f"{kind}: seconds over those of the tokenizer alone"
            yield Figure(what, entry.wall / alone, f"({entry.bytes / MB / alone:.0f} MB/s)", 2)


def _run_script(setup: Setup, argv: Sequence[str | Path]) -> float:
    """Run a script and return the number that it prints."""
    measure(argv, environment(setup), setup.work / "log")
    return float((setup.work / "log").read_text())


def _start_up(setup: Setup) -> list[Figure]:
    short = _short_records(setup)
    output = setup.work / "few"
    three = write_recipe(setup, short, setup.work / "three")
    single = write_recipe(setup, {"documents": short["documents"]}, output)
    rendered: list[str | Path] = ["render-yaml", three, "-o", setup.work / "train.yaml"]
    return [
        _seconds(setup, "`mdsmix --help`", 0.5, ["--help"]),
        _seconds(
            setup, "`convert` of 1,000 short records", 1.5, ["convert", single], without=output
        ),
        _seconds(setup, "`convert` of 3 unchanged local streams", 1.0, ["convert", three]),
        _seconds(setup, "`check` of them", 1.0, ["check", three]),
        _seconds(setup, "`render-yaml` of them", 1.0, rendered),
        _worker_start(setup),
    ]


def _short_records(setup: Setup) -> dict[str, Path]:
    """Write 1,000 records of each kind, to one folder for each. Return kind -> folder."""
    folders = {}
    for kind, records in (("documents", docstrings), ("pairs", questions), ("chats", chats)):
        folders[kind] = setup.work / "sources" / f"short-{kind}"
        folders[kind].mkdir(parents=True, exist_ok=True)
        lines = [orjson.dumps(record) + b"\n" for record in islice(records(), 1000)]
        (folders[kind] / "0.jsonl").write_bytes(b"".join(lines))
    return folders


def _second_runs(setup: Setup, entries: list[Entry]) -> list[Figure]:
    """The streams that counted the tokens were kept, and are unchanged."""
    largest = max(entries, key=lambda entry: entry.bytes)
    recipe = setup.work / "kept" / f"{largest.source.name}.yaml"
    what = f"`convert` of unchanged {largest.bytes / MB:,.0f} MB"
    return [_seconds(setup, what, 1.0, ["convert", recipe])]


def memory_figures(setup: Setup, plan: Plan, entries: list[Entry]) -> Iterator[Figure]:
    """Compare the memory of two workers, which cache words, on a large corpus and a larger one."""
    chosen = [e for e in entries if (e.contender.kind, e.contender.name) == ("words", OURS)]
    yield from (_growth(setup, plan, entry) for entry in chosen if not entry.fault)


def _growth(setup: Setup, plan: Plan, entry: Entry) -> Figure:
    larger = corpus.source(setup.work, entry.contender.kind, plan.grown)
    output = setup.work / "out"
    shutil.rmtree(output, ignore_errors=True)
    argv = entry.contender.command(setup, larger, output)
    peak = measure(argv, environment(setup), setup.work / "log", memory=True).peak
    shutil.rmtree(output)
    shutil.rmtree(larger)  # 10 GB
    what = (
        f"{entry.contender.name}, many words: peak with {plan.grown / MB:,.0f} MB over peak "
        f"with {entry.bytes / MB:,.0f} MB"
    )
    return Figure(what, peak / entry.peak, f"({peak / MB:,.0f} MB)", 1.1)


def _worker_start(setup: Setup) -> Figure:
    """Measure the time from the call until a worker has opened its tokenizer."""
    argv: list[str | Path] = [sys.executable, HERE / "worker_start.py", setup.tokenizer]
    seconds = [_run_script(setup, argv) for _ in range(REPEATS)]
    return Figure("a worker is ready to encode", median(seconds), "s", 0.5)


def _seconds(
    setup: Setup,
    what: str,
    goal: float,
    arguments: Sequence[str | Path],
    without: Path | None = None,
) -> Figure:
    """Return the median of several runs. The folder `without` is deleted before each."""
    argv = [setup.mdsmix, *arguments]
    seconds = []
    for _ in range(1 + REPEATS):
        if without:
            shutil.rmtree(without, ignore_errors=True)
        seconds.append(measure(argv, environment(setup), setup.work / "log").wall)
    return Figure(what, median(seconds[1:]), "s", goal)

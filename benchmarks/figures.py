"""The small figures: what must be quick whatever the corpus, and memory that must not grow
with it.
"""

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
from benchmarks.contenders import HERE, Place, write_recipe
from benchmarks.drawing import OURS
from benchmarks.measure import measure
from benchmarks.rounds import MB, Entry, Plan, environment
from tests.corpus import chats, docstrings, questions

REPEATS = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number and what the design asks of it."""

    what: str
    value: float
    unit: str
    most: float


def figures(place: Place, entries: list[Entry]) -> Iterator[Figure]:
    yield from _beside_the_tokenizer(place, entries)
    yield from _start_up(place)
    yield from _second_runs(place, entries)


def _beside_the_tokenizer(place: Place, entries: list[Entry]) -> Iterator[Figure]:
    """The seconds of a conversion over those of the tokenizer alone, which two processes run on
    texts in memory.
    """
    for entry in entries:
        kind = entry.contender.kind
        if entry.contender.name == OURS and kind != "chats" and not entry.fault:
            fields = ["prompt", "response"] if kind == "pairs" else ["text"]
            argv: list[str | Path] = [sys.executable, HERE / "bare.py", entry.source]
            alone = _printed(place, [*argv, place.tokenizer / "tokenizer.json", *fields])
            what = f"{kind}: seconds over those of the tokenizer alone"
            yield Figure(what, entry.wall / alone, f"({entry.bytes / MB / alone:.0f} MB/s)", 2)


def _printed(place: Place, argv: Sequence[str | Path]) -> float:
    """The number that a script prints."""
    measure(argv, environment(place), place.work / "log")
    return float((place.work / "log").read_text())


def _start_up(place: Place) -> list[Figure]:
    short, out = _short_records(place), place.work / "few"
    three = write_recipe(place, short, place.work / "three")
    one = write_recipe(place, {"documents": short["documents"]}, out)
    rendered: list[str | Path] = ["render-yaml", three, "-o", place.work / "train.yaml"]
    return [
        _seconds(place, "`mdsmix --help`", 0.5, ["--help"]),
        _seconds(place, "`convert` of 1,000 short records", 1.5, ["convert", one], without=out),
        _seconds(place, "`convert` of 3 unchanged local streams", 1.0, ["convert", three]),
        _seconds(place, "`check` of them", 1.0, ["check", three]),
        _seconds(place, "`render-yaml` of them", 1.0, rendered),
        _worker_start(place),
    ]


def _short_records(place: Place) -> dict[str, Path]:
    """1,000 of each kind, in a folder of its own."""
    folders = {}
    for kind, records in (("documents", docstrings), ("pairs", questions), ("chats", chats)):
        folders[kind] = place.work / "sources" / f"short-{kind}"
        folders[kind].mkdir(parents=True, exist_ok=True)
        lines = [orjson.dumps(record) + b"\n" for record in islice(records(), 1000)]
        (folders[kind] / "0.jsonl").write_bytes(b"".join(lines))
    return folders


def _second_runs(place: Place, entries: list[Entry]) -> list[Figure]:
    """The streams that counted the tokens were kept, and are unchanged."""
    largest = max(entries, key=lambda entry: entry.bytes)
    recipe = place.work / "kept" / f"{largest.source.name}.yaml"
    what = f"`convert` of unchanged {largest.bytes / MB:,.0f} MB"
    return [_seconds(place, what, 1.0, ["convert", recipe])]


def memory_figures(place: Place, plan: Plan, entries: list[Entry]) -> Iterator[Figure]:
    """Of two workers, on many words, which they remember: the large corpus against a larger one."""
    chosen = [e for e in entries if (e.contender.kind, e.contender.name) == ("words", OURS)]
    yield from (_growth(place, plan, entry) for entry in chosen if not entry.fault)


def _growth(place: Place, plan: Plan, entry: Entry) -> Figure:
    larger = corpus.source(place.work, entry.contender.kind, plan.grown)
    out = place.work / "out"
    shutil.rmtree(out, ignore_errors=True)
    argv = entry.contender.command(place, larger, out)
    peak = measure(argv, environment(place), place.work / "log", memory=True).peak
    shutil.rmtree(out)
    shutil.rmtree(larger)  # 10 GB
    what = f"{entry.contender.name}, many words: peak with {plan.grown / MB:,.0f} MB over peak with {entry.bytes / MB:,.0f} MB"
    return Figure(what, peak / entry.peak, f"({peak / MB:,.0f} MB)", 1.1)


def _worker_start(place: Place) -> Figure:
    """From the call until a worker has its tokenizer open."""
    argv: list[str | Path] = [sys.executable, HERE / "worker_start.py", place.tokenizer]
    found = [_printed(place, argv) for _ in range(REPEATS)]
    return Figure("a worker is ready to encode", median(found), "s", 0.5)


def _seconds(
    place: Place,
    what: str,
    most: float,
    arguments: Sequence[str | Path],
    without: Path | None = None,
) -> Figure:
    """The median of some runs; `without` is deleted before each."""
    argv = [place.mdsmix, *arguments]
    found = []
    for _ in range(1 + REPEATS):
        if without:
            shutil.rmtree(without, ignore_errors=True)
        found.append(measure(argv, environment(place), place.work / "log").wall)
    return Figure(what, median(found[1:]), "s", most)

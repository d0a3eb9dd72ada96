"""Writes RESULTS.md: the machine, a table for each kind of corpus, and the goals."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import median

from benchmarks import words
from benchmarks.contenders import Contender, Setup
from benchmarks.corpus import VOCABULARY
from benchmarks.drawing import OURS
from benchmarks.figures import Figure
from benchmarks.measure import CORES, Run
from benchmarks.rounds import MB, Entry
from benchmarks.start_up import MOST_START_UP, STARTS

TITLES = {
    "documents": "Pretraining: documents to rows of 2,048 tokens",
    "words": "The same of many words and scripts",
    "short": "Documents of 100 bytes",
    "long": "Documents of 1 MB",
    "pairs": "Prompt and response",
    "chats": "Chat",
}
GOALS = [
    ("words", "convert_dataset_json", 100),
    ("documents", "datatrove", 25),
    ("documents", "the ceiling", 1.15),
    ("words", "the ceiling", 1.3),
    ("pairs", "Foundry", 80),
    ("chats", "Foundry", 50),
]
"(corpus, contender, factor): mdsmix with 2 processes must be this many times as fast."
MOST_MEMORY = 1200 * MB
NOT_MEASURED = "**not measured**"
QUIET = 0.1
"Share of the machine that other processes may take before a run counts as disturbed."


def text(
    setup: Setup,
    entries: list[Entry],
    missing: Sequence[Contender],
    figures: Iterable[Figure],
    command: str,
) -> str:
    """Return the content of RESULTS.md."""
    parts = ["# Results", _heading(setup, entries, command)]
    for kind, title in TITLES.items():
        if chosen := [entry for entry in entries if entry.contender.kind == kind]:
            parts += [f"## {title}", make_tools_table(chosen)]
    parts += ["## Goals", make_goals_table(entries, figures)]
    parts += [f"Not run: {c.name} (its environment is not installed)." for c in missing]
    return "\n\n".join(parts) + "\n"


def _heading(setup: Setup, entries: list[Entry], command: str) -> str:
    today = datetime.datetime.now(datetime.timezone.utc).date()
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 1e6
    runs = chain.from_iterable([*entry.runs, *entry.starts] for entry in entries)
    disturbed = max(run.foreign_share for run in runs)
    quiet = "The machine was quiet" if disturbed <= QUIET else "**The machine was not quiet**"
    return "\n".join(
        [
            f"`{command}`, {today}: {_processor()}, {CORES} cores, {memory:.0f} GB of memory, "
            f"{platform.system()} {platform.release()}, Python {platform.python_version()}.",
            f"{', '.join(_versions(setup))}.",
            "Text of the Python standard library with one new word in a hundred, and text with "
            f"many words from installed packages: {words.read_summary(setup.work)}.",
            f"A tokenizer of {VOCABULARY:,} ids, trained on the library.",
            f"Medians of {len(entries[0].runs)} runs in turn, with the shortest and longest of "
            "several. Whole process trees are measured from outside. No output is compressed.",
            "MB are bytes of JSONL / 10^6. Times of the slow tools (\\*) do not include their "
            f"start-up, the median of at least {STARTS} runs on a few records, which favours them. "
            f"If it takes more than {MOST_START_UP:.0%} of a run, no figure is given.",
            f"{quiet}: other processes took up to {disturbed:.0%} of it during a run, which hardly "
            "affects CPU seconds.",
        ]
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _versions(setup: Setup) -> Iterator[str]:
    for name in ("mdsmix", "fastokens", "tokenizers", "orjson", "numpy"):
        yield f"{name} {version(name)}"
    packages = {
        setup.foundry: ["llm-foundry", "mosaicml-streaming", "transformers"],
        setup.peers: ["datatrove", "litdata", "gigatoken"],
    }
    for folder, names in packages.items():
        code = f"from importlib.metadata import version as v\nfor n in {names}: print(n, v(n))"
        if (python := folder / "bin/python").exists():
            yield from subprocess.check_output([python, "-c", code], text=True).splitlines()


def make_tools_table(entries: list[Entry]) -> str:
    ours = _ours(entries)
    head = [
        *("tool", "MB", "s", "MB/s", "M tokens/s", "CPU s/GB", "peak MB"),
        *("times slower", "times the CPU", "start-up s", "output"),
    ]
    return _markdown(head, [_cells(entry, ours) for entry in entries])


def _cells(entry: Entry, ours: Entry | None) -> list[str]:
    size = entry.bytes / MB
    name = entry.contender.name + ("" if entry.contender.is_fast else " \\*")
    if entry.fault:
        return [name, f"{size:,.0f}", *"-" * 7, _spread(entry.starts), entry.fault]
    wall = entry.wall
    spread = ""
    if len(entry.walls) > 1:
        spread = f" ({min(entry.walls):.1f}-{max(entry.walls):.1f})"
    return [
        name,
        f"{size:,.0f}",
        f"{wall:.1f}{spread}",
        f"{size / wall:.1f}",
        f"{entry.tokens / wall / 1e6:.2f}",
        f"{_cpu(entry):.1f}",
        f"{entry.peak / MB:,.0f}",
        f"{_times(ours, entry):.2f}" if ours else "-",
        f"{_cpu(entry) / _cpu(ours):.2f}" if ours else "-",
        _spread(entry.starts),
        entry.contender.holds,
    ]


def _spread(starts: Sequence[Run]) -> str:
    """Return the median of start-ups, and the shortest and the longest."""
    if not starts:
        return "-"
    walls = [start.wall for start in starts]
    return f"{median(walls):.1f} ({min(walls):.1f}-{max(walls):.1f})"


def _ours(entries: list[Entry]) -> Entry | None:
    """Return the entry that all are compared with: mdsmix with a process per core."""
    sound = (e for e in entries if not e.fault)
    return next((e for e in sound if e.contender.name == OURS), None)


def _times(ours: Entry, theirs: Entry) -> float:
    return (ours.bytes / ours.wall) / (theirs.bytes / theirs.wall)


def _cpu(entry: Entry) -> float:
    """Return the CPU seconds per GB of source."""
    return entry.cpu / entry.bytes * 1e9


def make_goals_table(entries: list[Entry], figures: Iterable[Figure]) -> str:
    rows = []
    for kind, name, least in GOALS:
        chosen = [e for e in entries if e.contender.kind == kind]
        ours = _ours(chosen)
        for entry in chosen if ours else []:
            if name in entry.contender.name and ours:
                what = f"{kind}: times the speed of {entry.contender.name}"
                if entry.fault:
                    rows.append([what, f">= {least}", "-", NOT_MEASURED])
                    continue
                times = _times(ours, entry)
                rows.append([what, f">= {least}", f"{times:.2f}", _verdict(times >= least)])
    peaks = [e.peak for e in entries if e.contender.name.startswith("mdsmix")]
    if peaks:
        peak = max(peaks)
        goal = f"< {MOST_MEMORY / MB:,.0f} MB"
        verdict = _verdict(peak < MOST_MEMORY)
        rows.append(["peak memory of mdsmix's tree", goal, f"{peak / MB:,.0f} MB", verdict])
    for f in figures:
        # A figure below zero is not measured: something larger was subtracted, or divided by.
        verdict = _verdict(f.value <= f.goal) if f.value >= 0 else NOT_MEASURED
        rows.append([f.what, f"<= {f.goal} {f.unit}", f"{f.value:.2f} {f.unit}", verdict])
    return _markdown(["measurement", "goal", "measured", "reached"], rows)


def _verdict(is_reached: bool) -> str:
    return "yes" if is_reached else "**no**"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""The figures of `make bench`: what is left of a slow tool without its start-up, and when that is
no figure.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import images, report
from benchmarks.contenders import Contender, Setup
from benchmarks.drawing import OURS
from benchmarks.figures import Figure
from benchmarks.measure import Run
from benchmarks.rounds import Entry, timed, warm_up
from benchmarks.start_up import MOST_START_UP, STARTS, find_start_up_fault, subtract_start_up
from benchmarks.versions import Case, Commit, compare

SLOW = "Foundry convert_dataset_json"


def make_run(wall: float, cpu: float | None = None) -> Run:
    return Run(wall=wall, cpu=wall if cpu is None else cpu, peak=0, foreign_share=0.0)


def make_entry(folder: Path, name: str, runs: Sequence[float], starts: Sequence[float]) -> Entry:
    """Make the entry of a tool that reads 100 bytes, with the wall seconds of its runs."""
    folder.mkdir(exist_ok=True)
    (folder / "0.jsonl").write_bytes(bytes(100))
    contender = Contender(
        name=name, kind="words", command=lambda *_: [], count=lambda _: 7, is_fast=name == OURS
    )
    return Entry(
        contender=contender,
        source=folder,
        expected=7,
        tokens=7,
        starts=[make_run(wall) for wall in starts],
        runs=[make_run(wall) for wall in runs],
    )


def test_one_disturbed_start_up_changes_no_figure(tmp_path: Path) -> None:
    """One start-up of 54.1 s was once subtracted from a run of 24.4 s."""
    disturbed = make_entry(tmp_path, SLOW, [24.4], [54.1, 11.2, 11.0])
    assert disturbed.fault == ""
    assert disturbed.wall == pytest.approx(24.4 - 11.2)
    assert disturbed.cpu == pytest.approx(24.4 - 11.2)


def test_a_run_that_is_nearly_all_start_up_gives_no_figure_and_reaches_no_goal(
    tmp_path: Path,
) -> None:
    ours = make_entry(tmp_path, OURS, [1.0], [])
    lost = make_entry(tmp_path, SLOW, [24.4], [54.1, 50.3, 11.0])
    for entry in lost, make_entry(tmp_path, SLOW, [24.4], [19.0, 19.0, 19.0]):
        table = report.make_tools_table([ours, entry])
        row = next(line for line in table.splitlines() if SLOW in line)
        assert "UNCERTAIN" in row
        assert row.count(" - |") == 7
        assert not re.search(r"\| -\d", table)
        goal = report.make_goals_table([ours, entry], []).splitlines()[2]
        assert goal.endswith(f"{SLOW} | >= 100 | - | **not measured** |")


def test_the_table_shows_the_start_ups_that_were_subtracted(tmp_path: Path) -> None:
    ours = make_entry(tmp_path, OURS, [1.0], [])
    slow = make_entry(tmp_path, SLOW, [24.4], [54.1, 11.2, 11.0])
    table = report.make_tools_table([ours, slow])
    head, _, our_row, row = ([*map(str.strip, line.split("|"))] for line in table.splitlines())
    assert row[head.index("start-up s")] == "11.2 (11.0-54.1)"
    assert our_row[head.index("start-up s")] == "-"
    assert row[head.index("times slower")] == "13.20"


seconds = st.floats(0.01, 1000)


@given(st.lists(seconds, min_size=1, max_size=4), st.lists(seconds, min_size=1, max_size=5))
def test_each_figure_is_a_fourth_of_its_run_or_is_refused(
    walls: list[float], starts: list[float]
) -> None:
    runs = [make_run(wall, cpu=1000.0) for wall in walls]
    begun = [make_run(wall, cpu=1.0) for wall in starts]
    if find_start_up_fault(runs, begun):
        assert min(walls) < max(starts) / MOST_START_UP
    else:
        for run, net in zip(runs, subtract_start_up(runs, begun), strict=True):
            assert net.wall >= (1 - MOST_START_UP) * run.wall - 1e-9


def test_a_start_up_is_also_refused_by_its_cpu_seconds() -> None:
    runs = [make_run(10, cpu=10)]
    assert not find_start_up_fault(runs, [make_run(5, cpu=5)])
    assert "CPU" in find_start_up_fault(runs, [make_run(5, cpu=9)])


def test_a_figure_below_zero_reaches_no_goal() -> None:
    figures = [Figure("ratio", -0.5, "x", 2), Figure("small", 0.0, "MB", 0.1)]
    lost, small = report.make_goals_table([], figures).splitlines()[-2:]
    assert lost.endswith("| **not measured** |")
    assert small.endswith("| yes |")


COUNTS_LINES = """
import sys
from pathlib import Path

source, output, calls = map(Path, sys.argv[1:])
lines = [line for path in source.glob("*.jsonl") for line in path.open()]
(output / "tokens").write_text(str(len(lines)))
with calls.open("a") as file:
    file.write(f"{len(lines)}\\n")
"""


@pytest.mark.parametrize(("rounds", "starts"), [(1, STARTS), (2, 2 * 2), (3, 3)])
def test_few_rounds_measure_several_start_ups_of_slow_tools_only(
    tmp_path: Path, rounds: int, starts: int
) -> None:
    """A tool that counts lines, as a process: which corpora it was given, in order."""
    setup = Setup(work=tmp_path, foundry=tmp_path, peers=tmp_path)
    source = tmp_path / "sources/words"
    source.mkdir(parents=True)
    (source / "0.jsonl").write_bytes(b'{"text":"some words of a document"}\n' * 3000)
    calls = tmp_path / "calls"
    slow = Contender(
        name=SLOW,
        kind="words",
        command=lambda _, source, output: [
            *(sys.executable, "-S", "-c", COUNTS_LINES, source, output, calls)
        ],
        count=lambda output: int((output / "tokens").read_text()),
    )
    for contender in (slow, replace(slow, is_fast=True)):
        calls.unlink(missing_ok=True)
        entry = Entry(contender=contender, source=source, expected=3000)
        warm_up(setup, entry)
        for _ in range(rounds):
            timed(setup, entry, rounds)
        lines = [int(line) for line in calls.read_text().split()]
        few = min(lines)
        assert few < 3000
        measured = starts // rounds if contender is slow else 0
        warm = [3000] if contender is slow else [few, 3000]
        assert lines == warm + [*[few] * measured, 3000] * rounds
        assert len(entry.starts) == measured * rounds
        assert len(entry.runs) == rounds


def test_images_are_compared_without_the_median_start_up(tmp_path: Path) -> None:
    """A start-up of eight images is disturbed in one way and takes all of the time in the other."""
    paths = [tmp_path / str(number) for number in range(100)]
    for path in paths:
        path.write_bytes(bytes(1000))
    walls = iter([50.0, 5.0, 5.0])
    ways = {
        "disturbed": lambda count: make_run(25.0 if count == 100 else next(walls)),
        "all start-up": lambda count: make_run(5.0),
    }
    _, disturbed, lost = images.subtract_few_images(ways, paths, rounds=1)
    assert disturbed.startswith("| disturbed | 100 | 20.0 |")
    assert lost.startswith("| all start-up | 100 | UNCERTAIN: start-up took 5.0 s")


def test_a_commit_is_compared_by_medians() -> None:
    """Of wall seconds, whatever the CPU seconds are: one disturbed run changes nothing."""
    new = [make_run(wall, cpu) for wall, cpu in ((9.0, 1.0), (1.0, 1.0), (1.5, 8.0))]
    old = [make_run(wall, 2.0) for wall in (2.0, 1.9, 50.0)]
    figure = compare("convert", 0.8, new, old)
    assert figure == Figure("convert", 0.75, "x (2.00 s; CPU 0.50 x)", 0.8)


@pytest.mark.parametrize("unchanged", ["", "check"])
def test_a_commit_converts_to_a_new_folder_and_checks_a_finished_one(
    tmp_path: Path, unchanged: str
) -> None:
    """In its own work folder, since `python -m` finds the modules of the current folder first."""
    work = tmp_path / "old"
    (work / "words").mkdir(parents=True)
    command = tmp_path / "mdsmix"
    command.write_text('#!/bin/sh\necho "$PWD $@ $(ls -d words 2>&1)" > "$0.said"\n')
    command.chmod(0o755)
    commit = Commit(command, Setup(work=work, foundry=tmp_path, peers=tmp_path))
    run = commit.run(Case("", "words", 1, 0.8, unchanged), tmp_path)
    assert 0 < run.wall < 60
    folder, verb, recipe, listed = Path(f"{command}.said").read_text().split(maxsplit=3)
    assert [folder, recipe] == [str(work), str(work / "words.yaml")]
    assert verb == (unchanged or "convert")
    assert (listed.strip() == "words") == bool(unchanged)

"""What a conversion costs on 64 and 128 processors, by simulation from costs measured on this
machine.

    python -m benchmarks.processors [--megabytes N] [--processors 64 128] [--validate] [--work DIR]

Measured are CPU seconds, so other work on the machine changes little. Only of the start-up the
wall seconds are taken, of the fastest run, since two threads share its work. A conversion in one
process gives for each work unit the seconds of the tokenizer, batch by batch, and of everything
else. An engine with sleeping tasks gives the parent's seconds for each fork and each unit.

Simulated is the local engine: it forks one worker after the other, gives each the next unit of the
real planner, and publishes at the end. If there are fewer units than processors, the tokenizer of a
worker has several threads. Each of them has its own cache of words: a thread that encodes a third
of a unit takes as long as a worker with one thread for the first third, and somewhat longer, as
measured with two threads.

The last columns are what it would take if several workers encoded a part of each unit, and one of
them joined the parts: the best number of parts. The engine shares units in another way: workers
without a unit encode batches of others (engines/assistants.py). Not simulated are these assistants,
disks, the bandwidth of memory, and processors that become slower when all of them work.
`--validate` compares the simulation with real runs of one and two workers.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import corpus
from benchmarks.contenders import HERE, Setup, write_recipe
from benchmarks.cores import Sleep
from benchmarks.measure import CORES, Run, measure
from benchmarks.rounds import MB, environment
from mdsmix.conversion.planning import Options
from mdsmix.conversion.run import convert
from mdsmix.encode.backends import Fastokens
from mdsmix.engines import local_engine
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.tasks import ActiveRecords, Attempt, Engine, Reporter
from mdsmix.engines.workers import THREADS
from mdsmix.kinds.recipes import open_recipe
from mdsmix.sources import find_files, plan_units
from tests.converting import RecordingWatcher

SIZES = (1_000, 10_000, 100_000)
"Megabytes of the simulated sources."
MOST_PARTS = 17
"The parts of a unit that are tried are fewer."
STARTS = 3
"Start-ups that are measured in a round."
SLEEPERS = 64
"Workers of the engine with sleeping tasks."


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """CPU seconds of a worker for one work unit."""

    size: int
    "Bytes of source."
    tokenizing: Sequence[float]
    "Of all threads of the tokenizer, for each batch."
    encoding: float
    "Of everything else until the unit is stored: reading, hashing, comparing."
    storing: float
    "Of storing it: making rows, hashing and writing shards."

    def tokenizing_until(self, share: float) -> float:
        """Return the seconds of the tokenizer for the first part of the unit."""
        count = len(self.tokenizing)
        sums = np.cumsum([0.0, *self.tokenizing])
        return float(np.interp(share * count, np.arange(count + 1), sums))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """CPU seconds of a conversion with one worker in this process."""

    end: float
    "Of the parent after the last unit."
    units: Sequence[UnitCost]
    "In order; the tokenizer of the first one has seen no words."

    @property
    def first(self) -> UnitCost:
        return self.units[0]

    @property
    def later(self) -> UnitCost:
        """The last unit that is as large as the first."""
        return [unit for unit in self.units if unit.size > self.first.size * 0.9][-1]


@dataclass(frozen=True, kw_only=True)
class ParentCosts:
    """CPU seconds of the engine, measured with sleeping tasks."""

    fork: float
    "Of the parent, for each worker."
    unit: float
    "Of the parent, for each unit: its messages, and measuring memory meanwhile."
    worker: float
    "Of a worker that does nothing: it starts, waits and ends."


class MeasuringEngine(Engine, Reporter):
    """Converts in this process, and measures the CPU seconds of each unit."""

    peak = 0
    memory = 1 << 32

    def __init__(self) -> None:
        self.units = list[UnitCost]()
        self.ended = 0.0
        self._tokenizing = list[float]()
        self._size = 0

    def run(
        self, tasks: Sequence[Any], on_progress: Any, say: Any
    ) -> Generator[tuple[int, Any], None, None]:
        for number, task in enumerate(tasks):
            self._tokenizing.clear()
            self._size = 0
            began = time.process_time()
            store = task.do(Attempt(), self)
            encoded = time.process_time()
            result = store()
            self.ended = time.process_time()
            cost = UnitCost(
                size=self._size,
                tokenizing=tuple(self._tokenizing),
                encoding=encoded - began - sum(self._tokenizing),
                storing=self.ended - encoded,
            )
            self.units.append(cost)
            yield number, result

    def on_progress(self, size: int, tokens: int) -> None:
        self._size += size

    def on_records(self, records: ActiveRecords | None) -> None:
        return

    def wait_for_room(self) -> None:
        return

    def is_tight(self) -> bool:
        return False

    def close(self) -> None:
        return

    def count_tokenizing(self) -> None:
        """Count the CPU seconds of the tokenizer's threads from now on."""
        encode = Fastokens.encode

        def timed(backend: Fastokens, texts: Sequence[str], match_special: bool) -> Any:
            began = time.process_time()
            ids = encode(backend, texts, match_special)
            self._tokenizing.append(time.process_time() - began)
            return ids

        Fastokens.encode = timed  # type: ignore[method-assign,assignment]


def measure_conversion(recipe: Path) -> Costs:
    """Convert in this process, whose tokenizer must not have seen a word."""
    engine = MeasuringEngine()
    engine.count_tokenizing()
    watcher = RecordingWatcher()
    list(convert(open_recipe(recipe, ()), Options(workers=1), watcher, engine))
    return Costs(end=time.process_time() - engine.ended, units=tuple(engine.units))


def measure_parent(workers: int = SLEEPERS) -> ParentCosts:
    """Run sleeping tasks with the local engine, in a process that has opened a tokenizer."""
    forking = 0.0
    start_worker = vars(local_engine)["start_worker"]

    def timed(*arguments: Any) -> Any:
        nonlocal forking
        began = time.process_time()
        worker = start_worker(*arguments)
        forking += time.process_time() - began
        return worker

    vars(local_engine)["start_worker"] = timed
    tasks = [Sleep(number, 2.0) for number in range(2 * workers)]
    began = time.process_time()
    with closing(LocalEngine(PoolSettings(workers=workers, memory=1 << 40))) as engine:
        for _ in engine.run(tasks, lambda *_: None, print):
            pass
        seconds = time.process_time() - began - forking
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ParentCosts(
        fork=forking / workers,
        unit=seconds / len(tasks),
        worker=(children.ru_utime + children.ru_stime) / workers,
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The measured costs."""

    start: float
    "Seconds of a whole conversion of a few records: start-up and publication."
    start_cpu: float
    "CPU seconds of the same."
    costs: Costs
    parent: ParentCosts
    slowdown: float
    "Seconds of the tokenizer with two threads, over those of one thread for half of the unit."
    end_per_byte: float
    "CPU seconds of the publication that each byte of source adds."
    exchange_per_byte: float
    "CPU seconds to write and read the tokens of each byte of source, if units were split."

    def seconds(self, unit: UnitCost, size: float, parts: int, threads: int) -> float:
        """Return the seconds of one of `parts` tasks of a unit. A worker's first unit begins with
        costs that do not depend on its size: the tokenizer is proved, and has seen no words.

        Args:
            unit: the first or a later unit of a worker.
            size: bytes of the task.
            parts: 1 for a whole unit, which is also stored.
            threads: threads of the tokenizer.
        """
        share = size / unit.size
        tokenizing = self.tokenizing(unit, share, threads)
        proof = unit.encoding - self.costs.later.encoding
        storing = share * unit.storing if parts == 1 else 0.0
        return tokenizing + proof + share * self.costs.later.encoding + storing

    def tokenizing(self, unit: UnitCost, share: float, threads: int) -> float:
        """Return the seconds of each thread of the tokenizer for a share of a unit."""
        seconds = unit.tokenizing_until(share / threads)
        return seconds if threads == 1 else seconds * self.slowdown


def plan_sizes(size: int) -> list[int]:
    """Return the bytes of each unit of a JSON Lines file of `size` bytes, by the real planner."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.jsonl"
        path.touch()
        os.truncate(path, size)  # a file without blocks on the disk
        units = plan_units(find_files([str(path)], folder))
    ends = [size if unit.end is None else unit.end for unit in units]
    return [end - unit.start for unit, end in zip(units, ends, strict=True)]


def simulate(
    machine: Machine, size: int, processors: int, workers: int | None = None, parts: int = 1
) -> float:
    """Return the seconds from the start of the command to the published index.

    Args:
        machine: the measured costs.
        size: bytes of source.
        processors: of the simulated machine.
        workers: the most worker processes; None: one for each processor.
        parts: into how many tasks each unit is split; the last of them joins the unit.
    """
    unit_sizes = plan_sizes(size)
    tasks = [unit_size / parts for unit_size in unit_sizes for _ in range(parts)]
    workers = min(workers or processors, len(tasks))
    threads = -(-processors // workers)  # as `workers.run_worker` chooses
    costs = machine.costs

    # The parent forks the workers one after the other, and gives each its first task.
    parent_free = machine.start
    running = list[tuple[float, int]]()
    for number in range(workers):
        parent_free += machine.parent.fork
        ready = parent_free + machine.parent.worker
        seconds = machine.seconds(costs.first, tasks[number], parts, threads)
        heapq.heappush(running, (ready + seconds, number))
    # It handles the end of each task, and gives the worker the next one.
    next_task = workers
    while running:
        ended, number = heapq.heappop(running)
        parent_free = max(parent_free, ended) + machine.parent.unit
        if next_task < len(tasks):
            seconds = machine.seconds(costs.later, tasks[next_task], parts, threads)
            heapq.heappush(running, (parent_free + seconds, number))
            next_task += 1
    if parts > 1:
        parent_free += costs.later.storing + machine.exchange_per_byte * unit_sizes[0]
    return parent_free + machine.end_per_byte * size


def ideal(machine: Machine, size: int, processors: int) -> float:
    """Return start-up and publication, and the seconds of the units divided by the processors."""
    unit = machine.costs.later
    work = machine.seconds(unit, unit.size, 1, 1) * size / unit.size
    return machine.start + machine.end_per_byte * size + work / processors


def simulate_cpu(machine: Machine, size: int, workers: int, threads: int) -> float:
    """Return the CPU seconds of the whole command, with threads of the tokenizer in each worker."""
    sizes = plan_sizes(size)
    seconds = machine.start_cpu + machine.end_per_byte * size
    for number, unit_size in enumerate(sizes):
        unit = machine.costs.first if number < workers else machine.costs.later
        other_threads = (threads - 1) * machine.tokenizing(unit, unit_size / unit.size, threads)
        seconds += machine.seconds(unit, unit_size, 1, threads) + other_threads
    return seconds


def measure_exchange(folder: Path, size: int = 50 * MB) -> float:
    """Return the CPU seconds to write and read tokens, for each byte of their source: about half a
    byte of tokens.
    """
    content = os.urandom(MB) * (size // MB)
    path = folder / "exchange"
    began = time.process_time()
    path.write_bytes(content)
    path.read_bytes()
    seconds = time.process_time() - began
    path.unlink()
    return seconds / (2 * size)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A corpus on this machine, and how often its conversion is measured."""

    setup: Setup
    source: Path
    rounds: int

    def measure(self) -> Machine:
        """Measure the costs in turn, and return their medians."""
        few = corpus.head(self.setup.work, self.source)
        single = list[Costs]()
        double = list[Costs]()
        parents = list[ParentCosts]()
        ends = list[float]()
        starts = list[Run]()
        exchanges = list[float]()
        for _ in range(self.rounds):
            single.append(self._ask_costs(self.source, 1))
            double.append(self._ask_costs(self.source, 2))
            answer = self._ask(few, 1, "--sleep")
            parents.append(ParentCosts(**answer["parent"]))
            ends.append(answer["costs"]["end"])
            starts += [self.run(few, 1) for _ in range(STARTS)]
            exchanges.append(measure_exchange(self.setup.work))
        costs = median_of_costs(single)
        of_two_threads = sum(median_of_costs(double).first.tokenizing)
        size = sum(unit.size for unit in costs.units)
        return Machine(
            start=min(run.wall for run in starts),
            start_cpu=median(run.cpu for run in starts),
            costs=costs,
            parent=ParentCosts(
                fork=median(cost.fork for cost in parents),
                unit=median(cost.unit for cost in parents),
                worker=median(cost.worker for cost in parents),
            ),
            slowdown=of_two_threads / 2 / costs.first.tokenizing_until(0.5),
            # A few records show the part of the publication that does not depend on the size.
            end_per_byte=max(0.0, costs.end - median(ends)) / size,
            exchange_per_byte=median(exchanges),
        )

    def _ask_costs(self, source: Path, threads: int) -> Costs:
        costs = self._ask(source, threads)["costs"]
        units = tuple(UnitCost(**unit) for unit in costs["units"])
        return Costs(end=costs["end"], units=units)

    def _ask(self, source: Path, threads: int, *options: str) -> dict[str, Any]:
        """Measure a conversion in a new process, and return the JSON that it prints."""
        recipe = str(self._recipe(source))
        command = [sys.executable, "-m", "benchmarks.processors", "--convert", recipe]
        counts = {name: str(threads) for name in THREADS}
        answer = subprocess.run(
            [*command, *options],
            env=environment(self.setup) | counts,
            stdout=subprocess.PIPE,
            check=True,
        )
        measured: dict[str, Any] = json.loads(answer.stdout)
        return measured

    def _recipe(self, source: Path) -> Path:
        """Return a recipe for a first conversion: its output is deleted."""
        output = self.setup.work / "processors"
        shutil.rmtree(output, ignore_errors=True)
        return write_recipe(self.setup, {"words": source}, output)

    def run(self, source: Path, workers: int) -> Run:
        """Run the real command."""
        recipe = self._recipe(source)
        argv: list[str | Path] = [self.setup.mdsmix, "convert", recipe, "--workers", str(workers)]
        return measure(argv, environment(self.setup), self.setup.work / "log")


def median_of_costs(runs: Sequence[Costs]) -> Costs:
    """Return the medians of several runs, unit by unit."""
    units = list[UnitCost]()
    for measured in zip(*(costs.units for costs in runs), strict=True):
        batches = zip(*(unit.tokenizing for unit in measured), strict=True)
        unit = UnitCost(
            size=measured[0].size,
            tokenizing=tuple(map(median, batches)),
            encoding=median(unit.encoding for unit in measured),
            storing=median(unit.storing for unit in measured),
        )
        units.append(unit)
    return Costs(end=median(costs.end for costs in runs), units=tuple(units))


def report(machine: Machine, processors: Sequence[int]) -> None:
    """Print the costs, and the simulated seconds of each size on each number of processors."""
    print("| CPU s of a unit | tokenizer | reading and the rest | storing |")
    print("| --- | ---: | ---: | ---: |")
    for name, unit in (("first", machine.costs.first), ("later", machine.costs.later)):
        print(
            f"| a worker's {name}, {unit.size / MB:.0f} MB | {sum(unit.tokenizing):.2f} | "
            f"{unit.encoding:.2f} | {unit.storing:.2f} |"
        )
    parent = machine.parent
    print(
        f"\nthe parent: start and end {machine.start:.2f} s, "
        f"{1e9 * machine.end_per_byte:.2f} s more for each GB, a fork {1000 * parent.fork:.1f} ms, "
        f"a unit {1000 * parent.unit:.1f} ms; the start of a worker {1000 * parent.worker:.1f} ms; "
        f"threads of the tokenizer take {machine.slowdown:.2f} times as long as they should\n"
    )
    print("| GB | processors | units | s | ideal s | times the ideal | split: parts | s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        for count in processors:
            print(table_row(machine, size * MB, count))


def table_row(machine: Machine, size: int, processors: int) -> str:
    """Return the row of the table for one size and number of processors."""
    seconds = simulate(machine, size, processors)
    least = ideal(machine, size, processors)
    split = {
        parts: simulate(machine, size, processors, parts=parts) for parts in range(2, MOST_PARTS)
    }
    best = min(split, key=lambda parts: split[parts])
    cells = (
        f"{size // (1000 * MB)}",
        processors,
        f"{len(plan_sizes(size)):,}",
        f"{seconds:.2f}",
        f"{least:.2f}",
        f"{seconds / least:.2f}",
        best,
        f"{split[best]:.2f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def validate(bench: Bench, machine: Machine) -> None:
    """Print the seconds of real runs, and those that the simulation gives for them."""
    size = sum(path.stat().st_size for path in bench.source.iterdir())
    for workers in (1, 2):
        runs = [bench.run(bench.source, workers) for _ in range(bench.rounds)]
        cpu = median(run.cpu for run in runs)
        wall = min(run.wall for run in runs)
        load = max(run.foreign_share for run in runs)
        # One worker has all processors: its tokenizer has a thread for each.
        simulated_cpu = simulate_cpu(machine, size, workers, -(-CORES // workers))
        simulated = simulate(machine, size, CORES, workers)
        print(
            f"{workers} workers, {size / MB:.0f} MB: {cpu:.2f} CPU s in real runs, simulated "
            f"{simulated_cpu:.2f} ({simulated_cpu / cpu - 1:+.0%}); {wall:.2f} s, simulated "
            f"{simulated:.2f} (other processes took up to {load:.0%} of the machine)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processors", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="of the measured corpus")
    parser.add_argument("--processors", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--validate", action="store_true", help="also compare with real runs")
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sleep", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        costs = measure_conversion(arguments.convert)
        parent = measure_parent() if arguments.sleep else None
        print(json.dumps({"costs": asdict(costs), "parent": parent and asdict(parent)}))
        return
    nowhere = Path(os.devnull)
    work = arguments.work.resolve()
    setup = Setup(work=work, foundry=nowhere, peers=nowhere)
    corpus.tokenizer(work)
    source = corpus.source(work, "words", arguments.megabytes * MB)
    bench = Bench(setup=setup, source=source, rounds=arguments.rounds)
    machine = bench.measure()
    report(machine, arguments.processors)
    if arguments.validate:
        validate(bench, machine)


if __name__ == "__main__":
    main()

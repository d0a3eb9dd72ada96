"""What a conversion costs on 64 and 128 processors, by simulation from costs measured on this
machine.

    python -m benchmarks.processors [--megabytes N] [--processors 64 128] [--validate] [--work DIR]

Measured are CPU seconds, so other work on the machine changes little. Only of the start-up the
wall seconds are taken, of the fastest run, since two threads share its work. A conversion in one
process gives for each work unit the seconds of the tokenizer, batch by batch, and of everything
else. An engine with sleeping tasks gives the parent's seconds for each fork and each unit.

`simulation.py` simulates the local engine with these costs, also workers without a unit, which
assist others. What an assistance costs is measured in one process too: a conversion sends every
batch through the real pipe to an assistant in the same process. The column `unshared` has the
seconds without assistants.

Not simulated are disks, the bandwidth of memory, and processors that become slower when all of them
work. `--validate` compares the simulation with real runs of one and two workers, also of a single
unit that two workers share.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
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
from benchmarks.simulation import (
    Costs,
    Machine,
    ParentCosts,
    Simulation,
    UnitCost,
    ideal,
    plan_sizes,
)
from mdsmix.conversion.planning import Options
from mdsmix.conversion.run import convert
from mdsmix.encode.backends import Fastokens
from mdsmix.engines import local_engine
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.memory_pipe import MemoryPipe
from mdsmix.engines.tasks import ActiveRecords, Assistant, Attempt, Engine, Part, Reporter
from mdsmix.engines.workers import THREADS
from mdsmix.kinds.recipes import open_recipe
from tests.converting import RecordingWatcher

SIZES = (1_000, 10_000, 100_000)
"Megabytes of the simulated sources."
UNIT_MEGABYTES = 90
"A source of one work unit."
STARTS = 3
"Start-ups that are measured in a round."
SLEEPERS = 64
"Workers of the engine with sleeping tasks."


class MeasuredAssistant:
    """Encodes batches in the process of the worker (`tasks.Assistant`), and measures the CPU
    seconds that this would take in a process of its own.
    """

    has_left = False
    unanswered = 0

    def __init__(self, task: Any) -> None:
        near, far = socket.socketpair()
        self._near = MemoryPipe(near.detach())
        self._far = MemoryPipe(far.detach())
        self._do_part = task.open_assistant()
        self.seconds = 0.0

    def send(self, part: Part) -> bool:
        self._near.send(part)
        began = time.process_time()
        received = self._far.receive()
        answer = self._do_part(received.content)
        self._far.send(answer)
        self.seconds += time.process_time() - began
        return True

    def take_back(self) -> None:
        raise AssertionError("each batch is answered before the next is sent")

    def has_answer(self, seconds: float = 0) -> bool:
        return True

    def receive(self) -> Any:
        return self._near.receive()

    def close(self) -> None:
        self._near.close()
        self._far.close()


class MeasuringEngine(Engine, Reporter):
    """Converts in this process, and measures the CPU seconds of each unit."""

    peak = 0
    memory = 1 << 32

    def __init__(self, is_assisted: bool) -> None:
        """Start without units. If `is_assisted`, all batches are sent to an assistant."""
        self._is_assisted = is_assisted
        self._assistants = list[MeasuredAssistant]()
        self.units = list[UnitCost]()
        self.ended = 0.0
        self._tokenizing = list[float]()
        self._tokenizing_of_batch = 0.0
        self._size = 0

    def run(
        self, tasks: Sequence[Any], on_progress: Any, say: Any
    ) -> Generator[tuple[int, Any], None, None]:
        for number, task in enumerate(tasks):
            self._tokenizing.clear()
            self._size = 0
            began = time.process_time()
            if self._is_assisted:
                self._assistants = [MeasuredAssistant(task)]
            store = task.do(Attempt(), self)
            encoded = time.process_time()
            result = store()
            self.ended = time.process_time()
            tokenizing = sum(self._tokenizing)
            assisting = 0.0
            for assistant in self._assistants:
                assisting = assistant.seconds - tokenizing
                assistant.close()
            cost = UnitCost(
                size=self._size,
                tokenizing=tuple(self._tokenizing),
                assisting=assisting,
                encoding=encoded - began - tokenizing - assisting,
                storing=self.ended - encoded,
            )
            self.units.append(cost)
            yield number, result

    def on_progress(self, size: int, tokens: int) -> None:
        """Note the end of a batch. The first call is for windows that are reused."""
        if size:
            self._size += size
            self._tokenizing.append(self._tokenizing_of_batch)
            self._tokenizing_of_batch = 0.0

    def on_records(self, records: ActiveRecords | None) -> None:
        return

    def wait_for_room(self) -> None:
        return

    def is_tight(self) -> bool:
        return False

    def list_assistants(self) -> Sequence[Assistant]:
        return self._assistants

    def close(self) -> None:
        return

    def count_tokenizing(self) -> None:
        """Count the CPU seconds of the tokenizer's threads from now on."""
        encode = Fastokens.encode

        def timed(backend: Fastokens, texts: Sequence[str], match_special: bool) -> Any:
            began = time.process_time()
            ids = encode(backend, texts, match_special)
            self._tokenizing_of_batch += time.process_time() - began
            return ids

        Fastokens.encode = timed  # type: ignore[method-assign,assignment]


def measure_conversion(recipe: Path, is_assisted: bool) -> Costs:
    """Convert in this process, whose tokenizer must not have seen a word."""
    engine = MeasuringEngine(is_assisted)
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
        assisted = list[Costs]()
        parents = list[ParentCosts]()
        ends = list[float]()
        starts = list[Run]()
        for _ in range(self.rounds):
            single.append(self._ask_costs(self.source, 1))
            double.append(self._ask_costs(self.source, 2))
            assisted.append(self._ask_costs(self.source, 1, "--assisted"))
            answer = self._ask(few, 1, "--sleep")
            parents.append(ParentCosts(**answer["parent"]))
            ends.append(answer["costs"]["end"])
            starts += [self.run(few, 1) for _ in range(STARTS)]
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
            assisted=median_of_costs(assisted),
            slowdown=of_two_threads / 2 / sum_half(costs.first.tokenizing),
            # A few records show the part of the publication that does not depend on the size.
            end_per_byte=max(0.0, costs.end - median(ends)) / size,
        )

    def _ask_costs(self, source: Path, threads: int, *options: str) -> Costs:
        costs = self._ask(source, threads, *options)["costs"]
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


def sum_half(batches: Sequence[float]) -> float:
    """Return the sum of the first half of the batches."""
    sums = np.cumsum([0.0, *batches])
    return float(np.interp(len(batches) / 2, np.arange(len(sums)), sums))


def median_of_costs(runs: Sequence[Costs]) -> Costs:
    """Return the medians of several runs, unit by unit."""
    units = list[UnitCost]()
    for measured in zip(*(costs.units for costs in runs), strict=True):
        batches = zip(*(unit.tokenizing for unit in measured), strict=True)
        unit = UnitCost(
            size=measured[0].size,
            tokenizing=tuple(map(median, batches)),
            assisting=median(unit.assisting for unit in measured),
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
    print(
        f"a batch of {machine.batch_bytes / MB:.1f} MB that an assistant encodes takes the worker "
        f"{1000 * machine.relaying:.1f} ms\n"
    )
    print("| GB | processors | units | s | unshared s | ideal s | times the ideal |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        for number in processors:
            print(table_row(machine, size * MB, number))


def table_row(machine: Machine, size: int, processors: int) -> str:
    """Return the row of the table for one size and number of processors."""
    seconds = Simulation(machine, size, processors).seconds
    unshared = Simulation(machine, size, processors, is_shared=False).seconds
    least = ideal(machine, size, processors)
    cells = (
        f"{size // (1000 * MB)}",
        processors,
        f"{len(plan_sizes(size)):,}",
        f"{seconds:.2f}",
        f"{unshared:.2f}",
        f"{least:.2f}",
        f"{seconds / least:.2f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def validate(bench: Bench, machine: Machine, single: Path) -> None:
    """Print the seconds of real runs, and those that the simulation gives for them.

    Args:
        bench: the corpus.
        machine: the measured costs.
        single: a source of one work unit, which two workers share.
    """
    for source, workers in ((bench.source, 1), (bench.source, 2), (single, 1), (single, 2)):
        size = sum(path.stat().st_size for path in source.iterdir())
        runs = [bench.run(source, workers) for _ in range(bench.rounds)]
        cpu = median(run.cpu for run in runs)
        wall = min(run.wall for run in runs)
        load = max(run.foreign_share for run in runs)
        simulated = Simulation(machine, size, CORES, workers)
        print(
            f"{workers} workers, {size / MB:.0f} MB: {cpu:.2f} CPU s in real runs, simulated "
            f"{simulated.cpu:.2f} ({simulated.cpu / cpu - 1:+.0%}); {wall:.2f} s, simulated "
            f"{simulated.seconds:.2f} ({simulated.seconds / wall - 1:+.0%}; other processes took "
            f"up to {load:.0%} of the machine)"
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
    parser.add_argument("--assisted", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        costs = measure_conversion(arguments.convert, arguments.assisted)
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
        validate(bench, machine, corpus.source(work, "words", UNIT_MEGABYTES * MB))


if __name__ == "__main__":
    main()

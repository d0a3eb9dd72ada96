"""The local engine with many processors, simulated from measured costs (`benchmarks.processors`).

The engine forks one worker after the other, gives each the next unit of the real planner, and
publishes at the end. If there are fewer workers than processors, the tokenizer of a worker has
several threads. Each of them has its own cache of words: a thread that encodes a third of a unit
takes as long as a worker with one thread for the first third, and somewhat longer, as measured with
two threads.

A worker without a unit assists another one (mdsmix/engines/assistants.py), batch by batch.
"""

from __future__ import annotations

import heapq
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mdsmix.conversion.shared_batches import MOST_UNANSWERED
from mdsmix.engines.assistants import LEAST_NEW_SHARE, LEAST_SHARE, count_sharers
from mdsmix.sources import find_files, plan_units


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """CPU seconds of a worker for one work unit."""

    size: int
    "Bytes of source."
    tokenizing: Sequence[float]
    "Of all threads of the tokenizer, for each batch."
    assisting: float
    "Of an assistant that encodes all batches, without the tokenizer; 0 if there was none."
    encoding: float
    "Of everything else until the unit is stored: reading, hashing, comparing, sending of batches."
    storing: float
    "Of storing it: making rows, hashing and writing shards."

    @property
    def batches(self) -> int:
        return len(self.tokenizing)


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


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The measured costs."""

    start: float
    "Seconds of a whole conversion of a few records: start-up and publication."
    start_cpu: float
    "CPU seconds of the same."
    costs: Costs
    parent: ParentCosts
    assisted: Costs
    "The same conversion as `costs`, but all batches were sent to an assistant."
    slowdown: float
    "Seconds of the tokenizer with two threads, over those of one thread for half of the unit."
    end_per_byte: float
    "CPU seconds of the publication that each byte of source adds."

    @property
    def batch_bytes(self) -> float:
        return self.costs.later.size / self.costs.later.batches

    @property
    def relaying(self) -> float:
        """CPU seconds of a worker for a batch that an assistant encodes: to read and send it, and
        to receive and add the answer.
        """
        return self.assisted.later.encoding / self.assisted.later.batches

    def tokenize(self, batches: float) -> float:
        """Return the seconds of a thread of the tokenizer for its first batches. It has seen no
        words before the first one.
        """
        first = self.costs.first.tokenizing
        sums = np.cumsum([0.0, *first])
        seconds = float(np.interp(batches, np.arange(len(sums)), sums))
        further_batches = max(0.0, batches - len(first))
        return seconds + further_batches * sum(self.costs.later.tokenizing) / len(first)

    def encode(self, begun: int, threads: int, is_assistant: bool) -> Encoding:
        """Return the costs of the next batch in a process that has encoded `begun` batches. The
        first one has costs that do not depend on its size: the tokenizer is proved.

        Args:
            threads: threads of the tokenizer, which share each batch.
            is_assistant: whether the process assists the worker of the batch's unit.
        """
        tokenizing = self.tokenize((begun + 1) / threads) - self.tokenize(begun / threads)
        if threads > 1:
            tokenizing *= self.slowdown
        later = self.costs.later
        rest = self.assisted.later.assisting if is_assistant else later.encoding
        rest /= later.batches
        if not begun:
            rest += self.costs.first.encoding - later.encoding
        return Encoding(seconds=tokenizing + rest, cpu=threads * tokenizing + rest)


class Encoding(NamedTuple):
    """The costs of encoding a batch."""

    seconds: float
    cpu: float
    "CPU seconds of all threads."


def plan_sizes(size: int) -> list[int]:
    """Return the bytes of each unit of a JSON Lines file of `size` bytes, by the real planner."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.jsonl"
        path.touch()
        os.truncate(path, size)  # a file without blocks on the disk
        units = plan_units(find_files([str(path)], folder))
    ends = [size if unit.end is None else unit.end for unit in units]
    return [end - unit.start for unit, end in zip(units, ends, strict=True)]


@dataclass(eq=False)
class Batch:
    """A batch that was read and is being encoded."""

    process: Process
    "It encodes the batch."
    end: float
    "When it has done so."


@dataclass(eq=False)
class Process:
    """A simulated worker process."""

    free: float
    "When it has encoded all batches that it has."
    encoded: int = 0
    "How many batches it has encoded in all."
    joined: float = 0.0
    "When it became an assistant."
    batches: list[Batch] = field(default_factory=list)
    "All that it has got of the unit that it assists."

    def count_unanswered(self, now: float) -> int:
        return sum(batch.end > now for batch in self.batches)


@dataclass(eq=False)
class SharedUnit:
    """A work unit that a simulated worker does."""

    worker: Process
    size: int
    batch_bytes: float
    unread: int
    "How many batches were not read yet."
    pending: deque[Batch] = field(default_factory=deque)
    "Those that were read, but not added to the rows yet."
    assistants: list[Process] = field(default_factory=list)

    def count_bytes(self) -> float:
        """Return how many bytes are left, as the engine knows them."""
        return self.batch_bytes * (self.unread + len(self.pending))


class Simulation:
    """The local engine with many processors."""

    def __init__(
        self,
        machine: Machine,
        size: int,
        processors: int,
        workers: int | None = None,
        is_shared: bool = True,
    ) -> None:
        """Simulate a conversion to its end.

        Args:
            machine: the measured costs.
            size: bytes of source.
            processors: of the simulated machine.
            workers: the most worker processes; None: one for each processor.
            is_shared: whether workers without a unit assist others.
        """
        self._machine = machine
        self._is_shared = is_shared
        self._queue = deque(plan_sizes(size))
        # As LocalEngine.count_useful_workers and run_worker choose.
        useful = len(self._queue)
        if is_shared:
            useful = sum(count_sharers(unit, LEAST_NEW_SHARE) for unit in self._queue)
        self._pool = min(workers or processors, max(useful, len(self._queue)))
        self._threads = -(-processors // self._pool)
        self._started = 0
        self._idle = list[Process]()
        self._units = list[SharedUnit]()
        self._steps = list[tuple[float, int, Callable[[float], None]]]()
        "A heap of what happens next: when, a number, and the function that does it."
        self._numbers = count()
        self.cpu = machine.start_cpu
        "CPU seconds of all processes."
        self._parent_free = machine.start
        "When the parent has done all that it has begun."
        while self._queue and self._started < self._pool:
            self._begin_unit(self._start_process())
        self._share(self._parent_free)
        while self._steps:
            now, _, step = heapq.heappop(self._steps)
            step(now)
        end = machine.end_per_byte * size
        self.cpu += end
        self.seconds = self._parent_free + end
        "From the start of the command to the published index."

    def _start_process(self) -> Process:
        """Fork a process. The parent forks one after the other."""
        parent = self._machine.parent
        self._started += 1
        self._parent_free += parent.fork
        self.cpu += parent.fork + parent.worker
        return Process(self._parent_free + parent.worker)

    def _begin_unit(self, worker: Process) -> None:
        size = self._queue.popleft()
        batches = max(1, round(size / self._machine.batch_bytes))
        unit = SharedUnit(worker, size, size / batches, batches)
        self._units.append(unit)
        self._do_later(worker.free, partial(self._step, unit))

    def _do_later(self, when: float, step: Callable[[float], None]) -> None:
        heapq.heappush(self._steps, (when, next(self._numbers), step))

    def _encode(self, process: Process, unit: SharedUnit, begin: float) -> float:
        """Let a process encode a batch after its other ones. Return when it has done so."""
        is_assistant = process is not unit.worker
        costs = self._machine.encode(process.encoded, self._threads, is_assistant)
        share = unit.batch_bytes / self._machine.batch_bytes
        process.encoded += 1
        process.free = max(process.free, begin) + share * costs.seconds
        self.cpu += share * costs.cpu
        return process.free

    def _step(self, unit: SharedUnit, now: float) -> None:
        """Let a worker do what it does next for its unit, as `SharedBatches.encode` does."""
        worker = unit.worker
        worker.free = now
        while unit.pending and unit.pending[0].end <= now:
            unit.pending.popleft()
        if unit.unread:
            unit.unread -= 1
            assistant = self._find_free(unit, now)
            if assistant:
                share = unit.batch_bytes / self._machine.batch_bytes
                self._work(worker, share * self._machine.relaying)
                batch = Batch(assistant, self._encode(assistant, unit, worker.free))
                assistant.batches.append(batch)
            else:
                batch = Batch(worker, self._encode(worker, unit, worker.free))
            unit.pending.append(batch)
            self._do_later(worker.free, partial(self._step, unit))
        elif unit.pending:
            # The worker encodes a batch of an assistant, or waits for the first answer.
            is_busy = self._take_back(unit, now)
            next_step = worker.free if is_busy else unit.pending[0].end
            self._do_later(next_step, partial(self._step, unit))
        else:
            self._end_unit(unit, now)

    def _work(self, process: Process, seconds: float) -> None:
        process.free += seconds
        self.cpu += seconds

    def _find_free(self, unit: SharedUnit, now: float) -> Process | None:
        present = [assistant for assistant in unit.assistants if assistant.joined <= now]
        fewest = min(present, key=lambda assistant: assistant.count_unanswered(now), default=None)
        return fewest if fewest and fewest.count_unanswered(now) < MOST_UNANSWERED else None

    def _take_back(self, unit: SharedUnit, now: float) -> bool:
        """Let the worker encode the last batch that an assistant has not begun. Return whether it
        does so.
        """
        for batch in reversed(unit.pending):
            assistant = batch.process
            if assistant is unit.worker or assistant.count_unanswered(now) < 2:
                continue
            # Undo what `_encode` has done.
            assistant.batches.pop()
            assistant.free = assistant.batches[-1].end
            assistant.encoded -= 1
            costs = self._machine.encode(assistant.encoded, self._threads, is_assistant=True)
            self.cpu -= costs.cpu * unit.batch_bytes / self._machine.batch_bytes
            batch.process = unit.worker
            batch.end = self._encode(unit.worker, unit, now)
            return True
        return False

    def _end_unit(self, unit: SharedUnit, now: float) -> None:
        """Release the assistants and store the unit."""
        self._units.remove(unit)
        self._idle += unit.assistants
        for assistant in unit.assistants:
            assistant.batches.clear()
        later = self._machine.costs.later
        self._work(unit.worker, later.storing * unit.size / later.size)
        self._do_later(unit.worker.free, partial(self._after_unit, unit.worker))
        self._share(now)

    def _after_unit(self, worker: Process, now: float) -> None:
        """Let the parent handle the end of a unit, and give the worker the next one."""
        self._parent_free = max(self._parent_free, now) + self._machine.parent.unit
        self.cpu += self._machine.parent.unit
        worker.free = self._parent_free
        if self._queue:
            self._begin_unit(worker)
        else:
            self._idle.append(worker)
            self._share(self._parent_free)

    def _share(self, now: float) -> None:
        """Let processes without a unit assist others, as `LocalEngine._assign_tasks` does."""
        while self._is_shared and not self._queue:
            least_share = LEAST_SHARE if self._idle else LEAST_NEW_SHARE
            unit = max(self._units, key=_share_of_next, default=None)
            has_process = self._idle or self._started < self._pool
            if not (unit and has_process and _share_of_next(unit) >= least_share):
                return
            if self._idle:
                assistant = self._idle.pop()
                assistant.free = max(assistant.free, now)
                assistant.joined = now
            else:
                assistant = self._start_process()
                assistant.joined = self._parent_free
            unit.assistants.append(assistant)


def _share_of_next(unit: SharedUnit) -> float:
    """Return the bytes of each process that shares a unit if it gets one more assistant."""
    return unit.count_bytes() / (len(unit.assistants) + 2)


def ideal(machine: Machine, size: int, processors: int) -> float:
    """Return start-up and publication, and the seconds of the units divided by the processors."""
    unit = machine.costs.later
    work = (sum(unit.tokenizing) + unit.encoding + unit.storing) * size / unit.size
    return machine.start + machine.end_per_byte * size + work / processors

"""The protocols of tasks, reporters and engines; and how every engine retries a unit whose worker
has died or hung.

A worker may die on its records, for want of memory or by a crash in a library. The unit is then
tried with a sixteenth of the records at a time, then with one at a time. So a worker that only took
too much memory gets through, and a record that kills every worker is found and named after four
deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

from mdsmix.errors import MdsmixError
from mdsmix.messages import Say

MOST_DEATHS = 10
"A unit is tried again after up to 10 deaths on its records; the eleventh ends the run."
DEATHS_ELSEWHERE = 3
"""A unit is tried again after up to 3 deaths without active records: while it was reading, laying
out shards or storing.
"""
HANGS_ELSEWHERE = 1
"""A unit is tried again after one hang without active records: a mount that did not answer twice is
not asked a third time.
"""
SIXTEENTH = 4
"How often the number of records at a time is halved after the first death."
ALONE = 30
"How often it is halved after others and after hangs: records are done one at a time."
NO_ACTIVE_RECORDS = "while no record was in work (reading, laying out shards, storing)"
CRASHED = "crashed_worker"
"The reason code of a record that is set aside because workers die on it."


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRecords:
    """The records that a worker is converting right now."""

    file: str
    ordinal: int
    "The number of the first record, as the file's format counts."
    where: str
    "The same for people: `byte 345`."
    length: int
    "Bytes of the first record."
    records: int
    "How many records there are."
    size: int = 0
    "Bytes of all these records at most."

    def __str__(self) -> str:
        if self.records == 1:
            return f"the record at {self.where} of {self.file} ({self.length} bytes)"
        return f"the {self.records:,} records from {self.where} of {self.file} on"


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """How a worker ended."""

    how: str
    "For people: `exit code 1`, `signal SIGKILL`, or why it was taken for hung."
    hung: bool = False


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How a unit is to be tried, after its earlier attempts."""

    deaths: int = 0
    "How many workers have died on the unit; 1 again once a record is set aside."
    halvings: int = 0
    "How often the number of records at a time is halved."
    died_at: ActiveRecords | None = None
    "The records that the last worker died on."
    skipped: frozenset[tuple[str, int]] = frozenset()
    "File and ordinal of records that are set aside without reading them."


def plan_next_attempt(
    attempt: Attempt, records: ActiveRecords | None, end: WorkerEnd, set_aside: bool, unit: str
) -> Attempt:
    """Return the next attempt of a unit whose worker has ended. A hang takes minutes to notice, so
    after a hang records are done one at a time.

    Raises MdsmixError if the unit is given up: a single record has killed two workers and is not
    set aside, or there were too many deaths.

    Args:
        attempt: the attempt in which the worker ended.
        records: the active records; None without any.
        end: how the worker ended.
        set_aside: whether a record that has killed two workers is skipped.
        unit: the unit's name, for the message.
    """
    deaths = attempt.deaths + 1
    if records and records.records == 1 and records == attempt.died_at:
        # The same record alone has ended two workers in a row.
        if not set_aside:
            raise _give_up(records, end, unit)
        skipped = attempt.skipped | {(records.file, records.ordinal)}
        return Attempt(skipped=skipped, deaths=1, halvings=ALONE)
    if records:
        most_deaths = MOST_DEATHS
    elif end.hung:
        most_deaths = HANGS_ELSEWHERE
    else:
        most_deaths = DEATHS_ELSEWHERE
    if deaths > most_deaths:
        raise _give_up(records, end, unit)
    is_first_death = not end.hung and not attempt.halvings
    halvings = SIXTEENTH if is_first_death else ALONE
    return replace(attempt, deaths=deaths, halvings=halvings, died_at=records)


def _give_up(records: ActiveRecords | None, end: WorkerEnd, unit: str) -> MdsmixError:
    verb = "hang" if end.hung else "die"
    return MdsmixError(
        f"worker processes {verb} ({end.how}) on the work unit {unit}, "
        f"{records or NO_ACTIVE_RECORDS}; finished units are kept: check that its files and the "
        "store answer, give the run more memory or fewer --workers, or fix the record. "
        "--quarantine-crashes sets a single record aside."
    )


def split_positions(count: int, halvings: int, without: set[int]) -> Iterator[range]:
    """Yield ranges that cover the positions of `count` records, except those in `without`.

    Args:
        halvings: no range is longer than `count` / 2^`halvings`, or 1.
    """
    longest = max(1, count >> halvings)
    edges = {count, *range(0, count, longest)}
    edges |= without
    edges |= {position + 1 for position in without}
    for start, end in pairwise(sorted(edges)):
        if start not in without:
            yield range(start, end)


R = TypeVar("R")
Result = TypeVar("Result", covariant=True)

TaskResults = Generator[tuple[int, R], None, None]
"""The position and the result of each task as it ends, in any order. Closing it stops the remaining
tasks.
"""
OnProgress = Callable[[int, int], None]
"Takes the source bytes read, and the tokens made, since the last call."


class Reporter(Protocol):
    """A task's connection to its engine: it takes progress, and knows how much memory the task may
    use.
    """

    @property
    def memory(self) -> int:
        """Bytes that the run may use on the machine of this task."""

    def on_progress(self, size: int, tokens: int) -> None:
        """Take progress: `size` more source bytes were read, and made into `tokens` tokens."""

    def on_records(self, records: ActiveRecords | None) -> None:
        """Take the records that are active from now on; None for no record. A worker's death is
        blamed on its active records.
        """

    def wait_for_room(self) -> None:
        """Return when there is memory for the next records. A task calls this before each piece of
        a batch.
        """

    def is_tight(self) -> bool:
        """Return whether this worker has more than its share of memory, so that the task should
        take fewer records at once.
        """


class Task(Protocol[Result]):
    """One piece of work as plain data: a frozen dataclass that can be pickled and done on any
    machine, any number of times.
    """

    @property
    def name(self) -> str:
        """The name of this piece of work for people: it completes "the work unit ..."."""

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], Result]:
        """Do the work, except for the part that waits for a disk or a store. Return a function that
        does that part and returns a result that can be pickled. A worker calls it in a thread while
        it does the next task. An exception of either ends the run.
        """


class Engine(Protocol):
    """An object that does tasks, by processes of its own."""

    @property
    def peak(self) -> int:
        """The most bytes that the run and its workers have used so far; 0 if unknown."""

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        """Yield (position in `tasks`, result) as tasks end, in any order, each position once.

        Raises the first exception of a task. That stops the remaining tasks, as closing the
        generator does. When the generator has ended, no worker of this machine is at work.
        """

    def close(self) -> None:
        """End all workers. The code that made the engine calls this at its end."""

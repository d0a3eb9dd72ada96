"""The protocols of tasks, reporters and engines; and how every engine tries a unit again whose
worker has died or hung.

A worker may die over its records, for want of memory or by a crash in a library. The unit is then
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
"A unit is tried again after up to 10 deaths over its records; the eleventh ends the run."
DEATHS_ELSEWHERE = 3
"""A unit is tried again after up to 3 deaths while no record was in work: reading, laying out
shards, storing.
"""
HANGS_ELSEWHERE = 1
"""A unit is tried again after one hang while no record was in work: a mount that did not answer
twice is not asked a third time.
"""
SIXTEENTH, ALONE = 4, 30
"""How often the number of records at a time is halved: 4 times after the first death; 30 times
after others and hangs, so one at a time.
"""
NO_ACTIVE_RECORDS = "while no record was in work (reading, laying out shards, storing)"
CRASHED = "crashed_worker"
"The reason code of a record that is set aside because workers die of it."


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRecords:
    """The records that a worker has in work."""

    file: str
    ordinal: int
    "The number of the first record, as the file's format counts."
    where: str
    "The same for people: `byte 345`."
    length: int
    "Bytes of the first record."
    records: int
    "How many records are in work."
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
    "How many workers have died over the unit; 1 again once a record is set aside."
    halvings: int = 0
    "How often the number of records at a time is halved."
    died_at: ActiveRecords | None = None
    "The records that the last worker died over."
    skipped: frozenset[tuple[str, int]] = frozenset()
    "File and ordinal of records that are set aside unseen."


def plan_next_attempt(
    attempt: Attempt, at: ActiveRecords | None, end: WorkerEnd, set_aside: bool, unit: str
) -> Attempt:
    """The next attempt of a unit whose worker has ended. MdsmixError where the unit is given up: a
    single record has killed two workers and is not set aside, or there were too many deaths.

    A hang takes minutes to notice, so after a hang records are done one at a time.

    Args:
        at: the records in work; None without any.
        set_aside: records that have killed two workers are skipped.
        unit: the unit's name, for the message.
    """
    deaths, is_found = attempt.deaths + 1, at and at.records == 1 and at == attempt.died_at
    if at and is_found and set_aside:
        return Attempt(skipped=attempt.skipped | {(at.file, at.ordinal)}, deaths=1, halvings=ALONE)
    most = MOST_DEATHS if at else HANGS_ELSEWHERE if end.hung else DEATHS_ELSEWHERE
    if is_found or deaths > most:
        raise MdsmixError(
            f"worker processes {'hang' if end.hung else 'die'} ({end.how}) over the work unit {unit}, {at or NO_ACTIVE_RECORDS}; finished units are "
            "kept: see that its files and the store answer, give the run more memory or fewer --workers, or mend the record, which "
            "--quarantine-crashes sets aside where it is one alone."
        )
    return replace(
        attempt,
        deaths=deaths,
        halvings=ALONE if end.hung or attempt.halvings else SIXTEENTH,
        died_at=at,
    )


def split_positions(count: int, halvings: int, without: set[int]) -> Iterator[range]:
    """Ranges of positions that cover `count` records, without those in `without`. None is longer
    than `count` / 2^`halvings`, or 1.
    """
    edges = {count, *range(0, count, max(1, count >> halvings))}
    for start, end in pairwise(sorted(edges | without | {position + 1 for position in without})):
        if start not in without:
            yield range(start, end)


R = TypeVar("R")
Result = TypeVar("Result", covariant=True)

TaskResults = Generator[tuple[int, R], None, None]
"""The position and the result of each task as it ends, in any order. Closing it stops the other
tasks.
"""
OnProgress = Callable[[int, int], None]
"Takes the source bytes read, and the tokens made, since the last call."


class Reporter(Protocol):
    """A task's connection to its engine: it takes progress, and tells how much memory the task may
    use.
    """

    @property
    def memory(self) -> int:
        """Bytes that the run may hold on the machine of this task."""

    def on_progress(self, size: int, tokens: int) -> None:
        """Takes progress: `size` more source bytes were read, and `tokens` made of them."""

    def on_records(self, place: ActiveRecords | None) -> None:
        """Takes the records that are in work from now on; None: no record is. A worker's death is
        blamed on the records in work.
        """

    def wait_for_room(self) -> None:
        """Returns when there is memory for the next records. A task calls this before each piece of
        a batch.
        """

    def is_tight(self) -> bool:
        """Whether this worker holds more than its share, so that the task should take fewer records
        at once.
        """


class Task(Protocol[Result]):
    """One piece of work as plain data: a frozen dataclass that can be pickled and done on any
    machine, any number of times.
    """

    @property
    def name(self) -> str:
        """The name of this piece of work for people: it completes the sentence "over the work unit
        ...".
        """

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], Result]:
        """Does the work, but for what waits for a disk or a store: that the returned function does,
        and gives a result that can be pickled. A worker calls it in a thread, while it does the
        next task. An exception of either ends the run.
        """


class Engine(Protocol):
    """An object that does tasks, by processes of its own."""

    @property
    def peak(self) -> int:
        """Bytes that the run and its workers held at most so far; 0 where that is not known."""

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        """Yields (position in `tasks`, result) as tasks end, in any order, each position once.

        The first exception of a task is raised here. It stops the other tasks, as closing the
        generator does. When the generator has ended, no worker of this machine is at work any more.
        """

    def close(self) -> None:
        """Ends all workers. The code that made the engine calls this at its end."""

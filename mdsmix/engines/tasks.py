"""What a task, its reporter and an engine are, and how a unit is tried again when its worker has died or hung: the same for every engine.

A worker dies over some records, for want of memory or by a crash in a library. The unit is tried again with a sixteenth of the records
at a time, then with one. So a worker that only took too much memory gets through, and a record that kills whoever touches it is found and
named after four deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

from mdsmix.errors import MdsmixError
from mdsmix.sources import RecordBatch

MOST_DEATHS = 10
"A unit is given up after so many deaths over its records."
DEATHS_ELSEWHERE = 3
"A unit is given up after so many deaths while no record was in work: reading, laying out shards, storing."
HANGS_ELSEWHERE = 1
"A unit is tried again after so many hangs while no record was in work: a mount that did not answer twice is not asked a third time."
SIXTEENTH, ALONE = 4, 30
"How often the records of a batch are halved after a first death, and after all others: one record at a time, whatever the batch."
ELSEWHERE = "while no record was in work (reading, laying out shards, storing)"
CRASHED = "crashed_worker"
"The reason code of a record that is set aside because workers die of it."


@dataclass(frozen=True, slots=True, kw_only=True)
class InWork:
    """The records that a worker has in work."""

    file: str
    ordinal: int
    "Of the first one, as the file's format counts."
    shown: str
    "The same for a person: `byte 345`."
    length: int
    records: int
    size: int = 0
    "Bytes that they come to at most."

    def __str__(self) -> str:
        if self.records == 1:
            return f"the record at {self.shown} of {self.file} ({self.length} bytes)"
        return f"the {self.records:,} records from {self.shown} of {self.file} on"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a worker came to its end."""

    how: str
    hung: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How a unit is to be done, given how its earlier attempts ended."""

    deaths: int = 0
    halvings: int = 0
    died_at: InWork | None = None
    skipped: frozenset[tuple[str, int]] = frozenset()
    "File and ordinal of records that are set aside unseen."


def after_death(
    attempt: Attempt, at: InWork | None, end: End, set_aside: bool, unit: str
) -> Attempt:
    """The next attempt. MdsmixError where there is none; it names the record where a single one has killed twice.

    A hang takes minutes to notice, so after one the records are done one at a time.
    """
    deaths, is_found = attempt.deaths + 1, at and at.records == 1 and at == attempt.died_at
    if at and is_found and set_aside:
        skipped = attempt.skipped | {(at.file, at.ordinal)}
        return Attempt(skipped=skipped, deaths=1, halvings=ALONE)
    most = MOST_DEATHS if at else HANGS_ELSEWHERE if end.hung else DEATHS_ELSEWHERE
    if is_found or deaths > most:
        raise MdsmixError(
            f"worker processes {'hang' if end.hung else 'die'} ({end.how}) over the work unit {unit}, {at or ELSEWHERE}; finished units are "
            "kept: see that its files and the store answer, give the run more memory or fewer --workers, or mend the record, which "
            "--quarantine-crashes sets aside where it is one alone."
        )
    halvings = ALONE if end.hung or attempt.halvings else SIXTEENTH
    return replace(attempt, deaths=deaths, halvings=halvings, died_at=at)


def skipped(batch: RecordBatch, attempt: Attempt) -> set[int]:
    """Positions in the batch of records that are set aside, because workers died of them."""
    if not attempt.skipped:
        return set()
    origins = map(batch.origin, range(len(batch.records)))
    return {p for p, o in enumerate(origins) if (o.file, o.ordinal) in attempt.skipped}


def pieces(count: int, halvings: int, without: set[int]) -> Iterator[range]:
    """Runs of positions that cover a batch of `count` records, except those in `without`; none is longer than `count` halved so often."""
    edges = {count, *range(0, count, max(1, count >> halvings))}
    cuts = sorted(edges | without | {position + 1 for position in without})
    for start, end in pairwise(cuts):
        if start not in without:
            yield range(start, end)


def in_work(batch: RecordBatch, positions: range) -> InWork:
    """Where these records stand."""
    origin = batch.origin(positions.start)
    return InWork(
        file=origin.file,
        ordinal=origin.ordinal,
        shown=origin.shown,
        length=origin.length,
        records=len(positions),
        size=batch.size,
    )


R = TypeVar("R")
Result = TypeVar("Result", covariant=True)

OnProgress = Callable[[int, int], None]
"Takes source bytes that were read and tokens that were made, each since the last call."
Say = Callable[[str], None]
"Takes a sentence that the user should read now."


class Reporter(Protocol):
    """How a task tells its engine what it is doing, and learns how much room it has."""

    @property
    def memory(self) -> int:
        """Bytes that the run may hold on the machine of this task."""

    def on_progress(self, size: int, tokens: int) -> None:
        """So many more source bytes were read, and tokens made of them."""

    def on_records(self, place: InWork | None) -> None:
        """These records are in work from now on, or none any more. A worker that dies is taken to have died of them."""

    def wait_for_room(self) -> None:
        """Returns when there is memory for the next records; is called before each piece of a batch."""

    def is_tight(self) -> bool:
        """Whether this worker holds more than its share, so that the task should take fewer records at once."""


class Task(Protocol[Result]):
    """One piece of work as plain data: a frozen dataclass that can be pickled and done on any machine, any number of times."""

    @property
    def name(self) -> str:
        """Which piece of work it is, for people: it completes the sentence "over the work unit ..."."""

    def do(self, attempt: Attempt, reporter: Reporter) -> Result:
        """Does the work and returns a result that can be pickled, or raises what ends the run."""


class Engine(Protocol):
    """Whoever does tasks."""

    @property
    def peak(self) -> int:
        """Bytes that the run and its workers held at most so far; 0 where that is not known."""

    def run(
        self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say
    ) -> Generator[tuple[int, R], None, None]:
        """Yields (position in `tasks`, result) as tasks end, in any order, each position once.

        The first exception of a task is raised here and stops the others; so does closing the generator. When it returns or
        raises, no worker of this machine is at work any more.
        """

    def close(self) -> None:
        """Ends all workers. Whoever made the engine calls it."""

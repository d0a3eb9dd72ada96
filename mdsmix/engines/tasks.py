"""The protocols of tasks, reporters and engines; and how every engine retries a unit whose worker
has died or hung.

A worker may die on its records, for lack of memory or by a crash in a library. The unit is then
tried with a sixteenth of the records at a time, then with one at a time. If the cause was only too
much memory, that succeeds. A record that kills every worker is found and named after four deaths.
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
"""A unit is tried again after one hang without active records; the second one ends the run. A mount
that did not answer twice would probably not answer a third time.
"""
SIXTEENTH = 4
"Halvings of the number of records at a time after the first death (2^4 = 16)."
ALONE = 30
"Halvings after later deaths and after hangs: so many that records are done one at a time."
NO_ACTIVE_RECORDS = "while no record was in work (reading, laying out shards, storing)"
CRASHED = "crashed_worker"
"The reason code of a record that is put into quarantine because workers die on it."


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRecords:
    """The records that a worker is converting right now."""

    file: str
    ordinal: int
    "The number of the first record, as the file's format counts: a byte offset or a row."
    where: str
    "The place of the first record, for people: `byte 345`."
    length: int
    "Bytes of the first record."
    records: int
    "How many records there are."
    size: int = 0
    "An upper bound of the bytes of all these records."

    def __str__(self) -> str:
        if self.records == 1:
            return f"the record at {self.where} of {self.file} ({self.length} bytes)"
        return f"the {self.records:,} records from {self.where} of {self.file} on"


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """How a worker ended."""

    how: str
    "For people: `exit code 1`, `signal SIGKILL`, or why it counts as hung."
    hung: bool = False


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How to try a unit next: how few records at a time, and which are skipped. It also notes the
    deaths of the earlier attempts. The first attempt has the defaults.
    """

    deaths: int = 0
    "How many workers have died on the unit; 1 again after a record was put into quarantine."
    halvings: int = 0
    "How often the number of records at a time is halved."
    died_at: ActiveRecords | None = None
    "The records that the last worker died on."
    skipped: frozenset[tuple[str, int]] = frozenset()
    "(file, ordinal) of records that are put into quarantine without converting them."


def plan_next_attempt(
    attempt: Attempt, records: ActiveRecords | None, end: WorkerEnd, set_aside: bool, unit: str
) -> Attempt:
    """Return how to try a unit next, after its worker has died or hung.

    A hang takes minutes to notice, so after a hang records are done one at a time.

    Raises MdsmixError if the unit is not tried again: a single record has killed two workers and
    `set_aside` is false, or too many workers have died.

    Args:
        attempt: the attempt in which the worker ended.
        records: the records that the worker was converting; None if there were none.
        end: how the worker ended.
        set_aside: whether a record that has killed two workers is put into quarantine.
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
    """Return the error of a unit that is not tried again."""
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
        without: positions that are in no range.
    """
    longest = max(1, count >> halvings)
    # A position of `without` is a range of its own, which is not yielded.
    edges = {count, *range(0, count, longest)}
    edges |= without
    edges |= {position + 1 for position in without}
    for start, end in pairwise(sorted(edges)):
        if start not in without:
            yield range(start, end)


R = TypeVar("R")
Result = TypeVar("Result", covariant=True)

TaskResults = Generator[tuple[int, R], None, None]
"""Yields (position, result) of each task when it ends, in any order. Closing the generator stops
the remaining tasks.
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
        """Report that `size` more bytes of source were read, and made into `tokens` tokens."""

    def on_records(self, records: ActiveRecords | None) -> None:
        """Report the records that the worker converts from now on; None if there are none. If it
        dies, these records are blamed.
        """

    def wait_for_room(self) -> None:
        """Wait until there is memory for the next records. A task calls this before each part of a
        batch.
        """

    def is_tight(self) -> bool:
        """Return whether this worker has more than its share of memory, so that the task should
        take fewer records at once.
        """


class Task(Protocol[Result]):
    """One piece of work as data: a frozen dataclass that can be pickled. It can be done on any
    machine, and repeated any number of times.
    """

    @property
    def name(self) -> str:
        """The name for people, as messages write it after "the work unit": `a.jsonl`."""

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], Result]:
        """Do the work, except for storing its output. Return a function that stores the output and
        returns a result that can be pickled.

        A worker calls that function in a thread, while it does the next task. An exception of
        either ends the run.
        """


class Engine(Protocol):
    """Does tasks in processes of its own: of this machine (`LocalEngine`), or of the nodes of a Ray
    cluster (`RayEngine`).
    """

    @property
    def peak(self) -> int:
        """The most bytes that the run and its workers have used so far; 0 if unknown."""

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        """Yield (position in `tasks`, result) as tasks end, in any order, each position once.

        Raises the first exception of a task. That stops the remaining tasks, as closing the
        generator does. Once the generator has ended, no worker of this machine is active.
        """

    def close(self) -> None:
        """End all workers. The code that made the engine calls this at its end."""

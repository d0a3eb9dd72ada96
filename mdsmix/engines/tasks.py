"""The protocols of tasks, reporters and engines. Also decides how an engine retries a work unit
(the part of a source that one task converts) whose worker has died or hung.

A worker may die on its records, for lack of memory or by a crash in a library. The unit is then
tried with a sixteenth of the records at a time, and after the next death with one record at a time.
If the cause was only a lack of memory, this succeeds. A record that kills every worker is found and
named after four deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from mdsmix.errors import MdsmixError
from mdsmix.frozen import frozen
from mdsmix.messages import Say

MOST_DEATHS = 10
"A unit is tried again after up to 10 deaths on its records; the eleventh death ends the run."
DEATHS_ELSEWHERE = 3
"""A unit is tried again after up to 3 deaths without active records: while it was reading, laying
out shards or storing.
"""
HANGS_ELSEWHERE = 1
"""A unit is tried again after one hang without active records; the second one ends the run. A mount
that did not answer twice would probably not answer a third time.
"""
SIXTEENTH = 4
"""After the first death of a unit, the number of records at a time is halved so often: a sixteenth,
since 2^4 = 16.
"""
ALONE = 30
"""After later deaths and after hangs, it is halved so often that records are done one at a time.
"""
NO_ACTIVE_RECORDS = (
    "while the worker was converting no record (but reading, laying out shards or storing)"
)
SIGN_OF_LIFE = 1.0
"Seconds between two messages to the engine while a worker and an assistant wait for each other."
CRASHED = "crashed_worker"
"The reason code of a record that is put into quarantine because workers die on it."


@frozen(kw_only=True, slots=True)
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
        """Return a phrase for messages: `the 8 records from byte 345 of a.jsonl on`."""
        if self.records == 1:
            return f"the record at {self.where} of {self.file} ({self.length} bytes)"
        return f"the {self.records:,} records from {self.where} of {self.file} on"


@frozen(kw_only=True)
class WorkerEnd:
    """How a worker ended."""

    how: str
    "For people: `exit code 1`, `signal SIGKILL`, or why it counts as hung."
    hung: bool = False


@frozen(kw_only=True)
class Attempt:
    """How to do a work unit the next time, after workers have died on it: with fewer records at a
    time, and without records that killed workers. The first attempt of a unit has the defaults:
    whole batches, all records.
    """

    deaths: int = 0
    "How many workers have died on the unit; 1 again after a record was put into quarantine."
    halvings: int = 0
    "How often the number of records at a time is halved; 0: whole batches."
    died_at: ActiveRecords | None = None
    "The records that the last worker was converting when it died."
    skipped: frozenset[tuple[str, int]] = frozenset()
    "(file, ordinal) of each record that is put into quarantine without converting it."


def plan_next_attempt(
    attempt: Attempt, records: ActiveRecords | None, end: WorkerEnd, set_aside: bool, unit: str
) -> Attempt:
    """Return how to try a unit next, after its worker has died or hung.

    A hang is noticed only after minutes, so after a hang records are done one at a time.

    Raises MdsmixError if the unit is not tried again, because too many workers have died, or a
    single record has killed two workers and `set_aside` is false.

    Args:
        attempt: the attempt that the worker had begun.
        records: the records that the worker was converting; None if there were none.
        end: how the worker ended.
        set_aside: whether a record that has killed two workers is put into quarantine.
        unit: the unit's name, for the message.
    """
    deaths = attempt.deaths + 1
    # Set a record aside if it alone has ended two workers in a row.
    if records and records.records == 1 and records == attempt.died_at:
        if not set_aside:
            raise _give_up(records, end, unit)
        skipped = attempt.skipped | {(records.file, records.ordinal)}
        # Deaths are counted anew without this record. The count is 1 and not 0, so that the next
        # worker looks for the windows that dead workers have stored.
        return Attempt(skipped=skipped, deaths=1, halvings=ALONE)
    # Give the unit up if too many workers have ended.
    if records:
        most_deaths = MOST_DEATHS
    elif end.hung:
        most_deaths = HANGS_ELSEWHERE
    else:
        most_deaths = DEATHS_ELSEWHERE
    if deaths > most_deaths:
        raise _give_up(records, end, unit)
    # Otherwise try fewer records at a time.
    is_first_death = not end.hung and not attempt.halvings
    halvings = SIXTEENTH if is_first_death else ALONE
    return replace(attempt, deaths=deaths, halvings=halvings, died_at=records)


def _give_up(records: ActiveRecords | None, end: WorkerEnd, unit: str) -> MdsmixError:
    """Return the error of a unit that is not tried again.

    Args:
        records: the records that the worker was converting; None if there were none.
        end: how the worker ended.
        unit: the name of the unit.
    """
    verb = "hang" if end.hung else "die"
    return MdsmixError(
        f"worker processes {verb} ({end.how}) on the work unit {unit}, "
        f"{records or NO_ACTIVE_RECORDS}. Finished units are kept. Check that the unit's files and "
        "the store answer, give the run more --memory or fewer --workers, or fix the record. If a "
        "single record is the cause, --quarantine-crashes puts it into quarantine and continues."
    )


def split_positions(count: int, halvings: int, without: set[int]) -> Iterator[range]:
    """Yield ranges that together contain the positions of `count` records, except those in
    `without`. For 8 records, 1 halving and without position 2 they are 0-1, 3 and 4-7.

    Args:
        count: the number of records.
        halvings: the longest range has `count` / 2^`halvings` positions, at least 1.
        without: positions that are in no range.
    """
    longest = max(1, count >> halvings)
    # Ranges begin and end at edges. Each position of `without` is a range that is not yielded.
    edges = {count, *range(0, count, longest)}
    edges |= without
    edges |= {position + 1 for position in without}
    for start, end in pairwise(sorted(edges)):
        if start not in without:
            yield range(start, end)


R = TypeVar("R")
Result = TypeVar("Result", covariant=True)

TaskResults = Generator[tuple[int, R], None, None]
"""A generator of (position, result) of each task when it ends, in any order. Closing the generator
stops the remaining tasks.
"""
OnProgress = Callable[[int, int], None]
"A function that takes the source bytes that were read, and the tokens, since its last call."


class Part(NamedTuple):
    """A part of a task, which another worker does for the worker that does the task."""

    records: ActiveRecords
    "The records of the part, for messages, and to know how long it may take."
    content: Any
    "The part, in the form that the function of `SharedTask.open_assistant` takes."


class Assistant(Protocol):
    """Another worker that does parts of a task, as the worker sees it that has the task. Parts are
    answered in their order.
    """

    @property
    def unanswered(self) -> int:
        """How many parts have no answer yet."""

    @property
    def has_left(self) -> bool:
        """Whether it is known that the assistant has left or died."""

    def send(self, part: Part) -> bool:
        """Send a part. Return False if it was not sent, since it cannot be pickled or the assistant
        has left: then the worker must do it.
        """

    def take_back(self) -> None:
        """Take the part back that was sent last, and has no answer yet."""

    def has_answer(self, seconds: float = 0) -> bool:
        """Wait up to so many seconds, and return whether `receive` would return at once."""

    def receive(self) -> Any:
        """Wait for the answer to the first part, and return it. Return None if the worker must do
        the part: the assistant has left or died, or its answer cannot be pickled.

        Raises the exception that the part has raised.
        """


class Reporter(Protocol):
    """A task's connection to its engine: the task reports its progress to it, and asks it how much
    memory there is.
    """

    @property
    def memory(self) -> int:
        """Bytes that the run may use on the machine of this task."""

    def on_progress(self, size: int, tokens: int) -> None:
        """Report that `size` more bytes of source were read, and encoded as `tokens` tokens."""

    def on_records(self, records: ActiveRecords | None) -> None:
        """Report the records that the worker converts from now on; None if there are none. If the
        worker dies, these records are blamed.
        """

    def wait_for_room(self) -> None:
        """Wait until there is memory for the next records. A task calls this before each part of a
        batch.
        """

    def is_tight(self) -> bool:
        """Return whether this worker has more than its share of memory, so that the task should
        take fewer records at once.
        """

    def list_assistants(self) -> Sequence[Assistant]:
        """Return the assistants of the task that have not left. An engine sends them only for a
        `SharedTask`, when other workers have nothing to do. An engine without assistants inherits
        from `Reporter`, and need not define this method.
        """
        return ()


class Task(Protocol[Result]):
    """A work unit as data: a frozen dataclass that can be pickled. A task can be done on any
    machine, and repeated any number of times.
    """

    @property
    def name(self) -> str:
        """The name for people, as messages write it after "the work unit": `of a.jsonl`."""

    def do(self, attempt: Attempt, reporter: Reporter) -> Callable[[], Result]:
        """Do the work, except for storing its output. Return a function that stores the output and
        returns a result that can be pickled.

        A worker calls the returned function in a thread, while it does the next task. An exception
        of `do` or of the returned function ends the run.

        Args:
            attempt: how to do the work after workers have died on it.
            reporter: the connection to the engine.
        """


@runtime_checkable
class SharedTask(Task[Result], Protocol[Result]):
    """A task whose parts can be done by other workers."""

    @property
    def shared_bytes(self) -> int:
        """About how many bytes the task reads and can share; 0 if its parts must all be done by one
        worker.
        """

    def open_assistant(self) -> Callable[[Any], Any]:
        """Return a function that does a part of the task (`Part.content`) and returns its result.
        An assistant calls it for each part that it gets.
        """


class Engine(Protocol):
    """Does tasks in processes of its own: of this machine (`LocalEngine`), or of the nodes of a Ray
    cluster (`RayEngine`).
    """

    @property
    def peak(self) -> int:
        """The most bytes of memory that the run and its workers have used so far; 0 if unknown."""

    def run(self, tasks: Sequence[Task[R]], on_progress: OnProgress, say: Say) -> TaskResults[R]:
        """Do the tasks, and yield (position in `tasks`, result) of each when it ends, in any order.

        The first exception of a task stops the remaining tasks; so does closing the generator. Once
        the generator has ended, all workers of this machine are idle or have ended.

        Raises the first exception of a task.

        Args:
            tasks: the tasks of the run.
            on_progress: called with the source bytes and tokens since the last call.
            say: called with each sentence for the user.
        """

    def begin_close(self) -> None:
        """Let idle workers of this machine end, without waiting for it, as `close` does later."""

    def close(self) -> None:
        """End all workers. The code that opened the engine calls this after its last run."""

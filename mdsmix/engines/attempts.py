"""What is tried next when the worker that did a unit has died, or hung and was killed.

Whatever kills a worker (the kernel for want of memory, a crash inside a library) it does over some records. The unit is done
again with half as many records at a time, and again, down to one: a worker that was only too greedy gets through, and a
record that kills whoever touches it is found and named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from mdsmix.errors import MdsmixError
from mdsmix.sources import RecordBatch

MOST_DEATHS = 25
"A batch of 8 MB holds at most 2^22 lines, so that halving ends before; one more death has another cause."
DEATHS_ELSEWHERE = 3
"So often a unit may kill its worker while no record is in work: reading, laying out shards, storing."
HANGS_ELSEWHERE = 1
"So often its worker may hang there: a mount that does not answer twice is not waited for a third time."
ALONE = 30
"Halvings after which records are done one at a time."
ELSEWHERE = "while no record was in work (reading, laying out shards, storing)"
CRASHED = "crashed_worker"
"The reason code of a record that is set aside because workers die of it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    """How a unit is to be done, after what befell it before."""

    deaths: int = 0
    halvings: int = 0
    died_at: Place | None = None
    skipped: frozenset[tuple[str, int]] = frozenset()
    "File and ordinal of records that are set aside unseen."


def after_death(
    attempt: Attempt, at: Place | None, end: End, set_aside: bool, unit: str
) -> Attempt:
    """The next attempt; MdsmixError where there is none: it names the record, if a single one is to blame twice.

    A hang takes minutes to notice, so after one the records are not halved, but done one at a time.
    """
    deaths = attempt.deaths + 1
    if at and at.records == 1 and at == attempt.died_at:
        if not set_aside:
            raise MdsmixError(
                f"worker processes {'hang' if end.hung else 'die'} ({end.how}) {'at' if end.hung else 'of'} {at}; "
                "finished units are kept: mend or remove the record, give the run more memory, or run the same "
                "command with --quarantine-crashes, which sets such records aside."
            )
        return Attempt(
            skipped=attempt.skipped | {(at.file, at.ordinal)}, deaths=1, halvings=_kept(attempt)
        )
    if deaths > (MOST_DEATHS if at else HANGS_ELSEWHERE if end.hung else DEATHS_ELSEWHERE):
        raise MdsmixError(
            f"a worker process died {deaths} times over one work unit, {unit} ({end.how}); finished units are kept: "
            "run the same command again, with more memory or fewer --workers if it dies again."
            if not end.hung
            else f"worker processes hang over one work unit, {unit}, {at or ELSEWHERE} ({end.how}); finished units are "
            "kept: see that its files and the store answer, and run the same command again."
        )
    halvings = ALONE if end.hung else attempt.halvings + 1
    return replace(attempt, deaths=deaths, halvings=halvings, died_at=at)


def _kept(attempt: Attempt) -> int:
    """A unit whose workers hang is gone on with one record at a time; one that is only too large is not."""
    return ALONE if attempt.halvings >= ALONE else 0


def skipped(batch: RecordBatch, attempt: Attempt) -> set[int]:
    """The records of the batch that workers died of before, and that are set aside."""
    if not attempt.skipped:
        return set()
    origins = map(batch.origin, range(len(batch.records)))
    return {p for p, o in enumerate(origins) if (o.file, o.ordinal) in attempt.skipped}


def pieces(count: int, halvings: int, without: set[int]) -> Iterator[range]:
    """The positions of a batch's records, but for those without, so many at a time."""
    edges = {count, *range(0, count, max(1, count >> halvings))}
    cuts = sorted(edges | without | {position + 1 for position in without})
    for start, end in pairwise(cuts):
        if start not in without:
            yield range(start, end)


def place(batch: RecordBatch, positions: range) -> Place:
    """Where these records stand."""
    origin = batch.origin(positions.start)
    return Place(
        file=origin.file,
        ordinal=origin.ordinal,
        shown=origin.shown,
        length=origin.length,
        records=len(positions),
        size=batch.size,
    )

"""One conversion by an array of jobs (Slurm, Kubernetes, make -j): each job does a part of the work units, and one joins them.

Every n-th unit of the plan is a part's own, so parts are of one size. A part writes what any run writes before it publishes:
shards and unit records, both named by what they hold, so parts need not know of each other, one may be done twice, and one that
was killed goes on where it was. Nothing is published and no lease is held. `--finish` is a conversion that finds all this:
it takes the lease, does the units that are missing, and publishes. What the parts found their sources to hold lies at
the target in notes, so that it reads no source again.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from mdsmix.convert.duplicates import without_duplicates
from mdsmix.convert.job import Job
from mdsmix.convert.known_sources import KnownSources, lines_of
from mdsmix.convert.ledger import FOLDER, compressed, decompressed
from mdsmix.convert.stored import UnitResult
from mdsmix.convert.work import Work, do_units
from mdsmix.errors import RecipeError
from mdsmix.shards.counts import Records
from mdsmix.shards.lease import Lease
from mdsmix.sources import Unit
from mdsmix.storage import Location, together
from mdsmix.words import does, listed, plural

NOTE = re.compile(r"part-(\d{1,6})-of-(\d{1,6})")


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """The `number`-th, from 1, of so many."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def note(self) -> str:
        return f"part-{self.number}-of-{self.of}"

    @property
    def own(self) -> slice:
        """Of the units of the plan, those that are its own."""
        return slice(self.number - 1, None, self.of)


def parse(text: str) -> ArrayPart:
    """`3/64`; RecipeError where it is no part of a whole."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    part = ArrayPart(int(found[1]), int(found[2])) if found else ArrayPart(0, 0)
    if not 1 <= part.number <= part.of:
        raise RecipeError(
            f"--part {shlex.quote(text)} is no part: write which one and of how many, from 1/64 to 64/64; an array that counts from 0 adds 1."
        )
    return part


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOutcome:
    """What a part came to in one stream. Nothing of it is published."""

    stream: str
    target: str
    part: ArrayPart
    units: int
    "Of the plan, that are this part's own."
    units_in_all: int
    reused: int
    "Records of windows that were there already."
    tokens: int
    seconds: float
    peak: int = 0
    "Bytes that the run and its workers held at most."
    records: Records = field(default_factory=Records)
    notes: tuple[str, ...] = ()


def do_part(work: Work, part: ArrayPart, size: int) -> PartOutcome:
    """Does the units of the part, of about `size` source bytes, and leaves a note of what their sources hold. Which records are dropped as
    duplicates follows from all units: each part reads those that no other has read. Whether too many are bad follows from all too: that
    is judged when the stream is published."""
    began, units, job = time.monotonic(), work.units[part.own], work.job
    results, note = list[UnitResult](), ""
    if units:
        dropped = without_duplicates(work).dropped[part.own]
        work.watcher.begin(job.name, size)
        job = replace(job, max_bad=Fraction(1))
        _, results, note = do_units(replace(work, job=job, units=units, dropped=dropped))
        contents = (result.content for result in results)
        content = lines_of(dict(zip(units, contents, strict=True)))
        (job.folder / FOLDER / part.note).write(compressed(content))
    return PartOutcome(
        stream=job.name,
        target=job.target,
        part=part,
        units=len(units),
        units_in_all=len(work.units),
        reused=sum(len(result.reused) for result in results),
        tokens=sum(record.totals.tokens for result in results for record in result.records),
        records=sum((result.total for result in results), Records()),
        seconds=time.monotonic() - began,
        peak=work.engine.peak,
        notes=(note,) if note else (),
    )


def learn(job: Job, cache: KnownSources, units: Sequence[Unit]) -> str:
    """Takes in what the notes of all parts at the target say; returns which parts have left one, and which have not or a damaged one.
    `units`: those of the plan; a part beyond the last one has nothing to do, and leaves no note."""
    found, whole = _notes(job.folder), list[ArrayPart]()
    notes = together(lambda part: decompressed((job.folder / FOLDER / part.note).read()), found)
    for part, content in zip(found, notes, strict=True):
        if content is not None:
            cache.learn_lines(content)
            whole.append(part)
    counts = {part.of for part in whole}
    every = [ArrayPart(n, of) for of in counts for n in range(1, min(of, len(units)) + 1)]
    said = f"{plural(len(whole), 'part')} {does(whole, 'has', 'have')} finished"
    if missing := [str(part) for part in every if part not in whole]:
        said += f", and what is left is done now, of {listed(missing, 8)}"
    return said


def forget(job: Job, held: Lease) -> None:
    """Deletes the notes of a stream that is published."""
    held.confirm()
    together(lambda part: (job.folder / FOLDER / part.note).delete(), _notes(job.folder))


def _notes(folder: Location) -> list[ArrayPart]:
    names = (NOTE.fullmatch(name) for name, _ in (folder / FOLDER).list())
    return [ArrayPart(int(found[1]), int(found[2])) for found in names if found]

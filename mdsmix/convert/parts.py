"""One conversion by an array of jobs (Slurm, Kubernetes, make -j): each job does a part of the work units, and one joins them.

Every n-th unit of the plan is a part's own, so parts are of one size. A part writes what any run writes before it publishes:
shards and unit records, both named by what they hold, so parts need not know of each other, one may be done twice, and one that
was killed goes on where it was. Nothing is published and no lease is held. `--finish` is a conversion that finds all this:
it takes the lease, does the units that are missing, and publishes. Each part leaves a note at the target on the content of
its sources, so that `--finish` reads no source again.

A dry run tells what a conversion would do, and why: nothing is encoded or written, and no source is read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction

from mdsmix.convert.duplicates import without_duplicates
from mdsmix.convert.guard import why_rebuilt
from mdsmix.convert.job import Dropped, Job, with_versions
from mdsmix.convert.known_sources import KnownSources, known_dropped, lines_of
from mdsmix.convert.ledger import FOLDER, compressed
from mdsmix.convert.planning import ArrayPart, Options, StreamPlan, Watcher, plan_streams
from mdsmix.convert.stored import StoredUnits, UnitResult, list_stored
from mdsmix.convert.work import Work, do_units
from mdsmix.engines.tasks import Engine
from mdsmix.recipe import Recipe
from mdsmix.shards.counts import Records
from mdsmix.shards.lease import Lease
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.shard_files import decompressed
from mdsmix.sources import Unit
from mdsmix.storage import Location, together
from mdsmix.words import does, listed, plural

NOTE = re.compile(r"part-\d{1,6}-of-\d{1,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOutcome:
    """The result of a part in one stream. Nothing of it is published."""

    stream: str
    target: str
    part: ArrayPart
    units: int
    "Units of the plan that are this part's own."
    units_in_all: int
    reused: int
    "Records of windows that were there already."
    tokens: int
    seconds: float
    peak: int = 0
    "Bytes that the run and its workers held at most."
    records: Records = field(default_factory=Records)
    notes: tuple[str, ...] = ()


def do_part(plan: StreamPlan, engine: Engine, watcher: Watcher) -> PartOutcome:
    """Does the units of the part, and leaves a note of what their sources hold. Which records are dropped as duplicates follows from all
    units: each part reads those that no other has read. Whether too many are bad follows from all too: that is judged when the stream is
    published."""
    began, job, part = time.monotonic(), plan.job, plan.options.part
    assert part, "else all of it is converted"
    if why := why_rebuilt(job, plan.target):
        watcher.say(why)
    units, results, note = plan.units[part.own], list[UnitResult](), ""
    if units:
        work = without_duplicates(Work.of(plan, engine, watcher))
        watcher.begin(job.name, plan.bytes_to_read)
        judged = replace(work.job, max_bad=Fraction(1))
        dropped = work.dropped[part.own]
        _, results, note = do_units(replace(work, job=judged, units=units, dropped=dropped))
        contents = (result.content for result in results)
        content = lines_of(dict(zip(units, contents, strict=True)))
        at = job.folder / FOLDER / f"part-{part.number}-of-{part.of}"
        at.write(compressed(content))
    return PartOutcome(
        stream=job.name,
        target=job.target,
        part=part,
        units=len(units),
        units_in_all=len(plan.units),
        reused=sum(len(result.reused) for result in results),
        tokens=sum(record.totals.tokens for result in results for record in result.records),
        records=sum((result.total for result in results), Records()),
        seconds=time.monotonic() - began,
        peak=engine.peak,
        notes=(note,) if note else (),
    )


def learn(job: Job, cache: KnownSources) -> str:
    """Takes in what the notes of all parts at the target say; returns how many have left one. A damaged note does not count."""
    notes = together(lambda note: decompressed(note.read()), _notes(job.folder))
    whole = [content for content in notes if content is not None]
    for content in whole:
        cache.learn_lines(content)
    return f"{plural(len(whole), 'part')} {does(whole, 'has', 'have')} finished; what is left is done now"


def forget(job: Job, held: Lease) -> None:
    """Deletes the notes of a stream that is published."""
    held.confirm()
    together(lambda note: note.delete(), _notes(job.folder))


def _notes(folder: Location) -> list[Location]:
    at = folder / FOLDER
    return [at / name for name, _ in at.list() if NOTE.fullmatch(name)]


def describe(recipe: Recipe, options: Options) -> Iterator[str]:
    """A sentence or more per stream."""
    for plan in plan_streams(recipe, options):
        yield from _of_stream(plan)


def _of_stream(plan: StreamPlan) -> Iterator[str]:
    job, old, units = plan.job, plan.old, plan.units
    if job.limit:  # only reading tells which units hold them
        yield f"{job.name}: the first {job.limit} records would be converted, where that is not done, into {job.target}"
        return
    if plan.options.is_finish:
        yield f"{job.name}: {learn(job, plan.cache)}"
    contents, is_done = plan.cache.contents(units), plan.is_up_to_date
    dropped = known_dropped(job, contents, plan.cache)
    todo = [] if is_done else _undone(plan, dropped or [{}] * len(contents))
    yield f"{job.name}: {len(todo)} of {len(units)} work units would be converted, into {job.target}"
    if plan.wanted:
        yield f"  {plan.wanted.said}"
    if unknown := len(units) - len(contents):
        yield f"  what {unknown} of them hold is not known before they are read: one whose records lie at the target already is read, no more"
    if dropped is None:
        yield (
            "  which records are dropped as duplicates is not known before they are read for it; units that lose records, or "
            "lose others than before, are converted too"
        )
    if old is None:
        yield f"  {why_rebuilt(job, plan.target) or 'nothing is published there yet'}"
        return
    changes = _changes(job, old)
    yield from (f"  {reason}" for reason in changes)
    if todo and not changes:
        names = sorted({file.name for unit in todo for file in unit.files})
        yield f"  units of which something is new, edited or not whole at the target: those of {listed(names, 5)}"
    if plan.lost:
        yield f"  {plan.lost}"
    if not todo and not is_done:
        yield f"  what is finished would be published: it is not, or not all, at {job.place(old.index_hash)}"


def _undone(plan: StreamPlan, dropped: Iterable[Dropped]) -> list[Unit]:
    """The units that a run would go through, as far as is known. `dropped`: of each unit whose content is known, in their order."""
    job, left, undone = with_versions(plan.job, plan.old), iter(dropped), list[Unit]()
    stored = StoredUnits() if plan.target.is_empty else list_stored(job)
    for unit in plan.units:
        content = plan.cache.content(unit)
        done = stored.find_all(job, content.windows, next(left)) if content else {}
        if content is None or len(done) < len(content.windows):
            undone.append(unit)
    return undone


def _changes(job: Job, old: Manifest) -> list[str]:
    """A phrase for each setting that shapes bytes and differs from the published stream's."""
    was, now = old.tokenizer, job.tokenizer
    template = now.chat_template_hash if job.kind.has_template else was.chat_template_hash
    trusted = all(map(job.trusts, old.backend.split(" + ")))
    pairs = {
        "the tokenizer": (was.hash[:8], now.hash[:8]),
        "the chat template": (was.chat_template_hash, template),
        "the tokenizer's backend": (old.backend, old.backend if trusted else "the reference"),
    }
    before, after = asdict(old.encoding), asdict(job.encoding)
    pairs |= {key: (before[key], after[key]) for key in after}
    return [f"{what} was {of} and is {to}" for what, (of, to) in pairs.items() if of != to]

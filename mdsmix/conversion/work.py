"""A stream's work units, and who does them: finished units are found by their records, the engine
does the rest.

Results are kept in the order of the plan, whoever did a unit and whenever it ended, so no byte
depends on the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TypeVar

from mdsmix.conversion.bad_records import publish_quarantine, shown_share, too_many_bad
from mdsmix.conversion.finished_units import StoredUnits, UnitResult, list_stored
from mdsmix.conversion.job import Dropped, Job, with_versions
from mdsmix.conversion.planning import StreamPlan, Watcher
from mdsmix.conversion.publish_pretrained import refuse_unproved_processor
from mdsmix.conversion.source_cache import KnownSources
from mdsmix.conversion.target import why_rebuilt
from mdsmix.conversion.unit import ReadTask, UnitTask, open_tokenizer_backend
from mdsmix.conversion.unit_files import KEY_DIGITS, read_blobs
from mdsmix.encode.backends import Unequal, store_difference
from mdsmix.engines.tasks import Engine, Task, TaskResults
from mdsmix.kinds.rules import rule_changes
from mdsmix.messages import join_names
from mdsmix.shapes.functions import import_function
from mdsmix.shards.counts import Records
from mdsmix.sources import Unit, counted_key, prepare_formats
from mdsmix.storage import map_in_batches, map_threads

R = TypeVar("R")
FIRST_UNITS = 3
NEARLY_ALL = Fraction(9, 10)
"""A run stops where so large a share of the records of the first units is bad: the wrong file, the
wrong field. Units are looked at in the order of the plan, so any number of workers gives the same
sentence.
"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A stream's units, and who does them."""

    job: Job
    units: Sequence[Unit]
    cache: KnownSources
    stored: StoredUnits
    "The finished units at the target."
    engine: Engine
    watcher: Watcher
    dropped: Sequence[Dropped]
    "The duplicates to drop from each unit."

    @staticmethod
    def of(plan: StreamPlan, engine: Engine, watcher: Watcher) -> Work:
        """The stream's units, with what lies at its target already. A target that was just seen to
        be empty is not listed. A stream or units of an earlier commit there are told. RecipeError
        where its processor is not proved equal.
        """
        refuse_unproved_processor(plan.job, plan.files)
        if why := why_rebuilt(plan.job, plan.target):
            watcher.say(why)
        if plan.old and (changes := rule_changes(plan.old.rules, plan.job.rules)):
            watcher.say(
                f"{plan.job.name}: rules have changed since it was published ({join_names([*map(str, changes)])}); "
                "what they shape is converted again"
            )
        is_empty = plan.target.is_empty
        job = plan.job if is_empty else with_versions(plan.job, plan.old)
        return Work(
            job=job,
            units=plan.units,
            cache=plan.cache,
            stored=StoredUnits() if is_empty else list_stored(job),
            engine=engine,
            watcher=watcher,
            dropped=[{}] * len(plan.units),
        )

    def say(self, sentence: str) -> None:
        self.watcher.say(f"{self.job.name}: {sentence}")

    def run(self, tasks: Sequence[Task[R]]) -> TaskResults[R]:
        """The results of these tasks as they end; closing the iterator stops the rest."""
        return self.engine.run(tasks, self.watcher.on_progress, self.say)

    def prepare(self) -> None:
        """Opens and imports everything that converting takes, before workers are forked: once for
        all of them.
        """
        open_tokenizer_backend(self.job)
        if said := import_function(self.job.encoding.shape):
            self.say(said)
        prepare_formats(self.units)

    def learn(self, tasks: Sequence[ReadTask]) -> None:
        """Reads these units, and notes what they hold."""
        prepare_formats(self.units)
        with closing(self.run(tasks)) as finished:
            for position, found in finished:
                self.cache.note(tasks[position].unit, found)


def do_units(work: Work) -> tuple[Work, list[UnitResult], str]:
    """Returns the work as it was done in the end, one result per unit, and what the user should
    know.

    Where the fast tokenizer turns out to differ from the reference, the whole stream is done by the
    reference.
    """
    try:
        return work, _results(work), ""
    except Unequal as unequal:
        store_difference(work.job.tokenizer, unequal)
        work.say(f"{unequal}; starting again with the reference tokenizer")
        note = f"{unequal}; the whole stream was encoded by the reference, and so will others be"
    work = replace(work, job=replace(work.job, backend="reference"))
    return work, _results(work), note


def _results(work: Work) -> list[UnitResult]:
    """One per unit, in the order of the plan."""
    cache, watcher = work.cache, work.watcher
    if work.job.limit:
        return _first_records(work, work.job.limit)
    _look_elsewhere(work)
    tasks = map_threads(partial(_planned, work), zip(work.units, work.dropped, strict=True))
    found, todo = dict[int, UnitResult](), list[int]()
    for number, task in enumerate(tasks):
        if result := task.done(cache.content(task.unit)):
            found[number] = result
            watcher.on_progress(sum(record.size for record in result.records), 0)
            watcher.on_bad(result.total.bad)
        else:
            todo.append(number)
    _refuse_hopeless(work, found)
    if todo:
        work.prepare()
    with closing(work.run([tasks[number] for number in todo])) as finished:
        for position, result in finished:
            number = todo[position]
            found[number] = result
            cache.note(work.units[number], result.content)
            watcher.on_bad(result.total.bad)
            if number < FIRST_UNITS:
                _refuse_hopeless(work, found)
    return [found[number] for number in range(len(tasks))]


def _planned(work: Work, of: tuple[Unit, Dropped]) -> UnitTask:
    """The task of what is left to do of a unit."""
    unit, dropped = of
    windows = work.cache.windows_of(unit)
    return UnitTask(
        job=work.job,
        unit=unit,
        dropped=dropped,
        windows=windows,
        records=work.stored.find_all(work.job, windows.values(), dropped),
    )


def _first_records(work: Work, left: int) -> list[UnitResult]:
    """Does the first units, one by one, since only reading tells how many records one holds. What
    is left of the limit is part of a unit's key.
    """
    results = list[UnitResult]()
    for unit in work.units:
        if left <= 0:
            break
        ((_, result),) = work.run([UnitTask(job=replace(work.job, limit=left), unit=unit)])
        left -= result.total.read
        results.append(result)
        work.watcher.on_bad(result.total.bad)
    return results


def _look_elsewhere(work: Work) -> None:
    """Reads the units that the cache does not know, where a record at the target belongs to no
    known unit, as after a file was moved: the record may be theirs. At a first conversion, or when
    a killed one goes on, the cache explains every record by a unit of this plan. Under `duplicates:
    drop` all units are read anyway; those of images are read here too, since an equal image may lie
    elsewhere.
    """
    job, cache, has_images = work.job, work.cache, work.job.kind.has_images
    known = (window for unit in work.units for window in cache.windows_of(unit).values())
    explained = {job.key(window.full_digest) for window in known}
    stored = (name for name in work.stored.files if len(name) == KEY_DIGITS)
    if (job.drops and not has_images) or explained.issuperset(stored):
        return
    work.learn(
        [
            ReadTask(job=job, unit=unit, dropped=dropped)
            for unit, dropped in zip(work.units, work.dropped, strict=True)
            if not cache.content(unit) and (has_images or not cache.windows_of(unit))
        ]
    )


def _refuse_hopeless(work: Work, found: Mapping[int, UnitResult]) -> None:
    """TooManyBadRecords where the first of many units are nearly all bad. Their bad records are
    published first, so that the user can read them.
    """
    job, of = work.job, len(work.units)
    first = [found[number] for number in range(FIRST_UNITS) if number in found]
    records = sum((result.total for result in first), Records())
    is_hopeless = records.bad > max(NEARLY_ALL, job.max_bad) * records.sampled
    if len(first) == FIRST_UNITS < of and is_hopeless:
        publish_bad(work, first)
        raise too_many_bad(
            job,
            records,
            f" in the first {FIRST_UNITS} of {of} work units, and max_bad is {shown_share(job)}, so the others were not waited for",
        )


def publish_bad(work: Work, results: Sequence[UnitResult]) -> list[str]:
    """Makes the bad records public, counted from the start of their files; returns the names of
    their files.
    """
    folder, bad, shifts, before = work.job.folder, list[tuple[str, str]](), [], 0
    for unit, result in zip(work.units, results, strict=False):
        before = before if unit.start else 0
        for done in result.windows:
            if done.record.records.bad:
                file = work.stored.files.get(done.bad_name, done.file)
                bad.append((done.bad_name, file))
                shifts.append((counted_key(unit), before))
        before += sum(record.lines for record in result.records)
    each = zip(bad, shifts, read_blobs(folder, bad), strict=True)
    list(map_in_batches(lambda of: publish_quarantine(folder, *of), each))
    return [name for name, _ in bad]

"""The work units of a stream: find those that are converted already, and let the engine convert the
others.

Results are in the order of the plan, whoever converted a unit and whenever it was ready, so no byte
depends on the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple, TypeVar

from mdsmix.conversion.bad_records import (
    QuarantineFile,
    format_max_bad,
    make_too_many_bad_error,
    publish_quarantine,
)
from mdsmix.conversion.finished_units import StoredUnits, UnitResult, list_stored
from mdsmix.conversion.job import Dropped, Job, with_versions
from mdsmix.conversion.planning import StreamPlan, Watcher
from mdsmix.conversion.publish_pretrained import refuse_unproved_processor
from mdsmix.conversion.source_cache import KnownSources
from mdsmix.conversion.target import rebuild_reason
from mdsmix.conversion.unit import ReadTask, UnitTask, open_tokenizer_backend
from mdsmix.conversion.unit_files import KEY_DIGITS, BlobRef, read_blobs
from mdsmix.encode.backends import Unequal, store_difference
from mdsmix.engines.tasks import Engine, Task, TaskResults
from mdsmix.kinds.rules import compare_rules
from mdsmix.messages import join_names
from mdsmix.shapes.functions import import_function
from mdsmix.shards.counts import Records
from mdsmix.sources import Unit, counted_key, prepare_formats
from mdsmix.storage import map_in_batches, map_threads

R = TypeVar("R")
FIRST_UNITS = 3
NEARLY_ALL = Fraction(9, 10)
"""A run stops if a larger share of the records of the first units is bad: the wrong file, the wrong
field. The units are the first ones of the plan, so any number of workers gives the same message.
"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A stream's units, and everything that is needed to convert them."""

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
    def prepare(plan: StreamPlan, engine: Engine, watcher: Watcher) -> Work:
        """List what is at the stream's target, and tell the watcher why published units are
        converted again. A target that was empty when the run began is not listed.

        Raises RecipeError if the stream's processor is not proved equal to what a loader computes.
        """
        refuse_unproved_processor(plan.job, plan.files)
        reason = rebuild_reason(plan.job, plan.target)
        if reason:
            watcher.say(reason)
        changes = compare_rules(plan.old.rules, plan.job.rules) if plan.old else []
        if changes:
            watcher.say(
                f"{plan.job.name}: rules have changed since it was published "
                f"({join_names([*map(str, changes)])}); the units that they affect are converted "
                "again"
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
        """Run these tasks, and yield their results as they end. Closing the iterator stops the
        remaining tasks.
        """
        return self.engine.run(tasks, self.watcher.on_progress, self.say)

    def open_shared(self) -> None:
        """Open and import everything that converting needs, before workers are forked: once for all
        of them.
        """
        open_tokenizer_backend(self.job)
        message = import_function(self.job.encoding.shape)
        if message:
            self.say(message)
        prepare_formats(self.units)

    def read_sources(self, tasks: Sequence[ReadTask]) -> None:
        """Read these units, and note their contents in the cache."""
        prepare_formats(self.units)
        with closing(self.run(tasks)) as finished:
            for position, content in finished:
                self.cache.note(tasks[position].unit, content)


class DoneWork(NamedTuple):
    """The result of `do_units`."""

    work: Work
    "The work as it was done: its job has the tokenizer backend that was used in the end."
    results: list[UnitResult]
    "One per unit, in the order of the plan."
    note: str
    "A sentence for the user; may be empty."


def do_units(work: Work) -> DoneWork:
    """Convert the units that are not finished.

    If the fast tokenizer turns out to differ from the reference, the whole stream is converted
    again by the reference.
    """
    try:
        return DoneWork(work, _convert_units(work), "")
    except Unequal as unequal:
        store_difference(work.job.tokenizer, unequal)
        work.say(f"{unequal}; starting again with the reference tokenizer")
        note = f"{unequal}; this stream and later ones are encoded by the reference"
    work = replace(work, job=replace(work.job, backend="reference"))
    return DoneWork(work, _convert_units(work), note)


def _convert_units(work: Work) -> list[UnitResult]:
    """Return one UnitResult per unit, in the order of the plan. Finished units come from the
    target, the others from the engine.
    """
    cache = work.cache
    watcher = work.watcher
    if work.job.limit:
        return _convert_first_records(work, work.job.limit)
    # Find the finished units.
    _read_unknown_units(work)
    tasks = map_threads(
        lambda position: _make_task(work, work.units[position], work.dropped[position]),
        range(len(work.units)),
    )
    results = dict[int, UnitResult]()
    unfinished = list[int]()
    for number, task in enumerate(tasks):
        result = task.finished_result(cache.content(task.unit))
        if result:
            results[number] = result
            watcher.on_progress(sum(record.size for record in result.records), 0)
            watcher.on_bad(result.total.bad)
        else:
            unfinished.append(number)
    _refuse_nearly_all_bad(work, results)
    # Convert the others.
    if unfinished:
        work.open_shared()
    with closing(work.run([tasks[number] for number in unfinished])) as finished:
        for position, result in finished:
            number = unfinished[position]
            results[number] = result
            cache.note(work.units[number], result.content)
            watcher.on_bad(result.total.bad)
            if number < FIRST_UNITS:
                _refuse_nearly_all_bad(work, results)
    return [results[number] for number in range(len(tasks))]


def _make_task(work: Work, unit: Unit, dropped: Dropped) -> UnitTask:
    """Return the task of converting the unfinished windows of a unit."""
    windows = work.cache.windows_of(unit)
    return UnitTask(
        job=work.job,
        unit=unit,
        dropped=dropped,
        windows=windows,
        records=work.stored.find_records(work.job, windows.values(), dropped),
    )


def _convert_first_records(work: Work, limit: int) -> list[UnitResult]:
    """Convert the first `limit` records, unit by unit, since how many records a unit has is known
    only when it is read. The remaining limit is part of a unit's key.
    """
    results = list[UnitResult]()
    remaining = limit
    for unit in work.units:
        if remaining <= 0:
            break
        task = UnitTask(job=replace(work.job, limit=remaining), unit=unit)
        ((_, result),) = work.run([task])  # one task: one (position, result)
        remaining -= result.total.read
        results.append(result)
        work.watcher.on_bad(result.total.bad)
    return results


def _read_unknown_units(work: Work) -> None:
    """Read the units that the cache does not know, if the target has a record that belongs to no
    known unit. Such a record may belong to an unknown unit, for example after a file was moved.

    At a first conversion, or when a killed one continues, every record belongs to a known unit of
    this plan, so nothing is read. Under `duplicates: drop` all units are read elsewhere; units of
    images are read here too, since an equal image may now be in another place.
    """
    job = work.job
    has_images = job.kind.has_images
    if job.drops and not has_images:
        return
    explained = set[str]()  # the keys of the records of all known windows
    for unit in work.units:
        for window in work.cache.windows_of(unit).values():
            explained.add(job.key(window.full_digest))
    stored = (name for name in work.stored.files if len(name) == KEY_DIGITS)
    if explained.issuperset(stored):
        return
    tasks = list[ReadTask]()
    for unit, dropped in zip(work.units, work.dropped, strict=True):
        has_known_windows = bool(work.cache.windows_of(unit))
        if not work.cache.content(unit) and (has_images or not has_known_windows):
            tasks.append(ReadTask(job=job, unit=unit, dropped=dropped))
    work.read_sources(tasks)


def _refuse_nearly_all_bad(work: Work, results: Mapping[int, UnitResult]) -> None:
    """Raise TooManyBadRecords if the first units of a longer plan are converted and nearly all of
    their records are bad. The bad records are published first, so that the user can read them.
    """
    job = work.job
    unit_count = len(work.units)
    first = [results[number] for number in range(FIRST_UNITS) if number in results]
    if not len(first) == FIRST_UNITS < unit_count:
        return
    records = sum((result.total for result in first), Records())
    if records.bad > max(NEARLY_ALL, job.max_bad) * records.sampled:
        publish_bad(work, first)
        reason = (
            f" in the first {FIRST_UNITS} of {unit_count} work units, and max_bad is "
            f"{format_max_bad(job)}, so the others were not converted"
        )
        raise make_too_many_bad_error(job, records, reason)


def publish_bad(work: Work, results: Sequence[UnitResult]) -> list[str]:
    """Write the bad records of units to the quarantine, with lines counted from the start of their
    files. Return the names of the quarantine files.
    """
    folder = work.job.folder
    files = list[QuarantineFile]()
    count_before = 0
    for unit, result in zip(work.units, results, strict=False):
        if not unit.start:  # the unit begins a file
            count_before = 0
        for done in result.windows:
            if done.record.records.bad:
                file = QuarantineFile(
                    name=done.bad_records_name,
                    unit_file=work.stored.files.get(done.bad_records_name, done.file),
                    place_key=counted_key(unit),
                    count_before=count_before,
                )
                files.append(file)
        count_before += sum(record.lines for record in result.records)
    frames = read_blobs(folder, [BlobRef(file.name, file.unit_file) for file in files])

    def publish(entry: tuple[QuarantineFile, bytes]) -> str:
        file, frame = entry
        publish_quarantine(folder, file, frame)
        return file.name

    return list(map_in_batches(publish, zip(files, frames, strict=True)))

"""A stream's work units, and who does them: finished units are found by their records, the engine does the rest.

Results are kept in the order of the plan, whoever did a unit and whenever it ended, so no byte depends on the engine.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from mdsmix.convert.bad_records import publish_quarantine
from mdsmix.convert.job import Dropped, Job, bad_name
from mdsmix.convert.known_sources import KnownSources
from mdsmix.convert.ledger import AT_ONCE, Extent
from mdsmix.convert.max_bad import FIRST_UNITS, are_nearly_all_bad, first_units, refusal_of_first
from mdsmix.convert.outcome import Watcher
from mdsmix.convert.stored import StoredUnits, UnitResult, lost, read_blobs
from mdsmix.convert.unit import LookTask, UnitTask, open_tokenizer_backend
from mdsmix.encode.backends import Unequal, remember_unequal
from mdsmix.engines.tasks import Engine, Task
from mdsmix.shapes.functions import load
from mdsmix.sources import Unit, counted_key, prepare
from mdsmix.storage import Location, together

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A stream's units, and who does them."""

    job: Job
    units: Sequence[Unit]
    cache: KnownSources
    stored: StoredUnits
    "What lies at the target."
    engine: Engine
    watcher: Watcher
    dropped: Sequence[Dropped] = ()
    "What is dropped from each unit; empty where nothing is from any."

    def say(self, sentence: str) -> None:
        self.watcher.say(f"{self.job.name}: {sentence}")

    def run(self, tasks: Sequence[Task[R]]) -> Generator[tuple[int, R], None, None]:
        """The results of these tasks as they end; closing the iterator stops the rest."""
        return self.engine.run(tasks, self.watcher.on_progress, self.say)

    def dropped_from(self, number: int) -> Dropped:
        return self.dropped[number] if self.dropped else {}


def do_units(work: Work) -> tuple[Job, list[UnitResult], tuple[str, ...]]:
    """Returns the job as it was run in the end, one result per unit, and what the user should know.

    Where the fast tokenizer turns out to differ from the reference, the whole stream is done by the reference.
    """
    job = work.job
    try:
        return job, _results(work), ()
    except Unequal as unequal:
        remember_unequal(job.tokenizer, unequal)
        work.say(f"{unequal}; starting again with the reference tokenizer")
        note = f"{unequal}; the whole stream was encoded by the reference, and so will others be"
    job = job.with_backend("reference")
    cache = work.cache if job.drops else KnownSources.of(job.target)
    return job, _results(replace(work, job=job, cache=cache)), (note,)


def _results(work: Work) -> list[UnitResult]:
    """One per unit, in the order of the plan."""
    job, units, cache = work.job, work.units, work.cache
    if job.limit:
        return list(_limited(work, job.limit))
    if _may_be_elsewhere(work):
        _look(work)
    tasks = together(partial(_task, work), range(len(units)))
    done = ((number, _done_before(work, task)) for number, task in enumerate(tasks))
    found = {number: result for number, result in done if result}
    work.watcher.on_progress(sum(map(_size, found.values())), 0)
    work.watcher.on_bad(sum(map(_bad, found.values())))
    _refuse_hopeless(work, found)
    todo = [number for number in range(len(units)) if number not in found]
    if todo:
        open_tokenizer_backend(job)  # once, for all workers that are forked
        if said := load(job.encoding.shape):
            work.say(said)
        prepare(units)
    with closing(work.run([tasks[number] for number in todo])) as finished:
        for position, result in finished:
            found[todo[position]] = result
            cache.note(units[todo[position]], result.content)
            work.watcher.on_bad(_bad(result))
            if todo[position] < FIRST_UNITS:
                _refuse_hopeless(work, found)
    return [found[number] for number in range(len(units))]


def _done_before(work: Work, task: UnitTask) -> UnitResult | None:
    """The result of a finished unit: the cache knows its content without reading, and all its records are stored."""
    content = work.cache.content(task.unit)
    if content is None or len(task.records) < len(content.windows):
        return None
    records = [task.records[window.number] for window in content.windows]
    return UnitResult(content=content, records=records, reused=frozenset(task.records))


def _size(result: UnitResult) -> int:
    return sum(record.size for record in result.records)


def _bad(result: UnitResult) -> int:
    return sum(record.records.bad for record in result.records)


def _task(work: Work, number: int) -> UnitTask:
    job, unit, dropped = work.job, work.units[number], work.dropped_from(number)
    windows = work.cache.windows_of(unit)
    each = {w.number: work.stored.find(job, w, dropped.get(w.number, b"")) for w in windows}
    return UnitTask(
        job=job,
        unit=unit,
        windows={window.number: window for window in windows},
        records={number: record for number, record in each.items() if record},
        dropped=dropped,
    )


def _may_be_elsewhere(work: Work) -> bool:
    """Whether a record at the target belongs to no known source, as after a file was moved. At a first conversion, or when a killed one
    goes on, the cache explains every record by a unit of this plan. Records that are dropped are found by reading all units anyway."""
    if work.job.drops and not work.job.kind.has_images:
        return False
    known = (window for unit in work.units for window in work.cache.windows_of(unit))
    explained = {work.job.key(window.said) for window in known}
    return not all(key in explained for key in work.stored.keys)


def _look(work: Work) -> None:
    """Learns what the units hold of which the cache knows nothing, since their records may be stored; images too, of which an equal one
    may lie elsewhere."""
    has_images, cache = work.job.kind.has_images, work.cache
    unknown = {
        number: unit
        for number, unit in enumerate(work.units)
        if not cache.content(unit) and (has_images or not cache.begun(unit))
    }
    numbers = list(unknown)
    prepare(list(unknown.values()))
    tasks = [
        LookTask(job=work.job, unit=unit, dropped=work.dropped_from(number))
        for number, unit in unknown.items()
    ]
    with closing(work.run(tasks)) as looked:
        for position, content in looked:
            cache.learn({work.units[numbers[position]]: content})


def _limited(work: Work, limit: int) -> Iterator[UnitResult]:
    """The first `limit` records: unit by unit, since only reading tells how many one holds."""
    for number, unit in enumerate(work.units):
        if limit <= 0:
            return
        # The rest of the limit is part of the unit's key, since it depends on how many records the earlier units held.
        job, dropped = replace(work.job, limit=limit), work.dropped_from(number)
        task = UnitTask(job=job, unit=unit, dropped=dropped)
        ((_, result),) = work.run([task])
        limit -= sum(record.records.read for record in result.records)
        work.watcher.on_bad(_bad(result))
        yield result


def _refuse_hopeless(work: Work, found: Mapping[int, UnitResult]) -> None:
    """TooManyBadRecords where the first of many units are nearly all bad. Their bad records are published first, so that the user can
    read them."""
    first = first_units(found)
    if len(work.units) > len(first) and are_nearly_all_bad(work.job, first):
        publish_bad(work, first)
        raise refusal_of_first(work.job, first, len(work.units))


def publish_bad(work: Work, results: Sequence[UnitResult]) -> list[str]:
    """Makes the bad records public, counted from the start of their files; returns the names of their files."""
    bad, before = list[tuple[str, Extent, dict[str, int]]](), 0
    for unit, result in zip(work.units, results, strict=False):
        before = before if unit.start else 0
        for done in result.windows:
            if done.record.records.bad:
                name = bad_name(done.record.key, done.window)
                bad.append((name, work.stored.bad_of(done), {counted_key(unit): before}))
        before += sum(record.lines for record in result.records)
    frames = read_blobs(work.job.folder, [(name, at) for name, at, _ in bad])
    each = zip(bad, frames, strict=True)
    while some := list(islice(each, AT_ONCE)):
        together(lambda of: _publish(work.job.folder, *of), some)
    return [name for name, _, _ in bad]


def _publish(folder: Location, bad: tuple[str, Extent, dict[str, int]], frame: bytes) -> None:
    from zstandard import ZstdError

    name, at, before = bad
    try:
        publish_quarantine(folder, name, frame, before)
    except ZstdError:
        raise lost(folder, at) from None

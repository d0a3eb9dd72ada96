"""A recipe's streams, one after the other: plan, do what is not done, publish.

A second run reads no source: it stats the files and compares keys. Streams are converted in turn rather than together,
so that each is published as soon as it can be, and what goes wrong in one leaves the finished ones published.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from mdsmix import sources
from mdsmix.convert.guard import (
    published_manifest,
    refuse_quarantine,
    refuse_replacing,
    why_rebuilt,
)
from mdsmix.convert.job import Job, make_job, on_day, with_versions
from mdsmix.convert.ledger import FOLDER
from mdsmix.convert.outcome import Outcome, Watcher
from mdsmix.convert.publish import is_published, publish
from mdsmix.convert.quarantine import bad_name, delete_stale_files, publish_quarantine, stale_files
from mdsmix.convert.seen import Seen
from mdsmix.convert.standing import Standing, stand
from mdsmix.convert.stored import listing, stored_at
from mdsmix.convert.unit import (
    Before,
    UnitResult,
    convert_unit,
    open_tokenizer_backend,
    recorded,
    window_key,
)
from mdsmix.convert.verdict import FirstUnits, refuse_too_many_bad
from mdsmix.encode.backends import Unequal, known_unequal, remember_unequal
from mdsmix.encode.tokenizer import open_tokenizer
from mdsmix.engines import local as engine
from mdsmix.engines.limits import cpu_count, default_cap
from mdsmix.engines.memory import Watch, is_told
from mdsmix.errors import RecipeError
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.index import Index, read_index
from mdsmix.shards.lease import lease
from mdsmix.shards.manifest import Manifest, SourceFile
from mdsmix.sources import Content, Unit, counted_key, shown_unit
from mdsmix.storage import locate, together

UNTOLD = (
    "this system does not tell what a process holds (no /proc/PID/smaps_rollup), so --memory is not enforced: "
    "give fewer --workers where memory is short"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run does, none of which shapes a published byte of a whole stream."""

    only: Sequence[str] = ()
    "Streams to convert; none named: all."
    limit: int | None = None
    "Only so many first records of each stream, into a folder of their own."
    reencode: bool = False
    "Published streams of other columns or other sources may be replaced."
    workers: int | None = None
    memory: int | None = None
    "Bytes that the run and its workers may hold; None: half of what the machine or its control group has."
    quarantine_crashes: bool = False
    "Records that workers die of are set aside; else the first one ends the run."
    verify_source: bool = False
    "Sources are read again even where size and stamp are as they were."
    again: bool = False
    "A published stream too is gone through, unit by unit: what a repair took away is made anew."


def convert(recipe: Recipe, options: Options, watcher: Watcher) -> Iterator[Outcome]:
    """Converts and publishes every stream that has a source, or those that the options name, one by one.

    What can be refused without reading a source is refused before the first stream is touched.
    """
    if not is_told():
        watcher.say(UNTOLD)
    jobs, is_fresh = planned_jobs(recipe, options, watcher.say), True
    crew = _crew(jobs, options)
    try:
        for job, files, standing in jobs:
            now = standing if is_fresh else stand(job)
            outcome = _convert_stream(job, files, now, options, crew, watcher)
            is_fresh = is_fresh and not outcome.units  # else time has gone by
            yield outcome
    finally:
        crew.dismiss()


def planned_jobs(
    recipe: Recipe, options: Options, say: Callable[[str], None] | None = None
) -> list[tuple[Job, list[sources.SourceFile], Standing]]:
    """Each stream's job, the files of its source and what stands at its target, in the order of the recipe; RecipeError
    where one may not be."""
    streams = [(s, s.source) for s in _chosen(recipe, options.only) if s.source]
    tokenizer = open_tokenizer(recipe.tokenizer, say)
    jobs = [
        (
            make_job(recipe, stream, tokenizer, options.limit),
            sources.find(source.path, recipe.folder),
        )
        for stream, source in streams
    ]
    refuse_quarantine(jobs, {locate(recipe.published(stream)) for stream in recipe.sourced})
    standings = together(stand, [job for job, _ in jobs])
    refuse_replacing(jobs, standings, options.reencode)
    return [(*planned, standing) for planned, standing in zip(jobs, standings, strict=True)]


def _crew(
    jobs: Sequence[tuple[Job, list[sources.SourceFile], Standing]], options: Options
) -> engine.Crew:
    """A process per processor; one more with a store, so that one loads or uploads while the others tokenize."""
    with_store = any(
        job.folder.is_s3 or any(file.location.is_s3 for file in files) for job, files, _ in jobs
    )
    return engine.Crew(
        workers=options.workers or cpu_count() + with_store,
        watch=Watch(options.memory or default_cap()),
        set_aside=options.quarantine_crashes,
        idle=[],
    )


def _chosen(recipe: Recipe, only: Sequence[str]) -> list[StreamSpec]:
    names = [stream.name for stream in recipe.sourced]
    for name in only:
        if name not in names:
            raise RecipeError(
                f"--only {name} names no stream with a source; these have one: {', '.join(names) or 'none'}."
            )
    if not names:
        raise RecipeError("no stream of the recipe has a source, so there is nothing to convert.")
    return [stream for stream in recipe.sourced if not only or stream.name in only]


def _convert_stream(
    job: Job,
    files: list[sources.SourceFile],
    standing: Standing,
    options: Options,
    crew: engine.Crew,
    watcher: Watcher,
) -> Outcome:
    began = time.monotonic()
    units, seen = sources.plan(files, fields=job.fields_read), Seen.of(job.target)
    old = published_manifest(job, standing, options.reencode)
    job = on_day(job, old.encoding.date_string if old else None)
    known = [None if options.verify_source else seen.content(unit) for unit in units]
    if old and not options.again and _is_up_to_date(job, old, standing, known):
        refuse_too_many_bad(job, old.records)
        return _outcome(job, old, standing.index, [], began)
    if why := why_rebuilt(job, old):
        watcher.say(why)
    crew = replace(crew, say=lambda sentence: watcher.say(f"{job.name}: {sentence}"))
    with lease(job.folder, watcher.say) as held:
        if standing.is_empty:
            job = replace(job, is_new=True)
        else:
            job = with_versions(job, old)
            crew.dismiss()  # workers that are forked now know what lies at the target
        watcher.begin(job.name, sum(file.stat.size for file in files))
        with listing(job):
            job, results, notes = _proved_results(job, units, options, crew, watcher)
        quarantined = _publish_bad(job, units, results)
        records = [record for result in results for record in result.records]
        manifest, index = publish(job, records, _source_files(units, results), held)
        if standing.folders:  # else the quarantine holds what this run has put there
            delete_stale_files(job.folder, quarantined, held)
        if not job.limit:
            seen.save(units, [result.content for result in results])
    return _outcome(
        job, manifest, index, results, began, (*notes, *_over(crew.watch)), crew.watch.peak
    )


def _over(watch: Watch) -> Iterator[str]:
    if watch.peak > watch.cap:
        yield (
            f"WARNING: {watch.peak / 1e6:,.0f} MB of memory were held, more than --memory allows "
            f"({watch.cap / 1e6:,.0f} MB): one worker at one record and the rows of its unit takes so much; raise it, or "
            "split the largest records"
        )


def _is_up_to_date(
    job: Job, old: Manifest, standing: Standing, known: Sequence[Content | None]
) -> bool:
    """Whether each source is known by its stamp, and just these parts and bad records are published."""
    windows = [
        (window_key(job, window), window)
        for content in known
        if content
        for window in content.windows
    ]
    keys = [key for key, _ in windows]
    if not keys or None in known or not is_published(job, old, standing, keys):
        return False
    return not stale_files(standing.quarantined, {bad_name(key, window) for key, window in windows})


def _proved_results(
    job: Job,
    units: list[Unit],
    options: Options,
    crew: engine.Crew,
    watcher: Watcher,
) -> tuple[Job, list[UnitResult], tuple[str, ...]]:
    """The results, by the reference where the fast tokenizer turned out to be another; the job that made them, and what to say."""
    try:
        return job, _results(job, units, options, crew, watcher), ()
    except Unequal as unequal:
        remember_unequal(job.tokenizer, unequal)
        watcher.say(f"{job.name}: {unequal}; starting again with the reference tokenizer")
        note = f"{unequal}; the whole stream was encoded by the reference, and so will others be"
    job = job.with_backend("reference")
    return job, _results(job, units, options, crew, watcher), (note,)


def _results(
    job: Job,
    units: list[Unit],
    options: Options,
    crew: engine.Crew,
    watcher: Watcher,
) -> list[UnitResult]:
    """One result per unit, in the order of the plan, whoever worked on it and whenever it was done."""
    if job.limit:
        return list(_limited(job, units, job.limit, crew, watcher))
    seen = Seen.of(job.target)
    known = [None if options.verify_source else seen.content(unit) for unit in units]
    asked = [(n, content) for n, content in enumerate(known) if content]
    done = together(lambda each: recorded(job, each[1]), asked)
    found = {n: result for (n, _), result in zip(asked, done, strict=True) if result}
    todo = [number for number in range(len(units)) if number not in found]
    for result in found.values():
        watcher.told(sum(record.size for record in result.records), 0)
    look = options.verify_source or not _are_explained(job, seen, units)
    tasks = [
        partial(
            convert_unit,
            job,
            units[number],
            None,
            _before(units[number], known[number], seen, look),
            crew.watch.cap,
        )
        for number in todo
    ]
    first = FirstUnits(job, units)
    _refuse_hopeless(first, found)
    if tasks:
        open_tokenizer_backend(job)  # once, for all workers
    names = [f"of {shown_unit(units[number])}" for number in todo]
    with closing(engine.run(tasks, crew, watcher.told, names)) as finished:
        for task, result in finished:
            found[todo[task]] = result
            seen.note(units[todo[task]], result.content)
            _refuse_hopeless(first, found)
    return [found[number] for number in range(len(units))]


def _refuse_hopeless(first: FirstUnits, found: Mapping[int, UnitResult]) -> None:
    """TooManyBadRecords where what is done shows that the stream cannot be published; its bad records can be read then."""
    if first.is_hopeless(found):
        done = range(first.done)
        _publish_bad(first.job, [first.units[n] for n in done], [found[n] for n in done])
        raise first.refusal()


def _before(unit: Unit, known: Content | None, seen: Seen, look: bool) -> Before:
    """What a worker is told of a unit that is not done, or not all."""
    windows = {w.number: w for w in known.windows} if known else {} if look else seen.begun(unit)
    return Before(windows=windows, look=look, seen=Seen(seen.path))


def _are_explained(job: Job, seen: Seen, units: list[Unit]) -> bool:
    """Whether every record at the target is known to be of units that are planned now: then others have none there, and
    are read once. So it is at a first conversion, and where one that was killed goes on."""
    explained = {job.key(digest) for digest in seen.digests(units)}
    stored = stored_at(job)
    names = stored.kept if stored else (name for name, _ in (job.folder / FOLDER).list())
    return all(name in explained for name in names if re.fullmatch("[0-9a-f]{32}", name))


def _limited(
    job: Job, units: list[Unit], limit: int, crew: engine.Crew, watcher: Watcher
) -> Iterator[UnitResult]:
    """The first `limit` records: unit by unit, since only reading tells how many one holds."""
    for unit in units:
        if limit <= 0:
            return
        # The rest of the limit is in the unit's key: it follows from what the units before held.
        before = Before(look=True)
        task = partial(convert_unit, replace(job, limit=limit), unit, limit, before, crew.watch.cap)
        ((_, result),) = engine.run([task], crew, watcher.told, [f"of {shown_unit(unit)}"])
        limit -= sum(record.records.read for record in result.records)
        yield result


def _source_files(units: list[Unit], results: list[UnitResult]) -> list[SourceFile]:
    """Each source file once, with the hash of what it holds."""
    digests: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for unit, result in zip(units, results, strict=False):
        for file, digest in zip(unit.files, result.content.files, strict=True):
            sizes[file.name] = file.stat.size
            digests.setdefault(file.name, []).append(digest)
    return [
        SourceFile(path=name, size=sizes[name], hash=sources.file_hash(of_units))
        for name, of_units in digests.items()
    ]


def _publish_bad(job: Job, units: list[Unit], results: list[UnitResult]) -> list[str]:
    """Makes the bad records public, counted from the start of their files; returns the names of their files."""
    bad, before = list[tuple[str, dict[str, int]]](), 0
    for unit, result in zip(units, results, strict=False):
        before = before if unit.start else 0
        for record, window in zip(result.records, result.content.windows, strict=True):
            if record.records.bad:
                bad.append((bad_name(record.key, window), {counted_key(unit): before}))
        before += sum(record.lines for record in result.records)
    together(lambda each: publish_quarantine(job.folder, *each), bad)
    return [name for name, _ in bad]


def _outcome(
    job: Job,
    manifest: Manifest,
    index: Index | None,
    results: list[UnitResult],
    began: float,
    notes: tuple[str, ...] = (),
    peak: int = 0,
) -> Outcome:
    reused = sum(result.reused for result in results)
    place = job.place(manifest.index_hash)
    if job.backend == "auto" and (unequal := known_unequal(job.tokenizer)):
        notes = (f"{unequal}, as was found before; so the reference encodes", *notes)
    if job.is_versioned:
        notes = (f"published as {place}", *notes)
    new = [r for result in results if not result.reused for r in result.records]
    return Outcome(
        stream=job.name,
        target=job.target,
        manifest=manifest,
        bytes=(index or read_index(place)).bytes,
        units=sum(len(result.records) for result in results),
        reused=reused,
        new_tokens=sum(record.totals.tokens for record in new),
        seconds=time.monotonic() - began,
        notes=notes,
        peak=peak,
    )

"""A recipe's streams, one after the other: plan, do what is not done, publish.

A second run reads no source: it stats the files and compares keys. Streams are converted in turn rather than together,
so that each is published as soon as it can be, and what goes wrong in one leaves the finished ones published.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from mdsmix import sources
from mdsmix.convert.compaction import Compaction
from mdsmix.convert.damage import delete_damaged
from mdsmix.convert.doing import do_units, publish_bad
from mdsmix.convert.engine import counting, engine_of
from mdsmix.convert.guard import (
    published_manifest,
    source_entries,
    told_of_lost,
    why_rebuilt,
    why_whole,
)
from mdsmix.convert.hashes import duplicates_among
from mdsmix.convert.images import forget_stamps
from mdsmix.convert.job import Job, on_day, with_versions
from mdsmix.convert.outcome import Outcome, Watcher
from mdsmix.convert.parts import Part, PartOutcome, do_part, forget, learn
from mdsmix.convert.planning import (
    Options,
    is_up_to_date,
    plan,
    planned_jobs,
    source_hashes,
)
from mdsmix.convert.processor_folder import publish_processor
from mdsmix.convert.publish import publish
from mdsmix.convert.quarantine import delete_stale_files
from mdsmix.convert.results import UnitResult
from mdsmix.convert.source_notes import note_objects
from mdsmix.convert.standing import Standing, standing_of
from mdsmix.convert.stored import listing
from mdsmix.convert.tokenizer_folder import publish_tokenizer
from mdsmix.convert.verdict import refuse_too_many_bad
from mdsmix.convert.work import Work
from mdsmix.encode.backends import known_unequal
from mdsmix.engines.base import Engine
from mdsmix.engines.ray_cluster import address_of
from mdsmix.errors import MdsmixError, all_of
from mdsmix.recipe import Recipe
from mdsmix.shards.beside import SourceEntry
from mdsmix.shards.index import Index, read_index
from mdsmix.shards.lease import Lease, lease
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import Unit

LOOK_AGAIN_SECONDS = 3600
"""A run that takes longer than this checks before each publication that the tokenizer is still there, because `gc` deletes one
that is a week old and named by no published stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the streams of a run share."""

    began: float
    options: Options
    engine: Engine
    watcher: Watcher


def convert(
    recipe: Recipe, options: Options, watcher: Watcher, engine: Engine | None = None
) -> Iterator[Outcome]:
    """Converts and publishes every stream that has a source, or those that the options name, one by one.

    What can be refused without reading a source is refused before the first stream is touched. A stream that fails ends no
    other: its error is raised when all have had their turn. `engine`: who does the units;
    None: processes of this machine, as many as the options say. One that is given is left open.
    """
    address_of(options.engine)  # refused before sources are looked for
    planned, is_fresh = planned_jobs(recipe, options, watcher.on_step), True
    _publish_beside([job for job, _, _ in planned])
    failed, done = list[MdsmixError](), list[str]()
    with ExitStack() as ends:
        ends.enter_context(counting(planned))
        if engine is None:
            engine = ends.enter_context(closing(engine_of(recipe, planned, options, watcher)))
        run = _Run(began=time.monotonic(), options=options, engine=engine, watcher=watcher)
        watcher.expect({job.name: _bytes_to_read(job, files) for job, files, _ in planned})
        for job, files, standing in planned:
            try:
                outcome = _convert_stream(
                    job, files, standing if is_fresh else standing_of(job), run
                )
            except MdsmixError as error:
                failed.append(error)
                is_fresh = False
                continue
            is_fresh = is_fresh and not outcome.units  # else time has gone by
            done.append(job.target)
            yield outcome
    if failed:
        if done and any(job.wanted for job, _, _ in planned):
            watcher.say(f"of what the budget wants these are published: {', '.join(done)}")
        raise all_of(failed)


def _publish_beside(jobs: Sequence[Job]) -> None:
    """What streams share lies beside them: their tokenizer, and the processor of those of images."""
    publish_tokenizer(jobs[0])
    if seeing := next((job for job in jobs if job.processor), None):
        publish_processor(seeing)


def convert_part(
    recipe: Recipe, options: Options, watcher: Watcher, part: Part
) -> Iterator[PartOutcome]:
    """Does the work units of one part of each chosen stream; nothing is published."""
    planned = planned_jobs(recipe, options, watcher.on_step)
    _publish_beside([job for job, _, _ in planned])
    watcher.expect({job.name: _bytes_to_read(job, files) // part.of for job, files, _ in planned})
    failed: list[MdsmixError] = []
    with counting(planned), closing(engine_of(recipe, planned, options, watcher)) as engine:
        run = _Run(began=time.monotonic(), options=options, engine=engine, watcher=watcher)
        for job, files, standing in planned:
            try:
                size = _bytes_to_read(job, files) // part.of
                yield do_part(_part_work(job, files, standing, run), part, size)
            except MdsmixError as error:
                failed.append(error)
    if failed:
        raise all_of(failed)


def _part_work(job: Job, files: list[sources.SourceFile], standing: Standing, run: _Run) -> Work:
    units = plan(job, files)
    cache = source_hashes(job, run.options, units, standing)
    job, old = _as_published(job, standing, run.options)
    if why := why_rebuilt(job, standing):
        run.watcher.say(why)
    job = _beside(job, old, standing, run.engine)
    return Work(job=job, units=units, cache=cache, engine=run.engine, watcher=run.watcher)


def _beside(job: Job, old: Manifest | None, standing: Standing, engine: Engine) -> Job:
    """The job with what lies at its target already, which new workers are to know too."""
    if standing.is_empty:
        return replace(job, is_new=True)
    engine.refresh()
    return with_versions(job, old)


def _as_published(job: Job, standing: Standing, options: Options) -> tuple[Job, Manifest | None]:
    """The job with what it keeps of the stream that is published, and that stream's manifest."""
    old = published_manifest(job, standing, options.reencode)
    unequal = known_unequal(job.tokenizer)
    job = on_day(job, old.encoding.date_string if old else None)
    return replace(job, unequal=unequal.label if unequal else ""), old


def _convert_stream(
    job: Job, files: list[sources.SourceFile], standing: Standing, run: _Run
) -> Outcome:
    began, options, watcher = time.monotonic(), run.options, run.watcher
    units = plan(job, files)
    cache = source_hashes(job, options, units, standing)
    job, old = _as_published(job, standing, options)
    if options.is_finish:
        watcher.on_step(f"{job.name}: {learn(job, cache, units)}")
    again = options.again or options.verify_target
    if old and not again and is_up_to_date(job, old, standing, units, cache):
        refuse_too_many_bad(job, old.records)
        return _outcome(job, old, standing.index, [], began)
    for why in filter(None, (why_rebuilt(job, standing), why_whole(job, old))):
        watcher.say(why)
    said = ""
    with lease(job.folder, watcher.say) as held:
        job = _beside(job, old, standing, run.engine)
        if options.verify_target:
            said = delete_damaged(job, held, watcher.say)
        watcher.begin(job.name, _bytes_to_read(job, files))
        work = Work(job=job, units=units, cache=cache, engine=run.engine, watcher=watcher)
        with listing(job) as stored:
            job, results, notes = do_units(work)
            if time.monotonic() - run.began > LOOK_AGAIN_SECONDS:
                _publish_beside([job])
            entries = source_entries(units, [result.content for result in results])
            lost = told_of_lost(job, old, entries, options.reencode)
            compaction = Compaction(job, stored, [r for result in results for r in result.records])
            manifest, index = _publish(job, units, results, entries, standing, held, compaction)
            compaction.finish(held)
        if options.is_finish:
            forget(job, held)
        if not job.limit:
            cache.save(units, contents := [result.content for result in results])
            note_objects(job, units, contents)
            forget_stamps(job, contents)
    notes = (*filter(None, [lost, said]), *notes, *run.engine.warnings())
    return _outcome(job, manifest, index, results, began, notes, run.engine.peak)


def _bytes_to_read(job: Job, files: list[sources.SourceFile]) -> int:
    """Where duplicates are dropped, sources are read twice."""
    return sources.size_of(files) * (2 if job.drops else 1)


def _publish(
    job: Job,
    units: list[Unit],
    results: list[UnitResult],
    entries: list[SourceEntry],
    standing: Standing,
    held: Lease,
    compaction: Compaction,
) -> tuple[Manifest, Index]:
    """Bad records first, then the index; bad records of units that are gone are deleted last."""
    quarantined = publish_bad(job, units, results)
    records = [record for result in results for record in result.records]
    noticed = None if job.drops else duplicates_among(job, records, compaction.fingerprints.note)
    if standing.quarantined and not (standing.manifest or standing.damage):
        delete_stale_files(job.folder, quarantined, held)  # of a run that was refused
    manifest, index = publish(job, records, entries, held, noticed)
    if standing.folders:  # else the quarantine holds what this run has put there
        delete_stale_files(job.folder, quarantined, held)
    return manifest, index


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
    tokens = sum(record.totals.tokens for result in results for record in result.records)
    return Outcome(
        stream=job.name,
        target=job.target,
        manifest=manifest,
        bytes=(index or read_index(place)).bytes,
        units=sum(len(result.records) for result in results),
        reused=reused,
        new_tokens=tokens - sum(result.reused_tokens for result in results),
        seconds=time.monotonic() - began,
        wanted=job.wanted,
        expected_mean=job.expected_mean,
        notes=notes,
        peak=peak,
    )

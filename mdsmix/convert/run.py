"""A recipe's streams, one after the other: plan, do what is not done, publish.

A second run reads no source: it stats the files and compares keys. Streams are converted in turn rather than together,
so that each is published as soon as it can be, and what goes wrong in one leaves the finished ones published.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

from mdsmix.convert.bad_records import delete_stale_files, refuse_too_many_bad
from mdsmix.convert.damage import (
    delete_damaged,
    refuse_older,
    refuse_other,
    refuse_other_recipe,
    sampled_as_published,
    stream_at,
)
from mdsmix.convert.duplicates import count_repeats, find_dropped
from mdsmix.convert.engine import counting, engine_of
from mdsmix.convert.guard import (
    source_entries,
    told_of_lost,
    why_rebuilt,
    why_whole,
)
from mdsmix.convert.image_stamps import forget_stamps
from mdsmix.convert.job import Job, with_versions
from mdsmix.convert.joining import Joining
from mdsmix.convert.outcome import Outcome, Watcher
from mdsmix.convert.parts import ArrayPart, PartOutcome, do_part, forget, learn
from mdsmix.convert.planning import Options, StreamPlan, plan_streams
from mdsmix.convert.pretrained_folders import publish_pretrained, refuse_unproved
from mdsmix.convert.publish import publish
from mdsmix.convert.stored import StoredUnits, UnitResult, list_stored, read_hashes
from mdsmix.convert.work import Work, do_units, publish_bad
from mdsmix.encode.backends import known_unequal
from mdsmix.engines.ray_cluster import address_of
from mdsmix.engines.tasks import Engine
from mdsmix.errors import MdsmixError, all_of
from mdsmix.recipe import Recipe
from mdsmix.shards.counts import Records
from mdsmix.shards.index import Index, read_index
from mdsmix.shards.lease import Lease, lease
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.published import StreamFault, working_folder
from mdsmix.shards.side_files import SourceEntry
from mdsmix.shards.verification import verify
from mdsmix.storage import Location

LOOK_AGAIN_SECONDS = 3600
"""Work that took longer than this is published after a look whether the tokenizer is still there, because `gc` deletes one that is a week
old and named by no published stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the streams of a run share."""

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
    plans = plan_streams(recipe, options, watcher.on_step)
    publish_pretrained([plan.job for plan in plans])
    failed, is_fresh = list[MdsmixError](), True
    with ExitStack() as ends:
        ends.enter_context(counting(plans))
        if engine is None:
            engine = ends.enter_context(closing(engine_of(recipe, plans, options, watcher)))
        run = _Run(engine=engine, watcher=watcher)
        watcher.expect({plan.job.name: plan.bytes_to_read for plan in plans})
        for plan in plans:
            try:
                outcome = _convert_stream(plan if is_fresh else plan.looked_at_again(), run)
            except MdsmixError as error:
                failed.append(error)
                is_fresh = False
                continue
            is_fresh = is_fresh and not outcome.units  # else time has gone by
            yield outcome
    if failed:
        raise all_of(failed)


def convert_part(
    recipe: Recipe, options: Options, watcher: Watcher, part: ArrayPart
) -> Iterator[PartOutcome]:
    """Does the work units of one part of each chosen stream; nothing is published."""
    plans, failed = plan_streams(recipe, options, watcher.on_step), list[MdsmixError]()
    publish_pretrained([plan.job for plan in plans])
    sizes = {plan.job.name: plan.bytes_to_read // part.of for plan in plans}
    watcher.expect(sizes)
    with counting(plans), closing(engine_of(recipe, plans, options, watcher)) as engine:
        run = _Run(engine=engine, watcher=watcher)
        for plan in plans:
            try:
                if why := why_rebuilt(plan.job, plan.target):
                    watcher.say(why)
                yield do_part(_work(plan, run), part, sizes[plan.job.name])
            except MdsmixError as error:
                failed.append(error)
    if failed:
        raise all_of(failed)


def _convert_stream(plan: StreamPlan, run: _Run) -> Outcome:
    """Plan, work, publish. A stream that is up to date costs a look."""
    began, job, old, watcher = time.monotonic(), plan.job, plan.old, run.watcher
    if plan.options.is_finish:
        watcher.on_step(f"{job.name}: {learn(job, plan.cache, plan.units)}")
    if old and not plan.options.verify_target and plan.is_up_to_date:
        refuse_too_many_bad(job, old.records)
        return _outcome(plan, job, old, plan.target.index, [], began)
    for why in filter(None, (why_rebuilt(job, plan.target), why_whole(job, old, plan.wanted))):
        watcher.say(why)
    with lease(job.folder, watcher.say) as held:
        looked = ""
        if plan.options.verify_target:
            looked = delete_damaged(with_versions(job, old), held, watcher.say)
        watcher.begin(job.name, plan.bytes_to_read)
        work = _work(plan, run)
        if job.drops:
            work = replace(work, dropped=find_dropped(work))
        job, results, notes = do_units(work)
        if time.monotonic() - began > LOOK_AGAIN_SECONDS:
            publish_pretrained([job])
        entries = source_entries(plan.units, [result.content for result in results])
        lost = told_of_lost(job, old, entries, plan.options.reencode)
        windows = [done for result in results for done in result.windows]
        joining = Joining.of(job.folder, work.stored, windows, job.drops)
        work = replace(work, job=job)
        manifest, index = _publish(plan, work, results, entries, held, joining)
        joining.finish(held)
        if plan.options.is_finish:
            forget(job, held)
        if not job.limit:
            contents = [result.content for result in results]
            plan.cache.save(dict(zip(plan.units, contents, strict=True)), job.folder)
            forget_stamps(job, contents)
    notes = (*filter(None, [lost, looked]), *notes, *run.engine.warnings())
    return _outcome(plan, job, manifest, index, results, began, notes, run.engine.peak)


def _work(plan: StreamPlan, run: _Run) -> Work:
    """The stream's units, with what lies at its target already: nothing is listed of one that was just seen to be empty.
    RecipeError where its processor is not proved equal."""
    refuse_unproved(plan.job, plan.files)
    is_empty = plan.target.is_empty
    job = plan.job if is_empty else with_versions(plan.job, plan.old)
    return Work(
        job=job,
        units=plan.units,
        cache=plan.cache,
        stored=StoredUnits() if is_empty else list_stored(job),
        engine=run.engine,
        watcher=run.watcher,
    )


def _publish(
    plan: StreamPlan,
    work: Work,
    results: list[UnitResult],
    entries: list[SourceEntry],
    held: Lease,
    joining: Joining,
) -> tuple[Manifest, Index]:
    """Bad records first, then the index; bad records of units that are gone are deleted last."""
    job, target, quarantined = work.job, plan.target, publish_bad(work, results)
    windows = [done for result in results for done in result.windows]
    noticed = None
    if not job.drops:
        wanted = [(d.base, work.stored.hashes_of(d.base, work.stored.file_of(d))) for d in windows]
        repeats = count_repeats(read_hashes(job.folder, wanted, joining.note))
        noticed = Records(duplicates=repeats)
    if target.quarantined and not (target.manifest or target.damage):
        delete_stale_files(job.folder, quarantined, held)  # of a run that was refused
    manifest, index = publish(job, [done.record for done in windows], entries, held, noticed)
    if target.folders:  # else the quarantine holds what this run has put there
        delete_stale_files(job.folder, quarantined, held)
    return manifest, index


def _outcome(
    plan: StreamPlan,
    job: Job,
    manifest: Manifest,
    index: Index | None,
    results: list[UnitResult],
    began: float,
    notes: tuple[str, ...] = (),
    peak: int = 0,
) -> Outcome:
    windows = [done for result in results for done in result.windows]
    place = job.place(manifest.index_hash)
    if job.backend == "auto" and (unequal := known_unequal(job.tokenizer)):
        notes = (f"{unequal}, as was found before; so the reference encodes", *notes)
    if job.is_versioned:
        notes = (f"published as {place}", *notes)
    return Outcome(
        stream=job.name,
        target=job.target,
        manifest=manifest,
        bytes=(index or read_index(place)).bytes,
        units=sum(len(result.records) for result in results),
        reused=sum(not done.is_new for done in windows),
        new_tokens=sum(done.record.totals.tokens for done in windows if done.is_new),
        seconds=time.monotonic() - began,
        wanted=plan.wanted,
        expected_mean=plan.expected_mean,
        notes=notes,
        peak=peak,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What was wrong and what was done about it."""

    stream: str
    faults: tuple[StreamFault, ...]
    shards: tuple[str, ...] = ()
    "Shards that were made again."
    units: int = 0
    "Work units that were converted again for them."
    of: int = 0
    "Work units in all."


def repair(recipe: Recipe, folder: Location, options: Options, watcher: Watcher) -> Repaired:
    """Makes the stream in `folder`, which this recipe publishes, what its manifest says; `options` say who may work.

    RecipeError where recipe or source would make another stream; Unreachable where it cannot be looked at.
    """
    split = working_folder(folder)
    name = stream_at(recipe, split)
    refuse_older(folder, split)
    with lease(split, watcher.say):
        look = partial(verify, folder, begin=watcher.begin, on_progress=watcher.on_progress)
        faults = look(quick=False).faults
        if not faults:
            return Repaired(stream=str(folder), faults=())
        damaged = {fault.file for fault in faults}
        recipe = sampled_as_published(recipe, name, split)
        # Whether it is the same stream is asked here, and stricter than a conversion asks.
        options = replace(options, only=(name,), verify_target=True, reencode=True)
        before = refuse_other_recipe(recipe, folder, options, damaged)
        (outcome,) = convert(recipe, options, watcher)
        refuse_other(folder, before, outcome.manifest, look(quick=True))
    shards = [shard.stored.basename for shard in read_index(folder).shards]
    return Repaired(
        stream=str(folder),
        faults=faults,
        shards=tuple(shard for shard in shards if shard in damaged),
        units=outcome.done,
        of=outcome.units,
    )

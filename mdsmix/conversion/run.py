"""A recipe's streams, one after the other: plan, do the units that are not done, publish.

A second run reads no source: it stats the files and compares keys. Streams are converted in turn
rather than together, so that each is published as soon as it can be, and what goes wrong in one
leaves the finished ones published.

An array of jobs (Slurm, Kubernetes, make -j) shares one conversion: each job does a part of the
work units, and one joins them. Every n-th unit of the plan is a part's own, so parts are of one
size. A part writes what any run writes before it publishes: shards and unit records, both named by
what they hold, so parts need not know of each other, one may be done twice, and one that was killed
goes on where it was. Nothing is published and no lease is held. `--finish` is a conversion that
finds these files: it takes the lease, does the units that are missing, and publishes. Each part
leaves a note at the target on the content of its sources, so that `--finish` reads no source again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from mdsmix.conversion.bad_records import delete_stale_files, refuse_too_many_bad
from mdsmix.conversion.budget_share import BudgetShare
from mdsmix.conversion.duplicates import count_repeats, without_duplicates
from mdsmix.conversion.finished_units import (
    DoneWindow,
    UnitResult,
    delete_damaged,
    delete_joined,
    join,
    read_hashes,
)
from mdsmix.conversion.job import with_versions
from mdsmix.conversion.planning import (
    ArrayPart,
    Options,
    StreamPlan,
    Watcher,
    plan_streams,
)
from mdsmix.conversion.publish import publish
from mdsmix.conversion.publish_pretrained import publish_pretrained
from mdsmix.conversion.source_cache import note_part, notes_of_parts
from mdsmix.conversion.target import source_entries
from mdsmix.conversion.work import Work, do_units, publish_bad
from mdsmix.encode.backends import find_known_difference
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.memory import can_measure_memory, choose_memory_cap, count_cpus
from mdsmix.engines.ray_cluster import parse_engine
from mdsmix.engines.tasks import Engine
from mdsmix.errors import MdsmixError, join_errors
from mdsmix.processor.server import SERVER_BYTES, share_server
from mdsmix.recipe import Recipe
from mdsmix.shards.counts import Records
from mdsmix.shards.index import Index
from mdsmix.shards.lease import hold_lease
from mdsmix.shards.manifest import Manifest
from mdsmix.sources.find import drop_empty_files
from mdsmix.sources.stamps import remember_stamps
from mdsmix.storage import map_threads, store_addresses

UNTOLD = (
    "this system does not tell what a process holds (no /proc/PID/smaps_rollup), so --memory is not enforced: "
    "give fewer --workers where memory is short"
)


@dataclass(frozen=True, kw_only=True)
class StreamOutcome:
    """The fields that the result of a run and the result of a part share."""

    stream: str
    target: str
    units: int
    "Of a part: its own units of the plan."
    reused: int
    "Units whose records were there already."
    seconds: float
    peak: int = 0
    """Bytes that the run and its workers held at most; 0 where nothing was done or the system does
    not tell.
    """
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PartOutcome(StreamOutcome):
    """The result of a part in one stream. Nothing of it is published."""

    part: ArrayPart
    units_in_all: int
    tokens: int
    records: Records


@dataclass(frozen=True, kw_only=True)
class Outcome(StreamOutcome):
    """The result of a run for one stream."""

    manifest: Manifest
    bytes: int
    "Bytes of all shards as stored."
    new_tokens: int
    "Tokens of the units that were worked on now."
    is_eval: bool = False
    "Whether the stream is for evaluation, not for training."
    wanted: BudgetShare | None = None
    "The stream's share of a budget, where a sample is taken for it."
    expected_mean: float | None = None
    "The mean tokens of a record that the recipe expects."

    @property
    def done(self) -> int:
        """Units that were worked on now."""
        return self.units - self.reused

    @property
    def state(self) -> str:
        kept = f", {self.reused} reused" if self.reused else ""
        if not self.done:
            return f"up to date{kept}"
        return f"{self.done} of {self.units} work units converted{kept}"


def convert(
    recipe: Recipe, options: Options, watcher: Watcher, engine: Engine | None = None
) -> Iterator[Any]:
    """Converts and publishes every stream that has a source, or those that the options name, one by
    one, and yields their Outcomes; where the options say a part, does its work units in each
    stream, and yields their PartOutcomes.

    What can be refused without reading a source is refused before the first stream is touched. A
    stream that fails ends no other: its error is raised when all have had their turn. `engine`: who
    does the units; None: processes of this machine, as many as the options say. A given engine is
    left open.
    """
    parse_engine(options.engine)  # refused before sources are looked for
    plans, failed = plan_streams(recipe, options, watcher.on_step), list[MdsmixError]()
    for remark in plans[0].job.tokenizer.remarks:
        watcher.say(remark)
    publish_pretrained([plan.job for plan in plans])
    with ExitStack() as ends:
        if any(plan.job.processor for plan in plans):
            ends.enter_context(
                share_server()
            )  # workers ask one process how many tokens images become
        if engine is None:
            engine = ends.enter_context(closing(engine_of(recipe, plans, options, watcher)))
        watcher.expect({plan.job.name: plan.bytes_to_read for plan in plans})
        do = _do_part if options.part else _convert_stream
        for plan in plans:
            try:
                outcome = do(plan, engine, watcher)
            except MdsmixError as error:
                failed.append(error)
            else:
                yield outcome
    if failed:
        raise join_errors(failed)


def _convert_stream(plan: StreamPlan, engine: Engine, watcher: Watcher) -> Outcome:
    """Plan, work, publish. A stream that is up to date costs a look."""
    began, job, old, options = time.monotonic(), plan.job, plan.old, plan.options
    if options.is_finish:
        watcher.on_step(f"{job.name}: {plan.cache.learn_parts(job.folder)}")
    if old and not options.verify_target and plan.is_up_to_date:
        refuse_too_many_bad(job, old.records)
        _remember_files(plan, old)
        return _outcome(plan, old, plan.target.index, (), began)
    with hold_lease(job.folder, watcher.say) as held:
        looked = ""
        if options.verify_target:
            looked = delete_damaged(with_versions(job, old), held, watcher.say)
        watcher.begin(job.name, plan.bytes_to_read)
        work, results, note = do_units(without_duplicates(Work.of(plan, engine, watcher)))
        job = work.job
        windows = [done for result in results for done in result.windows]
        contents = [result.content for result in results]
        entries = source_entries(plan.units, contents)
        stored, joined = join(job.folder, work.stored, windows, job.drops)
        work = replace(work, stored=stored)
        quarantined = publish_bad(work, results)
        if plan.target.quarantined and not (plan.target.manifest or plan.target.damage):
            delete_stale_files(job.folder, quarantined, held)  # of a run that was refused
        records = [done.record for done in windows]
        manifest, index = publish(job, records, entries, held, _repeats(work, windows))
        if plan.target.folders:  # else the quarantine holds what this run has put there
            delete_stale_files(job.folder, quarantined, held)
        delete_joined(job.folder, joined, held)
        if options.is_finish:
            held.confirm()
            map_threads(lambda note: note.delete(), notes_of_parts(job.folder))
        if not job.limit:
            plan.cache.save(dict(zip(plan.units, contents, strict=True)), job.folder)
            _remember_files(plan, manifest)
    notes = tuple(filter(None, [plan.lost, looked, note]))
    plan = replace(plan, job=job)
    return _outcome(plan, manifest, index, windows, began, notes, engine.peak)


def _remember_files(plan: StreamPlan, manifest: Manifest) -> None:
    """Keep on this machine which files the stream is made of, for `mdsmix check`."""
    remember_stamps(plan.job.target, manifest.index_hash, drop_empty_files(plan.files))


def _do_part(plan: StreamPlan, engine: Engine, watcher: Watcher) -> PartOutcome:
    """Does the units of the part, and leaves a note of what their sources hold. Which records are
    dropped as duplicates follows from all units: each part reads those that no other has read.
    Whether too many are bad follows from all too: that is judged when the stream is published.
    """
    began, job, part = time.monotonic(), plan.job, plan.options.part
    assert part, "else all of it is converted"
    units, results, note = plan.units[part.own], list[UnitResult](), ""
    if units:
        work = without_duplicates(Work.of(plan, engine, watcher))
        watcher.begin(job.name, plan.bytes_to_read)
        judged, dropped = replace(work.job, max_bad=Fraction(1)), work.dropped[part.own]
        _, results, note = do_units(replace(work, job=judged, units=units, dropped=dropped))
        contents = (result.content for result in results)
        note_part(
            job.folder, f"{part.number}-of-{part.of}", dict(zip(units, contents, strict=True))
        )
    return PartOutcome(
        stream=job.name,
        target=job.target,
        part=part,
        units=len(units),
        units_in_all=len(plan.units),
        reused=sum(len(result.reused) for result in results),
        tokens=sum(record.totals.seen_tokens for result in results for record in result.records),
        records=sum((result.total for result in results), Records()),
        seconds=time.monotonic() - began,
        peak=engine.peak,
        notes=tuple(filter(None, [note])),
    )


def _repeats(work: Work, windows: Sequence[DoneWindow]) -> Records:
    """Count the written records that equal an earlier written record of the stream, which no unit
    knows for itself. None if the stream drops duplicates.
    """
    if work.job.drops:
        return Records()
    stored = work.stored
    wanted = [
        (done.base, stored.hashes_of(done.base) or stored.file_of(done.record.key, done.window))
        for done in windows
    ]
    windows_hashes = read_hashes(work.job.folder, wanted)
    written = (
        done.record.hashes_of_written(hashes)
        for done, hashes in zip(windows, windows_hashes, strict=True)
    )
    return Records(duplicates=count_repeats(written))


def _outcome(
    plan: StreamPlan,
    manifest: Manifest,
    index: Index | None,
    windows: Sequence[DoneWindow],
    began: float,
    notes: tuple[str, ...] = (),
    peak: int = 0,
) -> Outcome:
    job = plan.job
    if job.backend == "auto" and (unequal := find_known_difference(job.tokenizer)):
        notes = (f"{unequal}, as was found before; so the reference encodes", *notes)
    notes = (*notes, *map(str, job.kind.end_notes(job.tokenizer)))
    if job.is_versioned:
        notes = (f"published as {job.place(manifest.index_hash)}", *notes)
    return Outcome(
        stream=job.name,
        target=job.target,
        manifest=manifest,
        bytes=index.bytes if index else 0,
        units=len(windows),
        reused=sum(not done.is_new for done in windows),
        new_tokens=sum(done.record.totals.tokens for done in windows if done.is_new),
        seconds=time.monotonic() - began,
        is_eval=job.is_eval,
        wanted=plan.wanted,
        expected_mean=plan.expected_mean,
        notes=notes,
        peak=peak,
    )


def engine_of(
    recipe: Recipe, plans: Sequence[StreamPlan], options: Options, watcher: Watcher
) -> Engine:
    """Who does the work units of a run: a Ray cluster, or processes of this machine: one for each
    CPU, and one more where a store is used, so that one loads or uploads while the others tokenize.
    """
    pool = PoolSettings(
        workers=options.workers or 0,
        memory=options.memory or 0,
        aside=SERVER_BYTES if any(plan.job.processor for plan in plans) else 0,
        set_aside=options.quarantine_crashes,
    )
    places = {at for plan in plans for at in (plan.job.root, plan.job.images_root) if at}
    places |= {file.location.parent for plan in plans for file in plan.files}
    address = parse_engine(options.engine)
    if address is not None:
        from mdsmix.engines.ray_engine import RayEngine

        local = sorted(at.url for at in places if not at.is_store)
        return RayEngine(address, pool, store_addresses(), [] if recipe.shared else local)
    if not can_measure_memory():
        watcher.say(UNTOLD)
    return LocalEngine(
        replace(
            pool,
            workers=pool.workers or count_cpus() + any(at.is_store for at in places),
            memory=pool.memory or choose_memory_cap(),
        )
    )

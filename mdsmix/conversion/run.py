"""Converts the streams of a recipe one after the other: plans, converts the unfinished work units
(parts of the source), and publishes.

A second run reads no source: it looks up sizes and times of the files, and compares keys. Streams
are converted one after the other, so that each is published as soon as possible, and a failure of
one stream leaves the finished ones published.

An array of jobs (Slurm, Kubernetes, make -j) can share one conversion: each job converts a part of
the units, and a last job publishes them. A part has every n-th unit of the plan, so parts are of
equal size. Like any run, a part first writes shards and unit records, which are named by their
content. So parts need not know of each other, a part may be done twice, and a killed part
continues. A part publishes nothing and takes no lease. `--finish` is a conversion that finds the
files of the parts: it takes the lease, converts the missing units, and publishes. Each part leaves
a note at the target on the content of its sources, so that `--finish` reads no source again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from importlib import import_module
from typing import TypeVar

from mdsmix.conversion.bad_records import delete_stale_files, refuse_too_many_bad
from mdsmix.conversion.duplicates import count_repeats, find_dropped
from mdsmix.conversion.finished_units import (
    DoneWindow,
    UnitResult,
    delete_damaged,
    delete_joined,
    join_unit_files,
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
from mdsmix.conversion.source_cache import (
    describe_finished_parts,
    list_part_notes,
    write_part_note,
)
from mdsmix.conversion.target import make_source_entries
from mdsmix.conversion.unit_files import BlobRef
from mdsmix.conversion.work import Work, do_units, publish_bad
from mdsmix.encode.backends import find_known_difference
from mdsmix.encode.fast_model import OpeningWhileDescribed, begin_opening, forget_openings
from mdsmix.engines.tasks import Engine
from mdsmix.errors import MdsmixError, join_errors
from mdsmix.estimate.budget_share import BudgetShare
from mdsmix.frozen import frozen
from mdsmix.messages import plural
from mdsmix.processor.server import SERVER_BYTES, list_server_pids, share_server
from mdsmix.recipe import Recipe
from mdsmix.shards.counts import Records
from mdsmix.shards.index import Index
from mdsmix.shards.lease import LEASE_PATH, Lease, hold_lease
from mdsmix.shards.manifest import Manifest
from mdsmix.sources.find import drop_empty_files
from mdsmix.sources.stamps import remember_stamps
from mdsmix.storage import Location, map_threads, store_addresses

NO_MEMORY_LIMIT = (
    "this system has no /proc/PID/smaps_rollup, so the memory of a process cannot be measured and "
    "--memory is not enforced; set fewer --workers if memory is short"
)
OutcomeT = TypeVar("OutcomeT")


@frozen(kw_only=True)
class StreamOutcome:
    """The result of a run for one stream: the fields that `Outcome` (a whole stream) and
    `PartOutcome` (one `--part` of a stream) share.
    """

    stream: str
    target: str
    units: int
    """Windows (slices of work units) of the stream; the user sees each as a work unit. For a part:
    its own units of the plan.
    """
    reused: int
    "Windows that were converted before this run."
    seconds: float
    "How long the run took for this stream."
    peak: int = 0
    """The most bytes of memory that the run and its workers used; 0 if nothing was converted, or
    the system does not report it.
    """
    notes: tuple[str, ...] = ()
    "Sentences for the user."


@frozen(kw_only=True)
class PartOutcome(StreamOutcome):
    """The result of `--part 3/64` for one stream: some of its work units are converted. Nothing is
    published.
    """

    part: ArrayPart
    units_in_all: int
    "Units of the whole stream."
    tokens: int
    "Tokens of the part's units, converted by this run or earlier."
    records: Records
    "Counts of the records of the part's units."


@frozen(kw_only=True)
class Outcome(StreamOutcome):
    """The result of a run for one stream."""

    manifest: Manifest
    bytes: int
    "Bytes of all shards as stored."
    new_tokens: int
    "Tokens of the units that this run converted."
    is_eval: bool = False
    "Whether the stream is for evaluation, not for training."
    budget_share: BudgetShare | None = None
    "The stream's share of a budget, if it is sampled for one."
    expected_mean: float | None = None
    "The mean tokens of a record that the recipe expects."

    @property
    def done(self) -> int:
        """The number of units that this run converted."""
        return self.units - self.reused

    @property
    def state(self) -> str:
        """What the run did: `up to date` if it published nothing, `published, 3 of 3 work
        units reused`, or `2 of 5 work units converted, 3 reused`.
        """
        if not self.units:
            return "up to date"
        if not self.done:
            return f"published, {self.reused} of {self.units} work units reused"
        reused = f", {self.reused} reused" if self.reused else ""
        return f"{self.done} of {self.units} work units converted{reused}"


def convert(
    recipe: Recipe, options: Options, watcher: Watcher, engine: Engine | None = None
) -> Generator[Outcome, None, None]:
    """Convert and publish every stream that has a source, or the streams that the options name, and
    yield an Outcome for each.

    Errors that can be found without reading a source are raised before the first stream is
    converted. If converting a stream fails, the other streams are still converted, and the error is
    raised after the last stream.

    Args:
        recipe: the recipe with the streams.
        options: the options of the run.
        watcher: receives the events of the conversion.
        engine: converts the units; it is not closed here. None: start the engine that the options
            choose, and close it at the end.
    """
    assert options.part is None, "a part is converted by `convert_part`"
    return _run_streams(recipe, options, watcher, engine, _convert_stream)


def convert_part(
    recipe: Recipe, options: Options, watcher: Watcher, engine: Engine | None = None
) -> Generator[PartOutcome, None, None]:
    """Convert some work units of each stream (`--part 3/64`: each 64th unit, from the third on),
    and yield a PartOutcome for each stream. Nothing is published. Streams are chosen and errors are
    raised as in `convert`.

    Args:
        recipe: the recipe with the streams.
        options: the options of the run; `options.part` names the part.
        watcher: receives the events of the conversion.
        engine: as in `convert`.
    """
    assert options.part is not None, "all of a stream is converted by `convert`"
    return _run_streams(recipe, options, watcher, engine, _convert_part_of_stream)


def _run_streams(
    recipe: Recipe,
    options: Options,
    watcher: Watcher,
    engine: Engine | None,
    run_stream: Callable[[StreamPlan, Callable[[], Engine], Watcher, bool], OutcomeT],
) -> Generator[OutcomeT, None, None]:
    """Plan all streams, and yield the outcome of `run_stream` for each.

    Args:
        recipe: the recipe with the streams.
        options: the options of the run.
        watcher: receives the events of the conversion.
        engine: as in `convert`.
        run_stream: converts one planned stream, or a part of it. Its last argument tells whether it
            may end the workers when it needs them no more.
    """
    # Plan. This refuses everything that can be refused without reading a source.
    if options.engine != "local":
        from mdsmix.engines.ray_cluster import parse_engine

        parse_engine(options.engine)
    # No name refers to the opener after the plan: it has a model, which may not be used.
    plans = plan_streams(
        recipe, options, watcher.on_step, OpeningWhileDescribed(recipe.tokenizer.backend)
    )
    for remark in plans[0].job.tokenizer.remarks:
        watcher.say(remark)
    errors = list[MdsmixError]()
    with ExitStack() as cleanup:
        # A stream that is not published has work. While the run prepares, open its tokenizer, and
        # import the engine.
        cleanup.callback(forget_openings)
        importing = threading.Thread(target=_import_engine, name="mdsmix imports", daemon=True)
        for plan in plans:
            if plan.old is None and not options.is_finish:
                begin_opening(plan.job.tokenizer, plan.job.backend)
                if engine is None and options.engine == "local" and not importing.ident:
                    # Also after an error: a program may then fork processes itself.
                    cleanup.callback(_wait_for, importing)
                    importing.start()
        _prepare_target(plans, options)
        # Start the one process that counts images' tokens for all workers.
        if any(plan.job.processor for plan in plans):
            cleanup.enter_context(share_server())

        @cache
        def get_engine() -> Engine:
            """Start the engine at the first stream that needs it: if all streams are up to date,
            not importing it saves 12 ms.
            """
            if engine is not None:
                return engine
            _wait_for(importing)  # a process that is forked meanwhile would wait for its locks
            new_engine = make_engine(recipe, plans, options, watcher)
            # Twice, since Ctrl-C may come before the first line of the first call is done.
            for _ in range(2):
                cleanup.callback(new_engine.close)
            return new_engine

        # Run stream after stream.
        watcher.expect({plan.job.name: plan.bytes_to_read for plan in plans})
        for plan in plans:
            try:
                ends_workers = engine is None and plan is plans[-1]
                outcome = run_stream(plan, get_engine, watcher, ends_workers)
            except MdsmixError as error:
                errors.append(error)
            else:
                yield outcome
    if errors:
        raise join_errors(errors)


def _import_engine() -> None:
    """Import the engine of this machine, with NumPy, and the library of the reference tokenizer.

    This takes 60 ms. A thread does it while the run waits: it publishes the tokenizer and takes the
    lease, which is 8 files to flush to a disk or 8 requests to a store, one after the other.
    """
    with suppress(Exception):  # it is raised again where the module is needed
        import_module("mdsmix.engines.local_engine")
        import_module("tokenizers")


def _wait_for(thread: threading.Thread) -> None:
    """Wait until this thread has ended. It need not have begun, as after a Ctrl-C."""
    if thread.is_alive():
        thread.join()


def _prepare_target(plans: Sequence[StreamPlan], options: Options) -> None:
    """Publish the tokenizer and the processor of the streams. Meanwhile try whether the store
    respects the conditions of writes, if a stream is new there: its lease will need the result.
    Each of both waits for several requests, one after the other.
    """
    steps: list[Callable[[], object]] = [
        partial(publish_pretrained, [plan.job for plan in plans]),
    ]
    new_folders = [plan.job.folder for plan in plans if plan.old is None]
    if options.part is None and new_folders and new_folders[0].is_store:
        steps.append((new_folders[0] / LEASE_PATH).try_conditions)
    map_threads(lambda step: step(), steps)


def _convert_stream(
    plan: StreamPlan, get_engine: Callable[[], Engine], watcher: Watcher, ends_workers: bool
) -> Outcome:
    """Convert a stream and publish it. If the stream is up to date, only its target is read.

    Args:
        plan: the plan of the stream.
        get_engine: returns the engine that converts its work units.
        watcher: receives the events of the conversion.
        ends_workers: whether the workers end while the stream is published.
    """
    began = time.monotonic()
    job = plan.job
    old = plan.old
    options = plan.options
    # Stop here if the published stream is up to date.
    if options.is_finish:
        finished_parts = plan.cache.learn_parts(job.folder)
        watcher.on_step(f"{job.name}: {describe_finished_parts(finished_parts)}")
    if old and not options.verify_target and plan.is_up_to_date:
        refuse_too_many_bad(job, old.records)
        _remember_files(plan, old)
        return _make_outcome(plan, old, plan.target.index, (), began)
    with hold_lease(job.folder, watcher.say) as held_lease:
        # Convert the units that are not finished.
        damage_note = ""
        if options.verify_target:
            damage_note = delete_damaged(with_versions(job, old), held_lease, watcher.say)
        watcher.begin(job.name, plan.bytes_to_read)
        engine = get_engine()
        work = find_dropped(Work.prepare(plan, engine, watcher))
        work, results, backend_note = do_units(work)
        if ends_workers:
            engine.begin_close()
        windows = list[DoneWindow]()
        for result in results:
            windows += result.windows
        manifest, index = _publish_stream(plan, work, results, windows, held_lease)
    fewer_note = _describe_fewer_records(manifest, old) if old and not job.limit else ""
    notes = [note for note in (damage_note, backend_note, fewer_note) if note]
    plan = replace(plan, job=work.job)
    return _make_outcome(plan, manifest, index, windows, began, notes, engine.peak)


def _describe_fewer_records(manifest: Manifest, old: Manifest) -> str:
    """Return a note if a stream now has fewer records of its source than when it was published
    before; otherwise an empty string.
    """
    fewer = old.records.read - manifest.records.read
    if fewer <= 0:
        return ""
    return (
        f"{plural(fewer, 'record')} fewer read than when the stream was published before: "
        f"{manifest.records.read:,}, which were {old.records.read:,}"
    )


def _publish_stream(
    plan: StreamPlan,
    work: Work,
    results: Sequence[UnitResult],
    windows: Sequence[DoneWindow],
    held_lease: Lease,
) -> tuple[Manifest, Index]:
    """Publish a stream whose units are converted, and delete what is not needed any more. Return
    the manifest and the index.

    Args:
        plan: the plan of the stream.
        work: its work; the job may differ from the plan's if the backend was changed.
        results: the result of each unit, in the order of the plan.
        windows: the windows (slices of the source) of all units, with their records.
        held_lease: this run's lease (a write lock) on the stream.
    """
    job = work.job
    # Join the unit files into segments, which the next run reads faster.
    joined = join_unit_files(job.folder, work.stored, windows, job.drops)
    work = replace(work, stored=joined.stored)
    # Publish the bad records. Without a manifest, an earlier run that did not publish has left the
    # bad records that are there: delete these.
    quarantined = publish_bad(work, results)
    if plan.target.quarantined and not (plan.target.manifest or plan.target.damage):
        delete_stale_files(job.folder, quarantined, held_lease)
    # Publish the stream.
    contents = [result.content for result in results]
    manifest, index = publish(
        job,
        [window.record for window in windows],
        make_source_entries(plan.units, contents),
        held_lease,
        _count_repeats(work, windows),
    )
    # Delete the files that are not needed any more: bad records that were fixed (an empty target
    # had none), unit files that were joined, and the notes of an array's parts.
    if plan.target.folders:
        delete_stale_files(job.folder, quarantined, held_lease)
    delete_joined(job.folder, joined.obsolete, held_lease)
    if plan.options.is_finish:
        held_lease.confirm()
        map_threads(lambda note: note.delete(), list_part_notes(job.folder))
    # Remember the sources on this machine.
    if not job.limit:
        plan.cache.save(dict(zip(plan.units, contents, strict=True)), job.folder)
        _remember_files(plan, manifest)
    return manifest, index


def _remember_files(plan: StreamPlan, manifest: Manifest) -> None:
    """Store on this machine from which files the stream was made, for `mdsmix check`."""
    remember_stamps(plan.job.target, manifest.index_hash, drop_empty_files(plan.files))


def _convert_part_of_stream(
    plan: StreamPlan, get_engine: Callable[[], Engine], watcher: Watcher, ends_workers: bool
) -> PartOutcome:
    """Convert the work units of one part of an array (`--part 3/64`). Store a note at the target
    with the hashes of their sources, so that the run that publishes (`--finish`) does not read them
    again.

    Which records are dropped as duplicates depends on all units of the stream. So each part also
    reads units of other parts, except those whose fingerprints another part has stored already.
    Whether too many records are bad depends on all units too, so `--finish` decides this.

    Args:
        plan: the plan of the stream; its options name the part.
        get_engine: returns the engine that converts the units.
        watcher: receives the events of the conversion.
        ends_workers: whether the workers end while the part's note is written.
    """
    began = time.monotonic()
    job = plan.job
    part = plan.options.part
    assert part, "convert_part has checked it"
    units = plan.units[part.units]
    results = list[UnitResult]()
    note = ""
    peak = 0
    # Convert the part's units.
    if units:
        engine = get_engine()
        work = find_dropped(Work.prepare(plan, engine, watcher))
        watcher.begin(job.name, plan.bytes_to_read)
        work_of_part = replace(
            work,
            job=replace(work.job, max_bad=Fraction(1)),  # bad records never end a part
            units=units,
            dropped=work.dropped[part.units],
        )
        _, results, note = do_units(work_of_part)
        if ends_workers:
            engine.begin_close()
        peak = engine.peak
        # Leave the note.
        contents = [result.content for result in results]
        write_part_note(
            job.folder, f"{part.number}-of-{part.count}", dict(zip(units, contents, strict=True))
        )
    # Add up the counts.
    tokens = 0
    for result in results:
        tokens += sum(record.totals.seen_tokens for record in result.records)
    return PartOutcome(
        stream=job.name,
        target=job.target,
        part=part,
        units=len(units),
        units_in_all=len(plan.units),
        reused=sum(len(result.reused) for result in results),
        tokens=tokens,
        records=sum((result.total for result in results), Records()),
        seconds=time.monotonic() - began,
        peak=peak,
        notes=(*plan.warnings, note) if note else plan.warnings,
    )


def _count_repeats(work: Work, windows: Sequence[DoneWindow]) -> Records:
    """Count the written records of a stream that equal an earlier written record. This is not known
    before all units are converted, since the earlier record may be in another unit.

    If the stream drops duplicates, the count is zero.

    Args:
        work: the converted stream.
        windows: all its windows (slices of units), in the order of the plan.
    """
    if work.job.drops:
        return Records()
    refs = list[BlobRef]()
    for done in windows:
        # Fingerprints are in a file of their own or a segment; otherwise in the window's unit file.
        file = work.stored.find_hashes_file(done.base)
        if not file:
            file = work.stored.find_file(done.record.key, done.window)
        refs.append(BlobRef(done.base, file))
    hashes_of_windows = read_hashes(work.job.folder, refs)
    written = (
        done.record.select_written_hashes(hashes)
        for done, hashes in zip(windows, hashes_of_windows, strict=True)
    )
    return Records(duplicates=count_repeats(written))


def _make_outcome(
    plan: StreamPlan,
    manifest: Manifest,
    index: Index | None,
    windows: Sequence[DoneWindow],
    began: float,
    notes: Sequence[str] = (),
    peak: int = 0,
) -> Outcome:
    """Return the result of a run for one stream.

    Args:
        plan: the plan of the stream.
        manifest: the manifest of the published stream.
        index: the published index; None, as in `TargetState`, counts as 0 bytes.
        windows: all windows of the stream, converted by this run or earlier. The list is empty if
            the stream was up to date.
        began: when the stream began, by `time.monotonic()`.
        notes: sentences for the user, in addition to those that are made here.
        peak: the most bytes of memory that the run has used; 0 if unknown.
    """
    job = plan.job
    all_notes = [*plan.warnings, *notes]
    unequal = find_known_difference(job.tokenizer) if job.backend == "auto" else None
    if unequal:
        all_notes.insert(0, f"{unequal}, as an earlier run found; so the reference encodes")
    all_notes += map(str, job.kind.end_notes(job.tokenizer))
    if job.is_versioned:
        all_notes.insert(0, f"published as {job.place(manifest.index_hash)}")
    new_windows = [done for done in windows if done.is_new]
    return Outcome(
        stream=job.name,
        target=job.target,
        manifest=manifest,
        bytes=index.bytes if index else 0,
        units=len(windows),
        reused=len(windows) - len(new_windows),
        new_tokens=sum(done.record.totals.tokens for done in new_windows),
        seconds=time.monotonic() - began,
        is_eval=job.is_eval,
        budget_share=plan.budget_share,
        expected_mean=plan.expected_mean,
        notes=tuple(all_notes),
        peak=peak,
    )


def make_engine(
    recipe: Recipe, plans: Sequence[StreamPlan], options: Options, watcher: Watcher
) -> Engine:
    """Return the engine of a run: a Ray cluster, or processes of this machine.

    The options give the number of processes. By default it is the number of CPUs, plus one if a
    store on another machine is used: one process can then wait for the store while the others
    tokenize. A store on this machine needs the CPUs itself: with a MinIO, one process more took 3 %
    more CPU time for 500 MB, and 7.2 instead of 6.7 s.

    Args:
        recipe: the recipe of the run.
        plans: the plans of its streams.
        options: the options, which choose the engine.
        watcher: receives a sentence if this system does not show the memory of processes.
    """
    from mdsmix.engines.local_engine import LocalEngine, PoolSettings, SideProcess
    from mdsmix.engines.memory import can_measure_memory, choose_memory_cap, count_cpus
    from mdsmix.engines.ray_cluster import parse_engine

    # Collect the settings of the engine, and the folders that its workers read and write.
    image_counter = None
    if any(plan.job.processor for plan in plans):
        image_counter = SideProcess(memory=SERVER_BYTES, start=share_server, pids=list_server_pids)
    pool = PoolSettings(
        workers=options.workers or 0,
        memory=options.memory or 0,
        side=image_counter,
        set_aside=options.quarantine_crashes,
    )
    folders = set[Location]()
    for plan in plans:
        folders.add(plan.job.root)
        if plan.job.images_root:
            folders.add(plan.job.images_root)
        folders.update(file.location.parent for file in plan.files)
    # Make a Ray engine.
    address = parse_engine(options.engine)
    if address is not None:
        from mdsmix.engines.ray_engine import RayEngine

        local = sorted(folder.url for folder in folders if not folder.is_store)
        return RayEngine(address, pool, store_addresses(), [] if recipe.shared else local)
    # Make an engine of this machine.
    if not can_measure_memory():
        watcher.say(NO_MEMORY_LIMIT)
    workers = pool.workers
    if not workers:
        workers = count_cpus()
        if not all(folder.is_on_this_machine for folder in folders):
            workers += 1
    return LocalEngine(replace(pool, workers=workers, memory=pool.memory or choose_memory_cap()))

"""Plans a run: what is to be done for each stream of a recipe, and whether what is published is up
to date.

Nothing is written here. Sources are found and stat-ed, not read. A dry run tells what a conversion
would do, and why.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

from mdsmix import sources
from mdsmix.conversion.bad_records import stale_files
from mdsmix.conversion.budget_share import BudgetShare, sampled
from mdsmix.conversion.finished_units import StoredUnits, list_stored
from mdsmix.conversion.job import (
    Dropped,
    Job,
    bad_name,
    make_job,
    on_day,
    window_key,
    with_versions,
)
from mdsmix.conversion.publish import is_published
from mdsmix.conversion.source_cache import KnownSources, forget_changed, known_dropped
from mdsmix.conversion.target import (
    TargetState,
    published_manifest,
    refuse_replacing,
    state_of,
    told_of_lost,
    why_rebuilt,
)
from mdsmix.conversion.unit_files import FOLDER
from mdsmix.encode.backends import find_known_difference
from mdsmix.errors import RecipeError
from mdsmix.kinds.encodings import shape_of
from mdsmix.kinds.recipe_changes import SAMPLE, encoding_changes, source_changes
from mdsmix.kinds.rules import raised_extras, rule_changes
from mdsmix.messages import Say, join_names
from mdsmix.processor.card import open_processor
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.verification import ReadingWatcher
from mdsmix.sources import Unit
from mdsmix.sources.formats import format_of, list_raised_versions
from mdsmix.storage import map_threads
from mdsmix.tokenizer.card import open_tokenizer
from mdsmix.tokenizer.published import PublishedTokenizer, adopt_hash


class Watcher(ReadingWatcher, Protocol):
    """Receives the events of a conversion; `report.progress` shows them."""

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Streams are about to be converted, in this order, each from so many source bytes."""

    def on_bad(self, records: int) -> None:
        """So many more records were quarantined, now or by an earlier run, in units that
        are done.
        """

    def on_step(self, sentence: str) -> None:
        """Something begins that takes a while, as it should: no news to a user who asked
        for quiet.
        """


@dataclass(frozen=True)
class ArrayPart:
    """The `number`-th part, from 1, of `of` parts."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def own(self) -> slice:
        """The slice of the plan's units that are the part's own: every `of`-th."""
        return slice(self.number - 1, None, self.of)


def part_of(text: str) -> ArrayPart:
    """Parses a text such as `3/64`; RecipeError where it is no part of a whole."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    part = ArrayPart(int(found[1]), int(found[2])) if found else ArrayPart(0, 0)
    if not 1 <= part.number <= part.of:
        raise RecipeError(
            f"--part {shlex.quote(text)} is no part: write which one and of how many, from 1/64 to 64/64; an array that counts from 0 adds 1."
        )
    return part


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run; no published byte of a whole stream depends on them."""

    only: Sequence[str] = ()
    "Streams to convert; none named: all."
    limit: int | None = None
    "Only so many first records of each stream, into a folder of their own."
    reencode: bool = False
    "Published streams of other columns or other sources may be replaced."
    workers: int | None = None
    memory: int | None = None
    """Bytes that the run and its workers may hold; None: half of what the machine or its control
    group has.
    """
    quarantine_crashes: bool = False
    "Records that workers die of are set aside; else the first one ends the run."
    verify_source: bool = False
    "Sources are read again even where size and stamp are as they were."
    verify_target: bool = False
    "Shards that are there are read and hashed before they are reused; damaged ones are made anew."
    part: ArrayPart | None = None
    "Only the work units of one job of an array are done, and nothing is published."
    is_finish: bool = False
    "Parts of the work were done by other jobs: what their notes at the target say is taken in."
    engine: str = "local"
    "Who does the units: `local`, `ray` or `ray://ADDRESS`."


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """The plan of a stream: built once, for a run, a part, a dry run and a repair. Workers need no
    more of it than the job.
    """

    job: Job
    "The job, with the day that the published stream's chat template printed."
    files: list[sources.SourceFile]
    "The files of its source."
    options: Options
    target: TargetState
    "The look at its target."
    old: Manifest | None
    "The manifest of the published stream, where a run can go on from it."
    wanted: BudgetShare | None
    "Its share of a budget, where a sample is taken for it."
    expected_mean: float | None
    "Tokens that a record is said to hold on average; what comes is held against it."
    lost: str
    "A warning where files that were published are no longer among its sources."

    @property
    def bytes_to_read(self) -> int:
        """Source bytes that this run reads. Where duplicates are dropped, sources are read
        twice.
        """
        size = sources.estimate_size(self.files) * (2 if self.job.drops else 1)
        return size // self.options.part.of if self.options.part else size

    @cached_property
    def units(self) -> list[Unit]:
        return self.job.units_of(self.files)

    @cached_property
    def cache(self) -> KnownSources:
        """The known content of the sources, from this machine and from beside the stream; empty
        where they are to be read again.
        """
        if self.options.verify_source:
            return KnownSources.at(self.job.target)
        known = KnownSources.of(self.job.target)
        if FOLDER in self.target.folders:
            known.learn_objects(self.job.folder, self.units)
        forget_changed(self.job, known)
        return known

    @property
    def is_up_to_date(self) -> bool:
        """Whether each unit's content is known by its stamp, and just these parts and bad records
        are published.
        """
        known = self.cache.contents(self.units)
        if self.old is None or not known or len(known) < len(self.units):
            return False
        dropped = known_dropped(self.job, known, self.cache)
        if dropped is None:
            return False
        windows = [
            (window, window_key(self.job, window, gone.get(window.number, b"")))
            for content, gone in zip(known, dropped, strict=True)
            for window in content.windows
        ]
        if not is_published(self.job, self.old, self.target, [key for _, key in windows]):
            return False
        names = {bad_name(key, window) for window, key in windows}
        return not stale_files(self.target.quarantined, names)


def plan_streams(recipe: Recipe, options: Options, say: Say | None = None) -> list[StreamPlan]:
    """The chosen streams, in the order of the recipe; RecipeError where one of them may not be
    published so.
    """
    streams = _chosen(recipe, options.only)
    tokenizer = open_tokenizer(recipe.tokenizer, say)
    if recipe.processor and any(stream.has_images for stream in streams):
        open_processor(recipe.processor, say)
    jobs = [make_job(recipe, stream, tokenizer, options.limit) for stream in streams]
    of_each = [stream.source for stream in streams if stream.source]
    found = [sources.find_files(of.path, recipe.folder, sources.ReadAs.of(of)) for of in of_each]
    sizes = [sampled(recipe, *each) for each in zip(streams, jobs, found, strict=True)]
    targets = map_threads(state_of, [job for job, _ in sizes])
    olds = [
        published_manifest(job, target, options.reencode)
        for (job, _), target in zip(sizes, targets, strict=True)
    ]
    published = [
        [PublishedTokenizer(old.tokenizer, job.root)] if old else []
        for (job, _), old in zip(sizes, olds, strict=True)
    ]
    of_new_streams = adopt_hash(tokenizer, chain(*published))
    plans = list[StreamPlan]()
    for stream, files, (job, wanted), target, old, own in zip(
        streams, found, sizes, targets, olds, published, strict=True
    ):
        job = replace(job, tokenizer=adopt_hash(tokenizer, own) if own else of_new_streams)
        unequal = find_known_difference(job.tokenizer)
        refuse_replacing(job, old, files, options.reencode)
        job = on_day(job, old.encoding.date_string if old else None)
        if old:
            rules = job.encoding.rules | raised_extras(old, shape_of(job.encoding))
            job = replace(job, encoding=replace(job.encoding, rules=rules))
        plan = StreamPlan(
            job=replace(
                job,
                unequal=unequal.label if unequal else "",
                formats=list_raised_versions(map(format_of, files)),
                source=_source_keys(job, old),
            ),
            files=files,
            options=options,
            target=target,
            old=old,
            wanted=wanted,
            expected_mean=stream.expected_mean_tokens,
            lost=told_of_lost(job, old, files, options.reencode),
        )
        plans.append(plan)
    return plans


def _source_keys(job: Job, old: Manifest | None) -> dict[str, Any]:
    """Return the job's source as its manifest is to have it. A sample that a budget decided stays
    one when the recipe gives the same share as a number, for a repair.
    """
    keys = dict(job.source)
    if old and SAMPLE in old.source and old.encoding.sample == job.encoding.sample:
        keys[SAMPLE] = old.source[SAMPLE]
    return keys


def _chosen(recipe: Recipe, only: Sequence[str]) -> list[StreamSpec]:
    names = [stream.name for stream in recipe.sourced]
    for name in only:
        if name not in names:
            raise RecipeError(
                f"--only {name} names no stream with a source; these have one: {', '.join(names) or 'none'}."
            )
    if not names:
        raise RecipeError("no stream of the recipe has a source, so there is nothing to convert.")
    wanted = set(only or names)
    return [s for s in recipe.sourced if wanted & {s.name, s.held_out_of}]


def describe(recipe: Recipe, options: Options) -> Iterator[str]:
    """Yield what a run would do, in sentences: about the tokenizer, then about each stream."""
    plans = plan_streams(recipe, options)
    yield from plans[0].job.tokenizer.remarks
    for plan in plans:
        yield from _of_stream(plan)


def _of_stream(plan: StreamPlan) -> Iterator[str]:
    job, old, units = plan.job, plan.old, plan.units
    if job.limit:  # only reading tells which units hold them
        yield f"{job.name}: the first {job.limit} records would be converted, where that is not done, into {job.target}"
        return
    if plan.options.is_finish:
        yield f"{job.name}: {plan.cache.learn_parts(job.folder)}"
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
        yield f"  units of which something is new, edited or not whole at the target: those of {join_names(names, 5)}"
    if plan.lost:
        yield f"  {plan.lost}"
    if not todo and not is_done:
        yield f"  what is finished would be published: it is not, or not all, at {job.place(old.index_hash)}"


def _undone(plan: StreamPlan, dropped: Iterable[Dropped]) -> list[Unit]:
    """The units that a run would go through, as far as is known. `dropped`: of each unit whose
    content is known, in their order.
    """
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
    takes_tools = job.kind.has_template and job.may_have_tools
    for_tools = now.tool_template_hash if takes_tools else was.tool_template_hash
    trusted = all(map(job.trusts, old.backend.split(" + ")))
    pairs = {
        "the tokenizer": (was.hash[:8], now.hash[:8]),
        "the chat template": (was.chat_template_hash, template),
        "the chat template tool_use": (was.tool_template_hash, for_tools),
        "the tokenizer's backend": (old.backend, old.backend if trusted else "the reference"),
    }
    changes = [f"{what} was {of} and is {to}" for what, (of, to) in pairs.items() if of != to]
    changes += map(str, encoding_changes(old.encoding, job.encoding))
    changes += map(str, source_changes(old.source, job.source))
    return changes + [f"the rule {change}" for change in rule_changes(old.rules, job.rules)]

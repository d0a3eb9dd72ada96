"""Plans a run: what is to be done for each stream of a recipe, and whether what is published is up to date.

Nothing is written here. Sources are found and stat-ed, not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from mdsmix import sources
from mdsmix.convert.bad_records import stale_files
from mdsmix.convert.budget_share import BudgetShare, refuse_empty, sampled
from mdsmix.convert.guard import (
    TargetState,
    published_manifest,
    refuse_replacing,
    state_of,
)
from mdsmix.convert.job import Job, bad_name, make_job, on_day, window_key
from mdsmix.convert.known_sources import KnownSources, forget_changed, known_dropped
from mdsmix.convert.ledger import FOLDER
from mdsmix.convert.publish import is_published
from mdsmix.encode.backends import known_unequal
from mdsmix.encode.pretrained import open_processor, open_tokenizer
from mdsmix.errors import RecipeError
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import Unit
from mdsmix.storage import together


class Watcher(Protocol):
    """Receives the events of a conversion; `report.progress` shows them."""

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Streams are about to be converted, in this order, each from so many source bytes."""

    def begin(self, stream: str, size: int) -> None:
        """A stream of `size` stored source bytes is being converted."""

    def on_progress(self, size: int, tokens: int) -> None:
        """So many more source bytes were read and tokens made of them."""

    def on_bad(self, records: int) -> None:
        """So many more records were quarantined, now or by an earlier run, in units that are done."""

    def on_step(self, sentence: str) -> None:
        """Something begins that takes a while, as it should: no news to a user who asked for quiet."""

    def say(self, sentence: str) -> None:
        """Something that the user should know now."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    "Bytes that the run and its workers may hold; None: half of what the machine or its control group has."
    quarantine_crashes: bool = False
    "Records that workers die of are set aside; else the first one ends the run."
    verify_source: bool = False
    "Sources are read again even where size and stamp are as they were."
    verify_target: bool = False
    "Shards that are there are read and hashed before they are reused; damaged ones are made anew."
    is_finish: bool = False
    "Parts of the work were done by other jobs: what their notes at the target say is taken in."
    engine: str = "local"
    "Who does the units: `local`, `ray` or `ray://ADDRESS`."


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """What is to be done for a stream: built once, for a run, a part, a dry run and a repair. No worker needs more of it than the job."""

    job: Job
    "With the day that the published stream has."
    files: list[sources.SourceFile]
    "Of its source."
    options: Options
    target: TargetState = field(default_factory=TargetState)
    "What lies at its target."
    old: Manifest | None = None
    "Of the stream that is published, where a run can go on from it."
    wanted: BudgetShare | None = None
    "Its share of a budget, where a sample is taken for it."
    expected_mean: float | None = None
    "Tokens that a record is said to hold on average; what comes is held against it."

    def over(self, target: TargetState) -> StreamPlan:
        """The plan by what lies at the target now."""
        old = published_manifest(self.job, target, self.options.reencode)
        unequal = known_unequal(self.job.tokenizer)
        job = on_day(self.job, old.encoding.date_string if old else None)
        job = replace(job, unequal=unequal.label if unequal else "")
        return replace(self, job=job, target=target, old=old)

    @property
    def bytes_to_read(self) -> int:
        """Where duplicates are dropped, sources are read twice."""
        return sources.size_of(self.files) * (2 if self.job.drops else 1)

    @cached_property
    def units(self) -> list[Unit]:
        return self.job.units_of(self.files)

    @cached_property
    def cache(self) -> KnownSources:
        """What is known of the sources, here and beside the stream; nothing where they are to be read again."""
        if self.options.verify_source:
            return KnownSources.at(self.job.target)
        known = KnownSources.of(self.job.target)
        if FOLDER in self.target.folders:
            known.learn_objects(self.job.folder, self.units)
        forget_changed(self.job, known)
        return known

    @property
    def is_up_to_date(self) -> bool:
        """Whether each unit's content is known by its stamp, and just these parts and bad records are published."""
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


def plan_streams(
    recipe: Recipe, options: Options, say: Callable[[str], None] | None = None
) -> list[StreamPlan]:
    """The chosen streams, in the order of the recipe; RecipeError where one of them may not be published so."""
    streams = [(s, s.source) for s in _chosen(recipe, options.only) if s.source]
    tokenizer = open_tokenizer(recipe.tokenizer, say)
    if recipe.processor and any(stream.has_images for stream, _ in streams):
        open_processor(recipe.processor, say)
    jobs = [make_job(recipe, stream, tokenizer, options.limit) for stream, _ in streams]
    found = [sources.find(of.path, recipe.folder, sources.ReadAs.of(of)) for _, of in streams]
    each = zip(streams, jobs, found, strict=True)
    sizes = [sampled(recipe, stream, job, files) for (stream, _), job, files in each]
    refuse_empty({job.name: wanted for job, wanted in sizes})
    targets = together(state_of, [job for job, _ in sizes])
    plans = [
        StreamPlan(
            job=job,
            files=files,
            options=options,
            wanted=wanted,
            expected_mean=stream.expected_mean_tokens,
        ).over(target)
        for (stream, _), files, (job, wanted), target in zip(
            streams, found, sizes, targets, strict=True
        )
    ]
    for plan in plans:
        refuse_replacing(plan.job, plan.old, plan.files, options.reencode)
    return plans


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

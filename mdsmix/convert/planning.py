"""Plans a run: the streams of a recipe, what is published at their targets, and whether that is up to date.

Nothing is written here. Sources are found and stat-ed, not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mdsmix import sources
from mdsmix.convert.budget import refuse_empty, sampled
from mdsmix.convert.dropping import known_dropped
from mdsmix.convert.guard import refuse_quarantine, refuse_replacing
from mdsmix.convert.images import confirmed
from mdsmix.convert.job import Job, make_job
from mdsmix.convert.keys import window_keys
from mdsmix.convert.ledger import FOLDER
from mdsmix.convert.publish import is_published
from mdsmix.convert.quarantine import bad_name, stale_files
from mdsmix.convert.source_hashes import SourceHashCache
from mdsmix.convert.source_notes import learn_objects
from mdsmix.convert.standing import Standing, standing_of
from mdsmix.encode.processor import open_processor
from mdsmix.encode.tokenizer import open_tokenizer
from mdsmix.errors import RecipeError
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import Unit
from mdsmix.storage import locate, together


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
    again: bool = False
    "Go through the units of a published stream too: a repair has deleted some of their shards."


Planned = tuple[Job, list[sources.SourceFile], Standing]
"A stream's job, the files of its source, and what stands at its target."


def planned_jobs(
    recipe: Recipe, options: Options, say: Callable[[str], None] | None = None
) -> list[Planned]:
    """The chosen streams, in the order of the recipe; RecipeError where one of them may not be published so."""
    streams = [(s, s.source) for s in _chosen(recipe, options.only) if s.source]
    tokenizer = open_tokenizer(recipe.tokenizer, say)
    if recipe.processor and any(stream.has_images for stream, _ in streams):
        open_processor(recipe.processor, say)
    jobs = [
        (
            make_job(recipe, stream, tokenizer, options.limit),
            sources.find(source.path, recipe.folder, sources.ReadAs.of(source)),
        )
        for stream, source in streams
    ]
    for job, _ in jobs:
        _refuse_lost_root(job)
    refuse_quarantine(jobs, {locate(recipe.published(stream)) for stream in recipe.sourced})
    jobs = [
        (sampled(recipe, stream, job, files), files)
        for (stream, _), (job, files) in zip(streams, jobs, strict=True)
    ]
    refuse_empty([job for job, _ in jobs])
    standings = together(standing_of, [job for job, _ in jobs])
    refuse_replacing(jobs, standings, options.reencode)
    return [(*planned, standing) for planned, standing in zip(jobs, standings, strict=True)]


def _refuse_lost_root(job: Job) -> None:
    """RecipeError where the folder of the images is not there: every record with an image would be bad, and a stream that is published
    be replaced by one without them."""
    root = job.images_root
    if root and "://" not in root.url and not os.path.isdir(root.url):
        raise RecipeError(
            f"{job.name}: images.root is {root}, and there is no such folder, so that no image would be found; correct it, or mount what lies there."
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
    wanted = set(only or names)
    return [s for s in recipe.sourced if wanted & {s.name, s.held_out_of}]


def plan(job: Job, files: list[sources.SourceFile]) -> list[Unit]:
    """The work units of the stream."""
    return sources.plan(
        files,
        window_bytes=job.kind.window_bytes,
        fields=job.fields_read,
        parsed=job.fields_parsed,
        line_bytes=job.kind.line_bytes,
        blobs=job.fields_of_bytes,
    )


def source_hashes(
    job: Job, options: Options, units: Sequence[Unit], standing: Standing
) -> SourceHashCache:
    """What is known of the sources, here and beside the stream; nothing where they are to be read again."""
    if options.verify_source:
        return SourceHashCache.at(job.target)
    cache = SourceHashCache.of(job.target)
    if FOLDER in standing.folders:
        learn_objects(job, units, cache)
    return confirmed(job, cache)


def is_up_to_date(
    job: Job, old: Manifest, standing: Standing, units: Sequence[Unit], cache: SourceHashCache
) -> bool:
    """Whether each unit's content is known by its stamp, and just these parts and bad records are published."""
    known = [content for unit in units if (content := cache.content(unit))]
    if not known or len(known) < len(units):
        return False
    dropped = known_dropped(job, known, cache)
    if dropped is None:
        return False
    each = zip(known, dropped, strict=True)
    keys = [key for content, gone in each for key in window_keys(job, content, gone)]
    if not is_published(job, old, standing, keys):
        return False
    windows = [window for content in known for window in content.windows]
    names = set(map(bad_name, keys, windows))
    return not stale_files(standing.quarantined, names)

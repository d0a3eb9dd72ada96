"""The repair of a published stream: it is verified, and where it is damaged and its source and recipe would make the same stream again,
converted with `--verify-target`, which deletes the damaged files and so does their units again."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from mdsmix.convert.guard import published_manifest
from mdsmix.convert.planning import Options, StreamPlan, Watcher, plan_streams
from mdsmix.convert.run import convert
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.recipe import Recipe
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shards.index import read_index
from mdsmix.shards.lease import lease
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.published import StreamFault, named_version, working_folder
from mdsmix.shards.verification import verify
from mdsmix.storage import Location, locate


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
    name, now = _stream_at(recipe, split), named_version(split) or split
    if folder != now:
        raise RecipeError(
            f"{folder} is an older version of the stream, and only the current one, {now}, can be made again from its "
            "source; bring the old source back and run mdsmix convert, or let mdsmix gc --keep delete it."
        )
    with lease(split, watcher.say):
        look = partial(verify, folder, begin=watcher.begin, on_progress=watcher.on_progress)
        faults = look(quick=False).faults
        if not faults:
            return Repaired(stream=str(folder), faults=())
        damaged = {fault.file for fault in faults}
        recipe = _sampled_as_published(recipe, name, split)
        # Whether it is the same stream is asked here, and stricter than a conversion asks.
        options = replace(options, only=(name,), verify_target=True, reencode=True)
        before = _refuse_other_recipe(recipe, folder, options, damaged)
        (outcome,) = convert(recipe, options, watcher)
        if outcome.manifest.index_hash != before.index_hash:
            raise MdsmixError(
                f"{folder} was made again, but as a new version: a file of its source was changed without changing its "
                "size, or a record that workers died of then (crashed_worker) is none now. The version that was damaged is "
                "gone; render the YAML again before you train."
            )
        if left := look(quick=True).faults:
            raise MdsmixError(f"{folder} is still damaged after its repair: {left[0]}")
    shards = [shard.stored.basename for shard in read_index(folder).shards]
    return Repaired(
        stream=str(folder),
        faults=faults,
        shards=tuple(shard for shard in shards if shard in damaged),
        units=outcome.done,
        of=outcome.units,
    )


def _stream_at(recipe: Recipe, folder: Location) -> str:
    """The name of the recipe's stream that is published there."""
    places = {locate(f"{recipe.published(s)}/{s.split}"): s.name for s in recipe.sourced}
    if folder not in places:
        raise RecipeError(
            f"the recipe does not publish {folder}, so it cannot make its shards again; it publishes "
            f"{', '.join(map(str, places)) or 'nothing'}."
        )
    return places[folder]


def _sampled_as_published(recipe: Recipe, name: str, split: Location) -> Recipe:
    """The recipe with the sample that the manifest names: a budget may have been given to that conversion alone."""
    stream, manifest = recipe.streams[name], None
    with suppress(Unreachable):  # what is damaged is told when the stream is planned
        manifest = read_manifest(split)
    if manifest and stream.sample in (None, BY_BUDGET):
        stream = replace(stream, sample=manifest.encoding.sample)
    return replace(recipe, streams={**recipe.streams, name: stream})


def _refuse_other_recipe(
    recipe: Recipe, folder: Location, options: Options, damaged: Collection[str]
) -> Manifest:
    """The manifest of the stream in `folder`, of which these files are damaged; RecipeError where recipe or source would make
    another stream. Nothing is touched."""
    (plan,) = plan_streams(recipe, options)
    manifest = published_manifest(plan.job, plan.target, reencode=False)
    if manifest is None:
        raise RecipeError(
            f"{plan.job.target} has no manifest, so nothing tells what it is to be; run mdsmix convert with --reencode."
        )
    if why := _why_another(plan, manifest, folder, damaged):
        raise RecipeError(
            f"{folder} cannot be repaired, because {why}, so the same shards would not come out; run mdsmix convert, "
            "which publishes a new version, or bring the old recipe and source back."
        )
    return manifest


def _why_another(
    plan: StreamPlan, manifest: Manifest, folder: Location, damaged: Collection[str]
) -> str | None:
    """Why the plan would make another stream than that of the manifest."""
    job = plan.job
    if job.place(manifest.index_hash) != folder:
        return f"publish in the recipe would not publish it at {folder} again"
    if job.encoding != manifest.encoding or job.tokenizer.hash != manifest.tokenizer.hash:
        return "the recipe or its tokenizer was changed since"
    # The names in a damaged part of the list are not known, only how many.
    sizes = {file.name: file.stat.size for file in plan.files if file.stat.size}
    whole = [part for part in manifest.source_parts if part.name not in damaged]
    named = replace(manifest, source_parts=whole).read_sources(job.folder)
    is_same = all(sizes.get(source.path) == source.size for source in named)
    if not is_same or len(sizes) != manifest.source_count:
        return "files of its source were added, removed or changed since"
    return None

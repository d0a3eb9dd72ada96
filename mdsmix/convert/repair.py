"""A damaged stream made whole: verified, what is damaged deleted, and converted again, which does the units that lack a shard.

Unit records make it cheap, since undamaged units are not encoded again. Shard names make it certain: a shard is named by the
hash of its bytes, so a unit whose shards get their old names has its old content. Where the source has changed, the damaged
version cannot be made again, which is refused before anything is touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mdsmix.convert.damage import SHARD, stored_hash
from mdsmix.convert.guard import published_manifest
from mdsmix.convert.job import Job
from mdsmix.convert.outcome import Watcher
from mdsmix.convert.planning import Options, StreamPlan, plan_streams
from mdsmix.convert.run import convert
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.recipe import Recipe
from mdsmix.recipe.sampling import BY_BUDGET
from mdsmix.shards import index as index_file
from mdsmix.shards.contradictions import StreamFault
from mdsmix.shards.index import read_index
from mdsmix.shards.lease import lease
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.published import named_version, versions, working_folder
from mdsmix.shards.side_files import is_named_file
from mdsmix.shards.verification import Report, verify
from mdsmix.sources import SourceFile
from mdsmix.storage import Location, locate


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What was wrong and what was done about it."""

    stream: str
    faults: tuple[StreamFault, ...]
    shards: tuple[str, ...]
    "Shards that were made again."
    units: int
    "Work units that were converted again for them."
    of: int
    "Work units in all."


def repair(recipe: Recipe, folder: Location, options: Options, watcher: Watcher) -> Repaired:
    """Makes the stream in `folder`, which this recipe publishes, what its manifest says; `options` say who may work.

    RecipeError where recipe or source would make another stream; Unreachable where it cannot be looked at.
    """
    split = working_folder(folder)
    # Whether it is the same stream is asked here, and stricter than a conversion asks.
    options = replace(options, only=(_name(recipe, split),), again=True, reencode=True)
    _refuse_older(folder, split)
    with lease(split, watcher.say):
        report = _look(folder, watcher)
        if not report.faults:
            return Repaired(stream=str(folder), faults=(), shards=(), units=0, of=0)
        recipe = _sampled_as_published(recipe, options.only[0], split)
        (plan,) = plan_streams(recipe, options)
        faults = report.faults
        manifest = _refuse_others(plan, folder, {fault.file for fault in faults})
        if any(fault.file == index_file.BASENAME for fault in faults):
            # Only the right index tells which shards there are to be; the unit records hold it.
            list(convert(recipe, options, watcher))
            faults = _look(folder, watcher).faults
        bad = {fault.file for fault in faults}
        _delete_damaged([folder, split, *versions(split)], bad)
        (outcome,) = convert(recipe, options, watcher)
        _refuse_other_version(folder, manifest, outcome.manifest)
        _refuse_damage(folder, _look(folder, watcher, quick=True))
    return Repaired(
        stream=str(folder),
        faults=report.faults,
        shards=tuple(name for name in _shards(folder) if name in bad),
        units=outcome.done,
        of=outcome.units,
    )


def _shards(folder: Location) -> list[str]:
    return [shard.stored.basename for shard in read_index(folder).shards]


def _delete_damaged(places: Iterable[Location], names: Iterable[str]) -> None:
    """A shard may be whole in one place and damaged in another, and hard links make the damage to one that to all. Units whose shards
    are gone count as unfinished."""
    ours = [name for name in names if SHARD.fullmatch(name) or is_named_file(name)]
    for at in {place / name for place in places for name in ours}:
        if at.stat() and not at.name.startswith(stored_hash(at)):
            at.delete()


def _look(folder: Location, watcher: Watcher, quick: bool = False) -> Report:
    return verify(folder, quick=quick, begin=watcher.begin, on_progress=watcher.on_progress)


def _name(recipe: Recipe, folder: Location) -> str:
    places = {s.name: locate(f"{recipe.published(s)}/{s.split}") for s in recipe.sourced}
    for name, place in places.items():
        if place == folder:
            return name
    raise RecipeError(
        f"the recipe does not publish {folder}, so it cannot make its shards again; it publishes "
        f"{', '.join(map(str, places.values())) or 'nothing'}."
    )


def _sampled_as_published(recipe: Recipe, name: str, split: Location) -> Recipe:
    """The recipe with the sample that the manifest names: a budget may have been given to that conversion alone."""
    streams, manifest = dict(recipe.streams), None
    with suppress(Unreachable):  # what is damaged is told when the stream is planned
        manifest = read_manifest(split)
    if manifest and streams[name].sample in (None, BY_BUDGET):
        streams[name] = replace(streams[name], sample=manifest.encoding.sample)
    return replace(recipe, streams=streams)


def _refuse_older(folder: Location, split: Location) -> None:
    """RecipeError for a version that is not the current one: its sources have changed since."""
    now = named_version(split) or split
    if folder != now:
        raise RecipeError(
            f"{folder} is an older version of the stream, and only the current one, {now}, can be made again from its "
            "source; bring the old source back and run mdsmix convert, or let mdsmix gc --keep delete it."
        )


def _refuse_others(plan: StreamPlan, folder: Location, bad: Collection[str]) -> Manifest:
    """The manifest; RecipeError where the recipe would now make another stream."""
    job, files = plan.job, plan.files
    manifest = published_manifest(job, plan.target, reencode=False)
    if manifest is None:
        raise RecipeError(
            f"{job.target} has no manifest, so nothing tells what it is to be; run mdsmix convert with --reencode."
        )
    if job.place(manifest.index_hash) != folder:
        raise _another(job, f"publish in the recipe would not publish it at {folder} again")
    is_same = job.encoding == manifest.encoding and job.tokenizer.hash == manifest.tokenizer.hash
    if not is_same:
        raise _another(job, "the recipe or its tokenizer was changed since")
    if not _has_these(job, manifest, files, bad):
        raise _another(job, "files of its source were added, removed or changed since")
    return manifest


def _has_these(
    job: Job, manifest: Manifest, files: Sequence[SourceFile], bad: Collection[str]
) -> bool:
    """Whether the manifest names these files, in their sizes. The names in a damaged part are not known, only how many."""
    found = {file.name: file.stat.size for file in files if file.stat.size}
    whole = [part for part in manifest.source_parts if part.name not in bad]
    named = replace(manifest, source_parts=whole).read_sources(job.folder)
    is_same = all(found.get(source.path) == source.size for source in named)
    return is_same and len(found) == manifest.source_count


def _another(job: Job, why: str) -> RecipeError:
    return RecipeError(
        f"{job.target} cannot be repaired, because {why}, so the same shards would not come out; run mdsmix convert, "
        "which publishes a new version, or bring the old recipe and source back."
    )


def _refuse_damage(folder: Location, report: Report) -> None:
    if report.faults:
        raise MdsmixError(f"{folder} is still damaged after its repair: {report.faults[0]}")


def _refuse_other_version(folder: Location, before: Manifest, after: Manifest) -> None:
    if after.index_hash != before.index_hash:
        raise MdsmixError(
            f"{folder} was made again, but as a new version: a file of its source was changed without changing its "
            "size, or a record that workers died of then (crashed_worker) is none now. The version that was damaged is "
            "gone; render the YAML again before you train."
        )

"""Files at a target that are not what their names say: found, deleted, and made anew.

A run trusts a shard that lies at the target in its full size. Under `--verify-target` every shard that it might reuse, those of older
versions too, is read and hashed first; that needs no index, since a shard is named by the hash of its stored bytes. Once a damaged shard
is deleted, the record of its work unit names a missing shard, so the unit is converted again. A shard that only an older
index or version names is not made again: its reader then misses a shard, where it would have trained on damage. What says what units hold
(ledger.py) is looked at likewise. `repair` verifies a stream, and if it is damaged and its source and recipe would make the same
stream again, converts it in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

import xxhash

from mdsmix.convert.guard import published_manifest
from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER, HASHES, SEGMENT, UNIT, decompressed, parse
from mdsmix.convert.planning import Options, StreamPlan, plan_streams
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.recipe import Recipe
from mdsmix.recipe.spec import BY_BUDGET
from mdsmix.shards.lease import Lease
from mdsmix.shards.manifest import Manifest, read_manifest
from mdsmix.shards.published import named_version
from mdsmix.shards.shard_files import SHARD
from mdsmix.shards.side_files import is_named_file
from mdsmix.shards.verification import Report
from mdsmix.storage import Location, locate, together
from mdsmix.words import plural

BLOCK = 1 << 20


def delete_damaged(job: Job, held: Lease, say: Callable[[str], None]) -> str:
    """Deletes the damaged files at the target, and calls `say` for each. Returns a sentence on what was checked and found.

    Unreachable where one cannot be read.
    """
    lying = [folder / name for folder in job.shard_folders for name, _ in folder.list()]
    state = [job.folder / FOLDER / name for name, _ in (job.folder / FOLDER).list()]
    shards = [at for at in lying if SHARD.fullmatch(at.name)]
    named = [at for at in (*lying, *state) if is_named_file(at.name) or SEGMENT.fullmatch(at.name)]
    units = [at for at in state if UNIT.fullmatch(at.name) or HASHES.fullmatch(at.name)]
    looked_at = [*shards, *named, *units]
    whole = together(_is_whole, looked_at)
    damaged = [at for at, is_whole in zip(looked_at, whole, strict=True) if not is_whole]
    for at in damaged:
        say(f"{job.name}: {at} is damaged: it is deleted, and made anew if the stream needs it")
        held.delete(at)
    result = f"{len(damaged):,} damaged, made anew" if damaged else "all whole"
    return f"{plural(len(shards), 'shard')} at the target read and hashed: {result}"


def _is_whole(at: Location) -> bool:
    if not (UNIT.fullmatch(at.name) or HASHES.fullmatch(at.name)):
        return at.name.startswith(stored_hash(at))
    stored = at.read()
    if (found := parse(at.name, stored)) is None:
        return False
    blobs = [stored[blob.start : blob.end] for blob in found.blobs.values()]
    return all(decompressed(blob) is not None for blob in blobs)


def stored_hash(at: Location) -> str:
    """The xxh128 that the name of a shard, of a file beside the manifest or of a segment begins with where it is whole."""
    digest = xxhash.xxh128()
    with at.open() as stored:
        while block := stored.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def refuse_other(folder: Location, before: Manifest, after: Manifest, report: Report) -> None:
    """MdsmixError where a conversion has not made the stream what it was."""
    if after.index_hash != before.index_hash:
        raise MdsmixError(
            f"{folder} was made again, but as a new version: a file of its source was changed without changing its "
            "size, or a record that workers died of then (crashed_worker) is none now. The version that was damaged is "
            "gone; render the YAML again before you train."
        )
    if report.faults:
        raise MdsmixError(f"{folder} is still damaged after its repair: {report.faults[0]}")


def refuse_other_recipe(
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


def refuse_older(folder: Location, split: Location) -> None:
    """RecipeError for a version that is not the current one: its sources have changed since."""
    now = named_version(split) or split
    if folder != now:
        raise RecipeError(
            f"{folder} is an older version of the stream, and only the current one, {now}, can be made again from its "
            "source; bring the old source back and run mdsmix convert, or let mdsmix gc --keep delete it."
        )


def stream_at(recipe: Recipe, folder: Location) -> str:
    """The name of the recipe's stream that is published there."""
    places = {s.name: locate(f"{recipe.published(s)}/{s.split}") for s in recipe.sourced}
    for name, place in places.items():
        if place == folder:
            return name
    raise RecipeError(
        f"the recipe does not publish {folder}, so it cannot make its shards again; it publishes "
        f"{', '.join(map(str, places.values())) or 'nothing'}."
    )


def sampled_as_published(recipe: Recipe, name: str, split: Location) -> Recipe:
    """The recipe with the sample that the manifest names: a budget may have been given to that conversion alone."""
    streams, manifest = dict(recipe.streams), None
    with suppress(Unreachable):  # what is damaged is told when the stream is planned
        manifest = read_manifest(split)
    if manifest and streams[name].sample in (None, BY_BUDGET):
        streams[name] = replace(streams[name], sample=manifest.encoding.sample)
    return replace(recipe, streams=streams)


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

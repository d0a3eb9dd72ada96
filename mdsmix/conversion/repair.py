"""Repair a published stream.

The stream is verified first. If it is damaged, and source and recipe would make the same stream
again, it is converted with `--verify-target`, which deletes the damaged files and converts their
units again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from mdsmix.conversion.planning import Options, StreamPlan, Watcher, plan_streams
from mdsmix.conversion.run import convert
from mdsmix.conversion.target import published_manifest
from mdsmix.errors import Damaged, MdsmixError, RecipeError
from mdsmix.recipe import Recipe
from mdsmix.shards.published import StreamFault, find_named_version, find_working_folder
from mdsmix.shards.verification import verify
from mdsmix.storage import Location, locate


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """The result of `repair`: the faults that it found, and how much it converted again."""

    stream: str
    faults: tuple[StreamFault, ...]
    units: int = 0
    "Work units that were converted again."
    of: int = 0
    "All work units of the stream."


def repair(recipe: Recipe, folder: Location, options: Options, watcher: Watcher) -> Repaired:
    """Repair the stream in `folder`, which this recipe publishes: make its missing and damaged
    files again.

    Raises RecipeError if the recipe or its source would make another stream, and Unreachable if the
    stream cannot be read.
    """
    # Find the stream in the recipe. Only its current version can be repaired.
    split = find_working_folder(folder)
    current = find_named_version(split) or split
    names = list[str]()
    for stream in recipe.sourced:
        if locate(f"{recipe.published(stream)}/{stream.split}") == split:
            names.append(stream.name)
    if not names:
        raise RecipeError(
            f"the recipe does not publish {folder}, so its shards cannot be made again from it; "
            "name a stream that it makes."
        )
    if folder != current:
        raise RecipeError(
            f"{folder} is an older version of the stream, but only the current version, {current}, "
            "can be made again from its source; restore the old source and run mdsmix convert, or "
            "delete the old version by mdsmix gc --keep."
        )
    # Find the damage.
    verified = verify(folder, watcher)
    if not verified.faults:
        return Repaired(stream=str(folder), faults=())
    # Convert, unless the result would be another stream. `reencode` turns off the checks of convert
    # for this; `_refuse_other_stream` is stricter than they are.
    options = replace(options, only=names, verify_target=True, reencode=True)
    (plan,) = plan_streams(recipe, options)
    index_hash = _refuse_other_stream(plan, folder)
    (outcome,) = convert(recipe, options, watcher)
    if outcome.manifest.index_hash != index_hash:
        raise MdsmixError(
            f"{folder} was made again, but as a new version: a file of its source was changed "
            "without changing its size, or a record that crashed workers then (crashed_worker) was "
            "converted now. The damaged version is gone; render the YAML again before you train."
        )
    return Repaired(
        stream=str(folder),
        faults=verified.faults,
        units=outcome.done,
        of=outcome.units,
    )


def _refuse_other_stream(plan: StreamPlan, folder: Location) -> str:
    """Return the hash of the index of the stream in `folder`. Nothing is written.

    Raises RecipeError if the plan would make another stream.
    """
    job = plan.job
    manifest = published_manifest(plan.job, plan.target, reencode=False)
    if manifest is None:
        raise RecipeError(
            f"{job.target} has no manifest, so what the stream should contain is unknown; run "
            "mdsmix convert with --reencode."
        )
    sizes = {file.name: file.stat.size for file in plan.files if file.stat.size}
    is_same_source = len(sizes) == manifest.source_count
    with suppress(Damaged):  # a damaged part of the list: only the number of its names is known
        for source in manifest.read_sources(job.folder):
            is_same_source = is_same_source and sizes.get(source.path) == source.size
    reason = ""
    if not is_same_source:
        reason = "files of its source were added, removed or changed since"
    if job.encoding != manifest.encoding or job.tokenizer.hash != manifest.tokenizer.hash:
        reason = "the recipe or its tokenizer was changed since"
        if manifest.encoding.sample:
            reason += f" (sample was {manifest.encoding.sample})"
    if job.place(manifest.index_hash) != folder:
        reason = f"with its current `publish` the recipe would not publish it at {folder} again"
    if reason:
        raise RecipeError(
            f"{folder} cannot be repaired, because {reason}, and converting would make other "
            "shards. Run mdsmix convert, which publishes a new version, or restore the old recipe "
            "and source."
        )
    return manifest.index_hash

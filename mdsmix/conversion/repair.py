"""Repairs a published stream. It is verified first. Where it is damaged, and source and recipe
would make the same stream again, it is converted with `--verify-target`, which deletes the damaged
files and does their units again.
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
    """The result of a repair: the faults found and the units done again."""

    stream: str
    faults: tuple[StreamFault, ...]
    units: int = 0
    "Work units that were converted again."
    of: int = 0
    "Work units in all."


def repair(recipe: Recipe, folder: Location, options: Options, watcher: Watcher) -> Repaired:
    """Makes the stream in `folder`, which this recipe publishes, what its manifest says; `options`
    say who may work.

    RecipeError where recipe or source would make another stream; Unreachable where it cannot be
    looked at.
    """
    split = find_working_folder(folder)
    now = find_named_version(split) or split
    names = [s.name for s in recipe.sourced if locate(f"{recipe.published(s)}/{s.split}") == split]
    if not names:
        raise RecipeError(
            f"the recipe does not publish {folder}, so it cannot make its shards again; name a stream that it makes."
        )
    if folder != now:
        raise RecipeError(
            f"{folder} is an older version of the stream, and only the current one, {now}, can be made again from its "
            "source; bring the old source back and run mdsmix convert, or let mdsmix gc --keep delete it."
        )
    found = verify(folder, watcher)
    if not found.faults:
        return Repaired(stream=str(folder), faults=())
    # `reencode` drops conversion's guards: `_refuse_another` judges the same stream, more strictly.
    options = replace(options, only=names, verify_target=True, reencode=True)
    (plan,) = plan_streams(recipe, options)
    index_hash = _refuse_another(plan, folder)
    (outcome,) = convert(recipe, options, watcher)
    if outcome.manifest.index_hash != index_hash:
        raise MdsmixError(
            f"{folder} was made again, but as a new version: a file of its source was changed without changing its "
            "size, or a record that workers died of then (crashed_worker) is written now. The version that was damaged is "
            "gone; render the YAML again before you train."
        )
    return Repaired(stream=str(folder), faults=found.faults, units=outcome.done, of=outcome.units)


def _refuse_another(plan: StreamPlan, folder: Location) -> str:
    """The hash of the index of the stream in `folder`; RecipeError where the plan would make
    another stream. Nothing is touched.
    """
    job, manifest = plan.job, published_manifest(plan.job, plan.target, reencode=False)
    if manifest is None:
        raise RecipeError(
            f"{job.target} has no manifest, so nothing tells what it is to be; run mdsmix convert with --reencode."
        )
    sizes = {file.name: file.stat.size for file in plan.files if file.stat.size}
    is_same = len(sizes) == manifest.source_count
    with suppress(Damaged):  # of a damaged part of the list only the number of its names is known
        sources = manifest.read_sources(job.folder)
        is_same = is_same and all(sizes.get(source.path) == source.size for source in sources)
    why = "" if is_same else "files of its source were added, removed or changed since"
    if job.encoding != manifest.encoding or job.tokenizer.hash != manifest.tokenizer.hash:
        sample = manifest.encoding.sample
        why = "the recipe or its tokenizer was changed since" + f" (sample was {sample})" * bool(
            sample
        )
    if job.place(manifest.index_hash) != folder:
        why = f"publish in the recipe would not publish it at {folder} again"
    if why:
        raise RecipeError(
            f"{folder} cannot be repaired, because {why}, so the same shards would not come out; run mdsmix convert, "
            "which publishes a new version, or bring the old recipe and source back."
        )
    return manifest.index_hash

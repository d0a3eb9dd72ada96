"""What a conversion would do, and why, without doing it: sources are read and hashed, nothing is encoded or written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from mdsmix.convert.guard import source_entries, told_of_lost, why_rebuilt
from mdsmix.convert.job import Dropped, Job, with_versions
from mdsmix.convert.known_sources import known_dropped
from mdsmix.convert.parts import learn
from mdsmix.convert.planning import Options, StreamPlan, plan_streams
from mdsmix.convert.stored import StoredUnits, list_stored
from mdsmix.convert.unit import ReadTask
from mdsmix.errors import RecipeError
from mdsmix.recipe import Recipe
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import Content, Unit
from mdsmix.storage import together
from mdsmix.words import listed


def describe(recipe: Recipe, options: Options) -> Iterator[str]:
    """A sentence or more per stream."""
    for plan in plan_streams(recipe, options):
        yield from _of_stream(plan)


def _of_stream(plan: StreamPlan) -> Iterator[str]:
    job, old, units, cache = plan.job, plan.old, plan.units, plan.cache
    if job.limit:  # which units hold them only reading tells
        yield f"{job.name}: the first {job.limit} records would be converted, where that is not done, into {job.target}"
        return
    if plan.options.is_finish:
        yield f"{job.name}: {learn(job, cache, units)}"
    for unit in units:
        if not cache.content(unit):
            cache.learn(unit, ReadTask(job=job, unit=unit).do().content)
    contents = cache.contents(units)
    dropped = known_dropped(job, contents, cache)
    is_done = plan.is_up_to_date
    todo = [] if is_done else _undone(plan, contents, dropped or [{}] * len(units))
    yield f"{job.name}: {len(todo)} of {len(units)} work units would be converted, into {job.target}"
    if plan.wanted:
        yield f"  {plan.wanted.said}"
    if dropped is None:
        yield (
            "  which records are dropped as duplicates is not known before they are read for it; units that lose records, or "
            "lose others than before, are converted too"
        )
    if old is None:
        yield f"  {why_rebuilt(job, plan.target) or 'nothing is published there yet'}"
        return
    entries = source_entries(units, contents)
    changes = _changes(job, old)
    yield from (f"  {reason}" for reason in changes)
    if todo and not changes:
        names = sorted({file.name for unit in todo for file in unit.files})
        yield f"  units of which something is new, edited or not whole at the target: those of {listed(names, 5)}"
    try:
        if lost := told_of_lost(job, old, entries, plan.options.reencode):
            yield f"  {lost}"
    except RecipeError as refusal:
        yield f"  it would be refused: {refusal}"
    if not todo and not is_done:
        yield f"  what is finished would be published: it is not, or not all, at {job.place(old.index_hash)}"


def _undone(
    plan: StreamPlan, contents: Sequence[Content], dropped: Sequence[Dropped]
) -> list[Unit]:
    """The units that a run would go through."""
    job = with_versions(plan.job, plan.old)
    stored = StoredUnits() if plan.target.is_empty else list_stored(job)
    each = zip([content.windows for content in contents], dropped, strict=True)
    done = together(lambda of: stored.find_all(job, *of), each)
    counted = zip(plan.units, contents, done, strict=True)
    return [unit for unit, content, found in counted if len(found) < len(content.windows)]


def _changes(job: Job, old: Manifest) -> list[str]:
    """The settings that shape bytes and are not those of the published stream."""
    before, now = asdict(old.encoding), asdict(job.encoding)
    said = [f"{key} was {before[key]} and is {now[key]}" for key in now if before[key] != now[key]]
    was, is_now = old.tokenizer, job.tokenizer
    if was.hash != is_now.hash:
        names = f"{was.name} ({was.hash[:8]}) and is another ({is_now.hash[:8]})"
        said.append(f"the tokenizer was {names}")
    elif was.chat_template_hash != is_now.chat_template_hash and job.kind.has_template:
        said.append("the chat template is another")
    if not all(map(job.trusts, old.backend.split(" + "))):
        said.append(f"it was encoded by {old.backend}, and is to be by the reference")
    return said

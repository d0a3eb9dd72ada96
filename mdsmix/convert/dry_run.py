"""What a conversion would do, and why, without doing it: nothing is encoded or written, and no source is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from mdsmix.convert.guard import why_rebuilt
from mdsmix.convert.job import Job, with_versions
from mdsmix.convert.known_sources import known_dropped
from mdsmix.convert.parts import learn
from mdsmix.convert.planning import Options, StreamPlan, plan_streams
from mdsmix.convert.stored import StoredUnits, list_stored
from mdsmix.recipe import Recipe
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import Unit
from mdsmix.words import listed


def describe(recipe: Recipe, options: Options) -> Iterator[str]:
    """A sentence or more per stream."""
    for plan in plan_streams(recipe, options):
        yield from _of_stream(plan)


def _of_stream(plan: StreamPlan) -> Iterator[str]:
    job, old, units = plan.job, plan.old, plan.units
    if job.limit:  # which units hold them only reading tells
        yield f"{job.name}: the first {job.limit} records would be converted, where that is not done, into {job.target}"
        return
    if plan.options.is_finish:
        yield f"{job.name}: {learn(job, plan.cache)}"
    is_done = plan.is_up_to_date
    todo = [] if is_done else _undone(plan)
    yield f"{job.name}: {len(todo)} of {len(units)} work units would be converted, into {job.target}"
    if plan.wanted:
        yield f"  {plan.wanted.said}"
    if unknown := len(units) - len(plan.cache.contents(units)):
        yield f"  what {unknown} of them hold is not known before they are read: one whose records lie at the target already is read, no more"
    if job.drops and known_dropped(job, plan.cache.contents(units), plan.cache) is None:
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
        yield f"  units of which something is new, edited or not whole at the target: those of {listed(names, 5)}"
    if plan.lost:
        yield f"  {plan.lost}"
    if not todo and not is_done:
        yield f"  what is finished would be published: it is not, or not all, at {job.place(old.index_hash)}"


def _undone(plan: StreamPlan) -> list[Unit]:
    """The units that a run would go through, as far as is known."""
    job, cache, undone = with_versions(plan.job, plan.old), plan.cache, list[Unit]()
    stored = StoredUnits() if plan.target.is_empty else list_stored(job)
    known = [unit for unit in plan.units if cache.content(unit)]
    dropped = known_dropped(job, cache.contents(known), cache) or [{}] * len(known)
    of = dict(zip(known, dropped, strict=True))
    for unit in plan.units:
        content = cache.content(unit)
        done = stored.find_all(job, content.windows, of[unit]) if content else {}
        if content is None or len(done) < len(content.windows):
            undone.append(unit)
    return undone


def _changes(job: Job, old: Manifest) -> list[str]:
    """The settings that shape bytes and are not those of the published stream."""
    was, now = old.tokenizer, job.tokenizer
    template = now.chat_template_hash if job.kind.has_template else was.chat_template_hash
    trusted = all(map(job.trusts, old.backend.split(" + ")))
    pairs = {
        "the tokenizer": (was.hash[:8], now.hash[:8]),
        "the chat template": (was.chat_template_hash, template),
        "the tokenizer's backend": (old.backend, old.backend if trusted else "the reference"),
    }
    before, after = asdict(old.encoding), asdict(job.encoding)
    pairs |= {key: (before[key], after[key]) for key in after}
    return [f"{what} was {of} and is {to}" for what, (of, to) in pairs.items() if of != to]

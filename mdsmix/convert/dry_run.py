"""What a conversion would do, and why, without doing it: sources are read and hashed, nothing is encoded or written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict

from mdsmix import sources
from mdsmix.convert.bad_records import refuse_too_many_bad
from mdsmix.convert.guard import source_entries, told_of_lost, why_rebuilt
from mdsmix.convert.job import Dropped, Job, with_versions
from mdsmix.convert.known_sources import known_dropped
from mdsmix.convert.parts import learn
from mdsmix.convert.planning import Options, StreamPlan, plan_streams
from mdsmix.convert.stored import StoredUnits, list_stored
from mdsmix.convert.unit import ReadTask, read_unit
from mdsmix.errors import RecipeError, TooManyBadRecords
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
    contents = {
        unit: cache.content(unit) or read_unit(ReadTask(job=job, unit=unit)).content
        for unit in units
    }
    cache.learn(contents)
    dropped = known_dropped(job, list(contents.values()), cache)
    is_done = plan.is_up_to_date
    todo = [] if is_done else _undone(plan, contents)
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
    yield from (f"  {reason}" for reason in _changes(job, old) or _edited(job, old, todo, contents))
    try:
        entries = source_entries(contents, contents.values())
        if lost := told_of_lost(job, old, entries, plan.options.reencode):
            yield f"  {lost}"
        if not todo:
            refuse_too_many_bad(job, old.records)
    except (RecipeError, TooManyBadRecords) as refusal:
        yield f"  it would be refused: {refusal}"
    if not todo and not is_done:
        yield f"  what is finished would be published: it is not, or not all, at {job.place(old.index_hash)}"


def _undone(plan: StreamPlan, contents: Mapping[Unit, Content]) -> list[Unit]:
    """The units that a run would go through."""
    job = with_versions(plan.job, plan.old)
    stored = StoredUnits() if plan.target.is_empty else list_stored(job)
    dropped = known_dropped(job, list(contents.values()), plan.cache) or [{}] * len(contents)
    each = zip(contents.values(), dropped, strict=True)
    whole = together(lambda of: _is_done(job, stored, *of), each)
    return [unit for unit, is_done in zip(contents, whole, strict=True) if not is_done]


def _is_done(job: Job, stored: StoredUnits, content: Content, dropped: Dropped) -> bool:
    return all(stored.find(job, w, dropped.get(w.number, b"")) for w in content.windows)


def _changes(job: Job, old: Manifest) -> list[str]:
    """The settings that shape bytes and are not those of the published stream."""
    before, now = asdict(old.encoding), asdict(job.encoding)
    said = [
        f"{name} was {before[name]} and is {value}"
        for name, value in now.items()
        if before[name] != value
    ]
    if old.tokenizer.hash != job.tokenizer.hash:
        was, now_is = old.tokenizer.hash[:8], job.tokenizer.hash[:8]
        said.append(f"the tokenizer was {old.tokenizer.name} ({was}) and is another ({now_is})")
    elif job.kind.has_template and (
        old.tokenizer.chat_template_hash != job.tokenizer.chat_template_hash
    ):
        said.append("the chat template is another")
    if not all(map(job.trusts, old.backend.split(" + "))):
        said.append(f"it was encoded by {old.backend}, and is to be by the reference")
    return said


def _edited(
    job: Job, old: Manifest, todo: Collection[Unit], contents: Mapping[Unit, Content]
) -> Iterator[str]:
    """Which files make these units to be done, where no setting does."""
    names = {file.name for unit in todo for file in unit.files}
    sources_before = old.read_sources(job.folder)
    before = {(each.path, each.hash) for each in sources_before if each.path in names}
    new, lost = set[str](), set[str]()
    for unit in todo:
        hashes = [sources.file_hash([digest]) for digest in contents[unit].files]
        each = zip((file.name for file in unit.files), hashes, strict=True)
        edited = {name for name, hash in each if (name, hash) not in before}
        new |= edited
        lost |= set() if edited else {file.name for file in unit.files}
    for why, names in (
        ("new or edited", new),
        ("not whole at the target, or with other images", lost),
    ):
        if names:
            yield f"{why}: {listed(sorted(names), 5)}"

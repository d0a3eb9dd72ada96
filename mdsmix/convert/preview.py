"""What a conversion would do, and why, without doing it: sources are read and hashed, nothing is encoded or written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from mdsmix import sources
from mdsmix.convert.budget import said_of_mean
from mdsmix.convert.dropping import known_dropped
from mdsmix.convert.guard import source_entries, told_of_lost, why_rebuilt
from mdsmix.convert.image_stamps import whole_content
from mdsmix.convert.job import Dropped, Job, window_keys, with_versions
from mdsmix.convert.parts import learn
from mdsmix.convert.planning import Options, StreamPlan, plan_streams
from mdsmix.convert.publish import is_published
from mdsmix.convert.put import is_put
from mdsmix.convert.stored import StoredUnits, list_stored
from mdsmix.convert.target_state import TargetState
from mdsmix.convert.verdict import refuse_too_many_bad
from mdsmix.errors import RecipeError, TooManyBadRecords
from mdsmix.recipe import Recipe
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import Content, Unit
from mdsmix.storage import together
from mdsmix.words import listed


def preview(recipe: Recipe, options: Options) -> Iterator[str]:
    """A sentence or more per stream."""
    for plan in plan_streams(recipe, options):
        yield from _preview_stream(plan)


def _preview_stream(plan: StreamPlan) -> Iterator[str]:
    job, old, target, units, cache = plan.job, plan.old, plan.target, plan.units, plan.cache
    if job.limit:  # which units hold them only reading tells
        yield f"{job.name}: the first {job.limit} records would be converted, where that is not done, into {job.target}"
        return
    if plan.options.is_finish:
        yield f"{job.name}: {learn(job, cache, units)}"
    known = {unit: cache.content(unit) for unit in units}
    contents = {unit: content or whole_content(job, unit) for unit, content in known.items()}
    is_known = bool(old) and None not in known.values()
    dropped = known_dropped(job, list(contents.values()), cache)
    losses = dict(zip(contents, dropped or [{}] * len(units), strict=True))
    todo = _undone(job, old if is_known else None, target, contents, losses)
    yield f"{job.name}: {len(todo)} of {len(units)} work units would be converted, into {job.target}"
    if plan.wanted:
        yield f"  {plan.wanted.said}"
        mean = plan.wanted.source.tokens / plan.wanted.source.records
        if far := said_of_mean(mean, plan.expected_mean):
            yield f"  a record that was looked at holds {mean:,.1f} tokens on average, {far}"
    if dropped is None:
        yield (
            "  which records are dropped as duplicates is not known before they are read for it; units that lose records, or "
            "lose others than before, are converted too"
        )
    older = why_rebuilt(job, target)
    if old is None:
        yield f"  {older or 'nothing is published there yet'}"
        return
    was = _hashes_before(job, old, todo)
    reasons = list(_changes(job, old)) or _of_units(todo, contents, old, was)
    yield from (f"  {reason}" for reason in reasons)
    try:
        if lost := told_of_lost(
            job, old, source_entries(contents, contents.values()), plan.options.reencode
        ):
            yield f"  {lost}"
    except RecipeError as refusal:
        yield f"  it would be refused: {refusal}"
    if todo:
        return
    try:
        refuse_too_many_bad(job, old.records)
    except TooManyBadRecords as refusal:
        yield f"  it would be refused: {refusal}"
    if not is_put(job, old, target):
        yield f"  what is finished would be published: it is not, or not all, at {job.place(old.index_hash)}"


def _hashes_before(job: Job, old: Manifest, todo: Iterable[Unit]) -> dict[str, str]:
    """What the files of the units to do were published with, name -> hash: of millions of sources only these are kept."""
    wanted = {file.name for unit in todo for file in unit.files}
    sources = old.read_sources(job.folder)
    return {source.path: source.hash for source in sources if source.path in wanted}


def _undone(
    job: Job,
    old: Manifest | None,
    target: TargetState,
    contents: Mapping[Unit, Content],
    dropped: Mapping[Unit, Dropped],
) -> dict[Unit, list[str]]:
    """The units that a run would go through; of a stream that is published (`old`) as it is to be no record is read."""
    keys = {unit: window_keys(job, content, dropped[unit]) for unit, content in contents.items()}
    if old and is_published(job, old, target, [key for of in keys.values() for key in of]):
        return {}
    stored = StoredUnits() if target.is_empty else list_stored(with_versions(job, old))
    found = together(lambda unit: stored.find_unit(job, contents[unit], dropped[unit]), contents)
    return {unit: keys[unit] for unit, done in zip(contents, found, strict=True) if not done}


def _of_units(
    todo: Mapping[Unit, list[str]],
    contents: Mapping[Unit, Content],
    old: Manifest,
    was: Mapping[str, str],
) -> Iterator[str]:
    """Why these units are to be done, where no setting is the reason."""
    published = {part.key for part in old.parts}
    lost = {unit for unit, keys in todo.items() if published.issuperset(keys)}
    new = todo.keys() - lost
    seen = {unit for unit in new if _is_of_images(unit, contents[unit], was)}
    reasons = {
        "new or edited": new - seen,
        "as they were, with images that are new, edited or gone": seen,
        "not whole at the target": lost,
    }
    for why, units in reasons.items():
        names = sorted({name for unit in units for name in _changed(unit, contents[unit], was)})
        if names:
            yield f"{why}: {listed(names, 5)}"


def _is_of_images(unit: Unit, content: Content, was: Mapping[str, str]) -> bool:
    """Whether the records are those that were published, so that only their images can be others."""
    return any(window.images for window in content.windows) and not _edited(unit, content, was)


def _changed(unit: Unit, content: Content, was: Mapping[str, str]) -> list[str]:
    """The unit's files that are other than they were; all of them where none is. Small files share a unit."""
    return _edited(unit, content, was) or [file.name for file in unit.files]


def _edited(unit: Unit, content: Content, was: Mapping[str, str]) -> list[str]:
    names = [file.name for file in unit.files]
    hashes = [sources.file_hash([digest]) for digest in content.files]
    return [name for name, hash in zip(names, hashes, strict=True) if was.get(name) != hash]


def _changes(job: Job, old: Manifest) -> Iterator[str]:
    """The settings that shape bytes and are not those of the published stream."""
    before, now = asdict(old.encoding), asdict(job.encoding)
    for name, value in now.items():
        if before[name] != value:
            yield f"{name} was {before[name]} and is {value}"
    if old.tokenizer.hash != job.tokenizer.hash:
        yield f"the tokenizer was {old.tokenizer.name} ({old.tokenizer.hash[:8]}) and is another ({job.tokenizer.hash[:8]})"
    elif job.kind.has_template and (
        old.tokenizer.chat_template_hash != job.tokenizer.chat_template_hash
    ):
        yield "the chat template is another"
    if not all(map(job.trusts, old.backend.split(" + "))):
        yield f"it was encoded by {old.backend}, and is to be by the reference"

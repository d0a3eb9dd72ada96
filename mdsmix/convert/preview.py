"""What a conversion would do, and why, without doing it: sources are read and hashed, nothing is encoded or written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from mdsmix import sources
from mdsmix.convert.guard import published_manifest
from mdsmix.convert.job import Job, on_day, with_versions
from mdsmix.convert.run import Options, planned_jobs
from mdsmix.convert.seen import Content, Seen
from mdsmix.convert.unit import find_record
from mdsmix.recipe import Recipe
from mdsmix.shards.manifest import Manifest
from mdsmix.sources import Unit


def preview(recipe: Recipe, options: Options) -> Iterator[str]:
    """A sentence or more per stream."""
    for job, files in planned_jobs(recipe, options):
        yield from _preview_stream(job, files, options)


def _preview_stream(job: Job, files: list[sources.SourceFile], options: Options) -> Iterator[str]:
    old = published_manifest(job, options.reencode)
    job = with_versions(on_day(job, old.encoding.date_string if old else None), old)
    units, seen = sources.plan(files), Seen.of(job.target)
    todo = [unit for unit in units if not _is_done(job, unit, seen, options.verify_source)]
    yield f"{job.name}: {len(todo)} of {len(units)} work units would be converted, into {job.target}"
    if old is None:
        yield "  nothing is published there yet"
        return
    changed = list(_changes(job, old))
    yield from (f"  {change}" for change in changed)
    if todo and not changed:
        names = sorted({file.name for unit in todo for file in unit.files})
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        yield f"  new or edited: {', '.join(names[:5])}{more}"
    gone = sorted({s.path for s in old.sources} - {file.name for file in files})
    if gone:
        yield f"  no longer among the sources: {', '.join(gone)}"


def _is_done(job: Job, unit: Unit, seen: Seen, verify: bool) -> bool:
    """Whether every window of the unit has a record; of a file not seen before only its first window is known."""
    content = None if verify else seen.content(unit)
    content = content or Content(hash=sources.content_hash(unit), windows=(0,))
    return all(find_record(job, content.hash, window) for window in content.windows)


def _changes(job: Job, old: Manifest) -> Iterator[str]:
    """The settings that shape bytes and are not those of the published stream."""
    before, now = asdict(old.encoding), asdict(job.encoding)
    for name, value in now.items():
        if before[name] != value:
            yield f"{name} was {before[name]} and is {value}"
    if old.tokenizer.hash != job.tokenizer.hash:
        yield f"the tokenizer was {old.tokenizer.name} ({old.tokenizer.hash[:8]}) and is another ({job.tokenizer.hash[:8]})"
    elif "messages" in job.encoding.fields and (
        old.tokenizer.chat_template_hash != job.tokenizer.chat_template_hash
    ):
        yield "the chat template is another"

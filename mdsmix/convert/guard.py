"""What stands at the target already, and whether it may be replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from heapq import nsmallest

from mdsmix import sources
from mdsmix.convert.job import Job
from mdsmix.convert.ledger import EARLIER, FOLDER
from mdsmix.convert.target_state import TargetState
from mdsmix.errors import Damaged, Earlier, RecipeError, Unreachable
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.published import QUARANTINE
from mdsmix.shards.shard_files import refuse_links
from mdsmix.shards.side_files import SourceEntry
from mdsmix.sources import Content, SourceFile, Unit
from mdsmix.storage import Location
from mdsmix.words import does, listed, percent, plural

MOST_LOST = Fraction(1, 10)
"Of a stream's source bytes: a run that would publish it with less asks first."


def published_manifest(job: Job, target: TargetState, reencode: bool) -> Manifest | None:
    """The manifest at the target, None where nothing is published there that can be gone on from.

    RecipeError where the target holds a stream that `mdsmix convert` did not make.
    """
    if isinstance(target.damage, Earlier):
        return None
    if target.damage and not reencode:
        raise Unreachable(f"{target.damage} To publish the stream anew, pass --reencode.")
    if target.manifest is None and not reencode and target.has_index:
        raise RecipeError(
            f"stream {job.name}: {job.target} holds a stream without an mdsmix manifest, which convert would "
            "overwrite; publish elsewhere (another stream name, remote or local), or pass --reencode to replace it."
        )
    return target.manifest


def refuse_quarantine(
    jobs: Sequence[tuple[Job, list[SourceFile]]], streams: Collection[Location]
) -> None:
    """RecipeError where a source pattern matches a quarantine file of these streams: its bad records would be read, and set aside, in every run."""
    for job, files in jobs:
        for place in (file.location for file in files):
            if place.parent.name == QUARANTINE and place.parent.parent.parent in streams:
                raise RecipeError(
                    f"stream {job.name}: its source finds {place}, the bad records that convert itself has set aside; "
                    "narrow the pattern, or publish outside of the folder that it searches."
                )


def refuse_replacing(
    streams: Sequence[tuple[Job, Manifest | None, list[SourceFile]]], reencode: bool
) -> None:
    """RecipeError that names every stream which would be replaced by another one, not by its new version.

    What `--limit` publishes is made to be thrown away.
    """
    sentences = []
    for job, old, files in streams:
        stream = job.folder.parent
        refuse_links(stream.parent, stream.name, job.folder.name)
        if old and not job.limit and not reencode and (sentence := _why_not(job, old, files)):
            sentences.append(sentence)
    if sentences:
        raise RecipeError(" ".join(sentences))


def _why_not(job: Job, manifest: Manifest, files: list[SourceFile]) -> str | None:
    """A sentence where the new stream would not be a new version of the old one, but another stream in its place."""
    if manifest.encoding.columns.keys() != job.encoding.columns.keys():
        return (
            f"stream {job.name} is published for the {manifest.encoding.loader} loader with the columns "
            f"{listed(manifest.encoding.columns)}; the recipe now wants {listed(job.encoding.columns)} for the "
            f"{job.encoding.loader} loader: all {manifest.records.read:,} records, {manifest.totals.tokens:,} tokens, "
            "are to be encoded again; pass --reencode if that is meant."
        )
    before = {
        key for source in manifest.read_sources(job.folder) for key in (source.path, source.size)
    }
    if before.isdisjoint(key for file in files for key in (file.name, file.stat.size)):
        old = nsmallest(3, (source.path for source in manifest.read_sources(job.folder)))
        return (
            f"stream {job.name}: {job.target} holds a stream made of {listed(old, of=manifest.source_count) or 'other streams'}, none of which is "
            f"among its sources now ({listed(sorted({file.name for file in files}))}); publish elsewhere, or pass --reencode to replace it."
        )
    return None


def told_of_lost(
    job: Job, old: Manifest | None, entries: Sequence[SourceEntry], reencode: bool
) -> str:
    """A warning where files of the published stream are not among these, by name or content; RecipeError where they are more than a run
    may leave out unasked."""
    if job.limit or not old:
        return ""
    known, before = (
        {key for entry in entries for key in (entry.path, entry.hash)},
        list[SourceEntry](),
    )
    with suppress(Damaged):  # a part of the list, which a publication writes anew
        before += old.read_sources(job.folder)
    gone = [source for source in before if known.isdisjoint((source.path, source.hash))]
    if not gone:
        return ""
    share = Fraction(sum(source.size for source in gone), sum(source.size for source in before))
    said = (
        f"{listed(sorted(source.path for source in gone))} {does(gone, 'is', 'are')} no longer among its sources: about "
        f"{float(share * old.records.read):,.0f} of the {plural(old.records.read, 'record')} published, {float(share):.1%} of their bytes"
    )
    if share > MOST_LOST and not reencode:
        raise RecipeError(
            f"stream {job.name}: {said}; bring back what is gone, or pass --reencode to replace {job.target} by a stream without it. "
            "What was converted is kept."
        )
    return f"WARNING: {said}"


def source_entries(units: Iterable[Unit], contents: Iterable[Content]) -> list[SourceEntry]:
    """Each source file once, with the hash of what it holds."""
    digests: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for unit, content in zip(units, contents, strict=False):
        for file, digest in zip(unit.files, content.files, strict=True):
            sizes[file.name] = file.stat.size
            digests.setdefault(file.name, []).append(digest)
    return [
        SourceEntry(path=name, size=sizes[name], hash=sources.file_hash(of_units))
        for name, of_units in digests.items()
    ]


def why_whole(job: Job, old: Manifest | None, wanted: object) -> str | None:
    """A sentence where the published stream is a sample, and nothing says so now: most likely --budget was left out."""
    if old is None or old.encoding.sample is None or job.encoding.sample or wanted or job.limit:
        return None
    return (
        f"{job.name}: published is a sample of {percent(old.encoding.sample)} of its source, and this run takes all of it: sample, or --budget, "
        "says that it is to be one again"
    )


def why_rebuilt(job: Job, target: TargetState) -> str | None:
    """A sentence where the target holds a stream, or finished work units, of an earlier format, so that all of it is converted again."""
    if isinstance(target.damage, Earlier):
        what = "the stream that is published"
    elif target.manifest is None and FOLDER in target.folders and _is_of_earlier(job.folder):
        what = "the finished work units"
    else:
        return None
    return f"{job.name}: an earlier commit of mdsmix made {what} at {job.target}; all of it is converted again"


def _is_of_earlier(folder: Location) -> bool:
    return any(EARLIER.fullmatch(name) for name, _ in (folder / FOLDER).list())

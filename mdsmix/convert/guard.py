"""What stands at the target already, and whether it may be replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    if not _share_a_file(job, manifest, files):
        old = nsmallest(3, (source.path for source in manifest.read_sources(job.folder)))
        return (
            f"stream {job.name}: {job.target} holds a stream made of {listed(old, of=manifest.source_count) or 'other streams'}, none of which is "
            f"among its sources now ({listed(sorted({file.name for file in files}))}); publish elsewhere, or pass --reencode to replace it."
        )
    names = {file.name for file in files if file.stat.size}
    lost = find_lost(job, manifest, names)
    # Where there are new files, one of them may be a lost one that was moved or compressed: that is known when they were read.
    if lost and lost.is_much and len(names) + len(lost.names) == manifest.source_count:
        return lost.refusal(job)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Source files that a published stream was made of, and that are gone or empty now."""

    names: Sequence[str]
    share: Fraction
    "Of the bytes of all its sources."
    records: int
    "Of the whole stream: those of one file are not counted."

    @property
    def is_much(self) -> bool:
        return self.share > MOST_LOST

    @property
    def said(self) -> str:
        return (
            f"{listed(self.names)} {does(self.names, 'is', 'are')} no longer among its sources: about {float(self.share * self.records):,.0f} "
            f"of the {plural(self.records, 'record')} published, {float(self.share):.1%} of their bytes"
        )

    def refusal(self, job: Job) -> str:
        them = does(self.names, "it", "them")
        return f"stream {job.name}: {self.said}; bring {them} back, or pass --reencode to replace {job.target} by a stream without {them}."


def find_lost(
    job: Job, manifest: Manifest, names: Collection[str], hashes: Collection[str] = ()
) -> Lost | None:
    """Which files of the published stream are gone; None where all are there, by name or, where the hashes of what the sources hold
    now are known, by content."""
    gone, total = list[SourceEntry](), 0
    with suppress(
        Damaged
    ):  # a part of the list: what it named is not known, and a publication writes it anew
        for source in manifest.read_sources(job.folder):
            total += source.size
            if source.path not in names and source.hash not in hashes:
                gone.append(source)
    if not gone:
        return None
    return Lost(
        names=sorted(source.path for source in gone),
        share=Fraction(sum(source.size for source in gone), total),
        records=manifest.records.read,
    )


def told_of_lost(
    job: Job, old: Manifest | None, entries: Sequence[SourceEntry], reencode: bool
) -> str:
    """A warning where files of the published stream are not among these; RecipeError where they are more than a run may leave out
    unasked."""
    if job.limit or not old:
        return ""
    lost = find_lost(job, old, {e.path for e in entries}, {e.hash for e in entries})
    if lost and lost.is_much and not reencode:
        raise RecipeError(f"{lost.refusal(job)} What was converted is kept.")
    return f"WARNING: {lost.said}" if lost else ""


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


def _share_a_file(job: Job, manifest: Manifest, files: list[SourceFile]) -> bool:
    """Whether a file of the published stream is among these, by its name or, where it was moved, by its content. Of a list
    in parts as a rule only the first is read."""
    now = {file.name for file in files}
    before = (source.path for source in manifest.read_sources(job.folder))
    return not now.isdisjoint(before) or _share_content(job, manifest, files)


def _share_content(job: Job, manifest: Manifest, files: list[SourceFile]) -> bool:
    """Only files as large as one of the published stream are read, the smallest first, until one is the same."""
    hashes: dict[int, set[str]] = {file.stat.size: set() for file in files}
    for source in manifest.read_sources(job.folder):
        if source.size in hashes:
            hashes[source.size].add(source.hash)
    alike = sorted((f for f in files if hashes[f.stat.size]), key=lambda file: file.stat.size)
    return any(_hash(file, job.fields_read) in hashes[file.stat.size] for file in alike)


def _hash(file: SourceFile, fields: tuple[str, ...]) -> str:
    """As a manifest says it."""
    found = (sources.content_of(unit) for unit in sources.plan([file], fields=fields))
    return sources.file_hash(digest for content in found for digest in content.files)


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

"""Looks at a stream's target when a run begins, and judges whether the published stream may be
replaced.

A stream that is up to date costs three requests: a listing, the manifest and the index that it
names. Many streams are asked at a time. The target of a stream that has work is looked at again
when its turn comes, since hours may have passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import PurePosixPath

from mdsmix import sources
from mdsmix.conversion.job import Job
from mdsmix.conversion.unit_files import EARLIER, FOLDER
from mdsmix.errors import Damaged, EarlierFormat, RecipeError, Unreachable
from mdsmix.messages import choose_verb, join_names, plural
from mdsmix.shards.index import INDEX, Index, find_metadata, parse_index
from mdsmix.shards.manifest import MANIFEST, Manifest, read_manifest
from mdsmix.shards.published import QUARANTINE
from mdsmix.shards.shard_files import refuse_links
from mdsmix.shards.side_files import SourceEntry
from mdsmix.sources import Content, SourceFile, Unit
from mdsmix.sources.inflate import PACKINGS
from mdsmix.storage import Stat


@dataclass(frozen=True, kw_only=True)
class TargetState:
    """One look at a target."""

    files: Mapping[str, Stat]
    "Files directly in the target."
    folders: Set[str]
    manifest: Manifest | None
    damage: Unreachable | None
    "Why the manifest that is there cannot be read."
    index_content: bytes | None
    "The bytes of the index that the manifest names, as stored."
    stored: Mapping[str, Stat]
    "The files beside that index: the target's own, or a version's."
    quarantined: Mapping[str, Stat]
    "Files in its quarantine."

    @cached_property
    def index(self) -> Index | None:
        """The index; None where it is missing, or damaged, so that it is written again. Parsed only
        when it is asked for: 10,000 shards take half a second.
        """
        if self.index_content is None:
            return None
        with suppress(Unreachable):
            return parse_index(self.index_content, INDEX)
        return None

    @property
    def is_empty(self) -> bool:
        return not self.files and not self.folders


def state_of(job: Job) -> TargetState:
    """Looks at the job's target; Unreachable where the store cannot be asked."""
    files, folders = job.folder.entries()
    manifest, damage, content, stored = None, None, None, files
    if MANIFEST in files:
        try:
            manifest = read_manifest(job.folder)
        except Unreachable as error:
            damage = error
    if manifest:
        place = job.place(manifest.index_hash)
        stored = files if place == job.folder else dict(place.list())
        with suppress(Unreachable):
            at = place / INDEX
            content = find_metadata(at) if at.name in stored else None
    quarantine = job.folder / QUARANTINE
    return TargetState(
        files=files,
        folders=folders,
        manifest=manifest,
        damage=damage,
        index_content=content,
        stored=stored,
        quarantined=dict(quarantine.list()) if QUARANTINE in folders else {},
    )


MOST_LOST = Fraction(1, 10)
"The largest share of a published stream's source bytes that a run leaves out unasked."


def published_manifest(job: Job, target: TargetState, reencode: bool) -> Manifest | None:
    """The manifest at the target; None where nothing is published there that a run can go on from.

    RecipeError where the target holds a stream that `mdsmix convert` did not make.
    """
    if isinstance(target.damage, EarlierFormat):
        return None
    if target.damage and not reencode:
        raise Unreachable(f"{target.damage} To publish the stream anew, pass --reencode.")
    if target.manifest is None and not reencode and INDEX in target.files:
        raise RecipeError(
            f"stream {job.name}: {job.target} holds a stream without an mdsmix manifest, which convert would "
            "overwrite; publish elsewhere (another stream name, remote or local), or pass --reencode to replace it."
        )
    return target.manifest


def refuse_replacing(
    job: Job, old: Manifest | None, files: Sequence[SourceFile], reencode: bool
) -> None:
    """RecipeError where the published stream has other columns, where its folders are links, and
    where its source includes the bad records that convert itself has set aside: every run would add
    to them.

    A stream of `--limit` may always be replaced: it is made to be thrown away.
    """
    stream = job.folder.parent
    refuse_links(stream.parent, stream.name, job.folder.name)
    for folder in (file.location.parent for file in files):
        if folder.name == QUARANTINE and folder.parent.parent.parent == job.root:
            raise RecipeError(
                f"stream {job.name}: its source finds files in {folder}, the bad records that convert itself has set aside; "
                "narrow the pattern, or publish outside of the folder that it searches."
            )
    if old is None or job.limit or reencode:
        return
    if old.encoding.columns.keys() != job.encoding.columns.keys():
        raise RecipeError(
            f"stream {job.name} is published for the {old.encoding.loader} loader with the columns "
            f"{join_names(old.encoding.columns)}; the recipe now wants {join_names(job.encoding.columns)} for the "
            f"{job.encoding.loader} loader: all {old.records.read:,} records, {old.totals.seen_tokens:,} tokens, "
            "are to be encoded again; pass --reencode if that is meant."
        )


def told_of_lost(
    job: Job, old: Manifest | None, files: Sequence[SourceFile], reencode: bool
) -> str:
    """A warning where files of the published stream are no longer among its sources; RecipeError
    where they are more than a run may leave out unasked. A new file of the same size counts as the
    old one moved; a name that differs in its packing, as the old one packed.
    """
    if job.limit or not old:
        return ""
    new, gone, total = {file.name: file.stat.size for file in files}, list[SourceEntry](), 0
    with suppress(Damaged):  # a part of the list of sources, which a publication writes anew
        for source in old.read_sources(job.folder):
            total += source.size
            if new.pop(source.path, None) is None:
                gone.append(source)
    sizes, names = {*new.values()}, {*_otherwise_packed(new)}
    gone = [of for of in gone if of.size not in sizes and PurePosixPath(of.path).name not in names]
    if not gone:
        return ""
    share = Fraction(sum(source.size for source in gone), total or 1)
    said = (
        f"{join_names(sorted(source.path for source in gone))} {choose_verb(gone, 'is', 'are')} no longer among its sources: about "
        f"{float(share * old.records.read):,.0f} of the {plural(old.records.read, 'record')} published, {float(share):.1%} of their bytes"
    )
    if share > MOST_LOST and not reencode:
        raise RecipeError(
            f"stream {job.name}: {said}; bring back what is gone, publish elsewhere, or pass --reencode to replace {job.target} by a stream "
            "without it."
        )
    return f"WARNING: {said}"


def _otherwise_packed(paths: Iterable[str]) -> Iterator[str]:
    """The names that these files would have if they were packed otherwise, or not at all."""
    for name in (PurePosixPath(path).name for path in paths):
        plain = name.removesuffix(next(filter(name.endswith, PACKINGS), ""))
        yield from (plain + p for p in ("", *PACKINGS) if plain + p != name)


def source_entries(units: Iterable[Unit], contents: Iterable[Content]) -> list[SourceEntry]:
    """Each source file once, with the hash of what it holds."""
    found: dict[str, tuple[int, list[str]]] = {}
    for unit, content in zip(units, contents, strict=False):
        for file, digest in zip(unit.files, content.files, strict=True):
            found.setdefault(file.name, (file.stat.size, []))[1].append(digest)
    return [
        SourceEntry(path=name, size=size, hash=sources.file_hash(digests))
        for name, (size, digests) in found.items()
    ]


def why_rebuilt(job: Job, target: TargetState) -> str | None:
    """A sentence where the target holds a stream, or finished work units, of an earlier format, so
    that all of it is converted again.
    """
    is_begun = FOLDER in target.folders and not target.manifest
    names = [name for name, _ in (job.folder / FOLDER).list()] if is_begun else []
    if not isinstance(target.damage, EarlierFormat) and not any(map(EARLIER.fullmatch, names)):
        return None
    return f"{job.name}: an earlier commit of mdsmix made what lies at {job.target}; all of it is converted again"

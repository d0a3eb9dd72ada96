"""The state of a stream's target when a run begins, and whether the published stream may be
replaced.

A stream that is up to date costs three requests: a listing, the manifest and the index that it
names. Many streams are read at the same time. The target of a stream that has work is read again
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
    """The files at a target, as they were at one moment."""

    files: Mapping[str, Stat]
    "Files directly in the target."
    folders: Set[str]
    manifest: Manifest | None
    damage: Unreachable | None
    "Why the existing manifest cannot be read."
    index_content: bytes | None
    "The bytes of the index that the manifest names, as stored."
    stored: Mapping[str, Stat]
    "The files next to that index: in the target, or in a version's folder."
    quarantined: Mapping[str, Stat]
    "Files in its quarantine."

    @cached_property
    def index(self) -> Index | None:
        """The index. None if it is missing, or damaged, so that it is written again. It is parsed
        only when needed: 10,000 shards take half a second.
        """
        if self.index_content is None:
            return None
        with suppress(Unreachable):
            return parse_index(self.index_content, INDEX)
        return None

    @property
    def is_empty(self) -> bool:
        return not self.files and not self.folders


def read_target(job: Job) -> TargetState:
    """Read the state of the job's target.

    Raises Unreachable if the store does not answer.
    """
    files, folders = job.folder.entries()
    # Read the manifest.
    manifest: Manifest | None = None
    damage: Unreachable | None = None
    if MANIFEST in files:
        try:
            manifest = read_manifest(job.folder)
        except Unreachable as error:
            damage = error
    # Read the index that it names: in the target, or in a version's folder.
    index_content: bytes | None = None
    stored = files
    if manifest:
        folder = job.place(manifest.index_hash)
        if folder != job.folder:
            stored = dict(folder.list())
        with suppress(Unreachable):
            if INDEX in stored:
                index_content = find_metadata(folder / INDEX)
    quarantine = job.folder / QUARANTINE
    return TargetState(
        files=files,
        folders=folders,
        manifest=manifest,
        damage=damage,
        index_content=index_content,
        stored=stored,
        quarantined=dict(quarantine.list()) if QUARANTINE in folders else {},
    )


MOST_MISSING = Fraction(1, 10)
"The largest share of a published stream's source bytes that may be missing without --reencode."


def published_manifest(job: Job, target: TargetState, reencode: bool) -> Manifest | None:
    """Return the manifest at the target. None if no stream that a run can continue from is
    published there.

    Raises RecipeError if the target contains a stream that `mdsmix convert` did not make, and
    Unreachable if the manifest is damaged; neither with `reencode`.
    """
    if isinstance(target.damage, EarlierFormat):
        return None
    if target.damage and not reencode:
        raise Unreachable(f"{target.damage} To publish the stream again, pass --reencode.")
    if target.manifest is None and not reencode and INDEX in target.files:
        raise RecipeError(
            f"stream {job.name}: {job.target} has a stream without an mdsmix manifest, which "
            "convert would overwrite; publish to another place (another stream name, remote or "
            "local), or pass --reencode to replace it."
        )
    return target.manifest


def refuse_replacing(
    job: Job, old: Manifest | None, files: Sequence[SourceFile], reencode: bool
) -> None:
    """Raise RecipeError if the published stream may not be replaced.

    It may not if it has other columns, if its folders are links, or if its source includes the bad
    records that convert itself wrote: every run would add to them. A stream of `--limit` may always
    be replaced by one with other columns: it is made to be thrown away.
    """
    stream = job.folder.parent
    refuse_links(stream.parent, stream.name, job.folder.name)
    for folder in (file.location.parent for file in files):
        if folder.name == QUARANTINE and folder.parent.parent.parent == job.root:
            raise RecipeError(
                f"stream {job.name}: its source includes files in {folder}, where convert itself "
                "writes bad records, so every run would add to its own source; narrow the pattern "
                "in source.path, or publish outside of the folder that it searches."
            )
    if old is None or job.limit or reencode:
        return
    if old.encoding.columns.keys() != job.encoding.columns.keys():
        raise RecipeError(
            f"stream {job.name} is published for the {old.encoding.loader} loader with the columns "
            f"{join_names(old.encoding.columns)}, but the recipe asks for "
            f"{join_names(job.encoding.columns)} for the {job.encoding.loader} loader. All "
            f"{old.records.read:,} records, {old.totals.seen_tokens:,} tokens, would be encoded "
            "again; if you want that, pass --reencode."
        )


def warn_missing_sources(
    job: Job, old: Manifest | None, files: Sequence[SourceFile], reencode: bool
) -> str:
    """Return a warning if files of the published stream are missing from its sources; empty
    otherwise.

    A new file of the same size counts as the old one, moved. A name that differs only in how the
    file is compressed counts as the old one, compressed again.

    Raises RecipeError if more than MOST_MISSING of the source's bytes are missing, unless
    `reencode`.
    """
    if job.limit or not old:
        return ""
    # Find the published files whose names are gone.
    new_sizes = {file.name: file.stat.size for file in files}
    gone = list[SourceEntry]()
    total = 0
    with suppress(Damaged):  # a part of the list of sources, which publication writes again
        for source in old.read_sources(job.folder):
            total += source.size
            if new_sizes.pop(source.path, None) is None:
                gone.append(source)
    # Drop those that were moved or compressed otherwise.
    moved_sizes = set(new_sizes.values())
    repacked_names = set(_repacked_names(new_sizes))
    missing = list[SourceEntry]()
    for source in gone:
        if source.size not in moved_sizes and _file_name(source.path) not in repacked_names:
            missing.append(source)
    if not missing:
        return ""
    # Refuse or warn, with the share that is missing.
    share = Fraction(sum(source.size for source in missing), total or 1)
    sentence = (
        f"{join_names(sorted(source.path for source in missing))} "
        f"{choose_verb(missing, 'is', 'are')} no longer among its sources: about "
        f"{float(share * old.records.read):,.0f} of the {plural(old.records.read, 'record')} "
        f"published, {float(share):.1%} of their bytes"
    )
    if share > MOST_MISSING and not reencode:
        raise RecipeError(
            f"stream {job.name}: {sentence}; bring the missing files back, publish to another "
            f"place, or pass --reencode to replace {job.target} by a stream without them."
        )
    return f"WARNING: {sentence}"


def _file_name(path: str) -> str:
    return PurePosixPath(path).name


def _repacked_names(paths: Iterable[str]) -> Iterator[str]:
    """Yield the file names that these files would have if they were compressed by another
    algorithm, or not at all.
    """
    for name in map(_file_name, paths):
        packing = next(filter(name.endswith, PACKINGS), "")
        plain_name = name.removesuffix(packing)
        for other_packing in ("", *PACKINGS):
            if other_packing != packing:
                yield plain_name + other_packing


def make_source_entries(units: Iterable[Unit], contents: Iterable[Content]) -> list[SourceEntry]:
    """Return an entry for each source file, with the hash of its content."""
    sizes = dict[str, int]()
    digests = dict[str, list[str]]()
    for unit, content in zip(units, contents, strict=False):
        for file, digest in zip(unit.files, content.files, strict=True):
            sizes.setdefault(file.name, file.stat.size)
            digests.setdefault(file.name, []).append(digest)
    return [
        SourceEntry(path=name, size=size, hash=sources.file_hash(digests[name]))
        for name, size in sizes.items()
    ]


def rebuild_reason(job: Job, target: TargetState) -> str | None:
    """Return why all of a stream is converted again: the target has a stream, or finished work
    units, of an earlier format. None otherwise.
    """
    unit_files = list[str]()
    if FOLDER in target.folders and not target.manifest:
        unit_files = [name for name, _ in (job.folder / FOLDER).list()]
    is_earlier = isinstance(target.damage, EarlierFormat) or any(map(EARLIER.fullmatch, unit_files))
    if not is_earlier:
        return None
    return (
        f"{job.name}: the data at {job.target} was written by an earlier commit of mdsmix; all of "
        "it is converted again"
    )

"""Reads the state of a stream's target (where it is published) when a run begins, and decides
whether the published stream may be replaced.

A stream that is up to date costs three requests: a listing, then the manifest and the index that it
names, both at the same time. Many streams are read at the same time. The target of a stream with
unfinished units is listed again when its turn comes, since hours may have passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from fractions import Fraction
from functools import cached_property
from pathlib import PurePosixPath
from typing import NamedTuple

from mdsmix import sources
from mdsmix.conversion.job import Job
from mdsmix.conversion.unit_files import EARLIER, FOLDER
from mdsmix.errors import Damaged, EarlierFormat, RecipeError, Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import choose_verb, join_names, plural
from mdsmix.recipe import Recipe
from mdsmix.shards.index import INDEX, Index, find_metadata, parse_index
from mdsmix.shards.manifest import MANIFEST, Manifest, parse_manifest
from mdsmix.shards.published import QUARANTINE
from mdsmix.shards.shard_files import refuse_links
from mdsmix.shards.side_files import SourceEntry
from mdsmix.sources import Content, SourceFile, Unit
from mdsmix.sources.inflate import PACKINGS
from mdsmix.storage import Location, Stat, map_files


@frozen(kw_only=True)
class TargetState:
    """The files at a target (the place where a stream is published), as they were at one moment."""

    files: Mapping[str, Stat]
    "Files directly in the target: name -> size and time."
    folders: Set[str]
    "Names of the folders directly in the target."
    manifest: Manifest | None
    "The manifest; None if it is missing or cannot be read."
    damage: Unreachable | None
    "Why the manifest cannot be read; None if it is missing or not damaged."
    index_content: bytes | None
    "The bytes of the index that the manifest names, as stored; None if it is missing."
    stored: Mapping[str, Stat]
    "The files next to the index: in the target, or in a version's folder."
    quarantined: Mapping[str, Stat]
    "Files in the target's quarantine."

    @cached_property
    def index(self) -> Index | None:
        """The index; None if it is missing or damaged, which makes a run write it again. It is
        parsed only when it is needed: 10,000 shards take half a second.
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
    # Read the manifest, and the index next to it.
    small_files = dict[str, _SmallFile]()
    if MANIFEST in files:
        names = [name for name in (MANIFEST, INDEX) if name in files]
        results = map_files(_read_small_file, [job.folder / name for name in names])
        small_files = dict(zip(names, results, strict=True))
    # Parse the manifest.
    manifest: Manifest | None = None
    content, damage = small_files.get(MANIFEST, _SmallFile())
    if content is not None:
        try:
            manifest = parse_manifest(content, str(job.folder / MANIFEST))
        except Unreachable as error:
            damage = error
    # Find the index that the manifest names. With versions it is in a version's folder.
    index_content: bytes | None = None
    stored = files
    if manifest:
        index_content = small_files.get(INDEX, _SmallFile()).content
        folder = job.place(manifest.index_hash)
        if folder != job.folder:
            stored = dict(folder.list())
            index_content = None
            if INDEX in stored:
                index_content = _read_small_file(folder / INDEX).content
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


class _SmallFile(NamedTuple):
    """A manifest or an index, as `_read_small_file` reads it."""

    content: bytes | None = None
    "None if the file is missing or cannot be read."
    error: Unreachable | None = None
    "Why it cannot be read."


def _read_small_file(file: Location) -> _SmallFile:
    """Read a manifest or an index, and keep the error if it cannot be read."""
    try:
        return _SmallFile(content=find_metadata(file))
    except Unreachable as error:
        return _SmallFile(error=error)


MOST_MISSING = Fraction(1, 10)
"The largest share of a published stream's source bytes that may be gone now without --reencode."


def find_published_manifest(job: Job, target: TargetState, reencode: bool) -> Manifest | None:
    """Return the manifest at the target; None if no stream is published there from which a run can
    continue.

    Raises RecipeError if the target contains a stream that `mdsmix convert` did not make.
    Raises Unreachable if the manifest is damaged. With `reencode` neither is raised.

    Args:
        job: the job of the stream.
        target: the files at its target.
        reencode: whether the user allows replacing the stream (`--reencode`).
    """
    if isinstance(target.damage, EarlierFormat):
        return None
    if target.damage and not reencode:
        raise Unreachable(
            f"{target.damage} To publish the stream again, run mdsmix convert with --reencode."
        )
    if target.manifest is None and not reencode and INDEX in target.files:
        raise RecipeError(
            f"stream {job.name}: {job.target} has a stream without an mdsmix manifest, and convert "
            "would overwrite that stream. Publish to another place (change the stream's name, or "
            "remote or local in the recipe), or pass --reencode to replace it."
        )
    return target.manifest


def refuse_replacing(
    job: Job,
    old: Manifest | None,
    files: Sequence[SourceFile],
    reencode: bool,
    recipe: Recipe,
) -> None:
    """Raise RecipeError if the published stream may not be replaced.

    It may not if it has other columns than the job, if its folders are links, or if its source
    includes bad records that convert itself wrote, since every run would add to these. A stream
    that was converted with `--limit` may be replaced by a stream with other columns.

    Args:
        job: the job of the stream.
        old: the manifest of the published stream; None before the first publication.
        files: the files of its source.
        reencode: whether the user allows replacing the stream (`--reencode`).
        recipe: the recipe of all streams, which decides the loader.
    """
    stream = job.folder.parent
    refuse_links(stream.parent, stream.name, job.folder.name)
    for folder in (file.location.parent for file in files):
        # The quarantine of a stream is ROOT/STREAM/SPLIT/quarantine.
        if folder.name == QUARANTINE and folder.parent.parent.parent == job.root:
            raise RecipeError(
                f"stream {job.name}: its source includes files in {folder}, where convert itself "
                "writes bad records, so every run would add to its own source. Narrow the pattern "
                "in source.path, or publish outside of the folder that the pattern searches."
            )
    if old is None or job.limit or reencode:
        return
    if old.encoding.columns.keys() != job.encoding.columns.keys():
        raise RecipeError(_describe_new_columns(job, old, recipe))


def _describe_new_columns(job: Job, old: Manifest, recipe: Recipe) -> str:
    """Return the message on a published stream whose columns would change.

    The columns follow from the loader. If no key of the recipe names the loader, it follows from
    the kinds of all streams: so a stream that comes or goes changes the columns of the others. The
    message then names that stream, and the key that keeps what is published.
    """
    new = job.encoding
    work = (
        f"all {old.records.read:,} records ({old.totals.seen_tokens:,} tokens) would be encoded "
        "again"
    )
    columns = (
        f"the columns {join_names(new.columns)} for the {new.loader} loader, and it is published "
        f"with {join_names(old.encoding.columns)} for the {old.encoding.loader} loader"
    )
    if "name" not in recipe.train_loader:
        if old.encoding.loader == "finetuning" and recipe.loader == "text":
            return (
                f"stream {job.name}: {_describe_gone(recipe)}, so the recipe has only pretraining "
                "streams now, and its loader changes from finetuning to text. The stream would get "
                f"{columns}. To keep it as it is, set train_loader.name: finetuning in the recipe. "
                f"Otherwise {work}: pass --reencode."
            )
        if old.encoding.loader == "text" and recipe.loader == "finetuning":
            pairs = [spec.name for spec in recipe.streams.values() if spec.kind != "pretraining"]
            return (
                f"stream {job.name}: the recipe has {join_names(pairs)} now, so it has not only "
                "pretraining streams, and its loader changes from text to finetuning. The stream "
                f"would get {columns}. To keep it as it is, set train_loader.name: mdsmix in the "
                "recipe: where mdsmix is installed, that loader reads it along with the others. "
                f"Otherwise {work}: pass --reencode."
            )
    return (
        f"stream {job.name} is published for the {old.encoding.loader} loader with the columns "
        f"{join_names(old.encoding.columns)}, but the recipe asks for the columns "
        f"{join_names(new.columns)} for the {new.loader} loader. {work.capitalize()}; if you want "
        "this, pass --reencode."
    )


def _describe_gone(recipe: Recipe) -> str:
    """Return which stream of prompts and responses is published next to the recipe's streams and
    not in the recipe any more.
    """
    from mdsmix.conversion.unnamed_streams import find_unnamed_streams, is_for_finetuning

    gone = list[str]()
    with suppress(Unreachable):
        for stream in find_unnamed_streams(recipe):
            if any(is_for_finetuning(stream, split) for split in stream.splits):
                gone.append(stream.name)
    if not gone:
        return "no stream of prompts and responses, such as chats, is in the recipe any more"
    return f"{join_names(gone)} {choose_verb(gone, 'is', 'are')} not in the recipe any more"


def warn_lost_sources(
    job: Job, old: Manifest | None, files: Sequence[SourceFile], reencode: bool
) -> list[str]:
    """Return a warning if files from which the stream was published are missing from its source
    now, or have 0 bytes, and a warning if files have become smaller.

    A new file of the same size counts as the old file, moved. A file whose name differs only in the
    suffix of its compression counts as the old file, compressed otherwise.

    Raises RecipeError if more than MOST_MISSING of the source's bytes are missing and `reencode` is
    false.

    Args:
        job: the job of the stream.
        old: the manifest of the published stream; None before the first publication.
        files: the files of its source.
        reencode: whether the user allows replacing the stream (`--reencode`).
    """
    if job.limit or not old:
        return []
    # Find the published files whose names are gone, or that are empty now, or smaller.
    new_sizes = {file.name: file.stat.size for file in files if file.stat.size}
    gone = list[SourceEntry]()
    smaller = list[_SmallerSource]()
    total = 0
    with suppress(Damaged):  # the list of sources is damaged: publication writes it again
        for source in old.read_sources(job.folder):
            total += source.size
            new_size = new_sizes.pop(source.path, None)
            if new_size is None:
                gone.append(source)
            elif new_size < source.size:
                smaller.append(_SmallerSource(source, new_size))
    warnings = [_describe_smaller_sources(smaller)] if smaller else []
    # Leave out the files that were moved or compressed otherwise. Only files that were not
    # published before remain in `new_sizes`.
    moved_sizes = set(new_sizes.values())
    repacked_names = set(_list_repacked_names(new_sizes))
    missing = list[SourceEntry]()
    for source in gone:
        if source.size not in moved_sizes and _file_name(source.path) not in repacked_names:
            missing.append(source)
    if not missing:
        return warnings
    # Refuse or warn, with the share of the bytes that is missing.
    share = Fraction(sum(source.size for source in missing), total or 1)
    names = {file.name for file in files}
    emptied = sorted(source.path for source in missing if source.path in names)
    size = ""
    if emptied:
        size = f" ({join_names(emptied)} {choose_verb(emptied, 'has', 'have')} 0 bytes now)"
    sentence = (
        f"{join_names(sorted(source.path for source in missing))} "
        f"{choose_verb(missing, 'is', 'are')} no longer among its sources{size}: about "
        f"{float(share * old.records.read):,.0f} of the {plural(old.records.read, 'record')} "
        f"published, {float(share):.1%} of their bytes"
    )
    if share > MOST_MISSING and not reencode:
        raise RecipeError(
            f"stream {job.name}: {sentence}; bring the missing files back, publish to another "
            f"place, or pass --reencode to replace {job.target} by a stream without these files."
        )
    return [f"WARNING: {sentence}", *warnings]


class _SmallerSource(NamedTuple):
    """A source file that has become smaller since the stream was published."""

    published: SourceEntry
    size: int
    "Its bytes now."


def _describe_smaller_sources(smaller: Sequence[_SmallerSource]) -> str:
    """Return a warning on source files that have become smaller, with the bytes that they lack now.
    A copy that was interrupted at the end of a line looks like a file that was edited.
    """
    names = join_names(sorted(source.published.path for source in smaller))
    before = sum(source.published.size for source in smaller)
    lost = before - sum(source.size for source in smaller)
    return (
        f"WARNING: {names} {choose_verb(smaller, 'has', 'have')} become smaller since the stream "
        f"was published, by {lost:,} of {plural(before, 'byte')} ({lost / before:.1%}): look "
        "whether a copy was interrupted"
    )


def _file_name(path: str) -> str:
    return PurePosixPath(path).name


def _list_repacked_names(paths: Iterable[str]) -> Iterator[str]:
    """Yield the file names that these files would have if they were compressed by another
    algorithm, or not at all: for `a.jsonl.gz` they are `a.jsonl`, `a.jsonl.zst` and so on.
    """
    for name in map(_file_name, paths):
        packing = ""
        for suffix in PACKINGS:
            if name.endswith(suffix):
                packing = suffix
                break
        plain_name = name.removesuffix(packing)
        for other_packing in ("", *PACKINGS):
            if other_packing != packing:
                yield plain_name + other_packing


def make_source_entries(units: Iterable[Unit], contents: Iterable[Content]) -> list[SourceEntry]:
    """Return an entry for each source file, with the hash of its content.

    Args:
        units: the work units (parts of the files), in the order of the plan.
        contents: the content of each of these units.
    """
    # A file may be divided into several units: collect the digests of all of them. Under `--limit`
    # only the first units have contents.
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


def explain_rebuild(job: Job, target: TargetState) -> str | None:
    """Return a sentence on why all of a stream is converted again, if the target has a stream or
    finished work units of an earlier format. Return None if it has not.
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

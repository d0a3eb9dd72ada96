"""Opens a published stream by a folder that a user names: its split's own folder, or one of the
versions beside it.

A stream is published in place, its index replaced at every change, or as versions:
`<split>-<hash8>/` folders that never change. Under versions the split's own folder holds no index.
The manifest in it names the current version by its index's hash. So one small write moves every
reader of the split's folder, and no reader of a version's own folder.

`contradictions` holds the rules between a stream's index, its manifest and the files beside them,
for `verify` and `check` alike. It needs one listing. Damage inside an index or a manifest is told
when that file is read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import orjson

from mdsmix.errors import NotPublished, Unreachable
from mdsmix.shards.index import INDEX, Index, Shard, find_index, read_index
from mdsmix.shards.manifest import MANIFEST, Manifest, read_manifest
from mdsmix.shards.shard_files import decompress_frame
from mdsmix.shards.shard_samples import Sample, read_samples
from mdsmix.shards.side_files import read_record_id
from mdsmix.storage import Location, Stat

LIMITED_NAME = re.compile(r"limit-\d+")
"Name of the folder that `convert --limit` publishes beside the splits."
QUARANTINE = "quarantine"
"""The folder of a stream's bad records: a file for each window that has some, a line of JSON for
each record.
"""
QUARANTINE_SUFFIX = ".jsonl.zst"
VERSION_NAME = re.compile(r"(.+)-([0-9a-f]{8})")


SHARD_MISSING, SHARD_SIZE, SHARD_BASENAMES = "shard-missing", "shard-size", "shard-basenames"
SIDE_FILES, PUBLICATION_INTERRUPTED, MANIFEST_CONTRADICTS = (
    "side-files",
    "publication-interrupted",
    "manifest-contradicts",
)
"The rules, by the names that `check` gives them."


@dataclass(frozen=True, slots=True)
class StreamFault:
    """A rule that a stream breaks."""

    rule: str
    "The rule's name in `check`."
    file: str
    "A shard, the index, the manifest or a file that it names, by its name in the stream's folder."
    problem: str
    "What was expected and what was found."

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class PublishedStream:
    """A published stream as it lies there. Its files are listed, and its samples read, when
    somebody asks.
    """

    folder: Location
    "Where index.json lies."
    index: Index
    manifest: Manifest | None

    @property
    def trusted_manifest(self) -> Manifest | None:
        """The manifest where it names this index; None where it names another, as after an
        interrupted publication.
        """
        is_trusted = self.manifest and self.manifest.index_hash == self.index.hash
        return self.manifest if is_trusted else None

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.index.shards

    @property
    def columns(self) -> Mapping[str, str]:
        """Column -> MDS encoding, of the first shard; a rule compares the others."""
        return self.shards[0].columns if self.shards else {}

    @property
    def first_filled(self) -> Shard | None:
        """The first shard with samples; None if no shard has any.

        MDSWriter writes a shard of 0 samples first if the first sample exceeds its `size_limit`.
        """
        return next((shard for shard in self.shards if shard.samples), None)

    @cached_property
    def files(self) -> Mapping[str, Stat]:
        """Path below the folder -> Stat of each file: one listing, however many shards."""
        return self.index.list_files(self.folder)

    @cached_property
    def contradictions(self) -> Sequence[StreamFault]:
        """Every rule between index, manifest and files that the stream breaks."""
        return list(find_contradictions(self.index, self.manifest, self.files))

    def holds(self, shard: Shard) -> bool:
        return shard.stored.find_problem(self.files) is None

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(shard.samples for shard in self.shards))

    def locate(self, sample: int) -> tuple[Shard, int]:
        """The shard that holds the `sample`-th sample of the stream, from 0, and the sample's
        number in that shard.
        """
        number = bisect_right(self._ends, sample)
        shard = self.shards[number]
        return shard, sample - (self._ends[number] - shard.samples)

    def read(self, sample: int) -> Sample:
        """A sample, decoded; Unreachable where it cannot be read."""
        shard, row = self.locate(sample)
        return read_samples(self.folder, shard, [row])[row]

    def id_of(self, sample: int) -> Any:
        """The name of the record behind a sample, or a list of names behind a packed row; None
        where no names are kept.
        """
        sides = self.trusted_manifest.side_files if self.trusted_manifest else ()
        return read_record_id(self.folder, sides, *self.locate(sample))


def find_contradictions(
    index: Index, manifest: Manifest | None, files: Mapping[str, Stat]
) -> Iterator[StreamFault]:
    """Every rule that the stream breaks. `files`: name -> size of each file beside its index."""
    for file in index.files:
        if problem := file.find_problem(files):
            yield StreamFault(
                SHARD_SIZE if file.basename in files else SHARD_MISSING, file.basename, problem
            )
    for name, times in Counter(file.basename for file in index.files).items():
        if times > 1:
            yield StreamFault(
                SHARD_BASENAMES, name, f"expected once in the index, found {times} times"
            )
    if manifest is None:
        return
    if index.hash != manifest.index_hash:
        expected = f"expected the xxh128 {manifest.index_hash} of the manifest, found {index.hash}"
        why = "a publication was interrupted, or the index was changed"
        yield StreamFault(PUBLICATION_INTERRUPTED, INDEX, f"{expected}: {why}")
        return
    for beside in manifest.named_files:
        if problem := beside.stored.find_problem(files):
            yield StreamFault(SIDE_FILES, beside.name, problem)
    columns = manifest.encoding.columns
    for shard in index.shards:
        if shard.columns != columns:
            problem = f"expected the columns {columns}, found {shard.columns}"
            yield StreamFault(MANIFEST_CONTRADICTS, shard.stored.basename, problem)
    for problem in _sums(index, manifest):
        yield StreamFault(MANIFEST_CONTRADICTS, MANIFEST, problem)


def _sums(index: Index, manifest: Manifest) -> Iterator[str]:
    """Sentences on counts of the manifest that do not add up, or not to what the index holds."""
    shards, parts = iter(index.shards), manifest.parts
    counts = [min(max(0, part.shards), len(index.shards)) for part in parts]
    found = [sum(shard.samples for shard in islice(shards, count)) for count in counts]
    said, total = [part.samples for part in parts], manifest.totals.samples
    if found != said or next(shards, None) or sum(said) != total:
        yield f"expected {total:,} samples, part by part, in the index, found {index.samples:,}"
    if not manifest.records.adds_up:
        yield f"expected as many records read as written, filtered and quarantined, found {manifest.records}"


def open_published(folder: Location) -> PublishedStream | None:
    """Opens the stream published at `folder`: two small reads, three where it is published as
    versions. None where there is none.

    Under versions the manifest is that in the split's folder, not the version's own: it names the
    newest sources.
    """
    index, manifest = find_index(folder), read_manifest(folder)
    if index is None and manifest:
        folder = locate_version(folder, manifest.index_hash)
        index = find_index(folder)
    return PublishedStream(folder=folder, index=index, manifest=manifest) if index else None


def open_stream_in(folder: Location) -> PublishedStream:
    """Opens the stream in just this folder; Unreachable where it has no index."""
    return PublishedStream(folder=folder, index=read_index(folder), manifest=read_manifest(folder))


def locate_version(folder: Location, index_hash: str) -> Location:
    """The folder of the version with this index, of the split in `folder`."""
    return folder.parent / f"{folder.name}-{index_hash[:8]}"


def list_versions(folder: Location) -> Iterator[Location]:
    """The versions beside the split's folder, finished or not."""
    for name in folder.parent.folders():
        found = VERSION_NAME.fullmatch(name)
        if found and found[1] == folder.name:
            yield folder.parent / name


def find_working_folder(folder: Location) -> Location:
    """The folder of a version's split, where conversion works. Any other folder, or a version whose
    split has no manifest, is returned as it is.
    """
    found = VERSION_NAME.fullmatch(folder.name)
    split = folder.parent / found[1] if found else folder
    return split if (split / MANIFEST).stat() else folder


def find_named_version(folder: Location) -> Location | None:
    """The version that the manifest in the split's folder names; None where the stream is published
    in place.
    """
    if (folder / INDEX).stat():
        return None
    manifest = read_manifest(folder)
    return locate_version(folder, manifest.index_hash) if manifest else None


def find_current(folder: Location) -> Location | None:
    """The folder that holds the index of the stream published at `folder`; None where there is
    none.
    """
    if (folder / INDEX).stat():
        return folder
    version = find_named_version(folder)
    return version if version and (version / INDEX).stat() else None


def find_published(at: Location) -> Location:
    """The folder that holds the index: `at`, the current version of `at`, or that of the only split
    in `at`. Unreachable where there is none, or several.
    """
    if found := find_current(at):
        return found
    splits = dict(_splits(at))
    chosen = {name: of for name, of in splits.items() if not LIMITED_NAME.fullmatch(name)} or splits
    if not chosen:
        raise make_not_published(at)
    if len(chosen) > 1:
        raise Unreachable(
            f"{at} holds {len(chosen)} splits ({', '.join(chosen)}); name one, for example {at / next(iter(chosen))}."
        )
    return next(iter(chosen.values()))


def list_limited(at: Location) -> list[Location]:
    """Return the folders of conversions with `--limit` that are published in the folder of a
    stream.
    """
    names = sorted(name for name in at.folders() if LIMITED_NAME.fullmatch(name))
    return [at / name for name in names if find_current(at / name)]


def make_not_published(at: Location) -> NotPublished:
    """The error for a place without a stream."""
    return NotPublished(
        f"{at} holds no published stream: neither it nor a folder in it has an {INDEX}; correct the "
        "path, or publish it (again) with the tool that makes it."
    )


def _splits(at: Location) -> Iterator[tuple[str, Location]]:
    """The published splits in `at`, and where the index of each lies. A version is no split where
    its split lies beside it.
    """
    names = set(at.folders())
    for name in sorted(names):
        version = VERSION_NAME.fullmatch(name)
        if not (version and version[1] in names) and (found := find_current(at / name)):
            yield name, found


def read_quarantine(folder: Location) -> Iterator[dict[str, Any]]:
    """All bad records of a stream, in the order of the files' names; Unreachable where a file is
    damaged.
    """
    quarantine = folder / QUARANTINE
    for name, _ in quarantine.list():
        if name.endswith(QUARANTINE_SUFFIX):
            at = quarantine / name
            if (content := decompress_frame(at.read())) is None:
                raise Unreachable(
                    f"{at} is damaged or cut off, and it holds bad records; delete it and run convert again, which writes it anew."
                )
            yield from map(orjson.loads, content.splitlines())

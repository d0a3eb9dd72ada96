"""Is a published stream what its index and manifest say? Every shard is read, hashed, decoded and counted.

A damaged shard ends a training run days in, or an epoch early without a word, so it is worth a reading of the stream: the
speed is that of the disk or the store (JSON columns: 14 M tokens/s). `quick` compares names and sizes by one listing, which
finds what is missing or cut off. Loss tokens and other counts that the samples alone cannot tell are not counted again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mdsmix.errors import Earlier, Unreachable
from mdsmix.shards import index as index_file
from mdsmix.shards import manifest as manifest_file
from mdsmix.shards.counts import Totals
from mdsmix.shards.decode import decode
from mdsmix.shards.index import (
    Index,
    Shard,
    StoredFile,
    find_description,
    parse_index,
    read_description,
)
from mdsmix.shards.manifest import Manifest, parse_manifest
from mdsmix.shards.sample import DECOMPRESSED
from mdsmix.shards.whole import check_stored, samples_of
from mdsmix.storage import Location

IN_FLIGHT_BYTES = 1 << 30
"Memory for the shards that are being looked at, 64 MiB each as a rule; one larger shard is looked at alone."
COPIES = 4
"A shard's bytes as stored and as decompressed, its ids, and what is made of them on the way."
S3_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is not as it should be."""

    file: str
    "A shard, the index, the manifest or a file that it names, by its name in the stream's folder."
    problem: str
    "What was expected and what was found."
    fix: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}; {self.fix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was looked at, and what was wrong."""

    stream: str
    shards: int = 0
    samples: int = 0
    bytes: int = 0
    undecoded: int = 0
    "Shards of a compression that mdsmix cannot undo: their size and hash are right, no more is known."
    unhashed: int = 0
    "Shards for which the index has no hash: damage that leaves the layout whole is not seen."
    faults: tuple[Fault, ...] = ()


def verify(
    folder: Location,
    *,
    quick: bool,
    begin: Callable[[str, int], None],
    on_progress: Callable[[int, int], None],
) -> Report:
    """Looks at all of the stream in `folder`; `begin` hears its size, `on_progress` of bytes and tokens that were looked at.

    Unreachable where it cannot be looked at: no index, no right, no store.
    """
    manifest, faults = _read_manifest(folder)
    fix = _fix(folder, manifest, bool(faults))
    at = folder / index_file.BASENAME
    content = read_description(at)
    try:
        index = parse_index(content, str(at))
    except Unreachable as error:
        return Report(
            stream=str(folder),
            faults=(*faults, Fault(file=at.name, problem=_problem(error), fix=fix)),
        )
    found = dict(folder.list())
    beside = [file.stored for file in manifest.beside] if manifest else []
    files = [*index.files, *beside]
    wrong = {file.basename: p for file in files if (p := file.missing_from(found))}
    whole = [shard for shard in index.shards if shard.stored.basename not in wrong]
    problems = [*wrong.items(), *_contradictions(index, manifest)]
    undecoded = 0
    if not quick:
        begin(str(folder), sum(shard.stored.bytes for shard in whole))
        damage, totals, undecoded = _look_inside_all(folder, whole, on_progress)
        damage += _damage(folder, [file for file in beside if file.basename not in wrong])
        problems += damage
        if not problems and not undecoded:
            problems += _miscounts(totals, manifest)
    return Report(
        stream=str(folder),
        shards=len(index.shards),
        samples=index.samples,
        bytes=index.bytes,
        undecoded=undecoded,
        unhashed=sum(not file.hashes for file in index.files),
        faults=(*faults, *(Fault(file=f, problem=p, fix=fix) for f, p in problems)),
    )


def _read_manifest(folder: Location) -> tuple[Manifest | None, list[Fault]]:
    at = folder / manifest_file.BASENAME
    content = find_description(at)
    if content is None:
        return None, []
    try:
        return parse_manifest(content, str(at)), []
    except Earlier:
        raise
    except Unreachable as error:
        fix = "mdsmix convert RECIPE --reencode writes it anew from the finished work units"
        return None, [Fault(file=at.name, problem=_problem(error), fix=fix)]


def _problem(error: Unreachable) -> str:
    """The problem that the error names, without its advice, since a fault has its own."""
    return str(error).rpartition("; ")[0] or str(error)


def _fix(folder: Location, manifest: Manifest | None, is_damaged: bool) -> str:
    if manifest and manifest.mixed:
        return "delete that file and run mdsmix mix again"
    if manifest or is_damaged:
        return f"mdsmix repair {folder} --recipe RECIPE makes it anew"
    return "publish the stream again with the tool that made it"


def _damage(folder: Location, files: list[StoredFile]) -> Iterator[tuple[str, str]]:
    """(name, problem) of the files that are not shards, one at a time in memory."""
    for file in files:
        try:
            check_stored(file, (folder / file.basename).read(), "manifest")
        except ValueError as error:
            yield file.basename, str(error)


def _contradictions(index: Index, manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    """(file, problem) where index and manifest contradict each other, as far as that shows without reading shards."""
    for name, times in Counter(file.basename for file in index.files).items():
        if times > 1:
            yield name, f"expected once in the index, found {times} times"
    if manifest is None:
        return
    if index.hash != manifest.index_hash:
        yield (
            index_file.BASENAME,
            f"expected the xxh128 {manifest.index_hash} of the manifest, found {index.hash}: "
            "a publication was interrupted, or the index was changed",
        )
        return
    for shard in index.shards:
        if shard.columns != manifest.encoding.columns:
            yield (
                shard.stored.basename,
                f"expected the columns {manifest.encoding.columns}, found {shard.columns}",
            )
    yield from ((manifest_file.BASENAME, problem) for problem in _sums(index, manifest))


def _sums(index: Index, manifest: Manifest) -> Iterator[str]:
    parts, total = manifest.parts, manifest.totals.samples
    if index.samples != total:
        yield f"expected {total:,} samples in the index, found {index.samples:,}"
    if not manifest.records.adds_up:
        yield f"expected as many records read as written, filtered and quarantined, found {manifest.records}"
    if sum(part.shards for part in parts) != len(index.shards):
        listed = sum(part.shards for part in parts)
        yield f"expected {listed:,} shards of all parts in the index, found {len(index.shards):,}"
        return
    ends = accumulate((part.shards for part in parts), initial=0)
    for part, (start, stop) in zip(parts, pairwise(ends), strict=True):
        held = sum(shard.samples for shard in index.shards[start:stop])
        if held != part.samples:
            yield f"expected {part.samples:,} samples in part {part.key}, found {held:,}"


def _miscounts(totals: Totals | None, manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    if manifest is None or totals is None:
        return
    for what in ("tokens", "largest_id", "longest", "lengths", "documents"):
        said, counted = getattr(manifest.totals, what), getattr(totals, what)
        if said != counted:
            yield manifest_file.BASENAME, f"expected {what} {said}, counted {counted}"


@dataclass(frozen=True, slots=True)
class _Inside:
    problem: str | None = None
    totals: Totals | None = None
    is_decoded: bool = True


def _look_inside_all(
    folder: Location, shards: list[Shard], on_progress: Callable[[int, int], None]
) -> tuple[list[tuple[str, str]], Totals | None, int]:
    """Problems, what the samples come to (None where some cannot be counted), and how many shards were not decoded."""
    problems: list[tuple[str, str]] = []
    totals: Totals | None = Totals()
    undecoded = 0
    with ThreadPoolExecutor(_threads(folder, shards)) as pool:
        looks: Iterable[_Inside] = pool.map(lambda shard: _look_inside(folder, shard), shards)
        for shard, inside in zip(shards, looks, strict=True):
            if inside.problem:
                problems.append((shard.stored.basename, inside.problem))
            totals = totals + inside.totals if totals and inside.totals else None
            undecoded += not inside.is_decoded
            on_progress(shard.stored.bytes, inside.totals.tokens if inside.totals else 0)
    return problems, totals, undecoded


def _threads(folder: Location, shards: list[Shard]) -> int:
    """Memory sets the limit, since hashing, decompressing and waiting for bytes release Python's lock."""
    largest = max((s.stored.bytes + s.raw_data.bytes for s in shards), default=1) or 1
    wanted = S3_THREADS if folder.is_s3 else (os.cpu_count() or 1) + 1
    return max(1, min(wanted, len(shards), 2 * IN_FLIGHT_BYTES // (COPIES * largest)))


def _look_inside(folder: Location, shard: Shard) -> _Inside:
    at = folder / shard.stored.basename
    try:
        data = at.read()
    except Unreachable:
        if at.stat() is None:
            return _Inside("expected the file that was listed, found it deleted since")
        raise
    try:
        if shard.zip_data and str(shard.compression).split(":")[0] not in DECOMPRESSED:
            check_stored(shard.stored, data)
            return _Inside(is_decoded=False)
        return _Inside(totals=decode(shard, samples_of(shard, data)))
    except Exception as error:  # whatever a decoder makes of damaged bytes
        return _Inside(str(error).rstrip(".") or type(error).__name__)

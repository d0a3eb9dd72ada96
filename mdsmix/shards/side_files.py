"""Files that lie beside the manifest which names them: a long list of sources in parts, and side files of shards.

Whoever checks, renders or inspects a stream reads its manifest, and a manifest that held ten million source names would have
1.4 GB. So a list of more than 10,000 names goes into files of its own, which are read only where names are asked for, one
part at a time. A file is named by the hash of its bytes, is written before the manifest and never changes. The names that
begin a part follow from the names alone, so a source that was added, removed or edited makes one part another.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import orjson
import xxhash

from mdsmix import typed
from mdsmix.errors import Damaged
from mdsmix.shards.index import StoredFile
from mdsmix.shards.shard_files import write_once
from mdsmix.shards.shard_layout import HASHES
from mdsmix.shards.shard_samples import decompressed
from mdsmix.storage import Location, together

NAMES = {
    "source list": r"([0-9a-f]{32})\.sources\.zst",
    "side file": r"([0-9a-f]{32})\.[a-z0-9-]+\.side",
}
"""Patterns of the names, which begin with the hash of the file's bytes."""
LISTED = 10_000
"""The most sources that the manifest itself lists: 1.4 MB, and 0.1 s of every `check` that reads it. 50,000 took half a
second, as long as all else that `check` does."""
FILES_A_PART = 1 << 15
"On average: 0.8 MB as stored. A source that is added writes as much again, and the names of a part need 15 MB of memory."


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """One file that was read: its path from the recipe's folder or its URL, its stored bytes, the hash of its content."""

    path: str
    size: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A file beside the manifest."""

    name: str
    bytes: int
    hash: str
    "xxh128 of its bytes, 32 hex digits, with which its name begins."

    @property
    def stored(self) -> StoredFile:
        return StoredFile(basename=self.name, bytes=self.bytes, hashes={HASHES[0]: self.hash})

    @property
    def is_well_named(self) -> bool:
        """Whether the name is one that a writer of manifests gives: it is opened, and it is deleted."""
        return is_named_file(self.name) and self.name.startswith(f"{self.hash}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceList(NamedFile):
    """Some of the sources, in the order of their paths: a JSON object a line, as zstd."""

    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFile(NamedFile):
    """A file that tells more of a shard, for example which records its rows are of."""

    kind: str
    shard: str
    "Basename of the shard's stored file; empty for a side file of the whole stream."


def is_named_file(name: str) -> bool:
    """Whether a file of this name is one of these."""
    return any(re.fullmatch(pattern, name) for pattern in NAMES.values())


def store_sources(folder: Location, files: Sequence[SourceEntry]) -> list[SourceList]:
    """Writes the list in parts, the parts that are there already excepted."""
    parts = _cut(sorted(files, key=lambda file: file.path))
    return together(lambda part: _store(folder, part), parts)


def _cut(files: Iterable[SourceEntry]) -> Iterator[list[SourceEntry]]:
    part: list[SourceEntry] = []
    for file in files:
        if part and xxhash.xxh3_64_intdigest(file.path) % FILES_A_PART == 0:
            yield part
            part = []
        part.append(file)
    if part:
        yield part


def _store(folder: Location, files: list[SourceEntry]) -> SourceList:
    from zstandard import ZstdCompressor

    lines = bytearray()
    for file in files:  # a list of the lines would hold 1 KB for each: orjson shrinks its buffer, and the rest stays unused
        lines += orjson.dumps(file, option=orjson.OPT_APPEND_NEWLINE)
    # Level 1 makes of paths and hashes less than level 3 does, four times as fast.
    content = ZstdCompressor(level=1).compress(lines)
    digest = xxhash.xxh128_hexdigest(content)
    name = f"{digest}.sources.zst"
    write_once(folder / name, [memoryview(content)])
    return SourceList(name=name, bytes=len(content), hash=digest, files=len(files))


def read_part(folder: Location, part: SourceList) -> list[SourceEntry]:
    """The sources of a part; Damaged where it is missing or not what the manifest says."""
    at = folder / part.name
    found = at.fetch(part.bytes)
    if problem := part.stored.missing_from({part.name: found[0]} if found else {}):
        raise _damaged(at, problem)
    content = found[1] if found else b""
    if (digest := xxhash.xxh128_hexdigest(content)) != part.hash:
        raise _damaged(at, f"expected the xxh128 {part.hash}, found {digest}")
    try:
        lines = decompressed(io.BytesIO(content), "zstd")
        files = [typed.load(SourceEntry, line) for line in lines]
    except Exception as error:  # whatever a decompressor makes of what is no list
        raise _damaged(at, str(error).rstrip(".")) from None
    if len(files) != part.files:
        raise _damaged(at, f"expected {part.files:,} files in it, found {len(files):,}")
    return files


def _damaged(at: Location, problem: str) -> Damaged:
    return Damaged(
        f"{at}, a part of the list of the stream's sources, is damaged: {problem}; "
        f"mdsmix repair {at.parent} --recipe RECIPE makes it anew."
    )

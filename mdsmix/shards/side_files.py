"""Files that lie beside the manifest which names them: a long list of sources in parts, and side
files of shards.

Whoever checks, renders or inspects a stream reads its manifest, and a manifest that held ten
million source names would have 1.4 GB. So a list of more than 10,000 names goes into files of its
own, which are read only where names are asked for, one part at a time. A file is named by the hash
of its bytes, is written before the manifest and never changes.

The names of records (a source's `id`) lie in a side file of each shard, a line of JSON for each
row: a text, a whole number, or null where the record has no name; for a packed row a list of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import orjson
import xxhash

from mdsmix.errors import Damaged
from mdsmix.ragged import Ragged
from mdsmix.shards.index import HASH_ALGORITHM, Shard, StoredFile
from mdsmix.shards.shard_files import compress_zstd, decompress_frame, write_once
from mdsmix.shards.shard_samples import check_stored
from mdsmix.storage import Location

NAME_PATTERNS = {
    "source list": r"([0-9a-f]{32})\.sources\.zst",
    "side file": r"([0-9a-f]{32})\.[a-z0-9-]+\.side",
}
"""Patterns of the names, which begin with the hash of the file's bytes."""
MOST_LISTED = 10_000
"""The most sources that the manifest itself lists: 1.4 MB, and 0.1 s of every `check` that reads
it. 50,000 took half a second, as long as all else that `check` does.
"""
FILES_PER_LIST = 1 << 15
"0.8 MB as stored; the names of a part need 15 MB of memory."
RECORD_IDS = "ids"
"The kind of the side files with the names of records."
RecordName = str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """One file that was read: its path from the recipe's folder or its URL, its stored bytes, the
    hash of its content.
    """

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
        return StoredFile(basename=self.name, bytes=self.bytes, hashes={HASH_ALGORITHM: self.hash})


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


def _write(folder: Location, lines: bytes | bytearray, suffix: str) -> dict[str, Any]:
    """Writes the lines as a file that is named by its hash; returns the fields of its NamedFile."""
    # Level 1 packs paths and hashes smaller than level 3 does, four times as fast.
    content = compress_zstd(lines, "zstd:1")
    digest = xxhash.xxh128_hexdigest(content)
    name = f"{digest}.{suffix}"
    write_once(folder / name, content)
    return {"name": name, "bytes": len(content), "hash": digest}


def _lines(at: Location, stored: NamedFile) -> list[bytes]:
    """The lines of a file; Damaged where it is missing or not what the manifest says."""
    found = at.fetch(stored.bytes)
    try:
        if found is None:
            raise ValueError("it is missing")
        check_stored(stored.stored, found[1], "manifest")
    except ValueError as error:
        raise Damaged(
            f"{at}, which the manifest of the stream names, is damaged: {error}; "
            f"mdsmix repair {at.parent} --recipe RECIPE makes it anew."
        ) from None
    return (decompress_frame(found[1]) or b"").splitlines()


def store_sources(folder: Location, files: Iterable[SourceEntry]) -> list[SourceList]:
    """Writes the list in parts; a part that is there already is not written again."""
    left, parts = iter(sorted(files, key=lambda file: file.path)), list[SourceList]()
    while some := list(islice(left, FILES_PER_LIST)):
        lines = bytearray()
        # a list of the lines would hold 1 KB for each: orjson shrinks its buffer, and the rest
        # stays unused
        for file in some:
            lines += orjson.dumps(file, option=orjson.OPT_APPEND_NEWLINE)
        parts.append(SourceList(**_write(folder, lines, "sources.zst"), files=len(some)))
    return parts


def read_source_list(folder: Location, part: SourceList) -> list[SourceEntry]:
    """The sources of a part; Damaged where it is missing or not what the manifest says."""
    return [SourceEntry(**orjson.loads(line)) for line in _lines(folder / part.name, part)]


def group_names(names: Sequence[RecordName], documents: Ragged) -> list[list[RecordName]]:
    """For each packed row, the names of its documents. `documents`: for each row, the numbers of
    its documents.
    """
    return [[names[number] for number in documents[row]] for row in range(len(documents))]


def store_record_names(
    folder: Location, names: Iterable[Any], shards: Sequence[Shard]
) -> list[SideFile]:
    """Writes a file for each of the shards, which hold rows of these names, in order."""
    left, written = iter(names), list[SideFile]()
    for shard in shards:
        rows = islice(left, shard.samples)
        lines = b"".join(orjson.dumps(name, option=orjson.OPT_APPEND_NEWLINE) for name in rows)
        written.append(
            SideFile(
                **_write(folder, lines, f"{RECORD_IDS}.side"),
                kind=RECORD_IDS,
                shard=shard.stored.basename,
            )
        )
    return written


def rename_shards(sides: Sequence[SideFile], shards: Sequence[Shard]) -> list[SideFile]:
    """The side files of these shards, in their order, with `shard` set to the names that the index
    gives the shards.
    """
    return [
        replace(side, shard=shard.stored.basename)
        for side, shard in zip(sides, shards[: len(sides)], strict=True)
    ]


def read_record_id(folder: Location, sides: Iterable[SideFile], shard: Shard, row: int) -> Any:
    """The name of the record behind a row of a shard, or a list of names behind a packed row; None
    where no names are kept, Damaged where their file cannot be read.
    """
    for side in sides:
        if (side.kind, side.shard) == (RECORD_IDS, shard.stored.basename):
            return orjson.loads(_lines(folder / side.name, side)[row])
    return None

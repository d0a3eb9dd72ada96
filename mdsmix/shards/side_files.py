"""Files next to the manifest, which names them: a long list of sources, and side files of shards.

`check`, `render-yaml` and `inspect` read a stream's manifest, and a manifest with ten million
source names would have 1.4 GB. So a list of more than 10,000 names is written to files of its own,
which are read only if the names are needed, one file at a time. A file is named by the hash of its
bytes, is written before the manifest and never changes.

The names of records (a source's `id`) are in a side file of each shard, a line of JSON for each
row: a string, a whole number, or null if the record has no name; for a packed row a list of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import orjson
import xxhash

from mdsmix.errors import Damaged
from mdsmix.frozen import frozen
from mdsmix.ragged import Ragged
from mdsmix.shards.index import HASH_ALGORITHM, Shard, StoredFile
from mdsmix.shards.shard_files import compress_zstd, decompress_frame, write_once
from mdsmix.shards.shard_samples import check_stored
from mdsmix.storage import Location

NAME_PATTERNS = {
    "source list": r"([0-9a-f]{32})\.sources\.zst",
    "side file": r"([0-9a-f]{32})\.[a-z0-9-]+\.side",
}
"Sort of file -> pattern of its name, which begins with the hash of the file's bytes."
MOST_LISTED = 10_000
"""The most sources that the manifest itself lists. They take 1.4 MB, and 0.1 s of every `check`.
50,000 sources took half a second, as long as everything else that `check` does.
"""
FILES_PER_LIST = 1 << 15
"Sources in each file of a long list: 0.8 MB as stored, and 15 MB of memory for their names."
RECORD_IDS = "ids"
"The kind of the side files with the names of records."
RecordName = str | int | None
"The name of a record, which is the value of the recipe's `source.id`; None if it has no name."


@frozen(kw_only=True, slots=True)
class SourceEntry:
    """One source file that was read."""

    path: str
    "The path relative to the recipe's folder, or the URL."
    size: int
    "Bytes of the file as stored."
    hash: str
    "Hash of the file's content."


@frozen(kw_only=True, slots=True)
class NamedFile:
    """A file next to the manifest, which names it."""

    name: str
    bytes: int
    hash: str
    "xxh128 of the file's bytes, 32 hex digits. The file's name begins with this hash."

    @property
    def stored(self) -> StoredFile:
        return StoredFile(basename=self.name, bytes=self.bytes, hashes={HASH_ALGORITHM: self.hash})


@frozen(kw_only=True, slots=True)
class SourceList(NamedFile):
    """A file with some of the sources, in the order of their paths: one JSON object per line,
    compressed by zstd.
    """

    files: int
    "How many sources the file lists."


@frozen(kw_only=True, slots=True)
class SideFile(NamedFile):
    """A file with facts about a shard, for example which records its rows come from."""

    kind: str
    "What the file contains, for example RECORD_IDS."
    shard: str
    "Basename of the shard's stored file; empty for a side file of the whole stream."


def _write_lines(folder: Location, lines: bytes | bytearray, suffix: str) -> dict[str, Any]:
    """Write lines to a compressed file. Its name is the hash of its bytes, and `suffix`. Return its
    name, bytes and hash as a dict with these keys, the arguments of `NamedFile`.
    """
    # Level 1 compresses paths and hashes to fewer bytes than level 3, four times as fast.
    content = compress_zstd(lines, "zstd:1")
    digest = xxhash.xxh128_hexdigest(content)
    name = f"{digest}.{suffix}"
    write_once(folder / name, content)
    return {"name": name, "bytes": len(content), "hash": digest}


def _read_lines(folder: Location, named_file: NamedFile) -> list[bytes]:
    """Return the lines of a file.

    Raises Damaged if the file is missing or is not as the manifest states.
    """
    file = folder / named_file.name
    answer = file.fetch(named_file.bytes)
    try:
        if answer is None:
            raise ValueError("it is missing")
        _, content = answer
        check_stored(named_file.stored, content, "manifest")
    except ValueError as error:
        raise Damaged(
            f"the file {file}, which the manifest of the stream names, is damaged: {error}; run "
            f"mdsmix repair {folder} --recipe RECIPE, which makes the file again."
        ) from None
    # The content has its stated hash. So it decompresses, unless a broken writer has stored it.
    lines = decompress_frame(content)
    return [] if lines is None else lines.splitlines()


def store_sources(folder: Location, files: Iterable[SourceEntry]) -> list[SourceList]:
    """Write a long list of sources to files of FILES_PER_LIST sources each, and return these files.
    A file that exists already is not written again.
    """
    remaining = iter(sorted(files, key=lambda file: file.path))
    source_lists = list[SourceList]()
    while batch := list(islice(remaining, FILES_PER_LIST)):
        lines = bytearray()
        # Each line is appended at once. In a list every line would take 1 KB of memory: orjson
        # allocates a larger buffer than it needs.
        for file in batch:
            lines += orjson.dumps(file, option=orjson.OPT_APPEND_NEWLINE)
        written = _write_lines(folder, lines, "sources.zst")
        source_lists.append(SourceList(**written, files=len(batch)))
    return source_lists


def read_source_list(folder: Location, source_list: SourceList) -> list[SourceEntry]:
    """Return the sources that one file of a long list contains.

    Raises Damaged if the file is missing or is not as the manifest states.
    """
    return [SourceEntry(**orjson.loads(line)) for line in _read_lines(folder, source_list)]


def group_names(names: Sequence[RecordName], documents: Ragged) -> list[list[RecordName]]:
    """Return the names of the documents in each packed row: [["a", "c"], ["b"]] for the names a, b
    and c if the rows contain the documents 0 and 2, and 1.

    Args:
        names: the names of all documents.
        documents: for each row, the numbers of its documents.
    """
    return [[names[number] for number in documents[row]] for row in range(len(documents))]


def store_record_names(
    folder: Location, names: Iterable[Any], shards: Sequence[Shard]
) -> list[SideFile]:
    """Write a side file with the names of the records for each shard, and return these files.

    Args:
        folder: the folder of the stream.
        names: the names of the rows of all shards, in order.
        shards: the shards.
    """
    remaining = iter(names)
    side_files = list[SideFile]()
    for shard in shards:
        rows = islice(remaining, shard.samples)
        lines = b"".join(orjson.dumps(name, option=orjson.OPT_APPEND_NEWLINE) for name in rows)
        written = _write_lines(folder, lines, f"{RECORD_IDS}.side")
        side_files.append(SideFile(**written, kind=RECORD_IDS, shard=shard.stored.basename))
    return side_files


def rename_shards(side_files: Sequence[SideFile], shards: Sequence[Shard]) -> list[SideFile]:
    """Return the side files with `shard` set to the name that their shard has in the index.

    Args:
        side_files: one side file per shard, in the order of the shards; empty for a stream without
            side files.
        shards: the shards of the index.
    """
    named_shards = shards[: len(side_files)]  # empty if there are no side files
    return [
        replace(side_file, shard=shard.stored.basename)
        for side_file, shard in zip(side_files, named_shards, strict=True)
    ]


def read_record_id(folder: Location, side_files: Iterable[SideFile], shard: Shard, row: int) -> Any:
    """Return the name of the record in a shard's row. For a packed row return the list of its
    documents' names; None if the stream stores no names.

    Raises Damaged if the file with the names cannot be read.
    """
    for side_file in side_files:
        if side_file.kind == RECORD_IDS and side_file.shard == shard.stored.basename:
            return orjson.loads(_read_lines(folder, side_file)[row])
    return None

"""Rows -> shards at the target, each named by the hash of the bytes that are stored."""

from __future__ import annotations

from dataclasses import replace

import xxhash

from mdsmix.shards.index import Shard, StoredFile
from mdsmix.shards.mds import HASHES, Layout, Rows, shard_parts, split
from mdsmix.shards.target import write_once
from mdsmix.storage import Location


def store_shards(folder: Location, layout: Layout, rows: Rows) -> list[Shard]:
    """Writes the rows as shards into `folder`; returns their index entries, in order."""
    return [_store(folder, layout, piece) for piece in split(rows)]


def distinct(folder: Location, shards: list[Shard]) -> list[Shard]:
    """Shards of equal bytes get names of their own: a cache that evicts one must not evict the other."""
    seen: dict[str, int] = {}
    named = []
    for shard in shards:
        ordinal = seen[shard.stored.basename] = seen.get(shard.stored.basename, -1) + 1
        named.append(_numbered(folder, shard, ordinal) if ordinal else shard)
    return named


def _numbered(folder: Location, shard: Shard, ordinal: int) -> Shard:
    def renamed(file: StoredFile) -> StoredFile:
        return replace(file, basename=file.basename.replace(".mds", f"-{ordinal}.mds"))

    twin = replace(
        shard,
        raw_data=renamed(shard.raw_data),
        zip_data=renamed(shard.zip_data) if shard.zip_data else None,
    )
    target = folder / twin.stored.basename
    if target.stat() is None:
        (folder / shard.stored.basename).copy_to(target)
    return twin


def _store(folder: Location, layout: Layout, rows: Rows) -> Shard:
    parts = shard_parts(layout, rows)
    raw = _described(parts)
    if layout.compression is None:
        write_once(folder / raw.basename, parts)
        return Shard.of(layout, len(rows), raw, None)
    packed = memoryview(_compressed(parts, layout.compression))
    zipped = _described([packed], ".zstd")
    write_once(folder / zipped.basename, [packed])
    raw = StoredFile(
        basename=zipped.basename.removesuffix(".zstd"), bytes=raw.bytes, hashes=raw.hashes
    )
    return Shard.of(layout, len(rows), raw, zipped)


def _described(parts: list[memoryview], suffix: str = "") -> StoredFile:
    digest = xxhash.xxh128()
    for part in parts:
        digest.update(part)
    value = digest.hexdigest()
    size = sum(part.nbytes for part in parts)
    return StoredFile(basename=f"{value}.mds{suffix}", bytes=size, hashes={HASHES[0]: value})


def _compressed(parts: list[memoryview], compression: str) -> bytes:
    """One zstd frame that names its size, as streaming writes it; level 3 where none is given."""
    from zstandard import ZstdCompressor

    level = int(compression.partition(":")[2] or 3)
    return ZstdCompressor(level).compress(b"".join(parts))

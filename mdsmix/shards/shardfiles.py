"""Rows -> shards at the target, each named by the hash of the bytes that are stored."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.shards.index import Shard, StoredFile
from mdsmix.shards.mds import HASHES, Layout, Rows, shard_parts, split
from mdsmix.shards.writing import write_once
from mdsmix.storage import Location, together

NamesAndSizes = Collection[tuple[str, int]]
"Names and sizes of the files in a folder."


def store_shards(
    folder: Location, layout: Layout, rows: Rows, held: NamesAndSizes | None = None
) -> list[Shard]:
    """Writes the rows as shards into `folder`; returns their index entries, in order. `held`: what was listed there."""
    return [_store(folder, layout, piece, held) for piece in split(rows)]


def distinct(shards: list[Shard]) -> list[Shard]:
    """Gives shards of equal bytes different names, so that a cache that evicts one does not evict the other."""
    seen: dict[str, int] = {}
    named = []
    for shard in shards:
        ordinal = seen[shard.stored.basename] = seen.get(shard.stored.basename, -1) + 1
        named.append(_numbered(shard, ordinal) if ordinal else shard)
    return named


def _numbered(shard: Shard, ordinal: int) -> Shard:
    def renamed(file: StoredFile) -> StoredFile:
        return replace(file, basename=file.basename.replace(".mds", f"-{ordinal}.mds"))

    return replace(
        shard,
        raw_data=renamed(shard.raw_data),
        zip_data=renamed(shard.zip_data) if shard.zip_data else None,
    )


def copy_missing(folder: Location, files: Iterable[StoredFile], places: Sequence[Location]) -> None:
    """Makes sure that all files lie in `folder`. A missing one is copied from the first of the places that holds it, under
    its name or that of a shard with the same bytes. The copy is made inside the store; nothing is uploaded."""
    here = dict(folder.list())
    sources = _sources([file for file in files if file.missing_from(here)], places)
    together(lambda name: _bring(sources[name], folder / name), sources)
    if sources:
        folder.flush()


def _sources(files: list[StoredFile], places: Sequence[Location]) -> dict[str, Location]:
    """Name -> where its bytes lie."""
    found: dict[str, Location] = {}
    for place in places:
        left = [file for file in files if file.basename not in found]
        stats = dict(place.list()) if left else {}
        for file in left:
            names = (file.basename, re.sub(r"-\d+\.mds", ".mds", file.basename))
            if name := next((n for n in names if n in stats and stats[n].size == file.bytes), None):
                found[file.basename] = place / name
    if lost := [file.basename for file in files if file.basename not in found]:
        raise Unreachable(
            f"the file {lost[0]} was deleted from {places[0]} while the stream was being published; run the same "
            "command again, which makes it anew."
        )
    return found


def _bring(source: Location, target: Location) -> None:
    if source.name == target.name:
        source.link_to(target)
    else:  # twins are there to be files of their own
        source.copy_to(target)


def _store(folder: Location, layout: Layout, rows: Rows, held: NamesAndSizes | None) -> Shard:
    parts = shard_parts(layout, rows)
    raw = _described(parts)
    if layout.compression is None:
        write_once(folder / raw.basename, parts, held)
        return Shard.of(layout, len(rows), raw, None)
    packed = memoryview(compressed(parts, layout.compression))
    zipped = _described([packed], ".zstd")
    write_once(folder / zipped.basename, [packed], held)
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


def compressed(parts: list[memoryview], compression: str) -> bytes:
    """One zstd frame that names its size, as streaming writes it; level 3 where none is given."""
    from zstandard import ZstdCompressor

    level = int(compression.partition(":")[2] or 3)
    return ZstdCompressor(level).compress(b"".join(parts))

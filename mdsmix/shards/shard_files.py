"""Writing only what is not there yet, so that a run that changes nothing leaves every file as it was.

A look costs one request where a needless write would cost a whole upload, and whoever watches the folder (a sync, a
backup, a running job) sees a change only where there is one.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import xxhash

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.shards.index import Index, Shard, StoredFile, parse_index
from mdsmix.shards.shard_layout import HASHES, Rows, ShardLayout, shard_parts, split
from mdsmix.storage import Location, together

SHARD = re.compile(r"([0-9a-f]{32})(-\d+)?\.mds(\.zstd)?")
"The name of a shard that mdsmix wrote; shards of equal bytes are numbered."
SUPERSEDED = ".mdsmix/{hash}.index"
"Where an index that was replaced is kept."
REPLACED = ".mdsmix/{hash}.replaced"
"A file whose time stamp says when a version, named by the first 8 digits of its index's hash, ceased to be current."


def write_if_new(at: Location, content: bytes) -> None:
    """For files whose content may change under one name: the bytes are compared."""
    found = at.fetch(len(content))
    if found is None or found[1] != content:
        at.write(content)


def write_once(at: Location, parts: list[memoryview], is_new: bool = False) -> None:
    """For files named by the hash of their bytes: one that is there in its full size is these bytes. `is_new`: nobody has written them,
    so nobody looks."""
    stat = None if is_new else at.stat()
    if stat is None or stat.size != sum(part.nbytes for part in parts):
        at.write(*parts)


def keep_index(folder: Location, index: bytes) -> None:
    """Keeps an index that is about to be replaced."""
    (folder / SUPERSEDED.format(hash=xxhash.xxh128_hexdigest(index))).write(index)


def superseded(folder: Location) -> Iterator[Index]:
    """The replaced indexes that are kept in this folder, except damaged ones, which no reader can be using."""
    kept = folder / SUPERSEDED.partition("/")[0]
    for name, _ in kept.list():
        if name.endswith(".index"):
            with suppress(Unreachable):
                yield parse_index((kept / name).read(), name)


INNER = (".mdsmix", "quarantine")
"The folders beneath a split's own."


def refuse_links(root: Location, *names: str) -> None:
    """RecipeError where `root`/name/... or a folder beneath the last of them is a link."""
    folder = root
    for name in names:
        folder = folder / name
        _refuse_link(folder)
    for name in INNER:
        _refuse_link(folder / name)


def _refuse_link(folder: Location) -> None:
    if not folder.is_store and os.path.islink(folder.url):
        raise RecipeError(
            f"{folder} is a link to {os.path.realpath(folder.url)}, outside of the folder that the stream is published "
            "in, where nothing is to be written: take the link away, or publish to that place by its own name."
        )


def store_shards(
    folder: Location, layout: ShardLayout, rows: Rows, is_new: bool = False
) -> list[Shard]:
    """Writes the rows as shards into `folder`; returns their index entries, in order. `is_new`: none of them lies there."""
    return [_store(folder, layout, piece, is_new) for piece in split(rows)]


def distinct(shards: list[Shard]) -> list[Shard]:
    """Gives shards of equal bytes different names, so that a cache that evicts one does not evict the other."""
    seen, named = Counter[str](), []
    for shard in shards:
        ordinal = seen[shard.stored.basename]
        seen[shard.stored.basename] += 1
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


def _store(folder: Location, layout: ShardLayout, rows: Rows, is_new: bool) -> Shard:
    parts = shard_parts(layout, rows)
    raw = _described(parts)
    if layout.compression is None:
        write_once(folder / raw.basename, parts, is_new)
        return Shard.of(layout, len(rows), raw, None)
    packed = memoryview(compressed(parts, layout.compression))
    zipped = _described([packed], ".zstd")
    write_once(folder / zipped.basename, [packed], is_new)
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

"""Samples -> shards: laid out as MDS, cut, named by the hash of their bytes, and written where they
do not lie yet.

Of ndarray columns a shard is byte for byte what streaming's MDSWriter writes for the same samples.
A `json` column is written without a space behind its commas and colons, which MDSWriter puts there:
75,062 bytes where it takes 91,624. Every reader decodes the same from both.

MDSWriter encodes one sample at a time; here a shard is laid out at once from flat token arrays, at
memory speed. The price is that only the column encodings that mdsmix writes are known:
`ndarray:<int>[:<length>]`, `json` and `list[jpeg]`.

A shard is: sample count (uint32), byte offsets of every sample and of the end (uint32 [n + 1]), a
JSON of its settings, then the samples. A sample is the sizes of its columns without a fixed size
(uint32 each), then its columns in the order of their names. Source:
streaming/base/format/mds/{writer,encodings}.py, 0.12 and 0.13 alike.

A file that is there is not written again: a look costs one request, a needless write a whole
upload. So a watcher of the folder sees a change only where there is one.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.ragged import Chunked, Interleaved, Ragged
from mdsmix.shards.codecs import Codec, find_codec
from mdsmix.shards.index import HASH_ALGORITHM, Shard, StoredFile
from mdsmix.storage import Location, map_threads

SHARD_NAME = re.compile(r"([0-9a-f]{32})(-\d+)?\.mds(\.zstd)?")
"The name of a shard that mdsmix wrote; shards of equal bytes are numbered."
SHARD_BYTES = 1 << 26
"64 MiB, MDSWriter's own default: a shard is the unit of download and of eviction."
SHARD_ROWS = 1 << 17
"131,072 rows, half of Streaming's smallest shuffle block: shards of more rows shuffle badly."
INNER_FOLDERS = (".mdsmix", "quarantine")
"Folders inside a split's folder."
Rows = Ragged | Chunked
"uint8: the bytes of each sample."


@dataclass(frozen=True)
class ShardLayout:
    """The settings that every shard of a stream shares."""

    encodings: Mapping[str, str]
    "Column name -> MDS encoding."
    compression: str | None = None
    "zstd or zstd:N."

    @property
    def codecs(self) -> dict[str, Codec]:
        """The codec of each column, in the order of their names, as MDSWriter sorts them."""
        return {name: find_codec(self.encodings[name]) for name in sorted(self.encodings)}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that stand in a shard's own head and again in index.json."""
        codecs = self.codecs
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression,
            "hashes": [HASH_ALGORITHM],
            "size_limit": SHARD_BYTES,
            "column_names": list(codecs),
            "column_encodings": [self.encodings[name] for name in codecs],
            "column_sizes": [codec.size for codec in codecs.values()],
        }


def lay_out_samples(layout: ShardLayout, columns: Mapping[str, Ragged]) -> Ragged:
    """uint8 rows, each the bytes of a sample, from one Ragged per column; ValueError for an empty
    ndarray row, as MDSWriter refuses it. Interleaved columns have one codec, without a fixed size.
    """
    if isinstance(columns, Interleaved):
        return _lay_out_cells(next(iter(layout.codecs.values())), columns.cells, len(columns))
    heads, values = list[NDArray[np.int64]](), list[Ragged]()
    for name, codec in layout.codecs.items():
        try:
            parts = codec.lay_out(columns[name])
        except ValueError as error:
            raise ValueError(f"column {name} {error}") from None
        values += parts
        if codec.size is None:
            heads.append(sum(part.lengths for part in parts))  # type: ignore[arg-type]
    if heads:
        sizes = np.stack(heads, axis=1).astype("<u4").reshape(-1).view(np.uint8)
        values.insert(0, Ragged.from_lengths(sizes, np.full(len(heads[0]), 4 * len(heads))))
    return Ragged.zip(values)


def _lay_out_cells(codec: Codec, cells: Ragged, columns: int) -> Ragged:
    parts = codec.lay_out(cells)
    sizes = np.asarray(sum(part.lengths for part in parts)).astype("<u4").view(np.uint8)
    widths = np.tile([4 * columns] + [0] * (columns - 1), len(cells) // columns)
    laid_out = Ragged.zip([Ragged.from_lengths(sizes, widths), *parts])
    return Ragged(laid_out.values, laid_out.offsets[::columns])


def lay_out_sample(cells: Sequence[bytes | memoryview]) -> bytes:
    """A sample of columns without a fixed size, in the order of their names: in a twentieth of the
    time that `lay_out` takes for one.
    """
    return np.array([*map(len, cells)], "<u4").tobytes() + b"".join(cells)


def split_into_shards(rows: Rows) -> Iterator[Rows]:
    """Cuts rows evenly into the fewest shards of at most SHARD_BYTES and SHARD_ROWS; a larger row
    is a shard alone.
    """
    for start, stop in pairwise(_cuts(rows.offsets)):
        yield rows.slice(start, stop)


def _cuts(ends: NDArray[np.int64]) -> list[int]:
    """Row numbers where shards begin and end. Shards have equal rows if such a cut is within the
    limits, else each is as full as may be.
    """
    full, n = [0], len(ends) - 1
    while full[-1] < n:
        full.append(_fullest(full[-1], ends))
    for count in range(len(full) - 1, len(full) + 2):
        even: list[int] = np.linspace(0, n, count + 1).astype(np.int64).tolist()
        if all(start < stop <= _fullest(start, ends) for start, stop in pairwise(even)):
            return even
    return full


def _fullest(start: int, ends: NDArray[np.int64]) -> int:
    """The row before which a shard that begins at `start` must end; its table of offsets counts
    too, 4 bytes a row.
    """
    rows = ends[start : start + SHARD_ROWS + 1] - ends[start]
    within = np.searchsorted(rows + 4 * np.arange(len(rows)), SHARD_BYTES, "right") - 1
    return start + max(1, int(within))


def make_shard_parts(layout: ShardLayout, rows: Rows) -> list[bytes | memoryview]:
    """The bytes of a raw shard: those before its rows, and the rows, which are not copied.
    ValueError where they exceed 4 GiB.
    """
    settings = json.dumps(layout.settings, sort_keys=True).encode()
    offsets = rows.offsets + 4 + 4 * len(rows.offsets) + len(settings)
    if offsets[-1] >= 1 << 32:
        raise ValueError(f"a sample of {offsets[-1]} bytes does not fit a shard's 32-bit offsets")
    head = np.uint32(len(rows)).tobytes() + offsets.astype("<u4").tobytes() + settings
    return [head, *(np.ascontiguousarray(array).data for array in rows.arrays)]


def store_shards(
    folder: Location, layout: ShardLayout, rows: Rows, is_new: bool = False
) -> list[Shard]:
    """Writes the rows as shards into `folder`; returns their index entries, in order. `is_new`:
    none lies there, so nobody looks.
    """
    return [_store(folder, layout, piece, is_new) for piece in split_into_shards(rows)]


def _store(folder: Location, layout: ShardLayout, rows: Rows, is_new: bool) -> Shard:
    parts = make_shard_parts(layout, rows)
    raw, zipped = _described(parts), None
    if layout.compression:
        parts = [compress_zstd(b"".join(parts), layout.compression)]
        zipped = _described(parts, ".zstd")
        raw = replace(raw, basename=zipped.basename.removesuffix(".zstd"))
    write_once(folder / (zipped or raw).basename, *parts, is_new=is_new)
    return make_shard(layout, len(rows), raw, zipped)


def make_shard(
    layout: ShardLayout, samples: int, raw: StoredFile, zipped: StoredFile | None
) -> Shard:
    """The index entry of a shard."""
    return Shard(samples=samples, raw_data=raw, zip_data=zipped, **layout.settings)


def _described(parts: Sequence[bytes | memoryview], suffix: str = "") -> StoredFile:
    hasher = xxhash.xxh128()
    for part in parts:
        hasher.update(part)
    name, size = hasher.hexdigest(), sum(map(len, parts))
    return StoredFile(basename=f"{name}.mds{suffix}", bytes=size, hashes={HASH_ALGORITHM: name})


def compress_zstd(content: bytes | bytearray, compression: str) -> bytes:
    """One zstd frame that names its size, as streaming writes it; level 3 where none is given."""
    from zstandard import ZstdCompressor

    return ZstdCompressor(int(compression.partition(":")[2] or 3)).compress(content)


def decompress_frame(stored: bytes) -> bytes | None:
    """The content of a Zstandard frame with a checksum; None where it is damaged or cut off,
    whatever size its head claims.
    """
    from zstandard import ZstdDecompressor, ZstdError

    frame = ZstdDecompressor().decompressobj()
    with suppress(ZstdError):
        content = frame.decompress(stored)
        return content if frame.eof and not frame.unused_data else None
    return None


def make_names_distinct(shards: list[Shard]) -> list[Shard]:
    """Gives shards of equal bytes different names, so that a cache that evicts one does not evict
    the other.
    """
    times = Counter[str]()
    named = []
    for shard in shards:
        number = times[shard.stored.basename]
        times[shard.stored.basename] += 1
        raw, zipped = shard.raw_data.with_number(number), shard.zip_data
        named.append(replace(shard, raw_data=raw, zip_data=zipped and zipped.with_number(number)))
    return named


def copy_missing(folder: Location, files: Iterable[StoredFile], places: Sequence[Location]) -> None:
    """Makes sure that all files lie in `folder`. A missing one is copied from the first of the
    places that holds it, under its name or that of a shard with the same bytes. The copy is made
    inside the store; nothing is uploaded.
    """
    here = dict(folder.list())
    left = [file for file in files if file.find_problem(here)]
    sources: dict[str, Location] = {}
    for place in places if left else ():
        stats = dict(place.list())
        for file in left:
            twin = replace(file, basename=re.sub(r"-\d+\.mds", ".mds", file.basename))
            for each in (twin, file):
                if not each.find_problem(stats):
                    sources[file.basename] = place / each.basename
        if not (left := [file for file in left if file.basename not in sources]):
            break
    if left:
        raise Unreachable(
            f"the file {left[0].basename} was deleted from {places[0]} while the stream was being published; run the same "
            "command again, which makes it anew."
        )
    map_threads(lambda name: _bring(sources[name], folder / name), sources)
    if sources:
        folder.flush()


def _bring(source: Location, target: Location) -> None:
    """Links a file of the same name. A twin of another name is copied, since damage to one must not
    be damage to both.
    """
    (source.link_to if source.name == target.name else source.copy_to)(target)


def write_if_changed(at: Location, content: bytes) -> None:
    """Writes a file unless it holds these bytes already, for files whose content may change under
    one name.
    """
    found = at.fetch(len(content))
    if found is None or found[1] != content:
        at.write(content)


def write_once(at: Location, *parts: bytes | memoryview, is_new: bool = False) -> None:
    """Writes a file of the joined parts, named by their hash, unless one of the same size lies
    there. `is_new`: none lies there, so nobody looks.
    """
    stat = None if is_new else at.stat()
    if stat is None or stat.size != sum(map(len, parts)):
        at.write(*parts)


def refuse_links(root: Location, *names: str) -> None:
    """RecipeError where a folder on the way `root`/name/..., or `.mdsmix` or `quarantine` in the
    last one, is a link.
    """
    folder = root
    for name in names:
        folder = folder / name
        _refuse_link(folder)
    for name in INNER_FOLDERS:
        _refuse_link(folder / name)


def _refuse_link(folder: Location) -> None:
    if not folder.is_store and os.path.islink(folder.url):
        raise RecipeError(
            f"{folder} is a link to {os.path.realpath(folder.url)}, outside of the folder that the stream is published "
            "in, where nothing is to be written: take the link away, or publish to that place by its own name."
        )

"""Samples -> shards: lays samples out as MDS, splits them into shards, names each shard by the hash
of its bytes, and writes the shards that are not stored yet.

If all columns are ndarrays, a shard is byte for byte the one that Streaming's MDSWriter writes for
the same samples. A `json` column is written without the spaces that MDSWriter puts after commas and
colons: 75,062 bytes instead of 91,624. Every reader decodes the same from both.

MDSWriter encodes one sample at a time; here a shard is laid out at once from flat token arrays, at
memory speed. The price is that only the column encodings that mdsmix writes are supported:
`ndarray:<int>[:<length>]`, `json` and `list[jpeg]`.

A shard is: sample count (uint32), byte offsets of every sample and of the end (uint32 [n + 1]), a
JSON of its settings, then the samples. A sample is the sizes of its columns that have no fixed size
(uint32 each), then its columns in the order of their names. Source:
streaming/base/format/mds/{writer,encodings}.py, the same in 0.12 and 0.13.

A file that exists is not written again: asking costs one request, a needless write costs a whole
upload. So the modification time of a file changes only if its content does.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import xxhash

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.frozen import frozen
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.ragged import Chunked, Interleaved, Ragged
from mdsmix.shards.codecs import Codec, find_codec
from mdsmix.shards.index import HASH_ALGORITHM, Shard, StoredFile
from mdsmix.storage import Location, Stat, map_threads

SHARD_NAME = re.compile(r"([0-9a-f]{32})(-\d+)?\.mds(\.zstd)?")
"The name of a shard that mdsmix wrote; shards with equal bytes have a number: `<hash>-1.mds`."
SHARD_BYTES = 1 << 26
"64 MiB, MDSWriter's own default: a shard is the unit of download and of eviction."
SHARD_ROWS = 1 << 17
"""131,072 rows, which is half of Streaming's smallest shuffle block. Shards with more rows are
shuffled badly.
"""
UPLOADS = 2
"""Shards that a store gets at once. While it hashes one and waits for its disk, the other one is
sent: 80 MB take MinIO on the same machine 0.2 s instead of 0.3.
"""
INNER_FOLDERS = (".mdsmix", "quarantine")
"Folders that mdsmix makes inside a split's folder."
Rows = Ragged | Chunked
"The samples of one or more shards: for each sample, its bytes (uint8)."


@frozen
class ShardLayout:
    """The settings that all shards of a stream share."""

    encodings: Mapping[str, str]
    "Column name -> MDS encoding."
    compression: str | None = None
    "zstd or zstd:N."

    @property
    def codecs(self) -> dict[str, Codec]:
        """Column name -> codec, sorted by column name as in MDSWriter."""
        return {name: find_codec(self.encodings[name]) for name in sorted(self.encodings)}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are written at the beginning of each shard and in index.json."""
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
    """Return the bytes of each sample as a uint8 row.

    Raises ValueError if an ndarray is empty, which MDSWriter refuses too.

    Args:
        layout: the settings of the stream.
        columns: column name -> the values of the column, one row per sample.
    """
    if isinstance(columns, Interleaved):
        # One Ragged has the values of all columns, sample by sample. All interleaved columns have
        # the same codec, and their values have no fixed size.
        codec, *_ = layout.codecs.values()
        return _lay_out_interleaved(codec, columns.cells, len(columns))
    # `pieces` are joined sample by sample at the end: sizes, then heads and values of each column.
    sizes_of_columns = list[NDArray[np.int64]]()
    pieces = list[Ragged]()
    for name, codec in layout.codecs.items():
        try:
            pieces_of_column = codec.lay_out(columns[name])
        except ValueError as error:
            raise ValueError(f"column {name}: {error}") from None
        pieces += pieces_of_column
        if codec.size is None:
            sizes_of_columns.append(
                sum(piece.lengths for piece in pieces_of_column)  # type: ignore[arg-type]
            )
    # A sample begins with the sizes of its columns that have no fixed size.
    if sizes_of_columns:
        heads = np.stack(sizes_of_columns, axis=1).astype("<u4").reshape(-1).view(np.uint8)
        samples = len(sizes_of_columns[0])
        head_bytes = 4 * len(sizes_of_columns)
        pieces.insert(0, Ragged.from_lengths(heads, np.full(samples, head_bytes)))
    return Ragged.zip(pieces)


def _lay_out_interleaved(codec: Codec, cells: Ragged, columns: int) -> Ragged:
    """Return the bytes of each sample, for samples whose columns have the same encoding. The cells
    (values of one column in one sample) of all samples are in one Ragged: first those of the first
    sample, then those of the second, and so on.

    Args:
        codec: the codec of every column.
        cells: the values of all columns.
        columns: the number of columns, and so of cells per sample.
    """
    pieces = codec.lay_out(cells)
    sizes = np.asarray(sum(piece.lengths for piece in pieces)).astype("<u4").view(np.uint8)
    # The sizes of all cells of a sample are put in front of its first cell.
    head_bytes = np.zeros(len(cells), np.int64)
    head_bytes[::columns] = 4 * columns  # a size is a uint32
    laid_out = Ragged.zip([Ragged.from_lengths(sizes, head_bytes), *pieces])
    # Of the offsets of all cells, keep those at which a sample begins.
    return Ragged(laid_out.values, laid_out.offsets[::columns])


def lay_out_sample(cells: Sequence[bytes | memoryview]) -> bytes:
    """Return the bytes of one sample whose columns have no fixed size: the sizes of all values,
    then the values.

    This takes a twentieth of the time of a call of `lay_out_samples` with one sample.

    Args:
        cells: the stored value of each column, in the order of the columns' names.
    """
    sizes = np.array([*map(len, cells)], "<u4")
    return sizes.tobytes() + b"".join(cells)


def split_into_shards(rows: Rows) -> Iterator[Rows]:
    """Split rows into as few shards as possible, of nearly the same number of rows. A shard has at
    most SHARD_BYTES and SHARD_ROWS; a row of more bytes is a shard of its own.
    """
    for start, stop in pairwise(_find_shard_edges(rows.offsets)):
        yield rows.slice(start, stop)


def _find_shard_edges(ends: NDArray[np.int64]) -> list[int]:
    """Return the row numbers at which shards begin and end: [0, 50, 100] for 100 rows in two
    shards.

    Shards get equal numbers of rows if they are then within the limits of size. Otherwise each
    shard is as full as the limits allow.

    Args:
        ends: the offset of each row in the bytes of all rows, and the end of the last row.
    """
    rows = len(ends) - 1
    full_edges = [0]
    while full_edges[-1] < rows:
        full_edges.append(_find_last_edge(full_edges[-1], ends))
    fewest = len(full_edges) - 1
    # Rows differ in size, so an even split may need one or two shards more than the fewest.
    for shards in range(fewest, fewest + 3):
        even_edges: list[int] = np.linspace(0, rows, shards + 1).astype(np.int64).tolist()
        shards_fit = (
            start < stop <= _find_last_edge(start, ends) for start, stop in pairwise(even_edges)
        )
        if all(shards_fit):
            return even_edges
    return full_edges


def _find_last_edge(start: int, ends: NDArray[np.int64]) -> int:
    """Return the row before which a shard must end that begins at row `start`. The size of a shard
    includes its table of offsets, which has 4 bytes per row.

    Args:
        start: the first row of the shard.
        ends: as in `_find_shard_edges`.
    """
    # Entry n of `sizes` is the size of a shard of n rows.
    row_ends = ends[start : start + SHARD_ROWS + 1] - ends[start]
    sizes = row_ends + 4 * np.arange(len(row_ends))
    fitting_rows = np.searchsorted(sizes, SHARD_BYTES, "right") - 1
    return start + max(1, int(fitting_rows))


def make_shard_parts(layout: ShardLayout, rows: Rows) -> list[bytes | memoryview]:
    """Return the bytes of an uncompressed shard as a list of parts, to be written one after the
    other. The first part is everything before the samples (count, offsets, settings); the other
    parts are the arrays of `rows`, which are not copied.

    Raises ValueError if the shard exceeds 4 GiB.

    Args:
        layout: the settings of the stream.
        rows: the bytes of each sample.
    """
    settings = json.dumps(layout.settings, sort_keys=True).encode()
    # In front of the rows are the count (4 bytes), the offsets (4 bytes each) and the settings.
    head_bytes = 4 + 4 * len(rows.offsets) + len(settings)
    offsets = rows.offsets + head_bytes
    shard_bytes = offsets[-1]  # the end of the last row
    if shard_bytes >= 1 << 32:
        raise ValueError(
            f"a shard would have {shard_bytes:,} bytes, but MDS stores offsets in 32 bits, so a "
            "shard, and each sample, must have less than 4 GiB: split or filter the largest records"
        )
    head = np.uint32(len(rows)).tobytes() + offsets.astype("<u4").tobytes() + settings
    return [head, *(np.ascontiguousarray(array).data for array in rows.arrays)]


def store_shards(
    folder: Location, layout: ShardLayout, rows: Rows, is_new: bool = False
) -> list[Shard]:
    """Write the rows as shards into `folder`. Return the shards' entries of index.json, in order.

    Args:
        folder: the folder to write to.
        layout: the settings of the stream.
        rows: the bytes of each sample.
        is_new: True if the folder certainly does not contain the shards yet: then each is written
            without asking the store whether it exists.
    """
    return map_threads(
        lambda piece: _store_shard(folder, layout, piece, is_new),
        split_into_shards(rows),
        threads=UPLOADS if folder.is_store else 1,
    )


def _store_shard(folder: Location, layout: ShardLayout, rows: Rows, is_new: bool) -> Shard:
    """Write the rows as one shard, compressed if the layout says so. Return the shard's entry of
    index.json. The arguments are those of `store_shards`.
    """
    parts = make_shard_parts(layout, rows)
    raw = _describe_file(parts)
    zipped = None
    if layout.compression:
        parts = [compress_zstd(b"".join(parts), layout.compression)]
        zipped = _describe_file(parts, ".zstd")
        # Readers decompress `x.mds.zstd` to `x.mds`, so both names have the compressed file's hash.
        raw = replace(raw, basename=zipped.basename.removesuffix(".zstd"))
    file = zipped or raw
    write_once(folder / file.basename, *parts, is_new=is_new)
    return make_shard(layout, len(rows), raw, zipped)


def make_shard(
    layout: ShardLayout, samples: int, raw: StoredFile, zipped: StoredFile | None
) -> Shard:
    """Make a shard's entry of index.json.

    Args:
        layout: the settings of the stream.
        samples: the number of samples in the shard.
        raw: the uncompressed file.
        zipped: the compressed file; None if the shard is stored uncompressed.
    """
    return Shard(samples=samples, raw_data=raw, zip_data=zipped, **layout.settings)


def _describe_file(parts: Sequence[bytes | memoryview], suffix: str = "") -> StoredFile:
    """Return the name (`<hash>.mds` and the suffix), size and hash of a file.

    Args:
        parts: the content of the file, in parts.
        suffix: the end of the name, such as `.zstd`.
    """
    hasher = xxhash.xxh128()
    for chunk in parts:
        hasher.update(chunk)
    digest = hasher.hexdigest()
    return StoredFile(
        basename=f"{digest}.mds{suffix}",
        bytes=sum(map(len, parts)),
        hashes={HASH_ALGORITHM: digest},
    )


def compress_zstd(content: bytes | bytearray, compression: str) -> bytes:
    """Compress bytes to one Zstandard frame. As in Streaming, the frame states the size of the
    content and has no checksum.

    Args:
        content: the bytes to compress.
        compression: `zstd`, which means level 3, or `zstd:N`.
    """
    from zstandard import ZstdCompressor

    _, _, level = compression.partition(":")
    compressor = ZstdCompressor(int(level) if level else 3)
    return compressor.compress(content)


def decompress_frame(stored: bytes) -> bytes | None:
    """Return the content of one Zstandard frame, or None if the frame is damaged or truncated. A
    checksum in the frame is verified. The size that the frame states is not trusted.
    """
    from zstandard import ZstdDecompressor, ZstdError

    frame = ZstdDecompressor().decompressobj()
    with suppress(ZstdError):
        content = frame.decompress(stored)
        return content if frame.eof and not frame.unused_data else None
    return None


def make_names_distinct(shards: list[Shard]) -> list[Shard]:
    """Give shards with equal bytes different names (`x.mds`, `x-1.mds`), so that a cache can evict
    one of them and keep the others.
    """
    times = Counter[str]()
    named_shards = []
    for shard in shards:
        number = times[shard.stored.basename]
        times[shard.stored.basename] += 1
        zipped = shard.zip_data
        named_shards.append(
            replace(
                shard,
                raw_data=shard.raw_data.with_number(number),
                zip_data=zipped.with_number(number) if zipped else None,
            )
        )
    return named_shards


def copy_missing(
    folder: Location, files: Iterable[StoredFile], sources: Sequence[Location]
) -> None:
    """Copy the files that `folder` lacks from other folders. The store copies them, so nothing is
    uploaded.

    A copy is made of the file with the same name, otherwise of a shard with the same bytes (`x.mds`
    for `x-1.mds`).
    Raises Unreachable if a missing file is in none of the other folders.

    Args:
        folder: the folder that is to contain all of the files.
        files: the files that `folder` must contain.
        sources: the other folders; a file is copied from the first folder that has it.
    """
    listing = dict(folder.list())
    missing = [file for file in files if file.find_problem(listing)]
    originals: dict[str, Location] = {}
    for source in sources:
        if not missing:
            break
        source_listing = dict(source.list())
        for file in missing:
            original = _find_original(file, source_listing)
            if original:
                originals[file.basename] = source / original
        missing = [file for file in missing if file.basename not in originals]
    if missing:
        # The first source is the folder in which this run has stored its files.
        raise Unreachable(
            f"the file {missing[0].basename} was deleted from {sources[0]} while this run was "
            "publishing the stream; run the same command again, which makes the file again."
        )
    map_threads(lambda name: _copy_or_link(originals[name], folder / name), originals)
    if originals:
        folder.flush()


def _find_original(file: StoredFile, listing: Mapping[str, Stat]) -> str | None:
    """Return the name, in a listing, of the file itself or else of a shard with the same bytes:
    for the file `x-1.mds` also `x.mds`. Return None if the listing has neither.
    """
    unnumbered = replace(file, basename=re.sub(r"-\d+\.mds", ".mds", file.basename))
    for candidate in (file, unnumbered):
        if not candidate.find_problem(listing):
            return candidate.basename
    return None


def _copy_or_link(source: Location, target: Location) -> None:
    """Link `target` to `source` if both have the same name. Otherwise copy the file: then the two
    are different shards with the same bytes, and damage to one must not damage the other.
    """
    if source.name == target.name:
        source.link_to(target)
    else:
        source.copy_to(target)


def write_if_changed(file: Location, content: bytes) -> None:
    """Write a file unless it has this content already. For files whose name does not contain the
    hash of their content; other files are written by `write_once`.
    """
    answer = file.fetch(len(content))
    if answer is not None:
        _, existing_content = answer
        if existing_content == content:
            return
    file.write(content)


def write_once(file: Location, *parts: bytes | memoryview, is_new: bool = False) -> None:
    """Write a file that is named by the hash of its content, unless it exists with the right size.

    Args:
        file: the file to write.
        parts: the content, in parts that are written one after the other.
        is_new: True if the file certainly does not exist: then it is written without asking the
            store.
    """
    stat = None if is_new else file.stat()
    if stat is None or stat.size != sum(map(len, parts)):
        file.write(*parts)


def refuse_links(root: Location, *names: str) -> None:
    """Raise RecipeError if a folder that a conversion writes to is a link. Checked are the folders
    `root/a` and `root/a/b` for the names `a` and `b`, and `.mdsmix` and `quarantine` in the last.
    """
    folder = root
    for name in names:
        folder = folder / name
        _refuse_link(folder)
    for name in INNER_FOLDERS:
        _refuse_link(folder / name)


def _refuse_link(folder: Location) -> None:
    """Raise RecipeError if a local folder is a symbolic link."""
    if not folder.is_store and os.path.islink(folder.url):
        raise RecipeError(
            f"{folder} is a link to {os.path.realpath(folder.url)}. mdsmix does not write through "
            "links, since a link may lead outside of the folder in which the stream is published. "
            "Remove the link, or publish to the linked folder by its own path."
        )

"""Reads the samples of a stored shard: all of them, after the shard was checked against its index,
or a few, by their positions.

Damage must not be copied into another stream, so `read_all_samples` checks the shard's hash before
it returns anything. The price is a whole shard in memory: usually 64 MiB, and less than 4 GB
whatever tool wrote it. `check` and `inspect` read a few samples. From an uncompressed shard they
read only the table of offsets and these samples, by ranged requests. A compressed shard is
decompressed from its beginning, only as far as needed. Images and pickles stay bytes, since a check
must never run the content of a shard.

Samples are rows of bytes, and so are the values of a column, its cells. All samples are cut into
cells at once, 20 times as fast as by a loop over the samples. Nothing is trusted: the sizes in
front of a sample must add up to the sample's length, and an array's own shape must fit its bytes.

Source: streaming/base/format/mds/reader.py.
"""

from __future__ import annotations

import bz2
import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import xxhash

from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.messages import flatten_error
from mdsmix.ragged import Ragged
from mdsmix.shards.codecs import Codec, find_codec, lay_out_lengths
from mdsmix.shards.index import Shard, StoredFile
from mdsmix.storage import Location

HEAD_SAMPLES = 32
HEAD_BYTES = 1 << 20
"""1 MiB of samples, or one larger sample: enough to see a stream's content, and little enough for a
slow store.
"""
MOST_GAP_BYTES = 1 << 16
"""64 KiB: two samples with fewer bytes between them are read by one request, since a store takes
longer to answer a second request.
"""
Sample = Mapping[str, Any]
"A decoded sample: column name -> ndarray, str, number, JSON value, or bytes."
READABLE_COMPRESSIONS = ("zstd", "gz", "bz2")
"The compressions of Streaming that mdsmix can decompress."


def can_unpack(shard: Shard) -> bool:
    """Return whether mdsmix can decompress the shard; True for an uncompressed shard."""
    return shard.packing in ("", *READABLE_COMPRESSIONS)


@contextmanager
def open_shard(folder: Location, shard: Shard) -> Iterator[Location]:
    """Give a `with` block the location of the shard's file. If a decoder raises an error in the
    block, raise Unreachable with the shard's name instead.

    Raises Unreachable if mdsmix cannot decompress the shard.
    """
    file = folder / shard.stored.basename
    if not can_unpack(shard):
        raise Unreachable(
            f"the shard {file} is compressed by {shard.packing}, but mdsmix reads only the "
            f"compressions {', '.join(READABLE_COMPRESSIONS)}; publish the stream again with one "
            "of these."
        )
    try:
        yield file
    except MdsmixError:
        raise
    except Exception as error:
        raise Unreachable(
            f"the shard {file} is damaged: {flatten_error(error)}; publish its stream again."
        ) from None


def read_all_samples(folder: Location, shard: Shard) -> Ragged:
    """Return the bytes of each of the shard's samples as a uint8 row.

    Raises Unreachable if the shard is not as its index states.
    """
    with open_shard(folder, shard) as file:
        return parse_samples(shard, file.read())


def parse_samples(shard: Shard, data: bytes) -> Ragged:
    """Return the bytes of each sample as a uint8 row.

    Raises an error of any class if the stored bytes are damaged; its message is the problem.

    Args:
        shard: the shard's entry in the index.
        data: the bytes of the shard's stored file.
    """
    check_stored(shard.stored, data)
    size = shard.raw_data.bytes
    raw = data
    if shard.packing:
        raw = _decompress(io.BytesIO(data), shard, size + 1)  # 1 more shows that it is too long
    if len(raw) != size:
        raise ValueError(f"the file does not decompress to {size:,} bytes, as its index states")
    table = _parse_sample_table(shard, raw)
    first_offset = table[0]
    return Ragged(np.frombuffer(raw, np.uint8, offset=first_offset), table - first_offset)


def check_stored(stored: StoredFile, data: bytes, origin: str = "index") -> None:
    """Raise ValueError if a file's bytes do not have the size and hashes that the index states.

    Hash algorithms that neither xxhash nor Python has are skipped.

    Args:
        stored: the size and hashes that the file should have.
        data: the bytes of the file.
        origin: the file that states size and hashes, `index` or `manifest`, for messages.
    """
    if len(data) != stored.bytes:
        raise ValueError(
            f"the file has {len(data):,} bytes, but its {origin} states {stored.bytes:,}"
        )
    for algorithm, expected in stored.hashes.items():
        digest = _compute_hash(algorithm, data)
        if digest not in (None, expected):
            raise ValueError(
                f"the file's {algorithm} hash is {digest}, but its {origin} states {expected}"
            )


def _compute_hash(algorithm: str, data: bytes) -> str | None:
    """Return the hash of data in hex digits; None if neither xxhash nor Python has it."""
    if algorithm in xxhash.algorithms_available:
        return str(getattr(xxhash, algorithm)(data).hexdigest())
    import hashlib  # 3 ms, and mdsmix's own shards have hashes of xxhash

    if algorithm in hashlib.algorithms_guaranteed and "shake" not in algorithm:
        return hashlib.new(algorithm, data).hexdigest()
    return None


def _decompress(stored: BinaryIO, shard: Shard, stop: int) -> bytes:
    """Return the first `stop` bytes of a compressed file's content."""
    import gzip

    import zstandard

    openers: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "zstd": zstandard.open}
    with openers[shard.packing](stored) as raw:
        content: bytes = raw.read(stop)
        return content


def _read_raw(file: Location, shard: Shard, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` (exclusive) of the shard, counted in its uncompressed
    bytes.
    """
    if not shard.packing:
        return file.read(start, stop - start)
    with file.open() as stored:
        return _decompress(stored, shard, stop)[start:]


def read_first_samples(folder: Location, shard: Shard, limit: int = HEAD_SAMPLES) -> list[Sample]:
    """Return the first samples of a shard: at most `limit`, and not more than have about HEAD_BYTES
    in all, by the mean size of the shard's samples.

    Return [] if mdsmix cannot decompress the shard, such as one compressed by br or snappy.
    Raises Unreachable if the shard is damaged.
    """
    if not can_unpack(shard):
        return []
    fitting = max(1, HEAD_BYTES * shard.samples // max(1, shard.raw_data.bytes))
    count = min(shard.samples, limit, fitting)
    return list(read_samples(folder, shard, range(count)).values())


def read_sample_table(folder: Location, shard: Shard) -> NDArray[np.int64]:
    """Return int64 [samples + 1]: the offset of each sample in the uncompressed shard, and the
    offset at which the last sample ends. Only 4 bytes per sample are read.

    Raises Unreachable if the offsets cannot be read.
    """
    with open_shard(folder, shard) as file:
        return _parse_sample_table(shard, _read_raw(file, shard, 0, 4 * (shard.samples + 2)))


def _parse_sample_table(shard: Shard, raw: bytes) -> NDArray[np.int64]:
    """Return the offsets at the beginning of a shard, as int64. The shard begins with the sample
    count (uint32) and then `count + 1` offsets (uint32).

    Raises ValueError if they are damaged.

    Args:
        shard: the shard's entry in the index.
        raw: the uncompressed shard, or only its beginning.
    """
    count = int.from_bytes(raw[:4], "little")
    if count != shard.samples:
        raise ValueError(f"the file contains {count} samples, but its index states {shard.samples}")
    table_end = 4 * (count + 2)
    if len(raw) < table_end:
        raise ValueError("the file ends before the end of the table of its samples' offsets")
    offsets = np.frombuffer(raw, "<u4", count + 1, 4).astype(np.int64)
    is_inside = table_end <= offsets[0] and offsets[-1] == shard.raw_data.bytes
    if not is_inside or (np.diff(offsets) < 0).any():
        raise ValueError(
            "the offsets in the file's table of samples do not ascend, or point outside of the file"
        )
    return offsets


def read_samples(folder: Location, shard: Shard, positions: Iterable[int]) -> dict[int, Sample]:
    """Return {position: decoded sample} for the samples at these positions in the shard.

    Samples with less than MOST_GAP_BYTES between them are read by one request. A compressed shard
    is decompressed up to the last of the samples.
    Raises Unreachable if a sample cannot be read.
    """
    table = read_sample_table(folder, shard)
    samples = dict[int, Sample]()
    rows = np.unique([*positions]).astype(np.int64)
    if not len(rows):
        return samples
    # A compressed shard is decompressed from its beginning, so one read gives all samples.
    most_gap = 1 << 32 if shard.packing else MOST_GAP_BYTES
    # For each sample but the first: whether its start is far from the end of the one before it.
    is_apart = table[rows[1:]] - table[rows[:-1] + 1] >= most_gap
    with open_shard(folder, shard) as file:
        # Each run of samples that are near to each other is read by one request.
        for run in np.split(rows, np.flatnonzero(is_apart) + 1):
            # The starts of the samples from the run's first to its last, and the end of the last.
            edges = table[run[0] : run[-1] + 2]
            data = _read_raw(file, shard, int(edges[0]), int(edges[-1]))
            rows_of_run = Ragged(np.frombuffer(data, np.uint8), edges - edges[0])
            chosen = rows_of_run.take(run - run[0])
            samples |= zip(run.tolist(), decode_samples(shard, chosen), strict=True)
    return samples


def decode_samples(shard: Shard, samples: Ragged) -> Iterator[Sample]:
    """Yield each sample as a mapping from column name to decoded value.

    Raises an error of any class if a sample is damaged; its message is the problem.
    """
    columns = [  # for each column: name, function that decodes a cell, iterator over the cells
        (name, find_codec(shard.columns[name]).decode, map(bytes, cells.slices()))
        for name, cells in split_columns(shard, samples)
    ]
    for _ in range(len(samples)):
        yield {name: decode(next(cells)) for name, decode, cells in columns}


def split_columns(shard: Shard, samples: Ragged) -> Iterator[tuple[str, Ragged]]:
    """Yield (name, cells) for every column. The cells are the column's value in each sample, as
    bytes (uint8).

    Raises ValueError if a sample's length is not the sum of its columns' sizes.

    Args:
        shard: the shard's entry in the index.
        samples: the bytes of each sample.
    """
    count = len(samples)
    # Each sample begins with the sizes (uint32) of its columns without a fixed size.
    varying = sum(1 for size in shard.column_sizes if not size)  # columns without a fixed size
    heads = samples.first(4 * varying)
    if (heads.lengths < 4 * varying).any():
        raise ValueError("a sample of the file is too short for the sizes of its columns")
    # The rows of the transposed array are columns: the sizes of one column in all samples.
    varying_sizes = iter(heads.values.view("<u4").reshape(count, varying).T.astype(np.int64))
    sizes_of_columns = list[NDArray[np.int64]]()
    for size in shard.column_sizes:
        sizes_of_columns.append(np.full(count, size) if size else next(varying_sizes))
    sizes = np.array(sizes_of_columns)  # int64 [columns, samples]
    ends = 4 * varying + np.cumsum(sizes, axis=0)  # where each cell ends in its sample
    if (ends[-1] != samples.lengths).any():
        raise ValueError("the length of a sample of the file is not the sum of its columns' sizes")
    for name, column_sizes, column_ends in zip(shard.columns, sizes, ends, strict=True):
        yield name, samples.cut(column_ends - column_sizes, column_sizes)


def decode_arrays(cells: Ragged, codec: Codec) -> Ragged:
    """Decode 1-d arrays of a column whose encoding fixes the dtype. Return one row of values per
    array.

    Raises ValueError if an array's length contradicts the shape in front of the array.

    Args:
        cells: the stored bytes of each array (uint8).
        codec: the codec of the column.
    """
    width = np.dtype(codec.dtype).itemsize
    skipped = np.zeros(len(cells), np.int64)
    heads = Ragged.from_rows([], np.uint8)
    if codec.size is None:
        # In front of each array is a head with its length. Make the heads that arrays of these
        # sizes must have; below they are compared with the stored heads. The lowest two bits of a
        # head are log2 of the number of bytes that store the length.
        log_widths = (cells.values[cells.offsets[:-1]] & 3).astype(np.int64)
        skipped = 1 + (1 << log_widths)
        heads = lay_out_lengths((cells.lengths - skipped) // width, log_widths)
    sizes = cells.lengths - skipped
    is_whole = (sizes >= 0).all() and not (sizes % width).any()
    if not is_whole or not np.array_equal(heads.values, cells.first(skipped).values):
        raise ValueError(
            "the bytes of an array in the file are more or fewer than its shape states"
        )
    values = cells.cut(skipped, sizes)
    return Ragged(values.values.view(codec.dtype), values.offsets // width)

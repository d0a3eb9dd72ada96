"""Reads the samples of a stored shard: all of them, after the shard was checked against its index,
or a few, by their positions.

Damage must not be copied into another stream, so `read_all_samples` checks the shard's hash before
it returns anything. The price is a whole shard in memory: usually 64 MiB, and less than 4 GB
whatever tool wrote it. `check` and `inspect` read a few samples: of an uncompressed shard the table
of offsets and these samples, by ranged requests. A compressed shard is decompressed from its
beginning, only as far as needed. Images and pickles stay bytes, since a check must never run the
content of a shard.

Samples are rows of bytes, and so are the cells of a column: all samples are cut at once, 20 times
as fast as by a loop over them. Nothing is trusted: the sizes in front of a sample must add up to
its length, and an array's own shape must fit its bytes.

Source: streaming/base/format/mds/reader.py.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.errors import MdsmixError, Unreachable
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
"""64 KiB: samples with less between them are read by one request, since a store takes longer to
answer a second one.
"""
Sample = Mapping[str, Any]
"A decoded sample: column name -> ndarray, str, number, JSON value, or bytes."
READABLE_COMPRESSIONS = ("zstd", "gz", "bz2")
"Compressions of Streaming that Python and zstandard can decompress."


def can_unpack(shard: Shard) -> bool:
    """Check whether mdsmix can decompress the shard."""
    return shard.packing in ("", *READABLE_COMPRESSIONS)


@contextmanager
def open_shard(folder: Location, shard: Shard) -> Iterator[Location]:
    """Give a `with` block the shard's file, and turn any error of a decoder in the block into
    Unreachable, which names the shard.
    """
    file = folder / shard.stored.basename
    if not can_unpack(shard):
        raise Unreachable(
            f"{file} is compressed by {shard.packing}, but mdsmix reads only "
            f"{', '.join(READABLE_COMPRESSIONS)}; publish the stream with one of these to read it."
        )
    try:
        yield file
    except MdsmixError:
        raise
    except Exception as error:
        raise Unreachable(
            f"the shard {file} is damaged: {flatten_error(error)}; publish that stream again."
        ) from None


def read_all_samples(folder: Location, shard: Shard) -> Ragged:
    """Return the bytes of the shard's samples, uint8.

    Raises Unreachable if the shard differs from its index.
    """
    with open_shard(folder, shard) as file:
        return parse_samples(shard, file.read())


def parse_samples(shard: Shard, data: bytes) -> Ragged:
    """Return the samples in a shard's stored bytes, uint8.

    Raises an error of any class if they are damaged; its message is the problem.
    """
    check_stored(shard.stored, data)
    size = shard.raw_data.bytes
    raw = data
    if shard.packing:
        raw = _decompress(io.BytesIO(data), shard, size + 1)
    if len(raw) != size:
        raise ValueError(f"its content does not decompress to the {size:,} bytes of its index")
    table = _parse_sample_table(shard, raw)
    return Ragged(np.frombuffer(raw, np.uint8, offset=table[0]), table - table[0])


def check_stored(stored: StoredFile, data: bytes, origin: str = "index") -> None:
    """Raise ValueError if stored bytes do not have the stated size and hashes.

    Hash algorithms that are unknown here are skipped.

    Args:
        origin: the file that states size and hashes, for messages.
    """
    if len(data) != stored.bytes:
        raise ValueError(f"it has {len(data):,} bytes, but its {origin} states {stored.bytes:,}")
    for algorithm, expected in stored.hashes.items():
        if algorithm in xxhash.algorithms_available:
            digest = getattr(xxhash, algorithm)(data).hexdigest()
        elif algorithm in hashlib.algorithms_guaranteed and "shake" not in algorithm:
            digest = hashlib.new(algorithm, data).hexdigest()
        else:
            continue
        if digest != expected:
            raise ValueError(f"its {algorithm} is {digest}, but its {origin} states {expected}")


def _decompress(stored: BinaryIO, shard: Shard, stop: int) -> bytes:
    """Return the first `stop` bytes of a compressed file's content."""
    import zstandard

    openers: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "zstd": zstandard.open}
    with openers[shard.packing](stored) as raw:
        content: bytes = raw.read(stop)
        return content


def _read_raw(file: Location, shard: Shard, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` (exclusive) of the raw shard."""
    if not shard.packing:
        return file.read(start, stop - start)
    with file.open() as stored:
        return _decompress(stored, shard, stop)[start:]


def read_first_samples(folder: Location, shard: Shard, limit: int = HEAD_SAMPLES) -> list[Sample]:
    """Return the first samples, `limit` at most, of about HEAD_BYTES by the shard's mean size.

    The list is empty if the shard is compressed by br or snappy.
    Raises Unreachable if the shard is damaged.
    """
    if not can_unpack(shard):
        return []
    fitting = max(1, HEAD_BYTES * shard.samples // max(1, shard.raw_data.bytes))
    count = min(shard.samples, limit, fitting)
    return list(read_samples(folder, shard, range(count)).values())


def read_sample_table(folder: Location, shard: Shard) -> NDArray[np.int64]:
    """Return int64 [samples + 1]: the offset of each sample in the raw shard, and that of the last
    one's end. 4 bytes a sample are read.

    Raises Unreachable if they cannot be read.
    """
    with open_shard(folder, shard) as file:
        return _parse_sample_table(shard, _read_raw(file, shard, 0, 4 * (shard.samples + 2)))


def _parse_sample_table(shard: Shard, raw: bytes) -> NDArray[np.int64]:
    """Return the table of offsets at the beginning of a raw shard: the sample count (uint32), then
    `count + 1` offsets (uint32).

    Raises ValueError if it is damaged.
    """
    count = int.from_bytes(raw[:4], "little")
    if count != shard.samples:
        raise ValueError(f"it contains {count} samples, but its index states {shard.samples}")
    first = 4 * (count + 2)  # where the table ends
    if len(raw) < first:
        raise ValueError("its table of samples is cut off")
    offsets = np.frombuffer(raw, "<u4", count + 1, 4).astype(np.int64)
    is_inside = first <= offsets[0] and offsets[-1] == shard.raw_data.bytes
    if not is_inside or (np.diff(offsets) < 0).any():
        raise ValueError("its table of samples does not ascend, or points outside of it")
    return offsets


def read_samples(folder: Location, shard: Shard, positions: Iterable[int]) -> dict[int, Sample]:
    """Return {position: decoded sample}.

    Samples with less than MOST_GAP_BYTES between them are read by one request; a compressed shard
    is decompressed up to the last sample.
    Raises Unreachable if a sample cannot be read.
    """
    table = read_sample_table(folder, shard)
    samples = dict[int, Sample]()
    rows = np.unique([*positions]).astype(np.int64)
    if not len(rows):
        return samples
    # A compressed shard is decompressed from its beginning, so one read gives all samples.
    most_gap = 1 << 32 if shard.packing else MOST_GAP_BYTES
    is_apart = table[rows[1:]] - table[rows[:-1] + 1] >= most_gap
    with open_shard(folder, shard) as file:
        for run in np.split(rows, np.flatnonzero(is_apart) + 1):
            edges = table[run[0] : run[-1] + 2]
            data = _read_raw(file, shard, int(edges[0]), int(edges[-1]))
            rows_of_run = Ragged(np.frombuffer(data, np.uint8), edges - edges[0])
            chosen = rows_of_run.take(run - run[0])
            samples |= zip(run.tolist(), decode_samples(shard, chosen), strict=True)
    return samples


def decode_samples(shard: Shard, samples: Ragged) -> Iterator[Sample]:
    """Yield each sample, decoded.

    Raises an error of any class if a sample is damaged; its message is the problem.
    """
    columns = [  # (name, decoder, iterator over the column's cells)
        (name, find_codec(shard.columns[name]).decode, map(bytes, cells.slices()))
        for name, cells in split_columns(shard, samples)
    ]
    for _ in range(len(samples)):
        yield {name: decode(next(cells)) for name, decode, cells in columns}


def split_columns(shard: Shard, samples: Ragged) -> Iterator[tuple[str, Ragged]]:
    """Yield the name of every column, and its cells, uint8.

    Raises ValueError if a sample's length is not the sum of its columns' sizes.
    """
    count = len(samples)
    # Each sample begins with the sizes (uint32) of its columns without a fixed size.
    varying = sum(not size for size in shard.column_sizes)
    heads = samples.first(4 * varying)
    if (heads.lengths < 4 * varying).any():
        raise ValueError("a sample is too short for the sizes of its columns")
    varying_sizes = iter(heads.values.view("<u4").reshape(count, varying).T.astype(np.int64))
    sizes = np.array(
        [np.full(count, size) if size else next(varying_sizes) for size in shard.column_sizes]
    )
    ends = 4 * varying + np.cumsum(sizes, axis=0)
    if (ends[-1] != samples.lengths).any():
        raise ValueError("a sample's length is not the sum of its columns' sizes")
    for name, size, end in zip(shard.columns, sizes, ends, strict=True):
        yield name, samples.cut(end - size, size)


def decode_arrays(cells: Ragged, codec: Codec) -> Ragged:
    """Return the values of 1-d arrays whose dtype the encoding fixes.

    Raises ValueError if an array's length contradicts the shape in front of it.
    """
    width = np.dtype(codec.dtype).itemsize
    skipped = np.zeros(len(cells), np.int64)
    heads = Ragged.from_rows([], np.uint8)
    if codec.size is None:
        # Make the heads that arrays of these lengths must have; below they are compared with the
        # stored ones. The lowest two bits of a head are log2 of the bytes that its length takes.
        log_widths = (cells.values[cells.offsets[:-1]] & 3).astype(np.int64)
        skipped = 1 + (1 << log_widths)
        heads = lay_out_lengths((cells.lengths - skipped) // width, log_widths)
    sizes = cells.lengths - skipped
    is_whole = (sizes >= 0).all() and not (sizes % width).any()
    if not is_whole or not np.array_equal(heads.values, cells.first(skipped).values):
        raise ValueError("an array's length contradicts its shape")
    values = cells.cut(skipped, sizes)
    return Ragged(values.values.view(codec.dtype), values.offsets // width)

"""Reads the samples of a stored shard: all, after the shard was checked against its index, or a few
by their positions.

Whoever copies samples into another stream must not copy damage, so `read_whole` hands nothing out
before the hash is right. The price is a whole shard in memory, 64 MiB as a rule and less than 4 GB
whoever wrote it. `check` and `inspect` look at a few samples. Of an uncompressed shard they read
the table of offsets and these samples, by ranged requests. A compressed shard is unpacked from its
beginning only as far as needed. Images and pickles stay bytes, since a check must never run what a
shard holds.

Samples are rows of bytes, and so are the cells of a column: they are cut for all samples at once,
20 times as fast as by a loop over them. Nothing is trusted: the sizes in front of a sample must add
up to its length, and an array's own shape to its bytes. Source:
streaming/base/format/mds/reader.py.
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
"""1 MiB of samples, or one sample: enough to see what a stream holds, little enough for a slow
store.
"""
MOST_GAP_BYTES = 1 << 16
"""64 KiB: samples less far apart are read by one request, since a store takes longer to answer a
second one.
"""
Sample = Mapping[str, Any]
"A decoded sample: column name -> ndarray, str, number, JSON value, or bytes."
READABLE_COMPRESSIONS = ("zstd", "gz", "bz2")
"Compressions of Streaming that Python and zstandard undo."


def can_unpack(shard: Shard) -> bool:
    """Whether mdsmix can decompress the shard."""
    return shard.packing in ("", *READABLE_COMPRESSIONS)


@contextmanager
def open_shard(folder: Location, shard: Shard) -> Iterator[Location]:
    """The shard's file, for a `with` block: any error of a decoder in it becomes Unreachable, which
    names the shard.
    """
    file = folder / shard.stored.basename
    if not can_unpack(shard):
        raise Unreachable(
            f"{file} is compressed by {shard.packing}, and mdsmix reads {', '.join(READABLE_COMPRESSIONS)}; publish the stream with "
            "one of these to look inside."
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
    """The bytes of the shard's samples, uint8; Unreachable names a shard that is not what its index
    says.
    """
    with open_shard(folder, shard) as file:
        return parse_samples(shard, file.read())


def parse_samples(shard: Shard, data: bytes) -> Ragged:
    """The samples in a shard's stored bytes; any error names what is wrong with them."""
    check_stored(shard.stored, data)
    size = shard.raw_data.bytes
    raw = _unpacked(io.BytesIO(data), shard, size + 1) if shard.packing else data
    if len(raw) != size:
        raise ValueError(f"decompressed it is not the {size:,} bytes of its index")
    table = _table(shard, raw)
    return Ragged(np.frombuffer(raw, np.uint8, offset=table[0]), table - table[0])


def check_stored(stored: StoredFile, data: bytes, by: str = "index") -> None:
    """ValueError where stored bytes do not have the size and hashes that the index says (`by`: or
    another file). An algorithm that is unknown here is skipped.
    """
    if len(data) != stored.bytes:
        raise ValueError(f"it has {len(data):,} bytes, and its {by} says {stored.bytes:,}")
    for algorithm, expected in stored.hashes.items():
        if algorithm in xxhash.algorithms_available:
            found = getattr(xxhash, algorithm)(data).hexdigest()
        elif algorithm in hashlib.algorithms_guaranteed and "shake" not in algorithm:
            found = hashlib.new(algorithm, data).hexdigest()
        else:
            continue
        if found != expected:
            raise ValueError(f"its {algorithm} is {found}, and its {by} says {expected}")


def _unpacked(stored: BinaryIO, shard: Shard, stop: int) -> bytes:
    """The first `stop` bytes of a compressed file's content."""
    import zstandard

    openers: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "zstd": zstandard.open}
    with openers[shard.packing](stored) as raw:
        found: bytes = raw.read(stop)
        return found


def _read(file: Location, shard: Shard, start: int, stop: int) -> bytes:
    """Bytes of the raw shard."""
    if not shard.packing:
        return file.read(start, stop - start)
    with file.open() as stored:
        return _unpacked(stored, shard, stop)[start:]


def read_first_samples(folder: Location, shard: Shard, limit: int = HEAD_SAMPLES) -> list[Sample]:
    """The first samples, `limit` at most, about HEAD_BYTES by their mean size; empty where br or
    snappy compressed the shard. Unreachable where it is damaged.
    """
    if not can_unpack(shard):
        return []
    fit = max(1, HEAD_BYTES * shard.samples // max(1, shard.raw_data.bytes))
    return list(read_samples(folder, shard, range(min(shard.samples, limit, fit))).values())


def read_sample_table(folder: Location, shard: Shard) -> NDArray[np.int64]:
    """int64 [samples + 1]: where each sample begins in the raw shard, and where the last one ends:
    4 bytes a sample are read. Unreachable where they cannot be.
    """
    with open_shard(folder, shard) as file:
        return _table(shard, _read(file, shard, 0, 4 * (shard.samples + 2)))


def _table(shard: Shard, raw: bytes) -> NDArray[np.int64]:
    count = int.from_bytes(raw[:4], "little")
    if count != shard.samples:
        raise ValueError(f"it holds {count} samples, and its index says {shard.samples}")
    first = 4 * (count + 2)
    if len(raw) < first:
        raise ValueError("its table of samples is cut off")
    offsets = np.frombuffer(raw, "<u4", count + 1, 4).astype(np.int64)
    is_inside = first <= offsets[0] and offsets[-1] == shard.raw_data.bytes
    if not is_inside or (np.diff(offsets) < 0).any():
        raise ValueError("its table of samples is not ascending or leads outside of it")
    return offsets


def read_samples(folder: Location, shard: Shard, positions: Iterable[int]) -> dict[int, Sample]:
    """Position -> decoded sample. Samples with less than GAP between them are read by one request;
    a compressed shard is unpacked up to the last one. Unreachable where one cannot be read.
    """
    table, found = read_sample_table(folder, shard), dict[int, Sample]()
    at = np.unique([*positions]).astype(np.int64)
    is_apart = table[at[1:]] - table[at[:-1] + 1] >= (1 << 32 if shard.packing else MOST_GAP_BYTES)
    with open_shard(folder, shard) as file:
        for run in np.split(at, np.flatnonzero(is_apart) + 1) if len(at) else ():
            edges = table[run[0] : run[-1] + 2]
            data = _read(file, shard, int(edges[0]), int(edges[-1]))
            samples = Ragged(np.frombuffer(data, np.uint8), edges - edges[0]).take(run - run[0])
            found |= zip(run.tolist(), decode_samples(shard, samples), strict=True)
    return found


def decode_samples(shard: Shard, samples: Ragged) -> Iterator[Sample]:
    """Each sample; any error says what does not decode."""
    columns = [
        (name, find_codec(shard.columns[name]).decode, map(bytes, cells.slices()))
        for name, cells in split_columns(shard, samples)
    ]
    for _ in range(len(samples)):
        yield {name: decode(next(cells)) for name, decode, cells in columns}


def split_columns(shard: Shard, samples: Ragged) -> Iterator[tuple[str, Ragged]]:
    """The name and the cells of every column, uint8; ValueError where samples are not as long as
    the sizes in front of them say.
    """
    count, varying = len(samples), sum(not size for size in shard.column_sizes)
    heads = samples.first(4 * varying)
    if (heads.lengths < 4 * varying).any():
        raise ValueError("a sample is too short to say how long its columns are")
    stated = iter(heads.values.view("<u4").reshape(count, varying).T.astype(np.int64))
    sizes = np.array(
        [np.full(count, size) if size else next(stated) for size in shard.column_sizes]
    )
    ends = 4 * varying + np.cumsum(sizes, axis=0)
    if (ends[-1] != samples.lengths).any():
        raise ValueError("a sample is not as long as its columns say")
    for name, size, end in zip(shard.columns, sizes, ends, strict=True):
        yield name, samples.cut(end - size, size)


def decode_arrays(cells: Ragged, codec: Codec) -> Ragged:
    """The values of 1-d arrays of a stated dtype; ValueError where one is not as long as the shape
    in front of it says.
    """
    width, skipped = np.dtype(codec.dtype).itemsize, np.zeros(len(cells), np.int64)
    heads = Ragged.from_rows([], np.uint8)
    if codec.size is None:
        log_widths = (cells.values[cells.offsets[:-1]] & 3).astype(np.int64)
        skipped = 1 + (1 << log_widths)
        heads = lay_out_lengths((cells.lengths - skipped) // width, log_widths)
    sizes = cells.lengths - skipped
    is_whole = (sizes >= 0).all() and not (sizes % width).any()
    if not is_whole or not np.array_equal(heads.values, cells.first(skipped).values):
        raise ValueError("an array is not as long as its shape says")
    bare = cells.cut(skipped, sizes)
    return Ragged(bare.values.view(codec.dtype), bare.offsets // width)

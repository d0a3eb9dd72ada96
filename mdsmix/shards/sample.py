"""Samples of a stored shard, decoded: what `check` and `inspect` look at in a stream of any origin.

An uncompressed shard is read by two ranged requests, its table of offsets and its first samples, whatever its size; a
compressed one is decompressed from its beginning only as far as needed. Text, numbers and arrays are decoded; images and
pickles stay bytes, since a check must never run what a shard holds. Source: streaming/base/format/mds/{reader,encodings}.py.
"""

from __future__ import annotations

import bz2
import gzip
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from mdsmix.errors import Unreachable
from mdsmix.shards.codecs import decode_value
from mdsmix.shards.index import Shard
from mdsmix.storage import Location

HEAD_SAMPLES = 32
HEAD_BYTES = 1 << 20
"1 MiB of samples, or one sample: enough to see what a stream holds, little enough for a slow store."

GAP = 1 << 16
"64 KiB between two samples are read along: a store takes longer to answer once more."

DECOMPRESSED = ("zstd", "gz", "bz2")
"Compressions of Streaming that Python and zstandard undo."

Read = Callable[[int, int], bytes]
"(start, length) -> bytes of the raw shard; starts only grow."


def can_unpack(shard: Shard) -> bool:
    """Whether its samples can be read here."""
    return shard.packing in ("", *DECOMPRESSED)


def read_head(folder: Location, shard: Shard, limit: int = HEAD_SAMPLES) -> list[dict[str, Any]]:
    """Up to `limit` first samples; none where br or snappy compressed them. Unreachable where the shard is damaged."""
    if not can_unpack(shard):
        return []
    with _opened(folder, shard) as read:
        return [decode_sample(shard, data) for data in _first(read, shard, limit)]


def read_sample(folder: Location, shard: Shard, position: int) -> dict[str, Any]:
    """The sample at a position of the shard, by two ranged requests. Unreachable where it cannot be read."""
    return read_samples(folder, shard, sample_table(folder, shard), [position])[position]


def sample_sizes(folder: Location, shard: Shard) -> NDArray[np.int64]:
    """int64 [samples]: the bytes of each sample, as the shard's table says. Unreachable where it cannot be read."""
    return np.diff(sample_table(folder, shard))


def sample_table(folder: Location, shard: Shard) -> NDArray[np.int64]:
    """int64 [samples + 1]: where each sample begins in the raw shard, and where the last one ends: 4 bytes a sample are read.
    Unreachable where they cannot be."""
    with _opened(folder, shard) as read:
        return _offsets(read, shard, shard.samples)


def read_samples(
    folder: Location, shard: Shard, table: NDArray[np.int64], positions: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Some samples of a shard by their positions, neighbours by one request. `table`: that of `sample_table`. A compressed
    shard is unpacked as far as the last of them. Unreachable where one cannot be read."""
    found = dict[int, dict[str, Any]]()
    with _opened(folder, shard) as read:
        for first, last in sample_runs(table, positions):
            begin = int(table[first])
            body = read(begin, int(table[last + 1]) - begin)
            for at in sorted({p for p in positions if first <= p <= last}):
                data = body[int(table[at]) - begin : int(table[at + 1]) - begin]
                found[at] = decode_sample(shard, data)
    return found


def sample_runs(table: NDArray[np.int64], positions: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) positions of each request: samples with less than GAP bytes between them are read together."""
    runs = list[tuple[int, int]]()
    for at in sorted(set(positions)):
        if runs and table[at] - table[runs[-1][1] + 1] < GAP:
            runs[-1] = (runs[-1][0], at)
        else:
            runs.append((at, at))
    return runs


@contextmanager
def _opened(folder: Location, shard: Shard) -> Iterator[Read]:
    """A reader of the raw shard; whatever a decoder makes of damaged bytes names the shard."""
    file = folder / shard.stored.basename
    if not can_unpack(shard):
        raise Unreachable(
            f"{file} is compressed by {shard.packing}, and mdsmix reads {', '.join(DECOMPRESSED)}; publish the stream with "
            "one of these to look inside."
        )
    try:
        with _raw(file, shard) as read:
            yield read
    except Unreachable:
        raise
    except Exception as error:
        raise Unreachable(
            f"{file} is damaged: {_size_problem(file, shard) or str(error).rstrip('.')}; publish the stream again."
        ) from None


def _size_problem(file: Location, shard: Shard) -> str:
    """Why no sense can be made of a file that is longer or shorter than its index says; nothing where it is neither."""
    stat = file.stat()
    if stat is None or stat.size == shard.stored.bytes:
        return ""
    what = "cut off" if stat.size < shard.stored.bytes else "replaced or added to"
    return f"it has {stat.size:,} bytes and its index says {shard.stored.bytes:,}, so it was {what}"


def decode_sample(shard: Shard, data: bytes) -> dict[str, Any]:
    """One sample from its bytes: column name -> ndarray, str, number, JSON value, or bytes."""
    position = 0
    sizes = []
    for size in shard.column_sizes:
        if not size:
            size = int.from_bytes(data[position : position + 4], "little")
            position += 4
        sizes.append(size)
    if position + sum(sizes) != len(data):
        raise ValueError(f"a sample of {len(data)} bytes says that its columns have {sum(sizes)}")
    sample = {}
    for (name, encoding), size in zip(shard.columns.items(), sizes, strict=True):
        sample[name] = decode_value(encoding, data[position : position + size])
        position += size
    return sample


def _first(read: Read, shard: Shard, limit: int) -> Iterator[bytes]:
    """The bytes of the first samples, as the shard's own table of offsets cuts them."""
    wanted = min(shard.samples, limit)
    offsets = _offsets(read, shard, wanted)
    wanted = max(
        min(wanted, 1), int(np.searchsorted(offsets - offsets[0], HEAD_BYTES, "right")) - 1
    )
    body = read(int(offsets[0]), int(offsets[wanted] - offsets[0]))
    for start, stop in pairwise(offsets[: wanted + 1]):
        yield body[start - offsets[0] : stop - offsets[0]]


def _offsets(read: Read, shard: Shard, wanted: int) -> NDArray[np.int64]:
    """int64 [wanted + 1]: where the first samples begin and the last of them ends."""
    head = read(0, 4 * (wanted + 2))
    count, table = int.from_bytes(head[:4], "little"), head[4:]
    if count != shard.samples:
        raise ValueError(f"it holds {count} samples, and its index says {shard.samples}")
    offsets = np.frombuffer(table[: len(table) // 4 * 4], "<u4").astype(np.int64)
    if len(offsets) != wanted + 1 or (np.diff(offsets) < 0).any():
        raise ValueError("its table of samples is cut off or not ascending")
    if offsets[0] < 4 * (shard.samples + 2) or offsets[-1] > shard.raw_data.bytes:
        raise ValueError("its table of samples leads outside of it")
    return offsets


@contextmanager
def _raw(file: Location, shard: Shard) -> Iterator[Read]:
    """A reader of the shard's raw bytes."""
    if not shard.packing:
        yield file.read
        return
    with file.open() as stored, decompressed(stored, shard.packing) as stream:
        yield _sequential(stream)


def decompressed(stored: BinaryIO, algorithm: str) -> BinaryIO:
    """A reader of what `stored` holds, compressed by one of DECOMPRESSED."""
    if algorithm == "gz":
        return cast(BinaryIO, gzip.open(stored))
    if algorithm == "bz2":
        return cast(BinaryIO, bz2.open(stored))
    import zstandard

    return cast(BinaryIO, io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(stored)))


def _sequential(stream: BinaryIO) -> Read:
    position = 0

    def read(start: int, length: int) -> bytes:
        nonlocal position
        stream.read(start - position)
        position = start + length
        return stream.read(length)

    return read

"""A stored shard, whole: read at once, held against the index's size and hash, decompressed, cut into its samples.

Whoever copies samples into another stream must not copy damage, so nothing is handed out before the hash is right. The
price is a whole shard in memory, 64 MiB as a rule and less than 4 GB whoever wrote it.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.errors import Unreachable
from mdsmix.shards.codecs import decode_value
from mdsmix.shards.index import Shard, StoredFile
from mdsmix.shards.shard_layout import Column
from mdsmix.storage import Location


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one shard: sample i is `data[offsets[i]:offsets[i + 1]]`."""

    data: bytes
    "The raw shard."
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


def read_whole(folder: Location, shard: Shard) -> Samples:
    """The shard's samples; Unreachable names a shard that is not what its index says."""
    file = folder / shard.stored.basename
    data = file.read()
    try:
        return samples_of(shard, data)
    except Exception as error:  # whatever a decompressor makes of damaged bytes
        raise Unreachable(
            f"the shard {file} is damaged: {str(error).rstrip('.')}; publish that stream again."
        ) from None


def samples_of(shard: Shard, data: bytes) -> Samples:
    """The samples in a shard's stored bytes; any error names what is wrong with them."""
    check_stored(shard.stored, data)
    raw = _raw(shard, data)
    return Samples(raw, _offsets(shard, raw))


def check_stored(stored: StoredFile, data: bytes, by: str = "index") -> None:
    """ValueError where the stored bytes are not of the size and hashes that the index says."""
    if len(data) != stored.bytes:
        raise ValueError(f"it has {len(data):,} bytes, and its {by} says {stored.bytes:,}")
    for algorithm, expected in stored.hashes.items():
        found = _digest(algorithm, data)
        if found and found != expected:
            raise ValueError(f"its {algorithm} is {found}, and its {by} says {expected}")


def _digest(algorithm: str, data: bytes) -> str | None:
    """None for a hash that is not known here."""
    if algorithm in xxhash.algorithms_available:
        return str(getattr(xxhash, algorithm)(data).hexdigest())
    if algorithm in hashlib.algorithms_guaranteed and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    return None


def _raw(shard: Shard, data: bytes) -> bytes:
    if not shard.packing:
        return data
    if not can_unpack(shard):
        raise ValueError(
            f"it is compressed by {shard.packing}, and mdsmix reads {', '.join(DECOMPRESSED)}"
        )
    raw = decompressed(io.BytesIO(data), shard.packing).read(shard.raw_data.bytes + 1)
    if len(raw) != shard.raw_data.bytes:
        raise ValueError(f"decompressed it is not the {shard.raw_data.bytes:,} bytes of its index")
    return raw


def _offsets(shard: Shard, raw: bytes) -> NDArray[np.int64]:
    count = int.from_bytes(raw[:4], "little")
    if count != shard.samples:
        raise ValueError(f"it holds {count} samples, and its index says {shard.samples}")
    if len(raw) < 4 * (count + 2):
        raise ValueError("its table of samples is cut off")
    offsets = np.frombuffer(raw, "<u4", count + 1, 4).astype(np.int64)
    if offsets[0] < 4 * (count + 2) or offsets[-1] != len(raw) or (np.diff(offsets) < 0).any():
        raise ValueError("its table of samples leads outside of it")
    return offsets


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
        return _first_offsets(read, shard, shard.samples)


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
        with _raw_reader(file, shard) as read:
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
    offsets = _first_offsets(read, shard, wanted)
    wanted = max(
        min(wanted, 1), int(np.searchsorted(offsets - offsets[0], HEAD_BYTES, "right")) - 1
    )
    body = read(int(offsets[0]), int(offsets[wanted] - offsets[0]))
    for start, stop in pairwise(offsets[: wanted + 1]):
        yield body[start - offsets[0] : stop - offsets[0]]


def _first_offsets(read: Read, shard: Shard, wanted: int) -> NDArray[np.int64]:
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
def _raw_reader(file: Location, shard: Shard) -> Iterator[Read]:
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


@dataclass(frozen=True, slots=True)
class Cells:
    """One column: cell i is `data[starts[i]:stops[i]]` of the shard."""

    column: Column
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.stops - self.starts


def cells(shard: Shard, samples: Samples) -> Iterator[Cells]:
    """Every column; ValueError where samples are not as long as the sizes in front of them say."""
    at, stops = samples.offsets[:-1], samples.offsets[1:]
    varying = 4 * sum(not size for size in shard.column_sizes)
    if (stops - at < varying).any():
        raise ValueError("a sample is too short to say how long its columns are")
    heads = iter(bytes_at(samples, at, varying).view("<u4").astype(np.int64).T)
    at = at + varying
    for name, size in zip(shard.column_names, shard.column_sizes, strict=True):
        column = Column(name, shard.columns[name])
        if column.size not in (None, size):
            raise ValueError(f"column {name}, {column.encoding}, is said to have {size} bytes")
        start, at = at, at + (size or next(heads))
        yield Cells(column, start, at)
    if (at != stops).any():
        row = int(np.flatnonzero(at != stops)[0])
        raise ValueError(
            f"sample {row} has {samples.sizes[row]:,} bytes, and its columns come to "
            f"{at[row] - samples.offsets[row]:,}"
        )


def bytes_at(samples: Samples, at: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """uint8 [n, width]: the bytes from each place on."""
    return np.frombuffer(samples.data, np.uint8)[at[:, None] + np.arange(width)]


def array_dtype(column: Column) -> np.dtype[Any] | None:
    """The dtype of a column of arrays; None where its encoding states none."""
    kind, *settings = column.encoding.split(":")
    return np.dtype(settings[0]) if kind == "ndarray" and settings else None


def payload(samples: Samples, part: Cells) -> Cells:
    """The values of a column of arrays of a stated dtype, behind the shape that each may begin with; ValueError where the
    shape and the bytes contradict each other."""
    if part.column.size is not None:
        return part
    if (part.sizes < 2).any():
        raise ValueError(f"an array in column {part.column.name} has no shape")
    heads = bytes_at(samples, part.starts, 1)[:, 0].astype(np.int64)
    starts = part.starts + 1 + (heads >> 2 << (heads & 3))
    values = Cells(part.column, starts, part.stops)
    expected = _elements(samples, part, heads) * part.column.dtype.itemsize
    if (values.sizes != expected).any():
        row = int(np.flatnonzero(values.sizes != expected)[0])
        raise ValueError(
            f"the array in column {part.column.name} of sample {row} has {values.sizes[row]:,} bytes, and its "
            f"shape says {expected[row]:,}"
        )
    return values


def _elements(samples: Samples, part: Cells, heads: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n]: the product of each shape: a byte `dimensions << 2 | log2(width)`, then the dimensions."""
    found = np.empty(len(heads), np.int64)
    for head in np.unique(heads).tolist():
        rows, ndim, width = heads == head, head >> 2, 1 << (head & 3)
        if (part.sizes[rows] < 1 + ndim * width).any():
            raise ValueError(f"an array in column {part.column.name} is shorter than its shape")
        shape = bytes_at(samples, part.starts[rows] + 1, ndim * width).view(f"<u{width}")
        found[rows] = shape.astype(np.int64).prod(axis=1)
    return found

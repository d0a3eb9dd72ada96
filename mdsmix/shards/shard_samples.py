"""Samples of a stored shard: of a whole one that is held against its index first, or some by their places.

Whoever copies samples into another stream must not copy damage, so `read_whole` hands nothing out before the hash is right. The
price is a whole shard in memory, 64 MiB as a rule and less than 4 GB whoever wrote it. `check` and `inspect` look at a few samples: of an
uncompressed shard its table of offsets and the samples are read, by ranged requests; a compressed one is unpacked from its beginning only as
far as needed. Images and pickles stay bytes, since a check must never run what a shard holds.

Where every column of every sample lies is computed for all samples at once, 20 times as fast as by a loop over them. Nothing is trusted: the
sizes in front of a sample must add up to its length, and an array's own shape to its bytes. Source: streaming/base/format/mds/reader.py.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.ragged import Ragged
from mdsmix.shards.codecs import Codec, codec_of
from mdsmix.shards.index import Shard, StoredFile
from mdsmix.storage import Location

HEAD_SAMPLES = 32
HEAD_BYTES = 1 << 20
"1 MiB of samples, or one sample: enough to see what a stream holds, little enough for a slow store."
GAP = 1 << 16
"64 KiB between two samples are read along: a store takes longer to answer once more."
DECOMPRESSED = ("zstd", "gz", "bz2")
"Compressions of Streaming that Python and zstandard undo."


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a shard: sample i is `data[offsets[i]:offsets[i + 1]]`."""

    data: bytes
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class Cells:
    """One column: cell i is `data[starts[i]:stops[i]]` of the samples."""

    name: str
    codec: Codec
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.stops - self.starts


def can_unpack(shard: Shard) -> bool:
    """Whether its samples can be read here."""
    return shard.packing in ("", *DECOMPRESSED)


@contextmanager
def reading(folder: Location, shard: Shard) -> Iterator[Location]:
    """The shard's file; whatever a decoder makes of damaged bytes becomes Unreachable, which names the shard."""
    file = folder / shard.stored.basename
    if not can_unpack(shard):
        raise Unreachable(
            f"{file} is compressed by {shard.packing}, and mdsmix reads {', '.join(DECOMPRESSED)}; publish the stream with "
            "one of these to look inside."
        )
    try:
        yield file
    except MdsmixError:
        raise
    except Exception as error:
        raise Unreachable(
            f"the shard {file} is damaged: {str(error).rstrip('.')}; publish that stream again."
        ) from None


def read_whole(folder: Location, shard: Shard) -> Samples:
    """The shard's samples; Unreachable names a shard that is not what its index says."""
    with reading(folder, shard) as file:
        return samples_of(shard, file.read())


def samples_of(shard: Shard, data: bytes) -> Samples:
    """The samples in a shard's stored bytes; any error names what is wrong with them."""
    check_stored(shard.stored, data)
    size = shard.raw_data.bytes
    raw = _unpacked(io.BytesIO(data), shard, size + 1) if shard.packing else data
    if len(raw) != size:
        raise ValueError(f"decompressed it is not the {size:,} bytes of its index")
    return Samples(raw, _table(shard, raw))


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


def decompressed(stored: BinaryIO, algorithm: str) -> BinaryIO:
    """A reader of what `stored` holds, compressed by one of DECOMPRESSED."""
    if algorithm == "gz":
        return cast(BinaryIO, gzip.open(stored))
    if algorithm == "bz2":
        return cast(BinaryIO, bz2.open(stored))
    import zstandard

    return cast(BinaryIO, io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(stored)))


def _unpacked(stored: BinaryIO, shard: Shard, stop: int) -> bytes:
    with decompressed(stored, shard.packing) as raw:
        return raw.read(stop)


def _read(file: Location, shard: Shard, start: int, stop: int) -> bytes:
    """Bytes of the raw shard."""
    if not shard.packing:
        return file.read(start, stop - start)
    with file.open() as stored:
        return _unpacked(stored, shard, stop)[start:]


def read_head(folder: Location, shard: Shard, limit: int = HEAD_SAMPLES) -> list[dict[str, Any]]:
    """Up to `limit` first samples; none where br or snappy compressed them. Unreachable where the shard is damaged."""
    if not can_unpack(shard):
        return []
    table = sample_table(folder, shard)
    fit = int(np.searchsorted(table - table[0], HEAD_BYTES, "right")) - 1
    count = min(shard.samples, limit, max(1, fit))
    return list(read_samples(folder, shard, table, range(count)).values())


def sample_table(folder: Location, shard: Shard) -> NDArray[np.int64]:
    """int64 [samples + 1]: where each sample begins in the raw shard, and where the last one ends: 4 bytes a sample are read.
    Unreachable where they cannot be."""
    with reading(folder, shard) as file:
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


def read_samples(
    folder: Location, shard: Shard, table: NDArray[np.int64], positions: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Some samples of a shard by their positions, neighbours by one request. `table`: that of `sample_table`. A compressed
    shard is unpacked as far as the last of them. Unreachable where one cannot be read."""
    found = dict[int, dict[str, Any]]()
    runs = sample_runs(table, positions)
    if shard.packing:
        runs = [(first, runs[-1][1]) for first, _ in runs[:1]]
    with reading(folder, shard) as file:
        for first, last in runs:
            begin, end = int(table[first]), int(table[last + 1])
            samples = Samples(_read(file, shard, begin, end), table[first : last + 2] - begin)
            rows = sorted({p - first for p in positions if first <= p <= last})
            decoded = decoded_samples(shard, samples, rows)
            found |= zip((first + row for row in rows), decoded, strict=True)
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


def decoded_samples(
    shard: Shard, samples: Samples, rows: Iterable[int]
) -> Iterator[dict[str, Any]]:
    """The samples of these numbers: column name -> ndarray, str, number, JSON value, or bytes; any error says what does not decode."""
    columns = [
        (each.name, each.codec.decode, each.starts.tolist(), each.stops.tolist())
        for each in cells(shard, samples)
    ]
    for row in rows:
        yield {
            name: decode(samples.data[starts[row] : stops[row]])
            for name, decode, starts, stops in columns
        }


def cells(shard: Shard, samples: Samples) -> Iterator[Cells]:
    """Every column; ValueError where samples are not as long as the sizes in front of them say."""
    at, stops = samples.offsets[:-1], samples.offsets[1:]
    varying = 4 * sum(not size for size in shard.column_sizes)
    if (stops - at < varying).any():
        raise ValueError("a sample is too short to say how long its columns are")
    heads = iter(bytes_at(samples, at, varying).view("<u4").astype(np.int64).T)
    at = at + varying
    for (name, encoding), size in zip(shard.columns.items(), shard.column_sizes, strict=True):
        start, at = at, at + (size or next(heads))
        yield Cells(name, codec_of(encoding), start, at)
    if (at != stops).any():
        row = int(np.flatnonzero(at != stops)[0])
        raise ValueError(
            f"sample {row} has {samples.sizes[row]:,} bytes, and its columns come to "
            f"{at[row] - samples.offsets[row]:,}"
        )


def bytes_at(samples: Samples, at: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """uint8 [n, width]: the bytes from each place on."""
    return np.frombuffer(samples.data, np.uint8)[at[:, None] + np.arange(width)]


def without_lengths(samples: Samples, part: Cells) -> Cells:
    """A column of 1-d arrays of a stated dtype without the length that each may begin with: a byte `4 | log2(width)` and `width` bytes.
    ValueError where the length and the bytes contradict each other."""
    if part.codec.size is not None:
        return part
    starts, itemsize = part.starts, np.dtype(part.codec.dtype).itemsize
    heads, ends = bytes_at(samples, starts, 1)[:, 0], np.full(len(starts), -1)
    for log_width in range(3):
        rows, width = heads == 4 | log_width, 1 << log_width
        lengths = bytes_at(samples, starts[rows] + 1, width).view(f"<u{width}")[:, 0]
        ends[rows] = starts[rows] + 1 + width + lengths.astype(np.int64) * itemsize
    if (ends != part.stops).any():
        row = int((ends != part.stops).argmax())
        raise ValueError(
            f"the array in column {part.name} of sample {row} is not as long as its shape says"
        )
    return replace(part, starts=starts + 1 + (1 << (heads & 3).astype(np.int64)))


def arrays(samples: Samples, parts: Sequence[Cells]) -> Ragged:
    """Row by row the values of these columns, which share a dtype, one behind the other."""
    edges = ([getattr(part, edge) for part in parts] for edge in ("starts", "stops"))
    slices = map(slice, *(np.stack(of, axis=1).reshape(-1).tolist() for of in edges))
    values = b"".join(map(memoryview(samples.data).__getitem__, slices))
    dtype, sizes = parts[0].codec.dtype, np.sum([part.sizes for part in parts], axis=0)
    return Ragged.from_lengths(np.frombuffer(values, dtype), sizes // np.dtype(dtype).itemsize)

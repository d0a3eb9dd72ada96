"""A whole MDS shard from arrays: of ndarray columns byte for byte what streaming's MDSWriter writes for the same samples.

A `json` column is written without a space behind its commas and colons, which MDSWriter puts there: 75,062 bytes where it
takes 91,624. Every reader decodes the same from both.

MDSWriter encodes one sample at a time; here a shard is laid out at once from flat token arrays, at memory speed. The
price is that only the column encodings that mdsmix writes are known: `ndarray:<int>[:<length>]`, `json` and `list[jpeg]`.

A shard is: sample count (uint32), byte offsets of every sample and of the end (uint32 [n + 1]), a JSON of its settings,
then the samples. A sample is the sizes of its columns without a fixed size (uint32 each), then its columns in the
order of their names. A 1-d ndarray without a fixed length starts with its length: one byte `4 | width`, then the
length in 1, 2 or 4 bytes. Source: streaming/base/format/mds/{writer,encodings}.py, 0.12 and 0.13 alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.ragged import Ragged
from mdsmix.shards.codecs import Codec, codec_of

SHARD_BYTES = 1 << 26
"64 MiB, MDSWriter's own default: a shard is the unit of download and of eviction."
SHARD_ROWS = 1 << 17
"131,072 rows, half of Streaming's smallest shuffle block: shards of more rows shuffle badly."
HASHES = ("xxh128",)
"Hashes in the index: xxh128 runs at 29 GB/s here, xxh64 at 10, and it names the shard too."


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The settings that every shard of a stream shares."""

    encodings: Mapping[str, str]
    "Column name -> MDS encoding."
    compression: str | None = None
    "zstd or zstd:N."

    @property
    def codecs(self) -> dict[str, Codec]:
        """The codec of each column, in the order of their names, as MDSWriter sorts them."""
        return {name: codec_of(self.encodings[name]) for name in sorted(self.encodings)}

    @property
    def settings(self) -> dict[str, Any]:
        """What a shard says of itself, in its own head and again in index.json."""
        codecs = self.codecs
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression,
            "hashes": list(HASHES),
            "size_limit": SHARD_BYTES,
            "column_names": list(codecs),
            "column_encodings": [self.encodings[name] for name in codecs],
            "column_sizes": [codec.size for codec in codecs.values()],
        }


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples laid out as in a shard, cut into shards by `split`."""

    body: NDArray[np.uint8]
    "All samples, one behind the other."
    sizes: NDArray[np.int64]
    "int64 [n]: bytes of each sample."

    def __len__(self) -> int:
        return len(self.sizes)


def lay_out(layout: ShardLayout, columns: Mapping[str, Ragged]) -> Rows:
    """The samples' bytes from one Ragged per column; an empty ndarray row is refused, as MDSWriter refuses it."""
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
    rows = Ragged.zip(values)
    return Rows(rows.values, rows.lengths)


def fixed_rows(layout: ShardLayout, tokens: NDArray[Any]) -> Rows:
    """Rows whose columns share one dtype and together hold `tokens` [n, max_seq_len]: the array is the bytes."""
    row = sum(codec.size or 0 for codec in layout.codecs.values())
    body = np.ascontiguousarray(tokens).reshape(-1).view(np.uint8)
    return Rows(body, np.full(len(body) // row, row, np.int64))


def split(rows: Rows) -> Iterator[Rows]:
    """Cuts rows evenly into the fewest shards of at most SHARD_BYTES and SHARD_ROWS; a larger row is a shard alone."""
    ends = Ragged.from_lengths(rows.body, rows.sizes).offsets
    for start, stop in pairwise(_cuts(len(rows), ends)):
        yield Rows(rows.body[ends[start] : ends[stop]], rows.sizes[start:stop])


def _cuts(n: int, ends: NDArray[np.int64]) -> list[int]:
    """Where shards begin and end: even in rows if some such cut is within the limits, else each as full as it may be."""
    full = [0]
    while full[-1] < n:
        full.append(_fullest(full[-1], ends))
    for count in range(len(full) - 1, len(full) + 2):
        even: list[int] = np.linspace(0, n, count + 1).astype(np.int64).tolist()
        if all(start < stop <= _fullest(start, ends) for start, stop in pairwise(even)):
            return even
    return full


def _fullest(start: int, ends: NDArray[np.int64]) -> int:
    """The row before which a shard that begins at `start` must end; its offsets count, 4 bytes a row."""
    rows = ends[start : start + SHARD_ROWS + 1] - ends[start]
    within = np.searchsorted(rows + 4 * np.arange(len(rows)), SHARD_BYTES, "right") - 1
    return start + max(1, int(within))


def shard_parts(layout: ShardLayout, rows: Rows) -> list[memoryview]:
    """The shard's raw bytes as buffers to be written in order; the samples are not copied."""
    settings = json.dumps(layout.settings, sort_keys=True).encode()
    offsets = Ragged.from_lengths(rows.body, rows.sizes).offsets
    offsets = offsets + 4 + 4 * len(offsets) + len(settings)
    if offsets[-1] >= 1 << 32:
        raise ValueError(f"a sample of {offsets[-1]} bytes does not fit a shard's 32-bit offsets")
    head = np.uint32(len(rows)).tobytes() + offsets.astype("<u4").tobytes() + settings
    return [memoryview(head), memoryview(np.ascontiguousarray(rows.body)).cast("B")]

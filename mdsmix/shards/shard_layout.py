"""A whole MDS shard from arrays: of ndarray columns byte for byte what streaming's MDSWriter writes for the same samples.

A `json` column is written without a space behind its commas and colons, which MDSWriter puts there: 75,062 bytes where it
takes 91,624. Every reader decodes the same from both.

MDSWriter encodes one sample at a time; here a shard is laid out at once from flat token arrays, at memory speed. The
price is that only the column encodings that mdsmix writes are known: `ndarray:<int>[:<length>]` and `json`.

A shard is: sample count (uint32), byte offsets of every sample and of the end (uint32 [n + 1]), a JSON of its settings,
then the samples. A sample is the sizes of its columns without a fixed size (uint32 each), then its columns in the
order of their names. A 1-d ndarray without a fixed length starts with its length: one byte `4 | width`, then the
length in 1, 2 or 4 bytes. Source: streaming/base/format/mds/{writer,encodings}.py, 0.12 and 0.13 alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.ragged import Ragged
from mdsmix.shards.codecs import ColumnBytes, codec_of

SHARD_BYTES = 1 << 26
"64 MiB, MDSWriter's own default: a shard is the unit of download and of eviction."
SHARD_ROWS = 1 << 17
"131,072 rows, half of Streaming's smallest shuffle block: shards of more rows shuffle badly."
LONG = 2048
"Bytes of a row from which on its columns are joined, not masked."
HASHES = ("xxh128",)
"Hashes in the index: xxh128 runs at 29 GB/s here, xxh64 at 10, and it names the shard too."


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name and its MDS encoding."""

    name: str
    encoding: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the column's flat values: the token dtype, or uint8 for the text of a json column."""
        codec, settings = codec_of(self.encoding)
        return np.dtype(codec.dtype(settings))

    @property
    def size(self) -> int | None:
        """Bytes of every row, where the encoding fixes them."""
        codec, settings = codec_of(self.encoding)
        return codec.size(settings)

    def lay_out(self, rows: Ragged) -> ColumnBytes:
        """The column's values as they stand in a shard."""
        codec, settings = codec_of(self.encoding)
        try:
            return codec.lay_out(settings, rows)
        except ValueError as error:
            raise ValueError(f"column {self.name} {error}") from None


@dataclass(frozen=True, slots=True)
class Layout:
    """The settings that every shard of a stream shares."""

    columns: tuple[Column, ...]
    "In the order of their names, as MDSWriter sorts them."
    compression: str | None = None
    "zstd or zstd:N."

    @staticmethod
    def of(encodings: Mapping[str, str], compression: str | None = None) -> Layout:
        return Layout(tuple(Column(n, encodings[n]) for n in sorted(encodings)), compression)

    @property
    def encodings(self) -> dict[str, str]:
        return {c.name: c.encoding for c in self.columns}

    @property
    def is_fixed(self) -> bool:
        """Every row has the same bytes, so rows need no heads and a shard's data is one array."""
        return all(c.size is not None for c in self.columns)

    @property
    def settings(self) -> dict[str, Any]:
        """What a shard says of itself, in its own head and again in index.json."""
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression,
            "hashes": list(HASHES),
            "size_limit": SHARD_BYTES,
            "column_names": [c.name for c in self.columns],
            "column_encodings": [c.encoding for c in self.columns],
            "column_sizes": [c.size for c in self.columns],
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


def lay_out(layout: Layout, columns: Mapping[str, Ragged]) -> Rows:
    """The samples' bytes from one Ragged per column; an empty ndarray row is refused, as MDSWriter refuses it."""
    if layout.is_fixed:
        parts = [
            columns[c.name].values.view(np.uint8).reshape(-1, c.size or 1) for c in layout.columns
        ]
        body = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return Rows(body.reshape(-1), np.full(len(body), body.shape[1], np.int64))
    return _lay_out_ragged([c.lay_out(columns[c.name]) for c in layout.columns])


def fixed_rows(layout: Layout, tokens: NDArray[Any]) -> Rows:
    """Rows whose columns share one dtype and together hold `tokens` [n, max_seq_len]: the array is the bytes."""
    row = sum(c.size or 0 for c in layout.columns)
    body = np.ascontiguousarray(tokens).reshape(-1).view(np.uint8)
    return Rows(body, np.full(len(body) // row, row, np.int64))


def _lay_out_ragged(parts: Sequence[ColumnBytes]) -> Rows:
    """Interleaves size heads, prefixes and payloads."""
    heads = np.stack([p.sizes + p.prefix_sizes for p in parts if p.has_size], axis=1).astype("<u4")
    sources = [heads.reshape(-1).view(np.uint8)]
    widths = [np.full(len(heads), heads.shape[1] * 4, np.int64)]
    for part in parts:
        sources += [part.prefix, part.payload]
        widths += [part.prefix_sizes, part.sizes]
    sizes = np.sum(widths, axis=0)
    interleave = _joined if sizes.sum() > LONG * len(sizes) else _masked
    return Rows(interleave(sources, widths), sizes)


def _masked(
    sources: Sequence[NDArray[np.uint8]], widths: Sequence[NDArray[np.int64]]
) -> NDArray[np.uint8]:
    """Each source fills its own bytes of the body by a mask: 8 ns a byte, however short the rows."""
    table = np.stack(widths, axis=1)
    owner = np.repeat(
        np.tile(np.arange(len(widths), dtype=np.uint8), len(table)), table.reshape(-1)
    )
    body = np.empty(len(owner), np.uint8)
    for number, source in enumerate(sources):
        if len(source):
            body[owner == number] = source
    return body


def _joined(
    sources: Sequence[NDArray[np.uint8]], widths: Sequence[NDArray[np.int64]]
) -> NDArray[np.uint8]:
    """Slices of bytes joined: 1 us each and a copy, so 6,000 packed rows of 12 KB take 0.06 s, and by masks 0.6."""
    cut = [_slices(*each) for each in zip(sources, widths, strict=True) if each[1].any()]
    return np.frombuffer(b"".join(chain.from_iterable(zip(*cut, strict=True))), np.uint8)


def _slices(values: NDArray[np.uint8], sizes: NDArray[np.int64]) -> Iterator[memoryview]:
    """The values cut into pieces of these sizes."""
    data = memoryview(np.ascontiguousarray(values)).cast("B")
    ends = np.cumsum(sizes)
    return map(data.__getitem__, map(slice, (ends - sizes).tolist(), ends.tolist()))


def split(rows: Rows) -> Iterator[Rows]:
    """Cuts rows evenly into the fewest shards of at most SHARD_BYTES and SHARD_ROWS; a larger row is a shard alone."""
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows.sizes, out=ends[1:])
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


def shard_parts(layout: Layout, rows: Rows) -> list[memoryview]:
    """The shard's raw bytes as buffers to be written in order; the samples are not copied."""
    settings = json.dumps(layout.settings, sort_keys=True).encode()
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows.sizes, out=offsets[1:])
    offsets += 4 + 4 * len(offsets) + len(settings)
    if offsets[-1] >= 1 << 32:
        raise ValueError(f"a sample of {offsets[-1]} bytes does not fit a shard's 32-bit offsets")
    head = np.uint32(len(rows)).tobytes() + offsets.astype("<u4").tobytes() + settings
    return [memoryview(head), memoryview(np.ascontiguousarray(rows.body)).cast("B")]

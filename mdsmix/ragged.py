"""Rows of unequal length as one flat array and its offsets.

Tokenizers return this layout and MDS shards contain it, so a batch goes from one to the other
without a Python object per token or per row. The price is that a row is not an object of its own:
`take` copies, indexing gives a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHORT = 1024
"""Mean bytes of a row. Rows that are shorter on average are cut as bytes (0.1 us each), longer ones
as views (0.3 us, no copy).
"""


@dataclass(frozen=True, slots=True)
class Ragged:
    """`n` rows: row `i` is `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[Any]
    "1-d, any dtype: all rows, one after the other."
    offsets: NDArray[np.int64]
    "int64 [n + 1], ascending; the first is 0 and the last is len(values)."

    @staticmethod
    def from_rows(rows: Iterable[Any], dtype: Any) -> Ragged:
        """Return rows from arrays, lists or bytes-like objects (read as `dtype`)."""
        arrays = [_as_array(row, dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return Ragged.from_lengths(values, np.array([len(a) for a in arrays], np.int64))

    @staticmethod
    def from_lengths(values: NDArray[Any], lengths: NDArray[Any]) -> Ragged:
        """Return rows of these lengths, cut from `values` in order."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(values, offsets)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all parts (at least one), in order."""
        values = np.concatenate([part.values for part in parts])
        return Ragged.from_lengths(values, np.concatenate([part.lengths for part in parts]))

    @staticmethod
    def zip(parts: Sequence[Ragged]) -> Ragged:
        """Return the rows `i` of all parts joined into row `i`. There is at least one part; all
        have the same dtype and number of rows.
        """
        if len(parts) == 1:
            return parts[0]
        lengths = np.sum([part.lengths for part in parts], axis=0)
        values = np.empty(lengths.sum(), parts[0].values.dtype)
        if values.nbytes >= SHORT * len(lengths):
            slices = chain.from_iterable(zip(*(part.slices() for part in parts), strict=True))
            joined = bytearray().join(slices)
            return Ragged.from_lengths(np.frombuffer(joined, values.dtype), lengths)
        rows = Ragged.from_lengths(values, lengths)
        rows._fill(parts)
        return rows

    def _fill(self, parts: Sequence[Ragged]) -> None:
        """Write the values of each part to their positions. Those of the largest part fill all
        positions that remain: 0.25 to 1 us a row, when joined slices take 1.3 to 2, in pairs of 70
        to 670 bytes.
        """
        starts = self.offsets[:-1].copy()
        is_free = np.ones(len(self.values), bool)
        largest = int(np.argmax([len(part.values) for part in parts]))
        for number, part in enumerate(parts):
            if number != largest:
                positions = np.repeat(starts - part.offsets[:-1], part.lengths)
                positions += np.arange(len(positions))
                self.values[positions] = part.values
                is_free[positions] = False
            starts += part.lengths
        self.values[is_free] = parts[largest].values

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The values in a list, as `Chunked` has them."""
        return [self.values]

    def slices(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of each row. Short rows are read one after the other, without a slice
        object each: 0.16 us a row instead of 0.25, and a worker's CPU for pairs 0.276 -> 0.258 s
        for 25 MB.
        """
        if self.values.nbytes >= SHORT * len(self):
            return self._slices(self.offsets[:-1], self.offsets[1:])
        data = BytesIO(np.ascontiguousarray(self.values).data)
        return map(data.read, (self.lengths * self.values.itemsize).tolist())

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [n]: the length of every row."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows `start` to `stop` (exclusive), without copying their values."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, rows: NDArray[Any]) -> Ragged:
        """Return the rows that a bool mask or an int array selects, in the array's order."""
        if rows.dtype == bool and rows.all():
            return self
        return self._pieces(self.offsets[:-1][rows], self.lengths[rows])

    def cut(self, starts: NDArray[np.int64] | int, lengths: NDArray[np.int64]) -> Ragged:
        """Return `lengths[i]` values of each row `i`, from its value `starts[i]` on. If all rows
        keep their lengths, return this object itself.
        """
        if np.array_equal(lengths, self.lengths):
            return self
        return self._pieces(self.offsets[:-1] + starts, lengths)

    def first(self, limit: NDArray[np.int64] | int) -> Ragged:
        """Return at most the first `limit` values of each row."""
        return self.cut(0, np.minimum(self.lengths, limit))

    def _pieces(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Ragged:
        """Return rows joined from slices of bytes: 0.3 us a row and one copy. Indexing by value
        takes ten times that copy.
        """
        joined = bytearray().join(self._slices(starts, starts + lengths))
        return Ragged.from_lengths(np.frombuffer(joined, self.values.dtype), lengths)

    def _slices(self, starts: NDArray[Any], ends: NDArray[Any]) -> Iterator[bytes | memoryview]:
        data: Any = np.ascontiguousarray(self.values).view(np.uint8).data
        if len(data) < SHORT * len(starts):
            data = bytes(data)
        width = self.values.itemsize
        slices = map(slice, (starts * width).tolist(), (ends * width).tolist())
        return map(data.__getitem__, slices)


def _as_array(row: Any, dtype: Any) -> NDArray[Any]:
    if isinstance(row, (bytes, bytearray, memoryview)):
        return np.frombuffer(row, dtype)
    return np.asarray(row, dtype)


@dataclass(frozen=True, slots=True)
class Chunked:
    """Rows whose values are in several arrays, one after the other: a work unit's rows, which
    joined would take their memory twice.
    """

    arrays: Sequence[NDArray[Any]]
    "1-d, all of one dtype; a row may begin in one and end in another."
    offsets: NDArray[np.int64]
    "int64 [n + 1], as those of Ragged; values after the last row are in no row."

    @staticmethod
    def from_parts(parts: Sequence[Ragged]) -> Chunked:
        """Return the rows of all parts, in order."""
        lengths = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
        return Chunked([part.values for part in parts], np.append(0, np.cumsum(lengths)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def slice(self, start: int, stop: int) -> Chunked:
        """Return rows `start` to `stop` (exclusive), without copying their values."""
        offsets = self.offsets[start : stop + 1]
        arrays = list[NDArray[Any]]()
        array_start = 0
        for array in self.arrays:
            first, end = np.clip(offsets[[0, -1]] - array_start, 0, len(array))
            if first < end:
                arrays.append(array[first:end])
            array_start += len(array)
        return Chunked(arrays, offsets - offsets[0])


@dataclass(frozen=True)
class Interleaved(Mapping[str, Ragged]):
    """Columns whose cells are in one Ragged, sample by sample: as in a shard, and as the tokenizer
    returns prompts and responses. Copies of both columns took a tenth of a conversion of pairs.
    """

    names: Sequence[str]
    "The columns, in the order of their names."
    cells: Ragged
    "For each sample a cell of each column."

    def __getitem__(self, name: str) -> Ragged:
        if name not in self.names:
            raise KeyError(name)
        return self.cells.take(np.arange(self.names.index(name), len(self.cells), len(self)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

"""Rows of unequal length as one flat array and its offsets.

Tokenizers return this shape and MDS shards hold it, so a batch goes from one to the other without a
Python object per token or per row. The price is that rows are addressed, not owned: `take` copies,
indexing gives a view.
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
    "1-d, any dtype: all rows, one behind the other."
    offsets: NDArray[np.int64]
    "int64 [n + 1], ascending; the first is 0 and the last is len(values)."

    @staticmethod
    def from_rows(rows: Iterable[Any], dtype: Any) -> Ragged:
        """Rows from arrays, lists or bytes-like objects (read as `dtype`)."""
        arrays = [
            np.frombuffer(row, dtype)
            if isinstance(row, (bytes, bytearray, memoryview))
            else np.asarray(row, dtype)
            for row in rows
        ]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return Ragged.from_lengths(values, np.array([len(a) for a in arrays], np.int64))

    @staticmethod
    def from_lengths(values: NDArray[Any], lengths: NDArray[Any]) -> Ragged:
        """Rows of the given lengths, cut from `values` in order."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(values, offsets)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts (at least one), in order."""
        values = np.concatenate([part.values for part in parts])
        return Ragged.from_lengths(values, np.concatenate([part.lengths for part in parts]))

    @staticmethod
    def zip(parts: Sequence[Ragged]) -> Ragged:
        """Row `i` joins the rows `i` of all parts: at least one part, all of one dtype and one
        number of rows.
        """
        if len(parts) == 1:
            return parts[0]
        lengths = np.sum([part.lengths for part in parts], axis=0)
        values = np.empty(lengths.sum(), parts[0].values.dtype)
        if values.nbytes >= SHORT * len(lengths):
            slices = chain.from_iterable(zip(*(part.slices() for part in parts), strict=True))
            return Ragged.from_lengths(
                np.frombuffer(bytearray().join(slices), values.dtype), lengths
            )
        rows = Ragged.from_lengths(values, lengths)
        rows._fill(parts)
        return rows

    def _fill(self, parts: Sequence[Ragged]) -> None:
        """Puts the values of each part at their places, those of the largest where no other's are:
        0.25 to 1 us a row where joined slices take 1.3 to 2, in pairs of 70 to 670 bytes.
        """
        begins, is_free = self.offsets[:-1].copy(), np.ones(len(self.values), bool)
        largest = int(np.argmax([len(part.values) for part in parts]))
        for number, part in enumerate(parts):
            if number != largest:
                places = np.repeat(begins - part.offsets[:-1], part.lengths)
                places += np.arange(len(places))
                self.values[places] = part.values
                is_free[places] = False
            begins += part.lengths
        self.values[is_free] = parts[largest].values

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The values, as `Chunked` has them."""
        return [self.values]

    def slices(self) -> Iterator[bytes | memoryview]:
        """The bytes of each row. Short rows are read one behind the other, without a slice object
        each: 0.16 us a row in place of 0.25, and a worker's CPU for pairs 0.276 -> 0.258 s for 25
        MB.
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
        """Rows `start` to `stop` (exclusive), their values not copied."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, rows: NDArray[Any]) -> Ragged:
        """The rows that a bool mask or an int array selects, in the array's order."""
        if rows.dtype == bool and rows.all():
            return self
        return self._pieces(self.offsets[:-1][rows], self.lengths[rows])

    def cut(self, starts: NDArray[np.int64] | int, lengths: NDArray[np.int64]) -> Ragged:
        """Row `i` keeps its `lengths[i]` values from `starts[i]` on. Where all rows stay whole,
        this very object.
        """
        if np.array_equal(lengths, self.lengths):
            return self
        return self._pieces(self.offsets[:-1] + starts, lengths)

    def first(self, most: NDArray[np.int64] | int) -> Ragged:
        """At most the first `most` values of each row."""
        return self.cut(0, np.minimum(self.lengths, most))

    def _pieces(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Ragged:
        """Rows joined from slices of bytes: 0.3 us a row and one copy. Indexing by value takes ten
        times that copy.
        """
        joined = bytearray().join(self._slices(starts, starts + lengths))
        return Ragged.from_lengths(np.frombuffer(joined, self.values.dtype), lengths)

    def _slices(self, begins: NDArray[Any], ends: NDArray[Any]) -> Iterator[bytes | memoryview]:
        data: Any = np.ascontiguousarray(self.values).view(np.uint8).data
        if len(data) < SHORT * len(begins):
            data = bytes(data)
        width = self.values.itemsize
        edges = ((at * width).tolist() for at in (begins, ends))
        return map(data.__getitem__, map(slice, *edges))


@dataclass(frozen=True, slots=True)
class Chunked:
    """Rows whose values lie in several arrays, one behind the other: a work unit's rows, which
    joined would take their memory twice.
    """

    arrays: Sequence[NDArray[Any]]
    "1-d, all of one dtype; a row may begin in one and end in another."
    offsets: NDArray[np.int64]
    "int64 [n + 1], as those of Ragged; values behind the last row are in no row."

    @staticmethod
    def from_parts(parts: Sequence[Ragged]) -> Chunked:
        """The rows of all parts, in order."""
        lengths = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
        return Chunked([part.values for part in parts], np.append(0, np.cumsum(lengths)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def slice(self, start: int, stop: int) -> Chunked:
        """Rows `start` to `stop` (exclusive), their values not copied."""
        offsets, arrays, at = self.offsets[start : stop + 1], list[NDArray[Any]](), 0
        for array in self.arrays:
            begin, end = np.clip(offsets[[0, -1]] - at, 0, len(array))
            arrays += [array[begin:end]] if begin < end else []
            at += len(array)
        return Chunked(arrays, offsets - offsets[0])


@dataclass(frozen=True)
class Interleaved(Mapping[str, Ragged]):
    """Columns whose cells lie in one Ragged, sample by sample: as a shard holds them, and as the
    tokenizer gives prompts and responses. Copies of both columns took a tenth of a conversion of
    pairs.
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

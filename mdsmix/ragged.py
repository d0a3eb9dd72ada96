"""Rows of unequal length, kept in one flat array with the offsets of the rows.

Tokenizers return this layout and MDS shards contain it, so a batch goes from the tokenizer to a
shard without a Python object for each token or row. The price is that a row is not an object of its
own: `take` copies rows, and `rows[3]` is a view of the flat array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from typing import Any

from mdsmix.frozen import frozen
from mdsmix.lazy_numpy import NDArray, np

SHORT = 1024
"""A mean length of rows, in bytes. Rows that are shorter on average are copied as bytes objects
(0.1 us each). Longer rows are read as views of the array (0.3 us each, without a copy).
"""


@frozen(slots=True)
class Ragged:
    """`n` rows of unequal length: row `i` is `values[offsets[i]:offsets[i + 1]]`.

    >>> rows = Ragged.from_rows([[7, 8], [], [9]], "u2")
    >>> rows.values.tolist(), rows.offsets.tolist()
    ([7, 8, 9], [0, 2, 2, 3])
    """

    values: NDArray[Any]
    "1-d, any dtype: all rows, one after the other."
    offsets: NDArray[np.int64]
    "int64 [n + 1], ascending; the first is 0 and the last is len(values)."

    @staticmethod
    def from_rows(rows: Iterable[Any], dtype: Any) -> Ragged:
        """Return rows that are given one by one.

        Args:
            rows: arrays, lists, or bytes-like objects, which are read as values of `dtype`.
            dtype: the NumPy dtype of all values.
        """
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
        """Return one Ragged with the rows of all parts, in order. There is at least one part."""
        values = np.concatenate([rows.values for rows in parts])
        return Ragged.from_lengths(values, np.concatenate([rows.lengths for rows in parts]))

    @staticmethod
    def zip(parts: Sequence[Ragged]) -> Ragged:
        """Return rows joined side by side: row `i` is row `i` of the first part, followed by row
        `i` of the second, and so on. Example: `[[1], [2, 3]]` and `[[8, 9], []]` become
        `[[1, 8, 9], [2, 3]]`.

        Args:
            parts: at least one. All have the same dtype and the same number of rows.
        """
        if len(parts) == 1:
            return parts[0]
        lengths = np.sum([rows.lengths for rows in parts], axis=0)
        values = np.empty(lengths.sum(), parts[0].values.dtype)
        is_long = values.nbytes >= SHORT * len(lengths)
        if is_long:
            # Join slices in the order: row 0 of each part, row 1 of each part, and so on.
            slices = chain.from_iterable(zip(*(rows.slices() for rows in parts), strict=True))
            joined = bytearray().join(slices)
            return Ragged.from_lengths(np.frombuffer(joined, values.dtype), lengths)
        rows = Ragged.from_lengths(values, lengths)
        rows._fill(parts)
        return rows

    def _fill(self, parts: Sequence[Ragged]) -> None:
        """Write the values of all parts into the empty rows of this object: row i gets row i of
        each part, one after the other. Only `zip` calls it.

        The position of each value is computed for all parts except the largest. The positions that
        are then still free get the values of the largest part. For prompts and responses of 70 to
        670 bytes together this takes 0.25 to 1 us a row. Joining slices of bytes, as for long rows,
        takes 1.3 to 2 us.
        """
        # Where the next part's values begin in each row.
        starts = self.offsets[:-1].copy()
        is_free = np.ones(len(self.values), bool)
        largest = int(np.argmax([len(rows.values) for rows in parts]))
        for number, rows in enumerate(parts):
            if number != largest:
                # Value v of the part, in its row i, goes to starts[i] + (v - rows.offsets[i]).
                positions = np.repeat(starts - rows.offsets[:-1], rows.lengths)
                positions += np.arange(len(positions))
                self.values[positions] = rows.values
                is_free[positions] = False
            starts += rows.lengths
        self.values[is_free] = parts[largest].values

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The values as a list of one array, so that code for `Chunked` works here too."""
        return [self.values]

    def slices(self) -> Iterator[bytes | memoryview]:
        """Return an iterator over the bytes of each row.

        Short rows are read one after the other from a stream, without a slice object for each row:
        0.16 us a row instead of 0.25. A worker's CPU time for 25 MB of pairs falls from 0.276 to
        0.258 s.
        """
        is_long = self.values.nbytes >= SHORT * len(self)
        if is_long:
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
        """Return some of the rows.

        Args:
            rows: a bool mask with an entry for each row, or an int array of row numbers. The
                result has the rows in the order of these numbers.
        """
        if rows.dtype == bool and rows.all():
            return self
        return self._pieces(self.offsets[:-1][rows], self.lengths[rows])

    def cut(self, starts: NDArray[np.int64] | int, lengths: NDArray[np.int64]) -> Ragged:
        """Return a slice of each row `i`: `row[starts[i] : starts[i] + lengths[i]]`. If all rows
        keep their lengths, return this object itself.
        """
        if np.array_equal(lengths, self.lengths):
            return self
        return self._pieces(self.offsets[:-1] + starts, lengths)

    def first(self, limit: NDArray[np.int64] | int) -> Ragged:
        """Return at most the first `limit` values of each row."""
        return self.cut(0, np.minimum(self.lengths, limit))

    def _pieces(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Ragged:
        """Return a Ragged whose row `i` is `values[starts[i] : starts[i] + lengths[i]]`.

        The rows are joined as bytes, in 0.3 us a row and the time of one copy. An index array over
        the values takes ten times that copy.
        """
        joined = bytearray().join(self._slices(starts, starts + lengths))
        return Ragged.from_lengths(np.frombuffer(joined, self.values.dtype), lengths)

    def _slices(self, starts: NDArray[Any], ends: NDArray[Any]) -> Iterator[bytes | memoryview]:
        """Return an iterator over the bytes of each `values[starts[i] : ends[i]]`."""
        data: Any = np.ascontiguousarray(self.values).view(np.uint8).data
        are_short = len(data) < SHORT * len(starts)
        if are_short:
            data = bytes(data)
        # Offsets count values: multiply them by the bytes of a value.
        width = self.values.itemsize
        slices = map(slice, (starts * width).tolist(), (ends * width).tolist())
        return map(data.__getitem__, slices)


def _as_array(row: Any, dtype: Any) -> NDArray[Any]:
    """Return a row as an array. Bytes are read as values of this dtype."""
    if isinstance(row, (bytes, bytearray, memoryview)):
        return np.frombuffer(row, dtype)
    return np.asarray(row, dtype)


@frozen(slots=True)
class Chunked:
    """Rows whose values are in several arrays, one after the other.

    So the arrays of many batches become one table of rows, and no joined copy of their values
    doubles the memory.
    """

    arrays: Sequence[NDArray[Any]]
    "1-d, all of one dtype. A row may begin in one array and end in another."
    offsets: NDArray[np.int64]
    """int64 [n + 1], ascending: row `i` is the values `offsets[i]` to `offsets[i + 1]` of the
    joined arrays. Values after the last offset are in no row.
    """

    @staticmethod
    def from_parts(parts: Sequence[Ragged]) -> Chunked:
        """Return the rows of all parts, in order."""
        lengths = np.concatenate([np.empty(0, np.int64), *(rows.lengths for rows in parts)])
        return Chunked([rows.values for rows in parts], np.append(0, np.cumsum(lengths)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def slice(self, start: int, stop: int) -> Chunked:
        """Return rows `start` to `stop` (exclusive), without copying their values."""
        offsets = self.offsets[start : stop + 1]
        arrays = list[NDArray[Any]]()
        array_start = 0
        for array in self.arrays:
            # The first and the last offset of the slice, as positions in this array.
            first, end = np.clip(offsets[[0, -1]] - array_start, 0, len(array))
            if first < end:
                arrays.append(array[first:end])
            array_start += len(array)
        return Chunked(arrays, offsets - offsets[0])


@frozen
class Interleaved(Mapping[str, Ragged]):
    """A mapping of column name -> rows. The cells of all columns are in one Ragged: first the cells
    of the first sample, then the cells of the second, and so on.

    Shards have their cells in this order, and the tokenizer returns prompts and responses in it. So
    the columns need no copies, which took a tenth of the time of a conversion of pairs.
    """

    names: Sequence[str]
    "The names of the columns, in the order of a sample's cells."
    cells: Ragged
    "For each sample a cell of each column: with two columns, row 2 i and row 2 i + 1."

    def __getitem__(self, name: str) -> Ragged:
        if name not in self.names:
            raise KeyError(name)
        # The cells of a column: with two columns, each second row.
        rows = np.arange(self.names.index(name), len(self.cells), len(self.names))
        return self.cells.take(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

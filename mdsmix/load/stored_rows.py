"""Samples as their shards contain them, and their columns of token ids.

The token ids of most samples are integers in columns of a fixed dtype, or a JSON column of turns.
`IdColumns` finds these columns in the bytes of a sample, so that a batch is written from them
directly (id_rows.py, direct_batch.py). Every other sample is decoded by Streaming and becomes a
TrainingRow first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from streaming.base.format import Reader

from mdsmix.errors import MixRefused, Unreachable
from mdsmix.frozen import frozen
from mdsmix.shards.token_ids import (
    LOSS_MASK,
    LOSS_WEIGHTS,
    PACKED_COLUMNS,
    PLAIN,
    SIDES,
    STARTS,
    TURNS,
    find_id_columns,
    has_images,
)

Row = TypeVar("Row")
TURN_DTYPE = np.dtype("<u4")
"The dtype as which the ids of conversations are written: JSON has none. It has no negative ids."
OTHER_DTYPES: dict[str, np.dtype[Any]] = {
    STARTS: np.dtype(np.int32),
    LOSS_MASK: np.dtype(np.uint8),
    LOSS_WEIGHTS: np.dtype(np.float32),
}
"The dtypes of the columns that are not token ids (mdsmix/shards/README.md)."


LENGTH_BYTES = {b"\4": 1, b"\5": 2, b"\6": 4}
"""The first byte of a stored 1-d array -> the number of bytes of its length, which follows. The
values come after the length. Streaming stores a length in as few bytes as it needs.
"""


@lru_cache(maxsize=1 << 14)
def make_head(size: int, itemsize: int) -> bytes:
    """Return the bytes that Streaming stores in front of the values of a 1-d array: the first byte
    and the length. Return b"" if no array that has values has this size.

    A head is compared as a whole, since reading it number by number takes twice as long.

    Args:
        size: bytes of the array, with its head.
        itemsize: bytes of each number.
    """
    for first_byte, length_bytes in LENGTH_BYTES.items():
        length, remainder = divmod(size - 1 - length_bytes, itemsize)
        if not remainder and 0 < length < 256**length_bytes:
            return first_byte + length.to_bytes(length_bytes, "little")
    return b""


PackedValues = tuple[bytes, bytes, bytes, bytes]
"""The columns of a packed row, as numbers in bytes: token ids, starts, loss_mask and loss_weights.
The last two are empty if the shard has no such column. Making a named tuple takes 0.2 us.
"""


class StoredColumn(NamedTuple):
    """A column of a shard."""

    name: str
    "Empty if the column is not read."
    size: int
    "Bytes of each value; 0 if they vary."
    itemsize: int
    "Bytes of each number of arrays that begin with their length; 0 for other columns."


class PackedForm(NamedTuple):
    """How the bytes of packed rows with the same sizes of columns are cut."""

    size: int
    "Bytes of a sample."
    cut: Callable[[bytes], tuple[bytes, ...]]
    "Cuts a sample into the head and the values of each column that is read, in their order."
    heads: tuple[bytes, ...]
    "The heads that a sample of this form has."
    arrange: Callable[[tuple[bytes, ...]], PackedValues]
    "Returns the values from such pieces."


@frozen(kw_only=True)
class IdColumns:
    """The columns of a shard's samples, if batches are written from their bytes: 1-d arrays of
    integers of at most 4 bytes, or turns in JSON.
    """

    layout: tuple[str, ...]
    "The columns with token ids: PLAIN, SIDES, PACKED_COLUMNS or TURNS."
    dtype: np.dtype[Any]
    "The dtype of the token ids."
    columns: Sequence[StoredColumn]
    "All columns, as they follow each other in a sample."

    @cached_property
    def sizes(self) -> struct.Struct:
        """The sizes in front of each sample, of the columns whose values vary in size."""
        return struct.Struct(f"<{sum(not column.size for column in self.columns)}I")

    @cached_property
    def _plain_columns(self) -> Sequence[tuple[str, int, int]]:
        """The columns as plain tuples, since a named tuple takes 50 ns longer to unpack."""
        return [(column.name, column.size, column.itemsize) for column in self.columns]

    def read(self, data: bytes) -> dict[str, bytes] | None:
        """Return the values of the columns that are read, by name: the numbers of an array, or
        JSON. Return None if the bytes are not as the columns state, or an array is empty.
        """
        begin = self.sizes.size
        if len(data) < begin:
            return None
        varying = iter(self.sizes.unpack_from(data))
        values = {}
        for name, size, itemsize in self._plain_columns:
            end = begin + (size or next(varying))
            if itemsize:
                head = make_head(end - begin, itemsize)
                if not head or not data.startswith(head, begin):
                    return None
                begin += len(head)
            if name:
                values[name] = data[begin:end]
            begin = end
        return values if begin == len(data) else None

    def read_packed(self, data: bytes) -> PackedValues | None:
        """Return the columns of a packed row. Return None in the cases of `read`, and if loss_mask
        or loss_weights have more or fewer entries than the row has tokens.

        Most packed rows are full, so few different sizes occur. What follows from the sizes is
        found once, and one call of `unpack` cuts all columns. `read` and its checks take twice as
        long: together with the places of full rows (direct_batch.py) this is 15 % of a batch.
        """
        form = self._find_packed_form(data[: self.sizes.size])
        if form is None:
            return None
        size, cut, heads, arrange = form
        if len(data) != size:
            return None
        pieces = cut(data)
        return arrange(pieces) if pieces[::2] == heads else None

    @cached_property
    def _find_packed_form(self) -> Callable[[bytes], PackedForm | None]:
        """`_make_packed_form`, which keeps the last 4,096 forms."""
        return lru_cache(maxsize=1 << 12)(self._make_packed_form)

    def _make_packed_form(self, sizes: bytes) -> PackedForm | None:
        """Return the form of packed rows. Return None if a sample cannot have these sizes.

        Args:
            sizes: the bytes in front of the columns.
        """
        if len(sizes) < self.sizes.size:
            return None
        varying = iter(self.sizes.unpack(sizes))
        # The format of `struct` that cuts a sample: `x` skips bytes, `s` is a piece.
        layout = [f"{len(sizes)}x"]
        heads = list[bytes]()
        counts = dict[str, int]()
        for column in self.columns:
            size = column.size or next(varying)
            if not column.name:
                layout.append(f"{size}x")
                continue
            head = b""
            if column.itemsize:
                head = make_head(size, column.itemsize)
                if not head:
                    return None
            values = size - len(head)
            layout.append(f"{len(head)}s{values}s")
            heads.append(head)
            dtype = OTHER_DTYPES.get(column.name, self.dtype)
            counts[column.name] = values // dtype.itemsize
        tokens = counts[PACKED_COLUMNS[0]]
        if any(counts.get(name, tokens) != tokens for name in (LOSS_MASK, LOSS_WEIGHTS)):
            return None

        # Cutting gives the head and the values of each column in turn. The last piece is empty, for
        # columns that the shard does not have.
        cut = struct.Struct("".join([*layout, "0s"]))
        pieces = {name: 2 * number + 1 for number, name in enumerate(counts)}
        pieces_of_row = [
            pieces.get(name, -1) for name in (*PACKED_COLUMNS, LOSS_MASK, LOSS_WEIGHTS)
        ]
        arrange: Any = itemgetter(*pieces_of_row)
        return PackedForm(cut.size, cut.unpack, (*heads, b""), arrange)


def find_id_columns_of(shard: Reader) -> IdColumns | None:
    """Return the columns of a shard from which batches are written directly. Return None if its
    samples need more: images, columns of bytes, ids of 8 bytes.

    Shards with the same columns get the same object. A shuffled batch has a sample from each of
    many shards, and what follows from the columns (`read_id_rows`) is found once for all.
    """
    return _find_columns(
        tuple(shard.column_names), tuple(shard.column_encodings), tuple(shard.column_sizes)
    )


@lru_cache(maxsize=64)
def _find_columns(
    names: tuple[str, ...], encodings: tuple[str, ...], sizes: tuple[int | None, ...]
) -> IdColumns | None:
    """Return the columns of shards with these columns, as `find_id_columns_of`.

    Args:
        names: the names of all columns of a sample, in order.
        encodings: their encodings, such as `ndarray:int32`.
        sizes: their bytes in each sample; None if they vary.
    """
    layout = find_id_columns(dict.fromkeys(names))
    if layout not in (PLAIN, SIDES, PACKED_COLUMNS, TURNS) or has_images(dict.fromkeys(names)):
        return None
    names_read = set(layout)
    if layout == PACKED_COLUMNS:
        names_read.add(LOSS_MASK)
    if layout != PLAIN:
        names_read.add(LOSS_WEIGHTS)

    # Describe each column. Those that are not read only have a size.
    columns = list[StoredColumn]()
    dtypes = dict[str, np.dtype[Any]]()
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        if name not in names_read:
            columns.append(StoredColumn("", size or 0, 0))
        elif name in TURNS:
            if encoding != "json":
                return None
            columns.append(StoredColumn(name, size or 0, 0))
        else:
            array = _parse_array_encoding(encoding)
            if array is None:
                return None
            dtypes[name] = array.dtype
            itemsize = array.dtype.itemsize if array.has_head else 0
            columns.append(StoredColumn(name, size or 0, itemsize))

    # All columns of ids have one dtype, of integers of at most 4 bytes.
    ids_dtype = TURN_DTYPE if layout == TURNS else dtypes[layout[0]]
    expected = {name: OTHER_DTYPES.get(name, ids_dtype) for name in dtypes}
    if dtypes != expected or ids_dtype.kind not in "iu" or ids_dtype.itemsize > 4:
        return None
    return IdColumns(layout=layout, dtype=ids_dtype, columns=columns)


class ArrayEncoding(NamedTuple):
    """The encoding of a column of arrays."""

    dtype: np.dtype[Any]
    has_head: bool
    "Whether the length of each array is stored in front of it, and not in the encoding."


def _parse_array_encoding(encoding: str) -> ArrayEncoding | None:
    """Return the encoding of 1-d arrays: `ndarray:int32`, or `ndarray:int32:2048` if all have one
    length. Return None for other encodings.
    """
    kind, *settings = encoding.split(":")
    has_head = len(settings) == 1
    has_length = len(settings) == 2 and settings[1].isdecimal()
    if kind != "ndarray" or not (has_head or has_length):
        return None
    return ArrayEncoding(np.dtype(settings[0]), has_head)


class RowStream(Protocol):
    """What rows need of their stream (checked_stream.CheckedStream)."""

    def describe_row(self, shard: Reader, position: int) -> str:
        """Return the name of a row, for messages."""

    def check(self, shard: Reader) -> None:
        """Compare the size and hash of a shard's decompressed file with the index."""

    def make_row_error(self, shard: Reader, position: int, error: Exception) -> Unreachable:
        """Return the error for a row that cannot be read or decoded."""


@dataclass(slots=True)
class ShardSource:
    """A shard of a loader."""

    stream: RowStream
    shard: Reader
    path: str
    "Its decompressed file."
    stream_number: int
    "The number of its stream in the mix."
    first: int
    "The number of its first sample in the dataset."
    columns: IdColumns | None
    "The columns from which batches are written directly; None if it has other columns."


class StoredRow(NamedTuple):
    """A sample that was read and not yet decoded."""

    data: bytes
    source: ShardSource
    position: int
    "The number of the sample in its shard."

    @property
    def number(self) -> int:
        """The number of the sample in the dataset."""
        return self.source.first + self.position

    @property
    def name(self) -> str:
        """Stream, shard and row, for messages."""
        return self.source.stream.describe_row(self.source.shard, self.position)

    def decode(self, make_row: Callable[[Any], Row]) -> Row:
        """Decode the sample, and return what `make_row` makes of it.

        Raises MixRefused if the sample does not fit the settings, Unreachable if it does not
        decode. Both name stream, shard and row.
        """
        try:
            return make_row(self.source.shard.decode_sample(self.data))
        except Unreachable:
            raise
        except MixRefused as refusal:
            raise MixRefused(f"{self.name}: {refusal}") from refusal
        except Exception as error:
            stream = self.source.stream
            raise stream.make_row_error(self.source.shard, self.position, error) from error

"""MDS's column encodings: how large a value is, how many values are laid out at once, how one is decoded.

An encoding is a name and settings, `ndarray:uint16:2048`. Values of encodings that mdsmix does not know (images, pickles) stay bytes, since
a check must never run the content of a shard. Another encoding is another `Codec` and one line in `CODECS`. Source:
streaming/base/format/mds/encodings.py, 0.12 and 0.13 alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.ragged import Ragged

Settings = Sequence[str]
"The words behind the name: `ndarray:uint16:2048` -> uint16, 2048."

_NUMBERS = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
)
SCALARS = {"int": "int64"} | {name: name for name in _NUMBERS}
"MDS's encodings of one number -> its dtype."
_DTYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4"} | {
    64: "u8",
    65: "i8",
    66: "f8",
}
"MDS's codes of an array's dtype, where the column's encoding does not fix it."


@dataclass(frozen=True, slots=True)
class ColumnBytes:
    """One column of a shard's rows: per row a prefix (an array's shape) and a payload, both flat."""

    payload: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    "Bytes of each row's payload."
    prefix: NDArray[np.uint8]
    prefix_sizes: NDArray[np.int64]
    has_size: bool
    "Its size stands at the sample's head, since the encoding does not fix it."

    @staticmethod
    def plain(rows: Ragged, has_size: bool) -> ColumnBytes:
        """Values without a prefix."""
        sizes = rows.lengths * rows.values.itemsize
        none = np.empty(0, np.uint8)
        return ColumnBytes(rows.values.view(np.uint8), sizes, none, np.zeros_like(sizes), has_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """One encoding; this one stands for all whose values are bytes to mdsmix."""

    dtype: Callable[[Settings], str] = lambda _: "uint8"
    "The dtype of the column's flat values in a Ragged: of tokens, or uint8 for text."
    size: Callable[[Settings], int | None] = lambda _: None
    "Bytes of every value, where the encoding fixes them."
    lay_out: Callable[[Settings, Ragged], ColumnBytes] = lambda _, rows: ColumnBytes.plain(
        rows, True
    )
    "Many values as they stand in a shard; ValueError for one that MDS cannot store."
    decode: Callable[[Settings, bytes], Any] = lambda _, data: data
    "One value: ndarray, str, number, JSON value, or bytes."
    is_decoded: bool = True
    "Whether damage can show in decoding."


def _array_size(settings: Settings) -> int | None:
    if len(settings) < 2:
        return None
    return math.prod(map(int, settings[1].split(","))) * np.dtype(settings[0]).itemsize


def _lay_out_arrays(settings: Settings, rows: Ragged) -> ColumnBytes:
    """1-d arrays: where the encoding fixes no length, each begins with its own."""
    if len(settings) > 1:
        return ColumnBytes.plain(rows, False)
    lengths = rows.lengths
    if len(lengths) and not lengths.min():
        raise ValueError("holds an empty row, which MDS cannot store")
    sizes = lengths * rows.values.itemsize
    return ColumnBytes(rows.values.view(np.uint8), sizes, *_length_prefixes(lengths), True)


def _length_prefixes(lengths: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The shape heads of 1-d arrays: `1 << 2 | log2(width)`, then the length in `width` bytes."""
    log_width = (lengths > 0xFF).astype(np.int64) + (lengths > 0xFFFF)
    widest = np.empty((len(lengths), 5), np.uint8)
    widest[:, 0] = 4 | log_width
    widest[:, 1:] = lengths.astype("<u4")[:, None].view(np.uint8).reshape(-1, 4)
    widths = 1 + (1 << log_width)
    return widest[np.arange(5) < widths[:, None]], widths


def _array(settings: Settings, data: bytes) -> NDArray[Any]:
    """An array whose dtype and shape are fixed by the encoding or stand before its values."""
    position = 0
    if not settings:
        settings, position = [_DTYPES[data[0]]], 1
    if len(settings) == 2:
        shape = [int(n) for n in settings[1].split(",")]
    else:
        ndim, width = data[position] >> 2, 1 << (data[position] & 3)
        shape = np.frombuffer(data, f"<u{width}", ndim, position + 1).tolist()
        position += 1 + ndim * width
    return np.frombuffer(data, np.dtype(settings[0]), offset=position).reshape(shape)


def _scalar(dtype: str) -> Codec:
    return Codec(
        dtype=lambda _: dtype,
        size=lambda _: np.dtype(dtype).itemsize,
        lay_out=lambda _, rows: ColumnBytes.plain(rows, False),
        decode=lambda _, data: np.frombuffer(data, dtype)[0].item(),
        is_decoded=False,
    )


def _images(settings: Settings, data: bytes) -> list[bytes]:
    """The images of a list, as bytes that nothing has decoded: a number for later, how many there are, the bytes of each, all of
    them uint32, and the images. ValueError where these do not add up."""
    count = int.from_bytes(data[4:8], "little")
    sizes = np.frombuffer(data[8 : 8 + 4 * count], "<u4").astype(np.int64)
    ends = 8 + 4 * count + np.concatenate([[0], np.cumsum(sizes)])
    if len(data) < 8 or len(sizes) < count or ends[-1] != len(data):
        raise ValueError(f"a list of {count} images does not fill its {len(data):,} bytes")
    return [data[start:end] for start, end in pairwise(ends.tolist())]


CODECS: dict[str, Codec] = {
    "ndarray": Codec(
        dtype=lambda settings: settings[0] if settings else "uint8",
        size=_array_size,
        lay_out=_lay_out_arrays,
        decode=_array,
    ),
    **dict.fromkeys(("list[jpeg]", "list[png]", "list[pil]"), Codec(decode=_images)),
    "json": Codec(decode=lambda _, data: json.loads(data)),
    "str": Codec(decode=lambda _, data: data.decode()),
    "str_int": Codec(decode=lambda _, data: int(data)),
    "str_float": Codec(decode=lambda _, data: float(data)),
    **{name: _scalar(dtype) for name, dtype in SCALARS.items()},
}
_BYTES = Codec(is_decoded=False)


def codec_of(encoding: str) -> tuple[Codec, list[str]]:
    """The codec of an encoding, and the encoding's settings."""
    name, *settings = encoding.split(":")
    return CODECS.get(name, _BYTES), settings


def decode_value(encoding: str, data: bytes) -> Any:
    """One value of a column: ndarray, str, number, JSON value, or bytes."""
    codec, settings = codec_of(encoding)
    return codec.decode(settings, data)

"""MDS's column encodings: how large a value is, how many values are laid out at once, how one is
decoded.

An encoding is a name and settings, `ndarray:uint16:2048`. Values of encodings that mdsmix does not
know (images, pickles) stay bytes, since a check must never run the content of a shard. Another
encoding is one line in `CODECS`: a function that makes a `Codec` of the settings. Source:
streaming/base/format/mds/encodings.py, 0.12 and 0.13 alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.extensions import load_extension
from mdsmix.ragged import Ragged

_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""MDS's codes of an array's dtype, where the column's encoding does not fix it. A column of numbers
is named by one of these dtypes.
"""


def _as_bytes(rows: Ragged) -> list[Ragged]:
    """Values without anything in front of them."""
    return [Ragged(rows.values.view(np.uint8), rows.offsets * rows.values.itemsize)]


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One encoding with its settings. The defaults are the codec of encodings that mdsmix does not
    know: values stay bytes.
    """

    dtype: str = "uint8"
    "Dtype of the column's flat values in a Ragged: that of tokens, or uint8 for text and bytes."
    size: int | None = None
    "Bytes of every value; None where values differ in length."
    lay_out: Callable[[Ragged], list[Ragged]] = _as_bytes
    """Lays out many values as a shard holds them, in uint8: heads, if values have them, and values.
    ValueError where MDS cannot store one.
    """
    decode: Callable[[bytes], Any] = bytes
    "One value: ndarray, str, number, JSON value, or bytes."
    is_array: bool = False
    "Whether values are arrays of the dtype, so that those of many samples are read at once."


def _arrays(dtype: str = "", shape: str = "") -> Codec:
    size = math.prod(map(int, shape.split(","))) * np.dtype(dtype).itemsize if shape else None
    return Codec(
        dtype=dtype or "uint8",
        size=size,
        lay_out=_as_bytes if shape else _with_lengths,
        decode=partial(_array, dtype, shape),
        is_array=bool(dtype),
    )


def _with_lengths(rows: Ragged) -> list[Ragged]:
    """1-d arrays that begin with their shape: `1 << 2 | log2(width)`, then the length in `width`
    bytes.
    """
    lengths = rows.lengths
    if len(lengths) and not lengths.min():
        raise ValueError("holds an empty row, which MDS cannot store")
    log_widths = (lengths > 0xFF).astype(np.int64) + (lengths > 0xFFFF)
    return [lay_out_lengths(lengths, log_widths), *_as_bytes(rows)]


def lay_out_lengths(lengths: NDArray[np.int64], log_widths: NDArray[np.int64]) -> Ragged:
    """The uint8 heads of 1-d arrays of these lengths: a byte of shape, then the length in `1 <<
    log_width` bytes, 4 at most.
    """
    widest = np.empty((len(lengths), 5), np.uint8)
    widest[:, 0] = 4 | log_widths
    widest[:, 1:] = lengths.astype("<u4")[:, None].view(np.uint8).reshape(-1, 4)
    widths = 1 + (1 << log_widths)
    return Ragged.from_lengths(widest[np.arange(5) < widths[:, None]], widths)


def _array(dtype: str, shape: str, data: bytes) -> NDArray[Any]:
    """An array whose dtype and shape are fixed by the encoding or stand before its values."""
    position = 0
    if not dtype:
        dtype, position = _DTYPES[data[0]], 1
    if shape:
        sides = [int(n) for n in shape.split(",")]
    else:
        ndim, width = data[position] >> 2, 1 << (data[position] & 3)
        sides = np.frombuffer(data, f"<u{width}", ndim, position + 1).tolist()
        position += 1 + ndim * width
    return np.frombuffer(data, np.dtype(dtype), offset=position).reshape(sides)


def _number(dtype: str) -> Codec:
    return Codec(
        dtype=dtype,
        size=np.dtype(dtype).itemsize,
        decode=lambda data: np.frombuffer(data, dtype)[0].item(),
    )


def _images(data: bytes) -> list[bytes]:
    """The bytes of each image of a list, not decoded. `data` holds an unused number, the count, the
    size of each image, all uint32, and then the images. ValueError where the sizes do not add up.
    """
    count = int.from_bytes(data[4:8], "little")
    sizes = np.frombuffer(data[8 : 8 + 4 * count], "<u4").astype(np.int64)
    ends = 8 + 4 * count + np.concatenate([[0], np.cumsum(sizes)])
    if len(sizes) < count or ends[-1] != len(data):
        raise ValueError(f"a list of {count} images does not fill its {len(data):,} bytes")
    return [data[start:end] for start, end in pairwise(ends.tolist())]


CODECS: dict[str, Callable[..., Codec]] = {
    "ndarray": _arrays,
    **dict.fromkeys(("list[jpeg]", "list[png]", "list[pil]"), partial(Codec, decode=_images)),
    "json": partial(Codec, decode=json.loads),
    "str": partial(Codec, decode=bytes.decode),
    "str_int": partial(Codec, decode=int),
    "str_float": partial(Codec, decode=float),
    "int": partial(_number, "int64"),
    **{name: partial(_number, name) for name in _DTYPES.values()},
}


@lru_cache(maxsize=64)
def find_codec(encoding: str) -> Codec:
    """The codec of an encoding such as `ndarray:uint16:2048`; ValueError or TypeError where its
    settings are wrong.
    """
    name, *settings = encoding.split(":")
    make = CODECS[name] if name in CODECS else load_extension("mdsmix.codecs", name)
    made: Codec = make(*settings) if make else Codec()
    return made

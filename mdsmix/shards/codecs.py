"""The column encodings of MDS: the size of a value, laying out many values, decoding one.

An encoding is a name and settings, `ndarray:uint16:2048`. Values of encodings that mdsmix does not
know (images, pickles) stay bytes, since a check must never run the content of a shard. To add an
encoding, add a line to `CODECS`: a function that makes a `Codec` from the settings.

Source: streaming/base/format/mds/encodings.py, the same in 0.12 and 0.13.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from mdsmix.extensions import load_extension
from mdsmix.frozen import frozen
from mdsmix.lazy_numpy import NDArray, np
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
"""MDS's code of a dtype -> the dtype. An array begins with this code if the column's encoding does
not fix the dtype. A column of plain numbers has one of these dtypes as its encoding.
"""
_WIDTHS = {name: code // 8 for code, name in _DTYPES.items()}
"""Dtype -> bytes of a number: MDS's code is the number of bits, or 1 or 2 more. NumPy, which knows
them too, need not be imported to read an index.
"""


def _as_bytes(rows: Ragged) -> list[Ragged]:
    """Return the rows as bytes (uint8), without a copy. For encodings that store only the values,
    and no shape in front of each value. The result is a list of one Ragged, the form that
    `Codec.lay_out` returns.
    """
    return [Ragged(rows.values.view(np.uint8), rows.offsets * rows.values.itemsize)]


@frozen(kw_only=True)
class Codec:
    """How the values of a column with one MDS encoding, such as `ndarray:uint16:2048`, become bytes
    and are decoded.

    The defaults are for encodings that mdsmix does not know: values stay bytes.
    """

    dtype: str = "uint8"
    """Dtype of the column's flat values in a Ragged: the dtype of token ids, or uint8 for other
    values.
    """
    size: int | None = None
    "Bytes of every value; None if values differ in length."
    lay_out: Callable[[Ragged], list[Ragged]] = _as_bytes
    """Lay out many values, one per sample, as a shard stores them. Returns a list of Raggeds of
    uint8 rows: [values], or [heads, values] if the encoding puts a head, the shape of the value, in
    front of each value. Raises ValueError if MDS cannot store a value.
    """
    decode: Callable[[bytes], Any] = bytes
    "Decode one value: to an ndarray, str, number, JSON value, or bytes."
    is_array: bool = False
    "Whether values are arrays of `dtype`; then the values of many samples are decoded at once."


def _make_array_codec(dtype: str = "", shape: str = "") -> Codec:
    """Return the codec of `ndarray:DTYPE:SHAPE`, for example with the dtype "uint16" and the shape
    "2048" or "2,3". If a setting is empty, each stored value has its own dtype or shape.
    """
    size = None
    if shape:
        width = _WIDTHS.get(dtype) or np.dtype(dtype).itemsize
        size = math.prod(map(int, shape.split(","))) * width
    return Codec(
        dtype=dtype or "uint8",
        size=size,
        lay_out=_as_bytes if shape else _lay_out_arrays,
        decode=partial(_decode_array, dtype, shape),
        is_array=bool(dtype),
    )


def _lay_out_arrays(rows: Ragged) -> list[Ragged]:
    """Return the stored form of arrays whose encoding fixes no shape, as a list of two Raggeds of
    bytes. The first has the head of each array (its number of dimensions and its length, from
    `lay_out_lengths`), the second has its values.

    Raises ValueError if an array is empty.

    Args:
        rows: 1-d arrays.
    """
    lengths = rows.lengths
    has_empty_row = len(lengths) > 0 and lengths.min() == 0
    if has_empty_row:
        raise ValueError("a sample has an array without values, which MDS cannot store")
    # A length takes 1, 2 or 4 bytes; log2 of this width is 0, 1 or 2.
    log_widths = (lengths > 0xFF).astype(np.int64) + (lengths > 0xFFFF)
    return [lay_out_lengths(lengths, log_widths), *_as_bytes(rows)]


def lay_out_lengths(lengths: NDArray[np.int64], log_widths: NDArray[np.int64]) -> Ragged:
    """Return the heads of 1-d arrays: the bytes in front of each stored array which state its
    length.

    A head is one byte, `dimensions << 2 | log_width` with 1 dimension, and then the array's length.
    For example, the head of an array of 7 values is the bytes 4, 7 if the log width is 0.

    Args:
        lengths: the length of each array.
        log_widths: log2 of the bytes that each length takes: 0, 1 or 2 for 1, 2 or 4 bytes.
    """
    # Make each head with a length of 4 bytes, then keep only the bytes that its width needs.
    widest = np.empty((len(lengths), 5), np.uint8)
    widest[:, 0] = 4 | log_widths
    widest[:, 1:] = lengths.astype("<u4")[:, None].view(np.uint8).reshape(-1, 4)
    widths = 1 + (1 << log_widths)
    return Ragged.from_lengths(widest[np.arange(5) < widths[:, None]], widths)


def _decode_array(dtype: str, shape: str, data: bytes) -> NDArray[Any]:
    """Decode one stored value of an encoding `ndarray`, `ndarray:DTYPE` or `ndarray:DTYPE:SHAPE`.

    Args:
        dtype: the dtype that the encoding fixes; "": the first byte of `data` is the dtype's code.
        shape: the shape that the encoding fixes, such as "2,3"; "": `data` contains the shape.
        data: the stored bytes.
    """
    position = 0
    if not dtype:
        dtype = _DTYPES[data[0]]
        position = 1
    if shape:
        sides = [int(side) for side in shape.split(",")]
    else:
        # One byte has the number of dimensions and log2 of the bytes that each side takes.
        ndim = data[position] >> 2
        width = 1 << (data[position] & 3)
        sides = np.frombuffer(data, f"<u{width}", ndim, position + 1).tolist()
        position += 1 + ndim * width
    return np.frombuffer(data, np.dtype(dtype), offset=position).reshape(sides)


def _make_number_codec(dtype: str) -> Codec:
    """Return the codec of a column with one number per sample, such as the MDS encoding `uint16`.

    Args:
        dtype: the dtype of the numbers.
    """
    return Codec(
        dtype=dtype,
        size=_WIDTHS[dtype],
        decode=lambda data: np.frombuffer(data, dtype)[0].item(),
    )


def _split_images(data: bytes) -> list[bytes]:
    """Return the bytes of each image of a stored list; the images are not decoded.

    `data` begins with uint32 numbers: an unused one, the count, and the size of each image. The
    images follow.
    Raises ValueError if the sizes do not add up to the length of `data`.
    """
    count = int.from_bytes(data[4:8], "little")
    head_bytes = 8 + 4 * count
    sizes = np.frombuffer(data[8:head_bytes], "<u4").astype(np.int64)
    edges = head_bytes + np.concatenate([[0], np.cumsum(sizes)])
    if len(sizes) < count or edges[-1] != len(data):
        raise ValueError(
            f"a sample's images are damaged: the sizes of its {count} images do not add up to the "
            f"{len(data):,} bytes that are stored for them"
        )
    return [data[start:end] for start, end in pairwise(edges.tolist())]


CODECS: dict[str, Callable[..., Codec]] = {
    "ndarray": _make_array_codec,
    "list[jpeg]": partial(Codec, decode=_split_images),
    "list[png]": partial(Codec, decode=_split_images),
    "list[pil]": partial(Codec, decode=_split_images),
    "json": partial(Codec, decode=json.loads),
    "str": partial(Codec, decode=bytes.decode),
    "str_int": partial(Codec, decode=int),
    "str_float": partial(Codec, decode=float),
    "int": partial(_make_number_codec, "int64"),
    **{name: partial(_make_number_codec, name) for name in _DTYPES.values()},
}
"Name of an encoding -> function that makes a `Codec` from its settings."


@lru_cache(maxsize=64)
def find_codec(encoding: str) -> Codec:
    """Return the codec of an encoding such as `ndarray:uint16:2048`. An encoding that neither
    mdsmix nor an extension knows gets the default codec, so its values stay bytes.

    Raises ValueError or TypeError if the settings are wrong.
    """
    name, *settings = encoding.split(":")
    make_codec = CODECS[name] if name in CODECS else load_extension("mdsmix.codecs", name)
    if make_codec is None:
        return Codec()
    codec: Codec = make_codec(*settings)
    return codec

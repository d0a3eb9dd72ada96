"""JSON files: one array of values, cut into its elements while it streams by, or JSON Lines that bear the name.

Only the array's own brackets and commas decide where an element ends, found by numpy at 7 MB a step; orjson then reads each element
alone, as it does lines. So an element that is no JSON costs its neighbours nothing, and each is kept with its bytes and its
place. The parsers that stream tell neither, end at the first fault, and the fastest (yajl) makes a `?` of a lone surrogate
without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.errors import Unreachable
from mdsmix.sources.format import MARK, Block, BoundedBytes, Item, Splits, item_blocks
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import Jsonl, Pieces, all_bytes, reason_of
from mdsmix.sources.units import SourceFile, Span

_WHITESPACE = b" \t\r\n"
_HEAD_BYTES = 64 << 10
"Among so many first bytes there is one that is no white space."
_TURNS = np.zeros(256, np.int8)
"What a byte outside of a string does to the depth."
_TURNS[list(b"[{")], _TURNS[list(b"]}")] = 1, -1
_SIGNS = bytes(chr(byte) in '[]{},"' for byte in range(256))
_SLASHES = bytes(chr(byte) == "\\" for byte in range(256))


class Json(Jsonl):
    """`*.json`. Its ordinals are uncompressed bytes."""

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        if self._is_array(file):
            return [(0, None)]
        return super().splits(file, window_bytes, fields)

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        if span.start or not self._is_array(file):
            yield from super().blocks(file, span)
            return
        with opened(file, self._packing, span.memory) as read:
            yield from item_blocks(file, span, "json", _elements(all_bytes(read, span), file))

    def _is_array(self, file: SourceFile) -> bool:
        with opened(file, self._packing, until=_HEAD_BYTES) as read:
            return read(_HEAD_BYTES).removeprefix(MARK).lstrip(_WHITESPACE).startswith(b"[")

    def fits(self, head: bytes) -> bool:
        head = head.lstrip(_WHITESPACE)
        return head.startswith(b"[") and head[1:].lstrip(_WHITESPACE).startswith(b"{")


def _elements(pieces: Pieces, file: SourceFile) -> Iterator[Item]:
    """What the array's commas and brackets part, without white space; what is empty is no element."""
    found, rest, depth, in_string, index = BoundedBytes(), b"", 0, False, 0
    blank = MARK + _WHITESPACE
    for at, piece in pieces:
        data, offset = rest + piece, at - len(rest)
        # A backslash is looked at together with what it stands before.
        kept = len(data.rstrip(b"\\")) if data.endswith(b"\\") else len(data)
        data, rest = data[:kept], data[kept:]
        signs, in_string = _outside(data, in_string)
        edges, depth = _edges(data, signs, depth)
        begin = 0
        for edge in [*edges, len(data)]:
            part = data[begin:edge]
            if not found.length:
                part = part.lstrip(blank)
                found.offset = offset + edge - len(part)
            found.add(part)
            if edge < len(data):
                blank = _WHITESPACE
                if found.length:
                    yield _item(index, found)
                    found, index = BoundedBytes(), index + 1
            begin = edge + 1
        if depth < 0:
            raise _no_array(file, "it closes more than it opens")
    if depth or in_string or rest:
        raise _no_array(file, "it is cut off, or not closed")
    if found.length:
        yield _item(index, found)


def _no_array(file: SourceFile, why: str) -> Unreachable:
    return Unreachable(
        f"{file.location.url} is no whole JSON array ({why}): records would be lost, so nothing of it is used; copy it again"
    )


def _item(index: int, found: BoundedBytes) -> Item:
    raw = b"".join(found.parts).rstrip(_WHITESPACE)
    if not found.is_too_long:
        found.parts, found.length = [raw], len(raw)
    return found.item({"index": index}, _decoded)


def _decoded(raw: bytes) -> tuple[Any, str]:
    try:
        return orjson.loads(raw), ""
    except orjson.JSONDecodeError as error:
        return None, reason_of(raw, str(error))


def _edges(data: bytes, signs: NDArray[np.int64], depth: int) -> tuple[list[int], int]:
    """Where the array's own commas and brackets stand among these signs, and the depth behind them all. A depth of 1 is that of
    the array, 2 that of an element."""
    turns = _TURNS[np.frombuffer(data, np.uint8)[signs]]
    depths = depth + np.cumsum(turns, dtype=np.int64)
    is_edge = np.minimum(depths, depths - turns) <= (turns == 0)
    return signs[is_edge].tolist(), int(depths[-1]) if len(depths) else depth


def _outside(data: bytes, in_string: bool) -> tuple[NDArray[np.int64], bool]:
    """Where commas and brackets stand outside of strings, and whether the data ends in a string."""
    at = _where(data, _SIGNS)
    is_quote = np.frombuffer(data, np.uint8)[at] == ord('"')
    is_sign = ~is_quote
    is_quote[is_quote] = ~_escaped(data, at[is_quote])
    inside = (np.cumsum(is_quote) + in_string) & 1
    return at[is_sign & (inside == 0)], bool(inside[-1]) if len(at) else in_string


def _where(data: bytes, table: bytes) -> NDArray[np.int64]:
    """Where bytes stand that the table has a 1 for."""
    return np.flatnonzero(np.frombuffer(data.translate(table), bool))


def _escaped(data: bytes, quotes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether an odd number of backslashes stands before each quote."""
    slashes = _where(data, _SLASHES)
    if not len(slashes):
        return np.zeros(len(quotes), bool)
    number = np.arange(len(slashes))
    first = np.maximum.accumulate(np.where(np.diff(slashes, prepend=-2) != 1, number, 0))
    last = np.searchsorted(slashes, quotes) - 1
    is_behind: NDArray[np.bool_] = slashes[last] == quotes - 1
    is_odd: NDArray[np.bool_] = (last - first[last]) % 2 == 0
    return is_behind & is_odd

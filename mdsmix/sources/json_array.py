"""JSON files: one array of values, cut into its elements while it streams by, or JSON Lines that bear the name.

Only brackets outside of strings decide where an element ends, found by numpy at 7 MB a step; orjson then reads each element
alone, as it does lines. So an element that is no JSON costs its neighbours nothing, and each is kept with its bytes and its
place. The parsers that stream tell neither, end at the first fault, and the fastest (yajl) makes a `?` of a lone surrogate
without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.errors import Unreachable
from mdsmix.sources import cut_items
from mdsmix.sources.cut_items import Item
from mdsmix.sources.format import Block
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import Jsonl, reason_of
from mdsmix.sources.lines import Pieces, all_bytes, shown
from mdsmix.sources.units import SourceFile, Span

_WHITESPACE = b" \t\r\n"
_BETWEEN = _WHITESPACE + b","
_HEAD_BYTES = 64 << 10
"Among so many first bytes there is one that is no white space."
_MARK = b"\xef\xbb\xbf"
_TURNS = np.zeros(256, np.int8)
"What a byte outside of a string does to the depth."
_TURNS[list(b"[{")], _TURNS[list(b"]}")] = 1, -1
_SIGNS = bytes(chr(byte) in '[]{}"' for byte in range(256))
_COMMAS = bytes(chr(byte) in ',"' for byte in range(256))
_SLASHES = bytes(chr(byte) == "\\" for byte in range(256))


class Json(Jsonl):
    """`*.json`. Its ordinals are uncompressed bytes."""

    def splits(
        self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]
    ) -> Iterable[tuple[int, int | None]]:
        if self._is_array(file):
            return [(0, None)]
        return super().splits(file, window_bytes, fields)

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        if span.start or not self._is_array(file):
            yield from super().blocks(file, span)
            return
        with opened(file, self._packing, span.memory) as read:
            found = _elements(all_bytes(read, span), file)
            yield from cut_items.blocks(file, span, "json", found)

    def _is_array(self, file: SourceFile) -> bool:
        with opened(file, self._packing, until=_HEAD_BYTES) as read:
            return read(_HEAD_BYTES).removeprefix(_MARK).lstrip(_WHITESPACE).startswith(b"[")

    def fits(self, head: bytes) -> bool:
        head = head.lstrip(_WHITESPACE)
        return head.startswith(b"[") and head[1:].lstrip(_WHITESPACE).startswith(b"{")


@dataclass(slots=True)
class _ArrayState:
    """Where the reading of an array stands."""

    depth: int = 0
    in_string: bool = False
    index: int = 0
    "Of the next element."
    begun: list[bytes] = field(default_factory=list)
    "What was read since the last element ended: an element's beginning, or what stands between two."
    offset: int = 0
    "Where that began."
    length: int = 0
    is_element: bool = False

    def take(self, part: bytes) -> None:
        self.length += len(part)
        if self.length <= cut_items.LONGEST:
            self.begun.append(part)
        else:
            self.begun.clear()

    def end(self, offset: int, begins_element: bool = False) -> Iterator[Item]:
        """What was taken, as an element, or as those that stand between two with brackets. Another one begins at `offset`."""
        raw = b"".join(self.begun)
        if self.is_element or self.length > len(raw):
            yield self._next(self.offset, self.length, raw)
        elif raw.removeprefix(_MARK).strip(_BETWEEN):
            for at, part in _apart(raw):
                yield self._next(self.offset + at, len(part), part)
        self.begun, self.length, self.offset, self.is_element = [], 0, offset, begins_element

    def _next(self, offset: int, length: int, raw: bytes) -> Item:
        self.index += 1
        return _item(self.index - 1, offset, length, raw)


def _elements(pieces: Pieces, file: SourceFile) -> Iterator[Item]:
    """The elements of the array; numbers, strings and words are some too, and whatever else is not a comma."""
    state, held = _ArrayState(), b""
    for offset, piece in pieces:
        data, offset = held + piece, offset - len(held)
        # A backslash is looked at together with what it stands before.
        kept = len(data.rstrip(b"\\")) if data.endswith(b"\\") else len(data)
        data, held = data[:kept], data[kept:]
        yield from _of_piece(state, offset, data)
        if state.depth < 0:
            raise _no_array(file, "it closes more than it opens")
    if state.depth or state.in_string or held:
        raise _no_array(file, "it is cut off, or not closed")
    yield from state.end(0)


def _no_array(file: SourceFile, why: str) -> Unreachable:
    return Unreachable(
        f"{file.location.url} is no whole JSON array ({why}): records would be lost, so nothing of it is used; copy it again"
    )


def _of_piece(state: _ArrayState, offset: int, data: bytes) -> Iterator[Item]:
    """The elements that end in a piece. A depth of 1 is that of the array, 2 that of an element."""
    at, depths = _brackets(state, data)
    before = np.concatenate([[state.depth], depths[:-1]])
    edges = np.flatnonzero(np.minimum(before, depths) < 2)
    begin, changes = (
        0,
        zip(at[edges].tolist(), before[edges].tolist(), depths[edges].tolist(), strict=True),
    )
    for position, was, depth in changes:
        # An element's brackets are part of it, the array's of nothing.
        opens = depth > was
        stop = position if opens or depth != 1 else position + 1
        state.take(data[begin:stop])
        begin = position if opens and depth == 2 else position + 1
        yield from state.end(offset + begin, begins_element=opens and depth == 2)
    state.take(data[begin:])
    state.depth = int(depths[-1]) if len(depths) else state.depth


def _brackets(state: _ArrayState, data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where brackets stand outside of strings, and the depth behind each."""
    at, state.in_string = _outside(data, _SIGNS, state.in_string)
    turns = _TURNS[np.frombuffer(data, np.uint8)[at]]
    return at, state.depth + np.cumsum(turns, dtype=np.int64)


def _apart(data: bytes) -> Iterator[tuple[int, bytes]]:
    """What commas outside of strings part, without white space, and where it stands; nothing is left out but commas."""
    begin = 0
    for comma in [*_outside(data, _COMMAS, False)[0].tolist(), len(data)]:
        part = data[begin:comma].lstrip(_WHITESPACE)
        if found := part.rstrip(_WHITESPACE):
            yield comma - len(part), found
        begin = comma + 1


def _outside(data: bytes, signs: bytes, in_string: bool) -> tuple[NDArray[np.int64], bool]:
    """Where signs but quotes stand outside of strings, and whether the data ends in a string."""
    at = _where(data, signs)
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


def _item(index: int, offset: int, length: int, raw: bytes) -> Item:
    place, record, reason = {"index": index, "offset": offset}, None, ""
    if length > cut_items.LONGEST:
        reason = cut_items.TOO_LONG
    else:
        try:
            record = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            reason = reason_of(raw, str(error))
    return Item(offset, shown(offset), place, length, raw, record, reason)

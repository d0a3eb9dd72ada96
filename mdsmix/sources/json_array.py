"""JSON files: one array of values, cut into its elements while it streams by, or JSON Lines under
the name `*.json`.

Only the array's own brackets and commas decide where an element ends: a regular expression passes
over strings and all else between them. orjson then reads each element alone, as it does lines. So
an element that is no JSON costs its neighbours nothing, and each element keeps its bytes and its
place. Streaming parsers tell neither bytes nor place and end at the first fault, and the fastest
(yajl) makes a `?` of a lone surrogate without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mdsmix.errors import Unreachable
from mdsmix.sources.format import MARK, Block, BoundedBytes, Item, Splits, item_blocks
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import Jsonl, Pieces, all_bytes, decode_lines
from mdsmix.sources.units import SourceFile, Span

_WHITESPACE = b" \t\r\n"
_HEAD_BYTES = 64 << 10
"First bytes of a file, among which at least one is assumed to be no white space."
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_PLAIN = rb'[^\[\]"{},\\]++|\\.|' + _STRING
_STRING_END = re.compile(_STRING[1:], re.DOTALL)
_SIGN = re.compile(rb"(?:%b|[\[{](?:,|%b)*+[\]}])*+([\[\]{},\"]|\Z)" % (_PLAIN, _PLAIN), re.DOTALL)
"""Matches up to the next bracket, brace or comma, or to the end of the bytes. Strings are passed
over, and so are objects and lists that hold no other. A quote as the sign begins a string that does
not end in these bytes.
"""
_TURNS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
"Sign -> its change of the depth."


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
        with opened(file, self.packing, span.memory) as stream:
            yield from item_blocks(file, span, "json", _elements(all_bytes(stream, span), file))

    def _is_array(self, file: SourceFile) -> bool:
        with opened(file, self.packing, until=_HEAD_BYTES) as stream:
            head = stream.read(_HEAD_BYTES).removeprefix(MARK)
            return head.lstrip(_WHITESPACE).startswith(b"[")


def _elements(pieces: Pieces, file: SourceFile) -> Iterator[Item]:
    """The elements between the array's commas and brackets, without white space around them; an
    empty one is left out.
    """
    found, rest, depth, in_string, index = BoundedBytes(), b"", 0, False, 0
    for at, piece in pieces:
        data, offset = rest + piece, at - len(rest)
        # A backslash at the end waits for the byte that it escapes.
        kept = len(data.rstrip(b"\\"))
        data, rest = data[:kept], data[kept:]
        edges, depth, in_string = _edges(data, depth, in_string)
        begin = 0
        for edge in [*edges, len(data)]:
            part = data[begin:edge]
            if not found.length:
                part = part.lstrip(_WHITESPACE)
                found.offset = offset + edge - len(part)
            found.add(part)
            if edge < len(data) and found.length:
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
    if not found.is_too_long:
        raw = b"".join(found.parts).rstrip(_WHITESPACE)
        found.parts, found.length = [raw], len(raw)
    return found.item(decode_lines, index=index)


def _edges(data: bytes, depth: int, in_string: bool) -> tuple[list[int], int, bool]:
    """Positions of the array's own commas and brackets; the depth at the end of the bytes; and
    whether a string goes on there. The array has depth 1, a list or object as its element depth 2.
    """
    end = _STRING_END.match(data) if in_string else None
    if in_string and end is None:
        return [], depth, True
    begin, edges = end.end() if end else 0, list[int]()
    if depth == 0 and (begin := data.find(b"[") + 1):
        depth, edges = 1, [begin - 1]
    for found in _SIGN.finditer(data, begin) if depth else ():
        sign = found[1]
        if sign in b'"':
            return edges, depth, bool(sign)
        turn = _TURNS.get(sign, 0)
        if min(depth, depth + turn) <= (turn == 0):
            edges.append(found.end() - 1)
        depth += turn
    return edges, depth, False

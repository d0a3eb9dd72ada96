"""JSON files: one array of values, which is split into its elements while it is read; or JSON Lines
in a file named `*.json`.

Only the array's own brackets and commas decide where an element ends: a regular expression skips
strings and everything else between them. orjson then reads each element alone, as it does lines. So
an element that is not valid JSON does not affect its neighbours, and each element keeps its bytes
and its place. Streaming parsers return neither bytes nor place, and stop at the first fault. The
fastest of them (yajl) also turns a lone surrogate into a `?` silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from mdsmix.errors import Unreachable
from mdsmix.sources.format import BYTE_ORDER_MARK, Block, BoundedBytes, Item, Splits, item_blocks
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import Jsonl, Pieces, all_bytes, decode_lines
from mdsmix.sources.units import SourceFile, Span

_WHITESPACE = b" \t\r\n"
_HEAD_BYTES = 64 << 10
"How many first bytes of a file are searched for a byte that is not white space."
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_PLAIN = rb'[^\[\]"{},\\]++|\\.|' + _STRING
_STRING_END = re.compile(_STRING[1:], re.DOTALL)
_SIGN = re.compile(rb"(?:%b|[\[{](?:,|%b)*+[\]}])*+([\[\]{},\"]|\Z)" % (_PLAIN, _PLAIN), re.DOTALL)
"""Matches up to the next bracket, brace or comma, or to the end of the bytes. Strings are skipped,
and so are objects and lists that contain no other. If the sign is a quote, it begins a string that
does not end in these bytes.
"""
_DEPTH_CHANGES = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


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
        """Return whether the file begins with `[`, after white space."""
        with opened(file, self.packing, until=_HEAD_BYTES) as stream:
            head = stream.read(_HEAD_BYTES).removeprefix(BYTE_ORDER_MARK)
            return head.lstrip(_WHITESPACE).startswith(b"[")


class _Scan(NamedTuple):
    """The result of scanning some bytes of an array."""

    edges: list[int]
    "Positions of the array's own commas and brackets."
    depth: int
    "The depth after these bytes: 1 in the array, 2 in a list or object that is its element."
    in_string: bool
    "The bytes end inside a string."


def _elements(pieces: Pieces, file: SourceFile) -> Iterator[Item]:
    """Yield the elements between the array's commas and brackets, without white space around them.

    Nothing is yielded for an empty element, as in `[]` or after a trailing comma.
    """
    element = BoundedBytes()
    index = 0
    depth = 0
    in_string = False
    backslashes = b""
    for piece_offset, piece in pieces:
        # Backslashes at the end wait for the byte that they escape.
        data = backslashes + piece
        offset = piece_offset - len(backslashes)
        complete = data.rstrip(b"\\")
        backslashes = data[len(complete) :]

        # Cut the bytes at the array's own commas and brackets.
        edges, depth, in_string = _scan(complete, depth, in_string)
        begin = 0
        for edge in [*edges, len(complete)]:
            chunk = complete[begin:edge]
            if not element.length:  # the element begins here
                chunk = chunk.lstrip(_WHITESPACE)
                element.offset = offset + edge - len(chunk)
            element.add(chunk)
            if edge < len(complete) and element.length:
                yield _element_item(index, element)
                element = BoundedBytes()
                index += 1
            begin = edge + 1
        if depth < 0:
            raise _incomplete_error(file, "it closes more brackets than it opens")
    if depth or in_string or backslashes:
        raise _incomplete_error(file, "it is cut off, or not closed")
    if element.length:
        yield _element_item(index, element)


def _incomplete_error(file: SourceFile, fault: str) -> Unreachable:
    """Return the error for the user about a file that is not one whole array."""
    return Unreachable(
        f"{file.location.url} is not a complete JSON array ({fault}): "
        "records would be lost, so the file is not used; copy it again"
    )


def _element_item(index: int, element: BoundedBytes) -> Item:
    """Return an element of the array, decoded, as an item. `index`: its number, from 0."""
    if not element.is_too_long:
        raw = b"".join(element.parts).rstrip(_WHITESPACE)
        element.parts = [raw]
        element.length = len(raw)
    return element.item(decode_lines, index=index)


def _scan(data: bytes, depth: int, in_string: bool) -> _Scan:
    """Find the array's own commas and brackets in the next bytes of a file.

    Args:
        depth: the depth before these bytes, as in `_Scan`.
        in_string: whether these bytes begin inside a string.
    """
    begin = 0
    edges = list[int]()
    if in_string:
        end = _STRING_END.match(data)
        if end is None:
            return _Scan(edges, depth, in_string=True)
        begin = end.end()
    if depth == 0:
        opening = data.find(b"[")
        if opening < 0:
            return _Scan(edges, depth, in_string=False)
        depth = 1
        edges.append(opening)
        begin = opening + 1
    for match in _SIGN.finditer(data, begin):
        sign = match[1]
        if sign in b'"':  # a quote, or nothing at the end of the bytes
            return _Scan(edges, depth, in_string=bool(sign))
        change = _DEPTH_CHANGES.get(sign, 0)
        is_comma = change == 0
        # An edge is the array's closing bracket, a comma between two elements, or anything after
        # the array.
        if min(depth, depth + change) <= 0 or (is_comma and depth == 1):
            edges.append(match.end() - 1)
        depth += change
    return _Scan(edges, depth, in_string=False)

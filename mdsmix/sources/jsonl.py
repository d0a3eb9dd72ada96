"""JSON Lines, plain or compressed: one JSON value of any type a line.

A block of good lines is decoded by one `map(_loads, lines)` in C. A bad line stops that loop,
is set aside and the loop goes on behind it, so that it costs its neighbours nothing. Lines are
never joined into one array, which would let two values on a line pass for one each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf
from typing import ClassVar

import orjson

from mdsmix.sources.format import Block, Decoded, Format
from mdsmix.sources.inflate import opened
from mdsmix.sources.lines import TAIL_BYTES, LineBlock, all_bytes, owned_bytes, shown, split_lines
from mdsmix.sources.units import SourceFile, Span

_loads = orjson.loads
_WHITESPACE = b" \t\r"
_OPENS_ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
"How a file begins that is one array of objects."
_FIRST, _LAST = frozenset(b'{["-0123456789tfn'), frozenset(b'}]"0123456789el')
"What a JSON value can begin and end with."
_SHORT = 1000
"A line of fewer bytes cannot be nested too deep."
_LEAST_LINE = 2
"Bytes of the shortest line that holds a record, with its end."


def decode_lines(lines: list[bytes]) -> Decoded:
    """The values of the lines; a line that is none is listed as bad or, if empty, as blank."""
    decoded = Decoded(records=[], bad=[], blank=[])
    try:
        decoded.records.extend(map(_loads, lines))
    except orjson.JSONDecodeError:
        decoded.records.clear()
        _decode_each(lines, _promising(lines, decoded), decoded)
        decoded.bad.sort()
    return decoded


def _promising(lines: list[bytes], decoded: Decoded) -> list[int]:
    """The lines that may hold a value. An exception takes 3 us, a look at a line 0.2 us: none is raised for those that are
    blank, nor for those that plainly are no JSON, as nearly every line of a text or of an indented JSON file."""
    found = []
    for index, line in enumerate(lines):
        text = line.strip(_WHITESPACE)
        if not text:
            decoded.blank.append(index)
        elif text[0] in _FIRST and (text[-1] in _LAST or len(text) > _SHORT or b"\\" in text):
            found.append(index)
        else:
            decoded.bad.append((index, reason_of(line, "")))
    return found


def _decode_each(lines: list[bytes], found: list[int], decoded: Decoded) -> None:
    """The values of the lines `found`, and which of them hold none."""
    rest, bad = map(lines.__getitem__, found), 0
    while True:
        try:
            # On an error `extend` has kept what came before, and `rest` stands behind the bad line.
            decoded.records.extend(map(_loads, rest))
            return
        except orjson.JSONDecodeError as error:
            index = found[len(decoded.records) + bad]
            decoded.bad.append((index, reason_of(lines[index], str(error))))
            bad += 1


def reason_of(line: bytes, message: str) -> str:
    """The code of why a line is no value, of which orjson said so."""
    try:
        line.decode()
    except UnicodeDecodeError:
        return "invalid_utf8"
    if "surrogate" in message:
        return "lone_surrogate"
    too_deep = "depth" in message or "recursion" in message.lower()  # as orjson 3.11, and before
    if too_deep:
        return "too_deep"
    return "json_array" if b"[" in line and _OPENS_ARRAY.match(line) else "not_json"


class Jsonl(Format):
    """`*.jsonl` and, compressed, `*.jsonl.gz` and `*.jsonl.zst`. Its ordinals are uncompressed bytes."""

    counted = "line"
    lines_format: ClassVar[str] = "jsonl"

    def __init__(self, packing: str) -> None:
        self._packing = packing
        self.size_factor = 4 if packing else 1  # text compresses three- to fivefold

    def splits(
        self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]
    ) -> Iterable[tuple[int, int | None]]:
        if self._packing:
            return [(0, None)]
        size = file.stat.size
        return [(n, min(n + window_bytes, size)) for n in range(0, size, window_bytes)]

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        until = None if span.end is None else span.end + TAIL_BYTES
        with opened(file, self._packing, span.memory, max(0, span.start - 1), until) as read:
            if self._packing or span.end is None:
                pieces = all_bytes(read, span)
            else:
                pieces = owned_bytes(read, span.start, span.end)
            said, decoder = self.lines_format, self.decoder()
            new_block = partial(LineBlock, format=said, file=file.name, decoder=decoder)
            yield from split_lines(pieces, span, new_block)

    def decoder(self) -> Callable[[list[bytes]], Decoded]:
        """What makes records of lines."""
        return decode_lines

    def shown(self, ordinal: int) -> str:
        return shown(ordinal)

    def fits(self, head: bytes) -> bool:
        line, *rest = head.lstrip().split(b"\n", 1)
        if not line.startswith(b"{"):
            return False
        decoded = decode_lines([line])
        return bool(decoded.records) or not rest  # a first line that is longer than the head

    def most_records(self, file: SourceFile, start: int, end: int | None) -> float:
        if self._packing:
            return inf
        return ((file.stat.size if end is None else end) - start) // _LEAST_LINE + 1

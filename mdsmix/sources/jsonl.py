"""JSON Lines, plain or compressed: one JSON value of any type a line.

A block of good lines is decoded by one `map(orjson.loads, lines)` in C. A bad line stops that loop,
is set aside and the loop goes on behind it, so that it costs its neighbours nothing. Lines are
never joined into one array, which would let two values on a line pass for one each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import orjson

from mdsmix.sources.blocks import Block, Decoded
from mdsmix.sources.inflate import Inflated
from mdsmix.sources.lines import LineBlock, all_bytes, owned_bytes, split_lines
from mdsmix.sources.units import SourceFile, Span

_WHITESPACE = b" \t\r"


def decode_lines(lines: list[bytes]) -> Decoded:
    """The values of the lines; a line that is none is listed as bad or, if empty, as blank."""
    decoded = Decoded(records=[], bad=[], blank=[])
    try:
        decoded.records.extend(map(orjson.loads, lines))
    except orjson.JSONDecodeError:
        decoded.records.clear()
        # An exception takes 1 us or more, a look at a line 0.05 us: none is raised for those that are blank.
        held = [index for index, line in enumerate(lines) if line.strip(_WHITESPACE)]
        if len(held) < len(lines):
            decoded.blank.extend(sorted(set(range(len(lines))).difference(held)))
        _decode_each(lines, held, decoded)
    return decoded


def _decode_each(lines: list[bytes], held: list[int], decoded: Decoded) -> None:
    """The values of the lines `held`, none of which is blank."""
    rest = map(lines.__getitem__, held)
    while True:
        try:
            # On an error `extend` has kept what came before, and `rest` stands behind the bad line.
            decoded.records.extend(map(orjson.loads, rest))
            return
        except orjson.JSONDecodeError as error:
            index = held[len(decoded.records) + len(decoded.bad)]
            decoded.bad.append((index, _reason(lines[index], str(error))))


def _reason(line: bytes, message: str) -> str:
    try:
        line.decode()
    except UnicodeDecodeError:
        return "invalid_utf8"
    if "surrogate" in message:
        return "lone_surrogate"
    too_deep = "depth" in message or "recursion" in message.lower()  # as orjson 3.11, and before
    return "too_deep" if too_deep else "not_json"


@dataclass(frozen=True, slots=True)
class Jsonl:
    """`*.jsonl` and, compressed, `*.jsonl.gz` and `*.jsonl.zst`."""

    packing: str = ""
    name: ClassVar[str] = "jsonl"

    @property
    def growth(self) -> int:
        return 4 if self.packing else 1  # text compresses three- to fivefold

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with file.open(max(0, span.start - 1), span.end) as stored:
            if self.packing:
                inflated = Inflated(stored, self.packing, file.location.url, span.memory)
                pieces = all_bytes(inflated.read, span)
            elif span.end is None:
                pieces = all_bytes(stored.read, span)
            else:
                pieces = owned_bytes(stored.read, span.start, span.end)
            new_block = partial(LineBlock, file=file.name, decoder=decode_lines)
            yield from split_lines(pieces, span, new_block)

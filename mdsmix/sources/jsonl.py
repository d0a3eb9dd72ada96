"""JSON Lines, plain or compressed: one JSON value of any type a line; and lines, 8 MB at a time, for other formats of lines.

Lines are cut by one `bytes.split` a block, and decoded by one `map(orjson.loads, lines)`, both in C; only the line that crosses from
one block into the next is put together by hand. A bad line stops the decoding loop, is set aside, and the loop goes on behind it.
Lines are never joined into one array, which would let two values on a line pass for one each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import ClassVar

import orjson

from mdsmix.sources.format import MARK, Block, BoundedBytes, Decoded, Format, Origin, Splits
from mdsmix.sources.inflate import opened
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span

PIECE_BYTES = BLOCK_BYTES - (1 << 20)
"Leaves room in a batch of 8 MB for the line that crosses into it."
TAIL_BYTES = 64 << 10
"Beyond the end of a split, where its last line may end: the same request brings them, and most lines are shorter."
_OPENS_ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
"How a file begins that is one array of objects."
_LEAST_LINE = 2
"Bytes of the shortest line that holds a record, with its end."

Read = Callable[[int], bytes]
Pieces = Iterator[tuple[int, bytes]]
"Consecutive (offset, bytes) of one file."
Decoder = Callable[[list[bytes]], Decoded]


def decode_lines(lines: list[bytes]) -> Decoded:
    """The values of the lines; a line that is none is listed as bad or, if empty, as blank."""
    decoded, rest = Decoded(), map(orjson.loads, lines)
    while True:
        try:
            # On an error `extend` has kept what came before, and `rest` stands behind the bad line.
            decoded.records.extend(rest)
            return decoded
        except orjson.JSONDecodeError as error:
            index = len(decoded.records) + len(decoded.bad) + len(decoded.blank)
            if lines[index].strip(b" \t\r"):
                decoded.bad.append((index, reason_of(lines[index], str(error))))
            else:
                decoded.blank.append(index)


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def reason_of(line: bytes, message: str) -> str:
    """The code of why a line is no value, of which orjson said so."""
    if not is_utf8(line):
        return "invalid_utf8"
    if "surrogate" in message:
        return "lone_surrogate"
    if "depth" in message or "recursion" in message.lower():  # as orjson 3.11, and before
        return "too_deep"
    return "json_array" if _OPENS_ARRAY.match(line) else "not_json"


@dataclass(slots=True, kw_only=True)
class LineBlock(Block):
    """Consecutive lines of one file, without their ends, or one that was too long to be kept. It starts at a line, counted from 1 at
    the split's start, and a byte."""

    decoder: Decoder
    _starts: list[int] = field(default_factory=list)

    def decode(self) -> Decoded:
        return Decoded(bad=[(0, "line_too_long")]) if self.sizes else self.decoder(self.raws)

    def origin(self, index: int) -> Origin:
        line, offset = self.start
        if not self._starts:
            self._starts.extend(accumulate((len(raw) + 1 for raw in self.raws), initial=offset))
        raw, offset = self.raws[index], self._starts[index]
        length = self.sizes[index] if self.sizes else len(raw)
        return Origin(self.file, offset, {"line": line + index, "offset": offset}, length, raw)


def owned_bytes(read: Read, start: int, end: int) -> Pieces:
    """The lines of a plain file that start in [start, end), whole, in pieces.

    `read` stands at `start`, or one byte before it where that is not 0: a line starts at `start`
    when a line ends there.
    """
    position = start - 1 if start else 0
    inside, last = start == 0, b"\n"
    while position < end and (piece := read(min(PIECE_BYTES, end - position))):
        position += len(piece)
        if not inside:
            _, newline, piece = piece.partition(b"\n")
            inside = bool(newline)
        if piece:
            last = piece[-1:]
            yield position - len(piece), piece
    while last != b"\n" and (piece := read(TAIL_BYTES)):
        head, last, _ = piece.partition(b"\n")
        yield position, head + last
        position += len(head) + len(last)


def all_bytes(read: Read, span: Span) -> Pieces:
    """A whole file in pieces of which none crosses a window's edge."""
    position = 0
    while piece := read(min(PIECE_BYTES, span.next_edge(position) - position)):
        yield position, piece
        position += len(piece)


def split_lines(
    pieces: Pieces, span: Span, file: SourceFile, format: str, decoder: Decoder
) -> Iterator[LineBlock]:
    """The lines of consecutive pieces as blocks; a line is in the window of its first byte."""
    line = 1

    def block(
        offset: int, raws: list[bytes], whole: memoryview | None, sizes: list[int] | None = None
    ) -> LineBlock:
        nonlocal line
        window, start = span.window_of(offset - span.start), offset
        if offset == 0 and raws[0].startswith(MARK):
            raws[0], start = raws[0][len(MARK) :], len(MARK)
            whole = whole and whole[start:]
        line += len(raws)
        return LineBlock(
            format=format,
            file=file.name,
            window=window,
            start=(line - len(raws), start),
            raws=raws,
            sizes=sizes,
            whole=whole,
            decoder=decoder,
        )

    def crossing() -> LineBlock:
        if held.is_too_long:
            return block(held.offset, [b""], None, [held.length])
        return block(held.offset, [b"".join(held.parts)], None)

    held = BoundedBytes()
    for offset, piece in pieces:
        texts = piece.split(b"\n")
        rest = texts.pop()
        begin, end = 0, len(piece) - len(rest)
        if held.length and texts:
            begin = len(texts[0]) + 1
            held.add(texts.pop(0))
            yield crossing()
            held = BoundedBytes()
        if texts:
            yield block(offset + begin, texts, memoryview(piece)[begin:end])
        if not held.length:
            held.offset = offset + end
        held.add(rest)
    if held.length:
        yield crossing()


class Jsonl(Format):
    """`*.jsonl` and, compressed, `*.jsonl.gz` and `*.jsonl.zst`. Its ordinals are uncompressed bytes."""

    counted = "line"
    lines_format: ClassVar[str] = "jsonl"

    def __init__(self, packing: str) -> None:
        self._packing = packing
        self.size_factor = 4 if packing else 1  # text compresses three- to fivefold

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
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
            yield from split_lines(pieces, span, file, self.lines_format, self.decoder)

    def decoder(self, lines: list[bytes]) -> Decoded:
        """The records of lines."""
        return decode_lines(lines)

    def fits(self, head: bytes) -> bool:
        line, *rest = head.lstrip().split(b"\n", 1)
        if not line.startswith(b"{"):
            return False
        return bool(decode_lines([line]).records) or not rest  # a first line longer than the head

    def most_records(self, file: SourceFile, start: int, end: int | None) -> float:
        if self._packing:
            return inf
        return ((file.stat.size if end is None else end) - start) // _LEAST_LINE + 1

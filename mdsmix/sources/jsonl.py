"""JSON Lines, plain or compressed: one JSON value of any type a line; and lines, 8 MB at a time, for other formats of lines.

Lines are cut by one `bytes.split` a block, and decoded by one `map(orjson.loads, lines)`, both in C; only the line that crosses from
one block into the next is put together by hand. A bad line stops the decoding loop, is set aside, and the loop goes on behind it.
Lines are never joined into one array, which would let two values on a line pass for one each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO, ClassVar

import orjson

from mdsmix.sources.format import (
    BLANK,
    MARK,
    Block,
    BoundedBytes,
    Decoded,
    Decoder,
    Format,
    Item,
    Splits,
)
from mdsmix.sources.inflate import opened
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span

PIECE_BYTES = BLOCK_BYTES - (1 << 20)
"Leaves room in a batch of 8 MB for the line that crosses into it."
TAIL_BYTES = 64 << 10
"Beyond the end of a split, where its last line may end: the same request brings them, and most lines are shorter."
_OPENS_ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
"How a file begins that is one array of objects."

Pieces = Iterator[tuple[int, bytes]]
"Consecutive (offset, bytes) of one file, without a byte order mark."


def decode_lines(lines: list[bytes]) -> Decoded:
    """The values of the lines."""
    records, faults, rest = list[Any](), dict[int, str](), map(orjson.loads, lines)
    while True:
        try:
            # On an error `extend` has kept what came before, and `rest` stands behind the bad line.
            records.extend(rest)
            return records, faults
        except orjson.JSONDecodeError as error:
            index = len(records) + len(faults)
            faults[index] = reason_of(lines[index], str(error))


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def reason_of(line: bytes, message: str) -> str:
    """The code of why a line is no value, of which orjson said so."""
    if not line.strip(b" \t\r"):
        return BLANK
    if not is_utf8(line):
        return "invalid_utf8"
    if "surrogate" in message:
        return "lone_surrogate"
    if "depth" in message or "recursion" in message.lower():  # as orjson 3.11, and before
        return "too_deep"
    return "json_array" if _OPENS_ARRAY.match(line) else "not_json"


def owned_bytes(stream: BinaryIO, start: int, end: int) -> Pieces:
    """The lines of a plain file that start in [start, end), whole, in pieces.

    `stream` stands at `start`, or one byte before it where that is not 0: a line starts at `start` when a line ends there.
    """
    position, piece = start, b"\n"
    if start:
        position += sum(map(len, _to_line_end(stream))) - 1
    while position < end and (piece := stream.read(min(PIECE_BYTES, end - position))):
        yield _unmarked(position, piece)
        position += len(piece)
    if not piece.endswith(b"\n"):
        for piece in _to_line_end(stream):
            yield position, piece
            position += len(piece)


def _to_line_end(stream: BinaryIO) -> Iterator[bytes]:
    """The rest of the line, in pieces."""
    while piece := stream.readline(PIECE_BYTES):
        yield piece
        if piece.endswith(b"\n"):
            return


def all_bytes(stream: BinaryIO, span: Span) -> Pieces:
    """A whole file in pieces of which none crosses a window's edge."""
    position = 0
    while piece := stream.read(min(PIECE_BYTES, span.next_edge(position) - position)):
        yield _unmarked(position, piece)
        position += len(piece)


def _unmarked(offset: int, piece: bytes) -> tuple[int, bytes]:
    has_mark = offset == 0 and piece.startswith(MARK)
    return (len(MARK), piece[len(MARK) :]) if has_mark else (offset, piece)


def split_lines(
    pieces: Pieces, span: Span, file: SourceFile, format: str, decoder: Decoder
) -> Iterator[Block]:
    """The lines of consecutive pieces as blocks; a line is in the window of its first byte."""
    line, held = 1, BoundedBytes()

    def block(offset: int, raws: list[bytes], whole: memoryview | None = None) -> Block:
        nonlocal line
        line += len(raws)
        return Block(
            format=format,
            file=file.name,
            window=span.window_of(offset - span.start),
            start=(line - len(raws), offset),
            raws=raws,
            whole=whole,
            decoder=decoder,
        )

    def crossing() -> Block:
        """The line that came in several pieces."""
        offset, place = held.offset, {"line": line, "offset": held.offset}
        made = block(offset, [b"".join(held.parts)])
        if not held.is_too_long:
            return made
        return replace(made, items=[Item(offset, place, held.length, b"", None, "line_too_long")])

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

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        if self.packing:
            return [(0, None)]
        size = file.stat.size
        return [(n, min(n + window_bytes, size)) for n in range(0, size, window_bytes)]

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        start, end = span.start, span.end
        until = None if end is None else end + TAIL_BYTES
        with opened(file, self.packing, span.memory, max(0, start - 1), until) as stream:
            if self.packing or end is None:
                pieces = all_bytes(stream, span)
            else:
                pieces = owned_bytes(stream, start, end)
            yield from split_lines(pieces, span, file, self.lines_format, self.decoder)

    def decoder(self, lines: list[bytes]) -> Decoded:
        """The records of lines."""
        return decode_lines(lines)

"""JSON Lines, plain or compressed: one JSON value of any type on each line. Other formats of lines
are cut into lines here too.

`BytesIO.readlines` cuts a block into lines, in a third of the time of `bytes.split`, and one
`map(orjson.loads, lines)` decodes them, both in C. Lines with a long run of digits are read by
`json_values.read_json`, which keeps large whole numbers. Only a line that crosses from one block
into the next is put together by hand. A bad line stops the decoding loop and is set aside, and the
loop goes on after it. Lines are never joined into one array: a line with two values, comma between,
would pass for two lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from typing import Any, BinaryIO, ClassVar

import orjson

from mdsmix.json_values import TOO_LARGE, UnreadableNumber, has_long_numbers, read_json
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

PIECE_BYTES = BLOCK_BYTES - (1 << 19)
"Bytes that are read at once; a batch of 4 MB has room left for the line that crosses into it."
TAIL_BYTES = 64 << 10
"""Bytes asked for beyond a split's end, in the same request: the last line ends there, as most
lines are shorter.
"""
_OPENS_ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
"The beginning of a file that is one array of objects."

Pieces = Iterator[tuple[int, bytes]]
"Consecutive (offset, bytes) of one file, without a byte order mark."


def decode_lines(lines: list[bytes]) -> Decoded:
    """The values of the lines, and the reasons of lines that hold none."""
    read = read_json if has_long_numbers(b"".join(lines)) else orjson.loads
    records, faults, rest = list[Any](), dict[int, str](), map(read, lines)
    while True:
        try:
            # On an error `extend` has kept the earlier values, and `rest` goes on after the bad
            # line.
            records.extend(rest)
            return records, faults
        except (ValueError, RecursionError) as error:
            index = len(records) + len(faults)
            faults[index] = reason_of(lines[index], error)


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def reason_of(line: bytes, error: Exception) -> str:
    """Return the reason code of a line that `read_json` refuses with this error."""
    message = str(error)
    if not line.strip(b" \t\r\n"):
        return BLANK
    if not is_utf8(line):
        return "invalid_utf8"
    if "surrogate" in message:
        return "lone_surrogate"
    if "depth" in message or "recursion" in message.lower():  # as orjson 3.11, and before
        return "too_deep"
    if isinstance(error, UnreadableNumber) or TOO_LARGE in message:
        return "unreadable_value"
    return "json_array" if _OPENS_ARRAY.match(line) else "not_json"


def owned_bytes(stream: BinaryIO, start: int, end: int) -> Pieces:
    """The whole lines that start in [start, end) of a plain file, in pieces.

    `stream` stands one byte before `start`, or at 0: a line starts at `start` only if the byte
    before ends a line.
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
    """The rest of the line at which `stream` stands, in pieces."""
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
        """The block of a line that came in several pieces."""
        offset, place = held.offset, {"line": line, "offset": held.offset}
        made = block(offset, [b"".join([*held.parts, b"\n"])])
        if not held.is_too_long:
            return made
        return replace(made, items=[Item(offset, place, held.length, b"", None, "line_too_long")])

    for offset, piece in pieces:
        lines = BytesIO(piece).readlines()
        rest = lines.pop() if lines and not piece.endswith(b"\n") else b""
        begin, end = 0, len(piece) - len(rest)
        if held.length and lines:
            begin = len(lines[0])
            held.add(lines.pop(0)[:-1])
            yield crossing()
            held = BoundedBytes()
        if lines:
            yield block(offset + begin, lines, memoryview(piece)[begin:end])
        if not held.length:
            held.offset = offset + end
        held.add(rest)
    if held.length:
        yield crossing()


class Jsonl(Format):
    """`*.jsonl` and, compressed, `*.jsonl.gz` and `*.jsonl.zst`. Its ordinals are uncompressed
    bytes.
    """

    counted = "line"
    lines_format: ClassVar[str] = "jsonl"
    reasons: ClassVar[Mapping[str, str]] = {
        "line_too_long": "The line has more than 256 MiB; its place and length are kept.",
    }

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

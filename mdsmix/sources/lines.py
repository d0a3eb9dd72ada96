"""The bytes of a file cut into lines, 8 MB at a time, each line owned by the window it starts in.

Lines are cut by one `bytes.split` a block, in C; only the line that crosses from one block into
the next is put together by hand. A line above 256 MiB is skipped as it streams by and reported by
its offset and length, so memory stays bounded whatever the file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from mdsmix.sources.format import Block, Decoded, Origin
from mdsmix.sources.units import BLOCK_BYTES, Span

LONGEST_LINE = 256 << 20
_PIECE_BYTES = BLOCK_BYTES - (1 << 20)
"""Leaves room in a batch of 8 MB for the line that crosses into it."""
TAIL_BYTES = 64 << 10
"""Beyond the end of a split, where its last line may end: the same request brings them, and most lines are shorter."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Read = Callable[[int], bytes]
Pieces = Iterator[tuple[int, bytes]]
"""Consecutive (offset, bytes) of one file."""


@dataclass(slots=True, kw_only=True)
class LineBlock(Block):
    """Consecutive lines of one file, without their ends, or one that was too long to be kept."""

    offset: int
    line: int
    "From 1, counted from the split's first line."
    decoder: Callable[[list[bytes]], Decoded]
    _starts: list[int] = field(default_factory=list)

    @property
    def start(self) -> tuple[int, int]:
        return self.line, self.offset

    def decode(self) -> Decoded:
        if self.sizes:
            return Decoded(records=[], bad=[(0, "line_too_long")], blank=[])
        return self.decoder(self.raws)

    def origin(self, index: int) -> Origin:
        if not self._starts:
            lengths = (len(raw) + 1 for raw in self.raws)
            self._starts.extend(accumulate(lengths, initial=self.offset))
        raw, offset = self.raws[index], self._starts[index]
        place = {"line": self.line + index, "offset": offset}
        length = self.sizes[index] if self.sizes else len(raw)
        return Origin(self.file, offset, shown(offset), place, length, raw)


NewBlock = Callable[..., LineBlock]


def shown(offset: int) -> str:
    """The place of a line for a person."""
    return f"byte {offset}"


def owned_bytes(read: Read, start: int, end: int) -> Pieces:
    """The lines of a plain file that start in [start, end), whole, in pieces.

    `read` stands at `start`, or one byte before it where that is not 0: a line starts at `start`
    when a line ends there.
    """
    position = start - 1 if start else 0
    inside, last = start == 0, b"\n"
    while position < end and (piece := read(min(_PIECE_BYTES, end - position))):
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
    while piece := read(min(_PIECE_BYTES, span.next_edge(position) - position)):
        yield position, piece
        position += len(piece)


def split_lines(pieces: Pieces, span: Span, new_block: NewBlock) -> Iterator[LineBlock]:
    """The lines of consecutive pieces as blocks; a line is in the window of its first byte."""
    line, crossing = 1, _Crossing()
    for offset, piece in pieces:
        texts = piece.split(b"\n")
        rest = texts.pop()
        begin, end = 0, len(piece) - len(rest)
        if crossing.length and texts:
            begin = len(texts[0]) + 1
            crossing.add(texts.pop(0), offset)
            yield crossing.block(line, span, new_block)
            line, crossing = line + 1, _Crossing()
        if texts:
            whole = memoryview(piece)[begin:end]
            yield _block(line, offset + begin, texts, span, new_block, whole)
            line += len(texts)
        crossing.add(rest, offset + end)
    if crossing.length:
        yield crossing.block(line, span, new_block)


@dataclass(slots=True)
class _Crossing:
    """The line that has begun in one piece and not ended yet."""

    offset: int = 0
    length: int = 0
    parts: list[bytes] = field(default_factory=list)

    def add(self, text: bytes, offset: int) -> None:
        if not self.length:
            self.offset = offset
        self.length += len(text)
        if self.length <= LONGEST_LINE:
            self.parts.append(text)
        else:
            self.parts.clear()

    def block(self, line: int, span: Span, new_block: NewBlock) -> LineBlock:
        if self.length <= LONGEST_LINE:
            return _block(line, self.offset, [b"".join(self.parts)], span, new_block)
        window = span.window_of(self.offset - span.start)
        return new_block(
            window=window, offset=self.offset, line=line, raws=[b""], sizes=[self.length]
        )


def _block(
    line: int,
    offset: int,
    texts: list[bytes],
    span: Span,
    new_block: NewBlock,
    whole: memoryview | None = None,
) -> LineBlock:
    """`whole`: the lines with their ends, where they stand behind each other already."""
    window = span.window_of(offset - span.start)
    if offset == 0 and texts[0].startswith(_BYTE_ORDER_MARK):
        offset = len(_BYTE_ORDER_MARK)
        texts[0] = texts[0][offset:]
        whole = None if whole is None else whole[offset:]
    return new_block(window=window, offset=offset, line=line, raws=texts, whole=whole)

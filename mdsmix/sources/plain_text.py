"""Plain text: a document is a file, a line or a paragraph, as the recipe's `source.split_by` says, since nothing in it tells.

The record has one field, `text`. Of a line its end is no part; of a paragraph neither are the lines of white space around it;
a file is its text as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from mdsmix.errors import RecipeError
from mdsmix.sources import format
from mdsmix.sources.format import (
    BLANK,
    MARK,
    Block,
    BoundedBytes,
    Decoded,
    Item,
    Splits,
    item_blocks,
)
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import Jsonl, LineBlock, Pieces, all_bytes, split_lines
from mdsmix.sources.units import SourceFile, Span

LONG_LINE = 120
"Bytes: lines that are longer on average were not broken for a reader."


def _text(raw: bytes) -> tuple[Any, str]:
    """A text as a record, or why it is none."""
    if not raw.strip():
        return None, BLANK
    try:
        return {"text": raw.decode()}, ""
    except UnicodeDecodeError:
        return None, "invalid_utf8"


def decode_texts(lines: list[bytes]) -> Decoded:
    """The lines as records; one of white space is none."""
    decoded = Decoded()
    for index, line in enumerate(lines):
        record, reason = _text(line.removesuffix(b"\r"))
        if not reason:
            decoded.records.append(record)
        elif reason == BLANK:
            decoded.blank.append(index)
        else:
            decoded.bad.append((index, reason))
    return decoded


class Text(Jsonl):
    """`*.txt`. Its ordinals are uncompressed bytes; only by lines a large file is cut."""

    heeds: ClassVar[tuple[str, ...]] = ("split_by",)
    lines_format = "text line"

    def decoder(self, lines: list[bytes]) -> Decoded:
        return decode_texts(lines)

    def check(self, file: SourceFile) -> None:
        super().check(file)
        if not file.read_as.split_by:
            raise RecipeError(
                f"{file.name} is plain text, in which nothing tells where a document ends: say it by source.split_by, which is file, "
                "line or paragraph"
            )

    def fits(self, head: bytes) -> bool:
        return False  # whatever is text may be anything

    def guess(self, file: SourceFile, head: Callable[[], bytes]) -> Mapping[str, Any]:
        """Lines that are long, without an empty one between them, are documents; else the file is one, if it is not too long."""
        lines = head().split(b"\n")[:-1]
        if len(lines) > 1 and all(lines) and sum(map(len, lines)) > LONG_LINE * len(lines):
            return {"split_by": "line"}
        is_short = file.stat.size * self.size_factor < format.LONGEST
        return {"split_by": "file" if is_short else "paragraph"}

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        if file.read_as.split_by != "line":
            return [(0, None)]
        return super().splits(file, window_bytes, fields)

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        split_by = file.read_as.split_by
        if split_by == "line":
            yield from super().blocks(file, span)
            return
        with opened(file, self._packing, span.memory) as read:
            pieces = all_bytes(read, span)
            if split_by == "file":
                found = _whole(pieces)
            else:
                found = _paragraphs(split_lines(pieces, span, file, "", decode_texts))
            yield from item_blocks(file, span, f"text {split_by}", found)


def _whole(pieces: Pieces) -> Iterator[Item]:
    """All of a file as one document."""
    text = BoundedBytes()
    for offset, piece in pieces:
        text.add(piece if offset else piece.removeprefix(MARK))
    yield text.item({"line": 1}, _text)


def _paragraphs(blocks: Iterator[LineBlock]) -> Iterator[Item]:
    """Runs of lines of which none is white space."""
    held, begin, first, offset = list[bytes](), -1, 0, 0

    def paragraph() -> Item:
        text = BoundedBytes(begin, offset - begin, [b"\n".join(held)])
        return text.item({"line": first}, _text, b"\r")

    for block in blocks:
        line, offset = block.start
        for number, raw in enumerate(block.raws, line):
            if not block.sizes and (not raw or raw.isspace()):
                if begin >= 0:
                    yield paragraph()
                held, begin = [], -1
            else:
                if begin < 0:
                    begin, first = offset, number
                held.append(raw)
            offset += block.sizes[0] if block.sizes else len(raw) + 1
            if begin >= 0 and offset - begin > format.LONGEST:
                held.clear()
    if begin >= 0:
        yield paragraph()

"""Plain text: a document is a file, a line or a paragraph, as the recipe's `source.split_by` says, since nothing in it tells.

The record has one field, `text`. Of a line its end is no part; of a paragraph neither are the lines of white space around it;
a file is its text as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, ClassVar

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
from mdsmix.sources.jsonl import Jsonl, Pieces, all_bytes
from mdsmix.sources.units import SourceFile, Span

LONG_LINE = 120
"Bytes: lines that are longer on average were not broken for a reader."


def decode_texts(texts: list[bytes]) -> Decoded:
    """The texts as records; one of white space is none."""
    records, faults = list[Any](), dict[int, str]()
    for index, raw in enumerate(texts):
        if not raw.strip():
            faults[index] = BLANK
            continue
        try:
            records.append({"text": raw.decode()})
        except UnicodeDecodeError:
            faults[index] = "invalid_utf8"
    return records, faults


class Text(Jsonl):
    """`*.txt`. Its ordinals are uncompressed bytes; only by lines a large file is cut."""

    heeds: ClassVar[tuple[str, ...]] = ("split_by",)
    lines_format = "text line"

    def decoder(self, lines: list[bytes]) -> Decoded:
        return decode_texts([line.removesuffix(b"\r") for line in lines])

    def check(self, file: SourceFile) -> None:
        super().check(file)
        if not file.read_as.split_by:
            raise RecipeError(
                f"{file.name} is plain text, in which nothing tells where a document ends: say it by source.split_by, which is file, "
                "line or paragraph"
            )

    def guess(self, file: SourceFile, head: Callable[[], bytes]) -> Mapping[str, Any]:
        """Lines that are long, without an empty one between them, are documents; else the file is one, if it is not too long."""
        lines = head().split(b"\n")[:-1]
        if len(lines) > 1 and all(lines) and sum(map(len, lines)) > LONG_LINE * len(lines):
            return {"split_by": "line"}
        return {"split_by": "file" if self.weight(file) < format.LONGEST else "paragraph"}

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        is_by_line = file.read_as.split_by == "line"
        return super().splits(file, window_bytes, fields) if is_by_line else [(0, None)]

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        split_by = file.read_as.split_by
        if split_by == "line":
            yield from super().blocks(file, span)
            return
        with opened(file, self.packing, span.memory) as stream:
            is_one = split_by == "file"
            found = _whole(all_bytes(stream, span)) if is_one else _paragraphs(stream)
            yield from item_blocks(file, span, f"text {split_by}", found)


def _whole(pieces: Pieces) -> Iterator[Item]:
    """All of a file as one document."""
    text = BoundedBytes()
    for _, piece in pieces:
        text.add(piece)
    yield text.item(decode_texts, line=1)


def _paragraphs(stream: BinaryIO) -> Iterator[Item]:
    """Runs of lines of which none is white space; of a line that is too long, pieces."""
    text, offset, number, first = BoundedBytes(), 0, 1, 1
    while line := stream.readline(format.LONGEST):
        if not offset and line.startswith(MARK):
            offset, line = len(MARK), line[len(MARK) :]
        if line.isspace():
            yield from _paragraph(text, first)
            text = BoundedBytes()
        else:
            if not text.length:
                text.offset, first = offset, number
            text.add(line)
        offset, number = offset + len(line), number + 1
    yield from _paragraph(text, first)


def _paragraph(text: BoundedBytes, line: int) -> Iterator[Item]:
    """The lines that were gathered, if there are any. The last one's end is counted, also where it has none."""
    if text.parts:
        last = text.parts.pop()
        text.length += not last.endswith(b"\n")
        text.parts.append(last.removesuffix(b"\n").removesuffix(b"\r"))
    if text.length:
        yield text.item(decode_texts, line=line)

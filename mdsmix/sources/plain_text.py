"""Plain text: a document is a file, a line or a paragraph. The recipe's `source.split_by` says
which, since the text does not tell.

A record has one field, `text`. A line is without its end, a paragraph without its last line end and
the blank lines around it, and a file is its text as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

HEAD_BYTES = 64 << 10
"First bytes of a file, as stored, from which its lines are judged."
LONG_LINE = 120
"Mean bytes of a line: longer lines were not broken for a reader."


def decode_texts(texts: list[bytes]) -> Decoded:
    """The texts as records; a text of white space is BLANK."""
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
    """`*.txt`. Its ordinals are uncompressed bytes. A large file is cut into splits only with
    `split_by: line`.
    """

    version = 1  # a new way to read JSON does not concern it

    heeds: ClassVar[tuple[str, ...]] = ("split_by",)
    lines_format = "text line"

    def decoder(self, lines: list[bytes]) -> Decoded:
        return decode_texts([line[:-1].removesuffix(b"\r") for line in lines])

    def check(self, file: SourceFile) -> None:
        super().check(file)
        if not file.read_as.split_by:
            raise RecipeError(
                f"{file.name} is plain text, in which nothing tells where a document ends: say it by source.split_by, which is file, "
                "line or paragraph"
            )

    def guess(self, file: SourceFile) -> Mapping[str, Any]:
        """`line` for long lines without an empty one between them; else `file` if the file is no
        longer than a record may be; else `paragraph`.
        """
        with file.open(until=HEAD_BYTES) as stored:
            lines = stored.read(HEAD_BYTES).split(b"\n")[:-1]
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
            found = _whole(all_bytes(stream, span)) if split_by == "file" else _paragraphs(stream)
            yield from item_blocks(file, span, f"text {split_by}", found)


def _whole(pieces: Pieces) -> Iterator[Item]:
    """All of a file as one document."""
    text = BoundedBytes()
    for _, piece in pieces:
        text.add(piece)
    yield text.item(decode_texts, line=1)


def _paragraphs(stream: BinaryIO) -> Iterator[Item]:
    """Runs of lines that are not white space. A line that is too long is read in pieces."""
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
    """The gathered lines as an item, if there are any. Their length counts a line end after the
    last line, also where it has none.
    """
    if text.parts:
        last = text.parts.pop()
        text.length += not last.endswith(b"\n")
        text.parts.append(last.removesuffix(b"\n").removesuffix(b"\r"))
    if text.length:
        yield text.item(decode_texts, line=line)

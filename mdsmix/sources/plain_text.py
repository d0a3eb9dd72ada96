"""Plain text: a document is a file, a line or a paragraph. The recipe's `source.split_by` decides
this, since the text itself does not show it.

A record has one field, `text`. It is a line without its newline; or a paragraph without its last
newline and the blank lines around it; or the whole text of a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, ClassVar

from mdsmix.errors import RecipeError
from mdsmix.sources import format
from mdsmix.sources.format import (
    BLANK,
    BYTE_ORDER_MARK,
    Block,
    BoundedBytes,
    Buffer,
    Decoded,
    Item,
    Splits,
    make_item_blocks,
)
from mdsmix.sources.inflate import open_unpacked
from mdsmix.sources.jsonl import Jsonl, Pieces, read_all_bytes
from mdsmix.sources.sniff import sniff_format
from mdsmix.sources.units import SourceFile, Span

HEAD_BYTES = 64 << 10
"How many first bytes of a file, as stored, `guess` looks at."
LONG_LINE = 120
"Mean bytes of a line. Text whose lines are longer was not wrapped for reading."


def decode_texts(texts: list[bytes]) -> Decoded:
    """Return (records, reasons) of texts: a record `{"text": ...}` for each text in order, and
    index -> reason code for each text that is not a record. The reason of a text of only white
    space is BLANK.
    """
    records = list[Any]()
    faults = dict[int, str]()
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
    """The format of `*.txt`. The ordinal of a record (a number that increases through the file) is
    the uncompressed byte at which it begins.

    The recipe's `split_by` says what a record is: the file, a paragraph or a line. Only with `line`
    is a large file cut into splits that are converted separately.
    """

    version = 1  # set here, so that it stays when Jsonl's version is increased

    heeds: ClassVar[tuple[str, ...]] = ("split_by",)
    lines_format = "text line"

    def decoder(self, lines: list[bytes], whole: Buffer | None = None) -> Decoded:
        return decode_texts([line[:-1].removesuffix(b"\r") for line in lines])

    def check(self, file: SourceFile) -> None:
        """Raise RecipeError if the recipe does not say what a document is, or sets a key that plain
        text does not use.
        """
        super().check(file)
        if not file.read_as.split_by:
            hint = ""
            if sniff_format(file) == "jsonl":
                hint = "; or, since it begins like JSON Lines, set source.format: jsonl"
            raise RecipeError(
                f"{file.name} is plain text, which does not show where a document ends: "
                f"set source.split_by in the recipe to file, line or paragraph{hint}"
            )

    def guess(self, file: SourceFile) -> Mapping[str, Any]:
        """Return a guess of the recipe's `split_by` for this file, such as `{"split_by": "line"}`.

        `line` if the first lines are long and none of them is empty; otherwise `file` if a record
        may be as long as the file; otherwise `paragraph`.
        """
        with file.open(until=HEAD_BYTES) as stored:
            lines = stored.read(HEAD_BYTES).split(b"\n")[:-1]  # without the last, unfinished line
        are_long = sum(map(len, lines)) > LONG_LINE * len(lines)
        if len(lines) > 1 and all(lines) and are_long:
            return {"split_by": "line"}
        if self.weight(file) < format.LONGEST:
            return {"split_by": "file"}
        return {"split_by": "paragraph"}

    def splits(self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]) -> Splits:
        if file.read_as.split_by != "line":
            return [(0, None)]
        return super().splits(file, window_bytes, fields)

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        """Yield the file's lines, its paragraphs, or the whole file as one record, in blocks."""
        split_by = file.read_as.split_by
        if split_by == "line":
            yield from super().blocks(file, span)
            return
        with open_unpacked(file, self.packing, span.memory) as stream:
            if split_by == "file":
                items = _read_whole_file(read_all_bytes(stream, span))
            else:
                items = _read_paragraphs(stream)
            yield from make_item_blocks(file, span, f"text {split_by}", items)


def _read_whole_file(pieces: Pieces) -> Iterator[Item]:
    """Yield the whole file as one item.

    Args:
        pieces: consecutive parts of the file, as (offset, bytes).
    """
    text = BoundedBytes()
    for _, piece in pieces:
        text.add(piece)
    yield text.item(decode_texts, line=1)


def _read_paragraphs(stream: BinaryIO) -> Iterator[Item]:
    """Yield the paragraphs of a file as items. A paragraph consists of consecutive lines that are
    not blank.
    """
    paragraph = BoundedBytes()  # the lines of the current paragraph
    first_line = 1  # the number of its first line
    line_number = 1
    offset = 0
    while line := stream.readline(format.LONGEST):  # a longer line is read in pieces
        if offset == 0 and line.startswith(BYTE_ORDER_MARK):
            offset = len(BYTE_ORDER_MARK)
            line = line[offset:]
        if line.isspace():
            yield from _make_paragraph_items(paragraph, first_line)
            paragraph = BoundedBytes()
        else:
            if not paragraph.length:
                paragraph.offset = offset
                first_line = line_number
            paragraph.add(line)
        offset += len(line)
        line_number += 1
    yield from _make_paragraph_items(paragraph, first_line)


def _make_paragraph_items(paragraph: BoundedBytes, first_line: int) -> Iterator[Item]:
    """Yield the paragraph as one item; nothing if no line was collected.

    The item's text has no newline at its end, but its length always includes one. So a paragraph
    has the same length whether or not the file ends in a newline.

    Args:
        paragraph: the collected lines of the paragraph.
        first_line: the number of its first line in the file.
    """
    # Drop the last newline. No bytes are left of a paragraph that is too long.
    if paragraph.parts:
        last_line = paragraph.parts.pop()
        if not last_line.endswith(b"\n"):
            paragraph.length += 1
        paragraph.parts.append(last_line.removesuffix(b"\n").removesuffix(b"\r"))
    if paragraph.length:
        yield paragraph.item(decode_texts, line=first_line)

"""Plain text: a document is a file, a line or a paragraph, as the recipe's `source.split_by` says, since nothing in it tells.

The record has one field, `text`. Of a line its end is no part; of a paragraph neither are the lines of white space around it;
a file is its text as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from mdsmix.errors import RecipeError
from mdsmix.sources import cut_items
from mdsmix.sources.cut_items import BLANK, TOO_LONG, Item
from mdsmix.sources.format import Block, Decoded
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import Jsonl
from mdsmix.sources.lines import LineBlock, Pieces, all_bytes, shown, split_lines
from mdsmix.sources.units import SourceFile, Span

LONG_LINE = 120
"Bytes: lines that are longer on average were not broken for a reader."
_MARK = b"\xef\xbb\xbf"


def decode_texts(lines: list[bytes]) -> Decoded:
    """The lines as records; one of white space is none."""
    decoded = Decoded(records=[], bad=[], blank=[])
    for index, line in enumerate(lines):
        if not line.strip():
            decoded.blank.append(index)
            continue
        try:
            decoded.records.append({"text": line.removesuffix(b"\r").decode()})
        except UnicodeDecodeError:
            decoded.bad.append((index, "invalid_utf8"))
    return decoded


class Text(Jsonl):
    """`*.txt`. Its ordinals are uncompressed bytes; only by lines a large file is cut."""

    heeds: ClassVar[tuple[str, ...]] = ("split_by",)
    lines_format = "text line"

    def decoder(self) -> Callable[[list[bytes]], Decoded]:
        return decode_texts

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
        return {
            "split_by": "file"
            if file.stat.size * self.size_factor < cut_items.LONGEST
            else "paragraph"
        }

    def splits(
        self, file: SourceFile, window_bytes: int, fields: tuple[str, ...]
    ) -> Iterable[tuple[int, int | None]]:
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
            found = _whole(pieces) if split_by == "file" else _paragraphs(pieces, span, file)
            yield from cut_items.blocks(file, span, f"text {split_by}", found)


def _whole(pieces: Pieces) -> Iterator[Item]:
    """All of a file as one document."""
    parts, size = list[bytes](), 0
    for _, piece in pieces:
        size += len(piece)
        if size <= cut_items.LONGEST:
            parts.append(piece)
        else:
            parts.clear()
    yield _item(b"".join(parts).removeprefix(_MARK), 0, 1, size)


def _paragraphs(pieces: Pieces, span: Span, file: SourceFile) -> Iterator[Item]:
    """Runs of lines of which none is white space."""
    held, size, offset, line = list[bytes](), 0, 0, 1
    for at, number, length, text in _lines(pieces, span, file):
        if length == 1 or text.isspace():
            if size:
                yield _item(b"\n".join(held).removesuffix(b"\r"), offset, line, size)
            held, size = [], 0
            continue
        if not size:
            offset, line = at, number
        size += length
        if size <= cut_items.LONGEST:
            held.append(text)
        else:
            held.clear()
    if size:
        yield _item(b"\n".join(held).removesuffix(b"\r"), offset, line, size)


def _lines(pieces: Pieces, span: Span, file: SourceFile) -> Iterator[tuple[int, int, int, bytes]]:
    """Offset, number, length with its end, and text of each line; no text of one that is too long."""
    new_block = partial(LineBlock, format="", file=file.name, decoder=decode_texts)
    for block in split_lines(pieces, span, new_block):
        offset = block.offset
        if block.sizes:
            yield offset, block.line, block.size, b""
            continue
        for number, text in enumerate(block.raws, block.line):
            yield offset, number, len(text) + 1, text
            offset += len(text) + 1


def _item(raw: bytes, offset: int, line: int, size: int) -> Item:
    reason, record = "", None
    if size > cut_items.LONGEST:
        raw, reason = b"", TOO_LONG
    elif not raw.strip():
        reason = BLANK
    else:
        try:
            record = {"text": raw.decode()}
        except UnicodeDecodeError:
            reason = "invalid_utf8"
    return Item(offset, shown(offset), {"line": line, "offset": offset}, size, raw, record, reason)

"""Tables of delimited text, csv and tsv: every cell is a text, a field may hold line ends, and a row that is none is a bad record.

Python's own csv reader decides what a row is, and is not asked for less: it takes a row's text and gives the cells, so every
row keeps its bytes and its place. It is handed rows whole, as the number of quotes before each line end suggests them; where
that is wrong (a quote inside of a cell) it says so, and is given the lines one by one. Arrow's reader is twice as fast, but
tells no place, ends at a field larger than its block, and makes null of "NA" and 7 of "007" unless told not to. Spreadsheets of
countries with a decimal comma write semicolons: a first row with semicolons and no comma is one of theirs.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

import numpy as np

from mdsmix.errors import Unreachable
from mdsmix.sources.format import BLANK, MARK, TOO_LONG, Block, Format, Item, item_blocks, parsed
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import Pieces, all_bytes
from mdsmix.sources.units import SourceFile, Span

LONGEST_FIELD = 16 << 20
"Characters of a cell; the reader holds four bytes for each."
LONGEST_ROW = 2 * LONGEST_FIELD
"Bytes."


class CsvTable(Format):
    """`*.csv` and `*.tsv`. Its ordinals are uncompressed bytes; a quote decides what a line end is, so a file is one split."""

    cells_are_texts = True
    heeds: ClassVar[tuple[str, ...]] = ("header",)

    def __init__(self, delimiter: str, packing: str = "") -> None:
        self._delimiter, self._packing = delimiter, packing
        self.size_factor = 4 if packing else 1

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with opened(file, self._packing, span.memory) as read:
            parts = _suggested(all_bytes(read, span))
            first = next(parts, b"")
            delimiter = (
                ";" if b";" in first and self._delimiter.encode() not in first else self._delimiter
            )
            found = _rows(chain([first] * bool(first), parts), delimiter)
            header = list(file.read_as.header) or _header(file, found)
            records = _records(file, found, header, span.parsed)
            yield from item_blocks(file, span, f"{delimiter} {header}", records)


@dataclass(slots=True)
class _CsvRow:
    """A row, or what should be one."""

    offset: int
    line: int
    raw: bytes
    cells: list[str]
    size: int
    reason: str = ""


def _header(file: SourceFile, rows: Iterator[_CsvRow]) -> list[str]:
    """The fields, from the first row."""
    first = next((row for row in rows if row.cells or row.reason), None)
    if first is None:
        return []
    twice = {name for name in first.cells if first.cells.count(name) > 1}
    if first.reason or twice:
        why = f"two columns are named {min(twice)!r}" if twice else f"it is {first.reason}"
        raise Unreachable(
            f"{file.location.url} begins with no line that names its columns ({why}): mend it, or name them by source.header"
        )
    return first.cells


def _records(
    file: SourceFile, rows: Iterator[_CsvRow], header: list[str], structured: tuple[str, ...]
) -> Iterator[Item]:
    number, width, names = 0, len(header), tuple(header)
    for row in rows:
        record, reason, place = (
            None,
            row.reason,
            {"row": number, "line": row.line, "offset": row.offset},
        )
        if not reason and not row.cells:
            reason = BLANK
        elif not reason and len(row.cells) != width:
            reason = "too_few_fields" if len(row.cells) < width else "too_many_fields"
        elif not reason:
            record = dict(zip(header, row.cells, strict=True))
            parsed(record, structured)
        number += reason != BLANK
        yield Item(row.offset, place, row.size, row.raw, record, reason, names)


def _suggested(pieces: Pieces) -> Iterator[bytes]:
    """The bytes, cut at each line end before which the number of quotes is even; where that leaves a part that is too long for
    a row, at another line end if there is one."""
    held, quotes = b"", 0
    for _, piece in pieces:
        signs = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(signs == ord("\n"))
        before = np.searchsorted(np.flatnonzero(signs == ord('"')), ends) + quotes
        begin = 0
        for end in (ends[before % 2 == 0] + 1).tolist():
            yield held + piece[begin:end]
            held, begin = b"", end
        held += piece[begin:]
        quotes += piece.count(b'"')
        if len(held) > LONGEST_ROW:
            cut = held.rfind(b"\n") + 1 or len(held)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _rows(parts: Iterator[bytes], delimiter: str) -> Iterator[_CsvRow]:
    """The rows of consecutive parts. After a row that is none the reading goes on at the next line."""
    csv.field_size_limit(LONGEST_FIELD)
    feed = _Feed(parts)
    while True:
        try:
            for cells in csv.reader(feed, delimiter=delimiter, strict=True):
                yield (
                    feed.ended(cells) if sum(map(len, feed.taken)) <= LONGEST_ROW else feed.passed()
                )
            return
        except csv.Error as error:
            if "limit" in str(error):
                yield feed.passed()
            elif not feed.give_back():
                yield feed.ended([], "not_csv")


@dataclass(slots=True)
class _Feed:
    """Hands text to the reader, and knows what it has taken for the row that it is at."""

    parts: Iterator[bytes]
    offset: int = 0
    line: int = 1
    taken: list[bytes] = field(default_factory=list)
    waiting: deque[bytes] = field(default_factory=deque)
    fault: str = ""

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        if not self.waiting:
            part = next(self.parts)
            # Within a row only the next line is sure to be part of it.
            self.waiting.extend(part.splitlines(keepends=True) if self.taken else [part])
        raw = self.waiting.popleft()
        self.taken.append(raw)
        return self._text(raw.removeprefix(MARK) if self.offset == 0 else raw)

    def _text(self, raw: bytes) -> str:
        if b"\0" in raw:
            self.fault, raw = self.fault or "nul_byte", raw.replace(b"\0", b"?")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fault = self.fault or "invalid_utf8"
            return raw.decode(errors="replace")

    def ended(self, cells: list[str], reason: str = "") -> _CsvRow:
        """What was taken, as a row."""
        raw = b"".join(self.taken)
        return self._row(raw, len(raw), raw.count(b"\n"), cells, reason or self.fault)

    def passed(self) -> _CsvRow:
        """What was taken and the rest of that row, which is too long: up to the line end before which its quotes are even."""
        last = b"".join(self.taken)
        size, lines, quotes = len(last), last.count(b"\n"), last.count(b'"')
        while quotes % 2 or not last.endswith(b"\n"):
            if not self.waiting and not (more := next(self.parts, b"")):
                break
            last = self.waiting.popleft() if self.waiting else more
            size, lines, quotes = (
                size + len(last),
                lines + last.count(b"\n"),
                quotes + last.count(b'"'),
            )
        return self._row(b"", size, lines, [], TOO_LONG)

    def _row(self, raw: bytes, size: int, lines: int, cells: list[str], reason: str) -> _CsvRow:
        row = _CsvRow(self.offset, self.line, raw, cells, size, reason)
        self.offset, self.line, self.fault = self.offset + size, self.line + lines, ""
        self.taken.clear()
        return row

    def give_back(self) -> bool:
        """After a fault: lines that were handed over as one are to be read again one by one, which is all that there is to do;
        of lines that were one by one, all but the first are to be read again."""
        is_one, lines = len(self.taken) == 1, b"".join(self.taken).splitlines(keepends=True)
        again = is_one and len(lines) > 1
        self.taken = [] if again else lines[:1]
        self.waiting.extendleft(reversed(lines[len(self.taken) :]))
        self.fault = "" if again else self.fault
        return again

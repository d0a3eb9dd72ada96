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
from itertools import chain
from typing import ClassVar, NamedTuple

import numpy as np

from mdsmix.errors import Unreachable
from mdsmix.sources.format import BLANK, MARK, TOO_LONG, Block, Format, Item, item_blocks, parsed
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import Pieces, all_bytes, is_utf8
from mdsmix.sources.units import SourceFile, Span

LONGEST_FIELD = 16 << 20
"Characters of a cell; the reader holds four bytes for each."
LONGEST_ROW = 2 * LONGEST_FIELD
"Bytes."
_MISFIT = ("", "too_many_fields", "too_few_fields")


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
            is_of_semicolons = b";" in first and self._delimiter.encode() not in first
            delimiter = ";" if is_of_semicolons else self._delimiter
            found = _rows(chain([first] * bool(first), parts), delimiter)
            header = list(file.read_as.header) or _header(file, found)
            records = _records(file, found, header, span.unit.parsed)
            yield from item_blocks(file, span, f"{delimiter} {header}", records)


class _CsvRow(NamedTuple):
    """A row, or what should be one."""

    offset: int
    line: int
    raw: bytes
    cells: list[str]
    size: int
    reason: str


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
        place = {"row": number, "line": row.line, "offset": row.offset}
        count, record = len(row.cells), None
        reason = row.reason or (_MISFIT[(count > width) - (count < width)] if count else BLANK)
        if not reason:
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
    offset, line, taken, rest = 0, 1, list[bytes](), deque[bytes]()

    def texts() -> Iterator[str]:
        """What the reader is handed for a row: a part, and then line by line, since only the next one is sure to belong to it."""
        while rest or (part := next(parts, b"")):
            if not rest:
                rest.extend(part.splitlines(keepends=True) if taken else [part])
            taken.append(rest.popleft())
            raw = taken[-1] if offset or taken[1:] else taken[0].removeprefix(MARK)
            yield raw.replace(b"\0", b"?").decode(errors="replace")

    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    while True:
        cells, reason = list[str](), ""
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = TOO_LONG if "limit" in str(error) else "not_csv"
            reader = csv.reader(texts(), delimiter=delimiter, strict=True)
        raw = taken[0] if len(taken) == 1 else b"".join(taken)
        if reason == "not_csv":
            # Lines that were handed over as one are read again one by one; of lines that were one by one, all but the first.
            lines = raw.splitlines(keepends=True)
            again = len(taken) == 1 and len(lines) > 1
            rest.extendleft(reversed(lines[not again :]))
            raw = lines[0]
            taken.clear()
            if again:
                continue
        taken.clear()
        size, ends = len(raw), raw.count(b"\n")
        if reason == TOO_LONG or size > LONGEST_ROW:
            size, ends = _passed(raw, parts, rest)
            raw, cells, reason = b"", [], TOO_LONG
        yield _CsvRow(offset, line, raw, cells, size, reason or _fault(raw))
        offset, line = offset + size, line + ends


def _passed(last: bytes, parts: Iterator[bytes], rest: deque[bytes]) -> tuple[int, int]:
    """Bytes and lines of a row that is too long: up to the line end before which its quotes are even."""
    size, lines, quotes = len(last), last.count(b"\n"), last.count(b'"')
    while quotes % 2 or not last.endswith(b"\n"):
        last = rest.popleft() if rest else next(parts, b"")
        if not last:
            break
        size, lines = size + len(last), lines + last.count(b"\n")
        quotes += last.count(b'"')
    return size, lines


def _fault(raw: bytes) -> str:
    """Why a row that the reader took is none all the same."""
    if b"\0" in raw:
        return "nul_byte"
    return "" if raw.isascii() or is_utf8(raw) else "invalid_utf8"

"""Tables of delimited text, csv and tsv. Every cell is a text and may hold line ends; a row with a
fault is a bad record.

Python's csv reader decides where a row ends: it is handed line after line until a row is whole, so
every row keeps its bytes and its place. Arrow's reader is twice as fast, but tells no place, ends
at a field larger than its block, and makes null of "NA" and 7 of "007" unless told not to.
Spreadsheets of countries with a decimal comma write semicolons: a first row with semicolons and
without the delimiter is read by semicolons.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar

from mdsmix.errors import Unreachable
from mdsmix.sources.format import (
    BLANK,
    MARK,
    TOO_LONG,
    Block,
    Format,
    Item,
    item_blocks,
    parse_json_fields,
)
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import is_utf8
from mdsmix.sources.units import SourceFile, Span

LONGEST_FIELD = 16 << 20
"Characters of a cell; the reader holds four bytes for each."
LONGEST_ROW = 2 * LONGEST_FIELD
"Bytes of a row with its line ends; a longer row is a bad record."
_MISFIT = ("", "too_many_fields", "too_few_fields")


class CsvTable(Format):
    """`*.csv` and `*.tsv`. Its ordinals are uncompressed bytes; a quote decides what a line end is,
    so a file is one split.
    """

    name = "csv"

    cells_are_texts = True
    heeds: ClassVar[tuple[str, ...]] = ("header",)
    reasons: ClassVar[Mapping[str, str]] = {
        "too_few_fields": "The row has fewer cells than the table has fields.",
        "too_many_fields": "The row has more cells than the table has fields.",
        "not_csv": ("A quote is in the wrong place; the next line is read as a row again."),
        "nul_byte": "The row of a table has a NUL byte.",
    }

    def __init__(self, delimiter: str, packing: str = "") -> None:
        super().__init__(packing)
        self._delimiter = delimiter

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with opened(file, self.packing, span.memory) as stream:
            first = stream.readline(LONGEST_ROW)
            is_of_semicolons = b";" in first and self._delimiter.encode() not in first
            delimiter = ";" if is_of_semicolons else self._delimiter
            found = _rows(first, partial(stream.readline, LONGEST_ROW), delimiter)
            header = list(file.read_as.header) or _header(file, found)
            records = _records(found, header, span.unit.parsed)
            yield from item_blocks(file, span, f"{delimiter} {header}", records)


def _header(file: SourceFile, rows: Iterator[Item]) -> list[str]:
    """The fields, from the first row."""
    first = next((row for row in rows if row.record or row.reason), None)
    if first is None:
        return []
    names: list[str] = first.record
    twice = {name for name in names if names.count(name) > 1}
    if first.reason or twice:
        why = f"two columns are named {min(twice)!r}" if twice else f"it is {first.reason}"
        raise Unreachable(
            f"{file.location.url} begins with no line that names its columns ({why}): mend it, or name them by source.header"
        )
    return names


def _records(
    rows: Iterator[Item], header: list[str], structured: tuple[str, ...]
) -> Iterator[Item]:
    """Rows of cells as records."""
    number, width, names = 0, len(header), tuple(header)
    for row in rows:
        count, record = len(row.record), None
        reason = row.reason or (_MISFIT[(count > width) - (count < width)] if count else BLANK)
        if not reason:
            record = dict(zip(header, row.record, strict=True))
            parse_json_fields(record, structured)
        place = {"row": number, **row.place}
        yield Item(row.ordinal, place, row.length, row.raw, record, reason, names)
        number += reason != BLANK


def _rows(first: bytes, next_line: Callable[[], bytes], delimiter: str) -> Iterator[Item]:
    """The rows of consecutive lines, each as its cells. `next_line` gives a line that is too long
    in pieces. After a faulty row, reading goes on at the next line.
    """
    csv.field_size_limit(LONGEST_FIELD)
    offset, number, taken, again = 0, 1, list[bytes](), deque([first])

    def line() -> bytes:
        return again.popleft() if again else next_line()

    def texts() -> Iterator[str]:
        """Lines for the reader, one at a time, since only the next line is sure to belong to its
        row.
        """
        while raw := line():
            taken.append(raw)
            raw = raw if offset or taken[1:] else raw.removeprefix(MARK)
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
        if reason == "not_csv":
            again.extendleft(reversed(taken[1:]))
            del taken[1:]
        raw = b"".join(taken)
        taken.clear()
        size, ends = len(raw), raw.count(b"\n")
        if reason == TOO_LONG or size > LONGEST_ROW:
            size, ends = _passed(raw, line)
            raw, cells, reason = b"", [], TOO_LONG
        place = {"line": number, "offset": offset}
        yield Item(offset, place, size, raw, cells, reason or _fault(raw))
        offset, number = offset + size, number + ends


def _passed(begin: bytes, line: Callable[[], bytes]) -> tuple[int, int]:
    """Passes over the rest of a row that is too long, and counts its bytes and lines. The row ends
    at a line end with an even number of quotes before it. `begin`: the bytes read so far.
    """
    size = ends = quotes = 0
    while begin:
        size, ends = size + len(begin), ends + begin.count(b"\n")
        quotes += begin.count(b'"')
        is_end = begin.endswith(b"\n") and quotes % 2 == 0
        begin = b"" if is_end else line()
    return size, ends


def _fault(raw: bytes) -> str:
    """The reason code of a fault that the csv reader does not see; empty without one."""
    if b"\0" in raw:
        return "nul_byte"
    return "" if raw.isascii() or is_utf8(raw) else "invalid_utf8"

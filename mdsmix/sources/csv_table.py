"""Tables of delimited text, csv and tsv. Every cell is a string and may contain line ends; a row
with a fault is a bad record.

Python's csv reader decides where a row ends. The reader gets one line after the other until a row
is complete, so the bytes and the place of every row are known. Arrow's reader is twice as fast. But
it returns no place, fails on a field larger than its block, and turns "NA" into null and "007" into
7 unless configured otherwise.

In countries with a decimal comma, spreadsheets separate cells by semicolons. So if the first line
has semicolons but not the delimiter, the delimiter is `;`.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

from mdsmix.errors import Unreachable
from mdsmix.messages import make_printable
from mdsmix.recipe.stream_spec import list_usual_names
from mdsmix.sources.format import (
    BLANK,
    BYTE_ORDER_MARK,
    CELL_REASONS,
    TOO_LONG,
    Block,
    Format,
    Item,
    item_blocks,
    parse_cells,
)
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import is_utf8
from mdsmix.sources.units import SourceFile, Span, Unit

NAME = re.compile(r"[a-z_][a-z0-9_. -]{0,40}")
"What the name of a field looks like, in lower case."
LONGEST_FIELD = 16 << 20
"The most characters of a cell; the reader uses four bytes for each."
MOST_SHOWN = 160
"The most characters of a row in a message."
LONGEST_ROW = 2 * LONGEST_FIELD
"The most bytes of a row with its line ends; a longer row is a bad record."


class CsvTable(Format):
    """The format of `*.csv` and `*.tsv`. The ordinal of a row (a number that increases through the
    file) is the uncompressed byte at which the row begins.

    A file is never cut into splits that are converted separately: whether a newline ends a row
    depends on all quotes before it.
    """

    name = "csv"
    version = 2  # of a field with texts or messages, only lists and objects are decoded
    version_without_messages = 1
    cells_are_texts = True
    empty_cells_are_texts = True
    heeds: ClassVar[tuple[str, ...]] = ("header",)
    reasons: ClassVar[Mapping[str, str]] = {
        "too_few_fields": "The row has fewer cells than the table has fields.",
        "too_many_fields": "The row has more cells than the table has fields.",
        "not_csv": "A quote is in the wrong place; the next line is read as a row again.",
        "nul_byte": "The row of a table has a NUL byte.",
        **CELL_REASONS,
    }

    def __init__(self, delimiter: str, packing: str = "") -> None:
        """Store the arguments.

        Args:
            delimiter: the character between two cells, `,` or a tab.
            packing: the suffix, such as `.gz`, of the files' compression; "" if they have none.
        """
        super().__init__(packing)
        self._delimiter = delimiter

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        """Yield all rows of the table as blocks of about 4 MB.

        The first row names the fields, unless the recipe names them (`source.header`). If the first
        line has `;` and lacks the format's own delimiter, `;` is the delimiter.
        """
        with opened(file, self.packing, span.memory) as stream:
            first_line = stream.readline(LONGEST_ROW)
            # Spreadsheets of countries with a decimal comma write `;` between cells.
            delimiter = self._delimiter
            if b";" in first_line and delimiter.encode() not in first_line:
                delimiter = ";"
            next_line = partial(stream.readline, LONGEST_ROW)
            rows = _RowReader(first_line, next_line, delimiter).rows()
            header = list(file.read_as.header)  # as the recipe sets it
            if header:
                rows = _refuse_repeated_header(file, rows, header)
            else:
                header = _read_header(file, rows)
            records = _records(rows, header, span.unit)
            # The digests cover the delimiter and the header: with others, equal bytes would be
            # other records.
            yield from item_blocks(file, span, f"{delimiter} {header}", records)


def _refuse_repeated_header(
    file: SourceFile, rows: Iterator[Item], header: list[str]
) -> Iterator[Item]:
    """Yield all rows. Raise Unreachable if the first row that is not blank names fields, as the
    header of the recipe does: it would become a record.
    """
    is_first = True
    for row in rows:
        if is_first and row.record and _names_fields(row.record, header):
            hint = "remove source.header from the recipe"
            if row.record != header:
                names = make_printable(", ".join(row.record)[:MOST_SHOWN])
                hint += f", and name the fields as this line does ({names})"
            raise Unreachable(
                f"the first line of {file.location.url} names the fields, as source.header does, "
                f"so it would be read as a record: {hint}"
            )
        if row.record or row.reason:
            is_first = False
        yield row


def _names_fields(cells: Sequence[str], header: Sequence[str]) -> bool:
    """Check whether a row is a header rather than a record: more than half of its cells are names
    of the recipe's header, perhaps in another order or with other capitals. Or it has two cells or
    more that look like names, and more than half of them are usual names of fields (`question`).
    """
    words = [cell.strip().casefold() for cell in cells]
    names = {name.strip().casefold() for name in header}
    if 2 * sum(word in names for word in words) > len(header):
        return True
    look_like_names = len(words) > 1 and all(map(NAME.fullmatch, words))
    usual_names = list_usual_names()
    return look_like_names and 2 * sum(word in usual_names for word in words) > len(words)


def _read_header(file: SourceFile, rows: Iterator[Item]) -> list[str]:
    """Return the names of the fields: the cells of the first row that is not blank. [] for a table
    without rows.

    Args:
        rows: the rows of the table, each with its cells as its `record`. The blank rows and the
            header are taken from this iterator.

    Raises Unreachable if the header has a fault, or two fields with the same name.
    """
    # Skip blank rows, which have neither cells nor a fault.
    first_row = None
    for row in rows:
        if row.record or row.reason:
            first_row = row
            break
    if first_row is None:
        return []
    names: list[str] = first_row.record
    repeated = {name for name in names if names.count(name) > 1}
    fault = first_row.reason
    if repeated:
        fault = f"two columns are named {min(repeated)!r}"
    if fault:
        raise Unreachable(
            f"the first line of {file.location.url} does not name its columns ({fault}): "
            "correct this line, or name the columns in the recipe with source.header"
        )
    return names


def _records(rows: Iterator[Item], header: list[str], unit: Unit) -> Iterator[Item]:
    """Yield each row of cells as a record.

    Args:
        rows: items whose `record` is a list of cells.
        header: the names of the fields.
        unit: names the fields whose cells are JSON, or may be.
    """
    fields = tuple(header)
    number = 0
    for row in rows:
        record = None
        reason = row.reason or _misfit(len(row.record), len(header))
        if not reason:
            record = dict(zip(header, row.record, strict=True))
            reason = parse_cells(record, unit.parsed, unit.text_or_messages)
        record_place = {"row": number, **row.place}
        yield Item(row.ordinal, record_place, row.length, row.raw, record, reason, fields)
        if reason != BLANK:
            number += 1


def _misfit(cells: int, fields: int) -> str:
    """Return the reason code of a row whose number of cells differs from the table's number of
    fields; "" if the numbers are equal. The reason of a row without cells is BLANK.
    """
    if cells == 0:
        return BLANK
    if cells < fields:
        return "too_few_fields"
    if cells > fields:
        return "too_many_fields"
    return ""


class SkippedRow(NamedTuple):
    """The size of a row that is too long to be read."""

    length: int
    "Its bytes."
    line_ends: int
    "The line ends in it, with that at its end."


class _RowReader:
    """Reads the rows of a table, each with its cells, its bytes and its place in the file.

    After a row with a fault, reading continues at the next line.
    """

    def __init__(self, first_line: bytes, next_line: Callable[[], bytes], delimiter: str) -> None:
        """Store the arguments.

        Args:
            first_line: a line of the file that was read already.
            next_line: returns the next line of the file, or the next piece of a line that is too
                long; b"" at the end of the file.
            delimiter: the character between two cells.
        """
        self._waiting = deque([first_line])
        "Lines that are read again before `next_line` is called."
        self._next_line = next_line
        self._delimiter = delimiter
        self._offset = 0
        "The byte of the file at which the current row begins."
        self._lines = list[bytes]()
        "The lines that the csv reader has read for the current row."

    def rows(self) -> Iterator[Item]:
        """Yield all rows as items. An item's `record` is the list of the row's cells. The item
        of a row with a fault has a reason code; its list of cells then has no meaning.
        """
        csv.field_size_limit(LONGEST_FIELD)
        line_number = 1
        reader = self._new_reader()
        while True:
            # Read the cells of the next row.
            cells = list[str]()
            reason = ""
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # The reader's own words if a cell is longer than `field_size_limit`.
                reason = TOO_LONG if "limit" in str(error) else "not_csv"
                reader = self._new_reader()

            # Collect the row's bytes. A row that is not valid csv consists of its first line only;
            # the lines after it are read again as new rows.
            if reason == "not_csv":
                self._waiting.extendleft(reversed(self._lines[1:]))
                del self._lines[1:]
            raw = b"".join(self._lines)
            self._lines.clear()
            length = len(raw)
            line_ends = raw.count(b"\n")
            if reason == TOO_LONG or length > LONGEST_ROW:
                skipped = self._skip_row(raw)
                length = skipped.length
                line_ends = skipped.line_ends
                raw = b""
                cells = []
                reason = TOO_LONG

            if not reason:
                reason = _find_unseen_fault(raw)
            row_place = {"line": line_number, "offset": self._offset}
            yield Item(self._offset, row_place, length, raw, cells, reason)
            self._offset += length
            line_number += line_ends

    def _new_reader(self) -> Iterator[list[str]]:
        return csv.reader(self._texts(), delimiter=self._delimiter, strict=True)

    def _texts(self) -> Iterator[str]:
        """Yield lines to the csv reader as strings, and add the bytes of each line to `_lines`. The
        reader takes another line only if the current row continues in the next line.

        NUL bytes and invalid UTF-8 are replaced here; `_find_unseen_fault` reports them.
        """
        while raw := self._read_line():
            self._lines.append(raw)
            if self._offset == 0 and len(self._lines) == 1:
                raw = raw.removeprefix(BYTE_ORDER_MARK)
            yield raw.replace(b"\0", b"?").decode(errors="replace")

    def _read_line(self) -> bytes:
        return self._waiting.popleft() if self._waiting else self._next_line()

    def _skip_row(self, raw: bytes) -> SkippedRow:
        """Skip the rest of a row that is too long. Return the size of the whole row.

        The row ends at the first line end that has an even number of quotes before it in the row.

        Args:
            raw: the bytes of the row that were read already.
        """
        length = 0
        line_ends = 0
        quotes = 0
        while raw:
            length += len(raw)
            line_ends += raw.count(b"\n")
            quotes += raw.count(b'"')
            if raw.endswith(b"\n") and quotes % 2 == 0:
                break
            raw = self._read_line()
        return SkippedRow(length, line_ends)


def _find_unseen_fault(raw: bytes) -> str:
    """Return the reason code of a fault in a row's bytes that the csv reader does not see: a NUL
    byte or invalid UTF-8. Return "" for a row without such a fault.
    """
    if b"\0" in raw:
        return "nul_byte"
    if raw.isascii() or is_utf8(raw):  # `isascii` is faster
        return ""
    return "invalid_utf8"

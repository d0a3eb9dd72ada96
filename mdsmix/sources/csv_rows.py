"""Cuts a csv file into rows, and each row into cells, with the bytes and the place of each row.

Python's csv reader in strict mode decides where rows and cells end. It looks at one character after
the other. So about 4 MB are cut at once by `csv_cells.py`, which finds the same rows and cells in
bytes without faults. If they have a fault (a wrong quote, a NUL byte, invalid UTF-8, a cell that is
too long), the csv reader reads them line by line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from mdsmix.sources import jsonl
from mdsmix.sources.csv_cells import CellRows, count_line_ends, find_rows
from mdsmix.sources.format import BYTE_ORDER_MARK, TOO_LONG
from mdsmix.sources.jsonl import is_utf8

LONGEST_FIELD = 16 << 20
"The most characters of a cell; the reader uses four bytes for each."
LONGEST_ROW = 2 * LONGEST_FIELD
"The most bytes of a row with its line ends; a longer row is a bad record."


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Consecutive rows of a table, whatever its fields are."""

    offset: int
    "The byte of the file at which the first row begins."
    line: int
    "The number of the line that begins there, from 1."
    raws: list[bytes]
    'The bytes of each row with its line end; b"" for a row that is too long.'
    lengths: list[int]
    "The number of bytes of each row."
    cells: list[str]
    "The cells of all rows; those of a row with a fault have no meaning."
    widths: list[int]
    "The number of cells of each row; 0 for a blank line."
    faults: dict[int, str]
    "Index of a row that cannot be read -> reason code, ascending."

    def list_cells(self, index: int) -> list[str]:
        """Return the cells of a row."""
        first = sum(self.widths[:index])
        return self.cells[first : first + self.widths[index]]

    def slice(self, start: int, stop: int) -> Stretch:
        """Return the rows `start` to `stop` (exclusive)."""
        first_cell = sum(self.widths[:start])
        widths = self.widths[start:stop]
        return Stretch(
            offset=self.offset + sum(self.lengths[:start]),
            line=self.find_line(start),
            raws=self.raws[start:stop],
            lengths=self.lengths[start:stop],
            cells=self.cells[first_cell : first_cell + sum(widths)],
            widths=widths,
            faults={i - start: why for i, why in self.faults.items() if start <= i < stop},
        )

    def find_line(self, index: int) -> int:
        """Return the number of the line, from 1, at which a row begins."""
        return self.line + sum(raw.count(b"\n") for raw in self.raws[:index])

    def is_blank(self, index: int) -> bool:
        """Return whether a row is a blank line."""
        return not self.widths[index] and index not in self.faults

    def count_filled(self) -> int:
        """Return the number of rows that are not blank lines."""
        faults_without_cells = sum(not self.widths[index] for index in self.faults)
        return len(self.widths) - self.widths.count(0) + faults_without_cells

    def find_filled(self) -> int | None:
        """Return the index of the first row that is not a blank line; None if all are."""
        for index in range(len(self.widths)):
            if not self.is_blank(index):
                return index
        return None


class _ParsedRows(NamedTuple):
    """The rows at the beginning of some bytes."""

    raws: list[bytes]
    "The bytes of each row with its line end."
    cells: list[str]
    "The cells of all rows."
    widths: list[int]
    "The number of cells of each row; 0 if the row is not valid csv."
    faults: dict[int, str]
    "Index of a row that cannot be read -> reason code, ascending."
    read_of_long_row: int
    "Bytes that were read of the row after these, if one of its cells is too long; otherwise 0."


class RowReader:
    """Reads the rows of a table. After a row with a fault, reading continues at the next line."""

    def __init__(self, first_line: bytes, stream: BinaryIO, delimiter: str) -> None:
        """Store the arguments.

        Args:
            first_line: a line of the file that was read already.
            stream: the file, from the next byte on.
            delimiter: the character between two cells.
        """
        self._unread = first_line
        "Bytes that were read from the stream, and whose rows were not returned yet."
        self._stream = stream
        self._delimiter = delimiter
        self._offset = 0
        "The byte of the file at which `_unread` begins."
        self._line = 1
        "The number of the line that begins there."

    def read(self) -> Iterator[Stretch]:
        """Yield all rows."""
        csv.field_size_limit(LONGEST_FIELD)
        is_at_end = False
        while not is_at_end:
            is_at_end = not self._read_lines()
            yield from self._take_rows(is_at_end)

    def _read_lines(self) -> bool:
        """Add the next lines of the file to `_unread`, about 4 MB. Return False at the end of the
        file. Of a line that is too long, more than LONGEST_ROW bytes are read, but not its end.
        """
        # Read as much again as an unfinished row has, which is parsed from its beginning each time.
        piece = self._stream.read(max(jsonl.PIECE_BYTES, len(self._unread)))
        rest_of_line = b""
        if piece and not piece.endswith(b"\n"):
            rest_of_line = self._stream.readline(LONGEST_ROW + 1)
        self._unread = b"".join([self._unread, piece, rest_of_line])
        return bool(piece)

    def _take_rows(self, is_at_end: bool) -> Iterator[Stretch]:
        """Yield the rows at the beginning of `_unread`, and remove them from there. The last row
        stays there if it may continue in the next lines of the file.

        Args:
            is_at_end: whether the file has no more lines.
        """
        while self._unread:
            rows = self._parse(is_at_end)
            lengths = [*map(len, rows.raws)]
            count = len(lengths)
            read_of_long_row = rows.read_of_long_row
            if max(lengths, default=0) > LONGEST_ROW:
                # Stop before the first row that is too long.
                count = next(i for i, length in enumerate(lengths) if length > LONGEST_ROW)
                read_of_long_row = lengths[count]
            stretch = Stretch(
                offset=self._offset,
                line=self._line,
                raws=rows.raws[:count],
                lengths=lengths[:count],
                cells=rows.cells[: sum(rows.widths[:count])],
                widths=rows.widths[:count],
                faults={index: why for index, why in rows.faults.items() if index < count},
            )
            size = sum(stretch.lengths)
            self._offset += size
            self._line += count_line_ends(self._unread[:size])
            self._unread = self._unread[size:]
            yield stretch
            if read_of_long_row:
                yield self._skip_row(read_of_long_row)
            elif not is_at_end:
                return

    def _parse(self, is_at_end: bool) -> _ParsedRows:
        """Return the rows at the beginning of `_unread`, without the last one if it may continue in
        the next lines of the file.

        Args:
            is_at_end: whether the file has no more lines.
        """
        text = self._unread
        mark = b""
        if self._offset == 0 and text.startswith(BYTE_ORDER_MARK):
            mark = BYTE_ORDER_MARK
            text = text[len(mark) :]
        rows = find_rows(text, self._delimiter, is_at_end)
        if rows is None or (is_at_end and not rows.raws) or _has_long_cell(rows):
            return self._parse_lines(is_at_end)
        if rows.raws:
            rows.raws[0] = mark + rows.raws[0]
            return _ParsedRows(rows.raws, rows.cells, rows.widths, {}, 0)

        # All of the text is the beginning of one row.
        read_of_long_row = 0
        if rows.open_cell is not None:
            read_of_long_row = _find_long_cell(text, rows.open_cell)
        if not read_of_long_row and len(text) > LONGEST_ROW:
            read_of_long_row = len(text)
        if read_of_long_row:
            read_of_long_row += len(mark)
        return _ParsedRows([], [], [], {}, read_of_long_row)

    def _parse_lines(self, is_at_end: bool) -> _ParsedRows:
        """Return what `_parse` returns, as the csv reader reads one line after the other.

        Args:
            is_at_end: whether the file has no more lines.
        """
        lines = BytesIO(self._unread).readlines()
        # The csv reader gets no NUL bytes, since old releases of it fail on them.
        texts = [*map(_decode_faulty, lines)]
        if self._offset == 0:
            texts[0] = texts[0].removeprefix("\ufeff")
        cells = list[str]()
        widths = list[int]()
        faults = dict[int, str]()
        ends = [0]  # the number of lines up to the end of each row
        read_of_long_row = 0
        while True:
            # Read rows up to the end or to a fault.
            first = ends[-1]
            unread = map(texts.__getitem__, range(first, len(texts)))
            reader = csv.reader(unread, delimiter=self._delimiter, strict=True)
            try:
                for row in reader:
                    cells += row
                    widths.append(len(row))
                    ends.append(first + reader.line_num)
                break
            except csv.Error as error:
                message = str(error)
            start = ends[-1]  # the first line of the bad row
            stop = first + reader.line_num
            if stop == len(lines) and not is_at_end:
                break  # perhaps the row continues in the next lines of the file
            if "limit" in message:  # the reader's own words if a cell is too long
                read_of_long_row = sum(map(len, lines[start:stop]))
                break
            # The bad row is its first line. The lines after it are read again as new rows.
            faults[len(widths)] = "not_csv"
            widths.append(0)
            ends.append(start + 1)

        # Join the lines of each row, and find the faults that the csv reader does not see.
        raws = [b"".join(lines[start:stop]) for start, stop in pairwise(ends)]
        for index, raw in enumerate(raws):
            fault = _find_unseen_fault(raw)
            if fault:
                faults.setdefault(index, fault)
        return _ParsedRows(raws, cells, widths, dict(sorted(faults.items())), read_of_long_row)

    def _skip_row(self, read: int) -> Stretch:
        """Skip a row that is too long, and return it without its bytes. The row ends at the first
        line end that has an even number of quotes before it in the row.

        Args:
            read: how many bytes of the row were read already: one line or several.
        """
        raw = self._unread[:read]
        next_lines = BytesIO(self._unread[read:])
        length = 0
        line_ends = 0
        quotes = 0
        while raw:
            length += len(raw)
            line_ends += raw.count(b"\n")
            quotes += raw.count(b'"')
            if raw.endswith(b"\n") and quotes % 2 == 0:
                break
            # Of a line that is too long, this reads one piece after the other.
            raw = next_lines.readline() or self._stream.readline(LONGEST_ROW)
        stretch = Stretch(
            offset=self._offset,
            line=self._line,
            raws=[b""],
            lengths=[length],
            cells=[],
            widths=[0],
            faults={0: TOO_LONG},
        )
        self._offset += length
        self._line += line_ends
        self._unread = next_lines.read()
        return stretch


def _has_long_cell(rows: CellRows) -> bool:
    """Return whether a cell has more characters than LONGEST_FIELD."""
    if max(map(len, rows.raws), default=0) <= LONGEST_FIELD:
        return False  # most often; there are fewer rows than cells
    return max(map(len, rows.cells), default=0) > LONGEST_FIELD


def _find_long_cell(text: bytes, opening: int) -> int:
    """Return the end of the first line with which a quoted cell has more characters than
    LONGEST_FIELD; 0 if the cell is not too long.

    Args:
        text: lines that do not contain the cell's end.
        opening: the index of the quote that opens the cell.
    """
    if len(text) - opening <= LONGEST_FIELD:
        return 0
    characters = 0
    end = opening + 1
    for line in BytesIO(text[end:]):
        characters += len(_decode_faulty(line)) - line.count(b'""')
        end += len(line)
        if characters > LONGEST_FIELD:
            return end
    return 0


def _decode_faulty(raw: bytes) -> str:
    """Return bytes as a string, with NUL bytes and invalid UTF-8 replaced. `_find_unseen_fault`
    reports them.
    """
    return raw.replace(b"\0", b"?").decode(errors="replace")


def _find_unseen_fault(raw: bytes) -> str:
    """Return the reason code of a fault in a row's bytes that the csv reader does not see: a NUL
    byte or invalid UTF-8. Return "" for a row without such a fault.
    """
    if b"\0" in raw:
        return "nul_byte"
    if raw.isascii() or is_utf8(raw):  # `isascii` is faster
        return ""
    return "invalid_utf8"

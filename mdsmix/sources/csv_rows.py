"""Cuts a csv file into rows, and each row into cells, with the bytes and the place of each row.

Python's csv reader decides where a row ends. It gets one string after the other until a row is
complete. If a string were one line, a text of 4 KB would be a hundred strings. So about 4 MB are
cut at once, at the line ends that have an even number of quotes before them: in valid csv these are
the ends of the rows. Between two of them, all line ends must be in quotes, as any other gives an
error of the reader. After an error, the strings of the row are cut into lines and read again. So
the rows are those of a reader that gets line after line.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from mdsmix.lazy_numpy import np
from mdsmix.sources import jsonl
from mdsmix.sources.format import TOO_LONG
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
    cells: list[list[str]]
    "The cells of each row; without meaning if the row has a fault. A blank line has none."
    faults: dict[int, str]
    "Index of a row that cannot be read -> reason code, ascending."

    def part(self, start: int, stop: int) -> Stretch:
        """Return the rows `start` to `stop` (exclusive)."""
        earlier = self.raws[:start]
        return Stretch(
            offset=self.offset + sum(self.lengths[:start]),
            line=self.line + sum(raw.count(b"\n") for raw in earlier),
            raws=self.raws[start:stop],
            lengths=self.lengths[start:stop],
            cells=self.cells[start:stop],
            faults={i - start: why for i, why in self.faults.items() if start <= i < stop},
        )

    def is_blank(self, index: int) -> bool:
        """Return whether a row is a blank line."""
        return not self.cells[index] and index not in self.faults

    def count_filled(self) -> int:
        """Return the number of rows that are not blank lines."""
        faults_without_cells = sum(not self.cells[index] for index in self.faults)
        return len(self.cells) - self.cells.count([]) + faults_without_cells

    def find_filled(self) -> int | None:
        """Return the index of the first row that is not a blank line; None if all are."""
        for index in range(len(self.cells)):
            if not self.is_blank(index):
                return index
        return None


class _ParsedRows(NamedTuple):
    """The rows at the beginning of some bytes."""

    raws: list[bytes]
    "The bytes of each row with its line end."
    cells: list[list[str]]
    "The cells of each row; [] if the row is not valid csv."
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
            lines = self._read_lines()
            is_at_end = not lines
            self._unread += lines
            yield from self._take_rows(is_at_end)

    def _read_lines(self) -> bytes:
        """Return the next lines of the file, about 4 MB; b"" at the end of the file. Of a line that
        is too long, more than LONGEST_ROW bytes are returned, but not its end.
        """
        # Read as much again as an unfinished row has, which is parsed from its beginning each time.
        lines = self._stream.read(max(jsonl.PIECE_BYTES, len(self._unread)))
        if lines and not lines.endswith(b"\n"):
            lines += self._stream.readline(LONGEST_ROW + 1)
        return lines

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
                cells=rows.cells[:count],
                faults={index: why for index, why in rows.faults.items() if index < count},
            )
            size = sum(stretch.lengths)
            self._offset += size
            self._line += self._unread.count(b"\n", 0, size)
            self._unread = self._unread[size:]
            yield stretch
            if not read_of_long_row:
                return
            yield self._skip_row(read_of_long_row)

    def _parse(self, is_at_end: bool) -> _ParsedRows:
        """Return the rows at the beginning of `_unread`, without the last one if it may continue in
        the next lines of the file.

        Args:
            is_at_end: whether the file has no more lines.
        """
        # Decode the parts. The csv reader gets no NUL bytes, since old releases of it fail on them.
        parts = _cut_after_rows(self._unread)
        has_faults = b"\0" in self._unread
        texts = list[str]()
        try:
            texts += map(bytes.decode, parts)
        except UnicodeDecodeError:
            has_faults = True
        if has_faults:
            texts = [*map(_decode_faulty, parts)]
        mark = "\ufeff" if self._offset == 0 else ""
        texts[0] = texts[0].removeprefix(mark)

        waiting = deque[str | None](texts)  # the parts that the csv reader has not read
        waiting.append(None)  # the end
        cells = list[list[str]]()
        faults = dict[int, str]()
        ends = [0]  # the number of parts up to the end of each row
        read_of_long_row = 0
        while True:
            # Read rows up to the end or to a fault.
            first = ends[-1]
            reader = csv.reader(iter(waiting.popleft, None), delimiter=self._delimiter, strict=True)
            try:
                for row in reader:
                    cells.append(row)
                    ends.append(first + reader.line_num)
                break
            except csv.Error as error:
                message = str(error)
            start = ends[-1]
            stop = first + reader.line_num
            if stop == len(parts) and not is_at_end:
                break  # perhaps the row continues in the next lines of the file

            # Read the row again line by line, or note its fault.
            lines = [line for part in parts[start:stop] for line in BytesIO(part).readlines()]
            again = [*map(_decode_faulty, lines)]
            if len(lines) > stop - start:
                parts[start:stop] = lines
                if start == 0:
                    again[0] = again[0].removeprefix(mark)
            elif "limit" in message:  # the reader's own words if a cell is too long
                read_of_long_row = sum(map(len, lines))
                break
            else:
                # The bad row is the first line. The lines after it are read again as new rows.
                faults[len(cells)] = "not_csv"
                cells.append([])
                ends.append(start + 1)
                del again[0]
            if not waiting:
                waiting.append(None)
            waiting.extendleft(reversed(again))

        # Join the parts of each row, and find the faults that the csv reader does not see.
        if ends[-1] == len(cells):  # each row is one part
            raws = parts[: len(cells)]
        else:
            raws = [b"".join(parts[start:stop]) for start, stop in pairwise(ends)]
        if has_faults:
            unseen = {index: _find_unseen_fault(raw) for index, raw in enumerate(raws)}
            found = {index: why for index, why in unseen.items() if why} | faults
            faults = dict(sorted(found.items()))
        return _ParsedRows(raws, cells, faults, read_of_long_row)

    def _skip_row(self, read: int) -> Stretch:
        """Skip a row that is too long, and return it without its bytes. The row ends at the first
        line end that has an even number of quotes before it in the row.

        Args:
            read: how many bytes of the row were read already: one line or several.
        """
        raw = self._unread[:read]
        rest = BytesIO(self._unread[read:])
        length = 0
        line_ends = 0
        quotes = 0
        while raw:
            length += len(raw)
            line_ends += raw.count(b"\n")
            quotes += raw.count(b'"')
            if raw.endswith(b"\n") and quotes % 2 == 0:
                break
            raw = rest.readline() or self._stream.readline(LONGEST_ROW)
        stretch = Stretch(
            offset=self._offset,
            line=self._line,
            raws=[b""],
            lengths=[length],
            cells=[[]],
            faults={0: TOO_LONG},
        )
        self._offset += length
        self._line += line_ends
        self._unread = rest.read()
        return stretch


def _cut_after_rows(text: bytes) -> list[bytes]:
    """Return the text in parts that end at the line ends with an even number of quotes before them,
    which are the ends of rows in valid csv. Lines after the last such end are parts of their own.
    """
    array = np.frombuffer(text, np.uint8)
    line_ends = np.flatnonzero(array == ord("\n"))
    quotes = np.flatnonzero(array == ord('"'))
    is_after_row = np.searchsorted(quotes, line_ends) % 2 == 0
    stops = (line_ends[is_after_row] + 1).tolist()
    parts = [text[start:stop] for start, stop in pairwise([0, *stops])]
    last_stop = stops[-1] if stops else 0
    return parts + BytesIO(text[last_stop:]).readlines()


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

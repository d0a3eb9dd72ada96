"""Tables of delimited text, csv and tsv. Every cell is a string and may contain line ends; a row
with a fault is a bad record.

Rows and cells end where they do for Python's csv reader (`csv_rows.py`, `csv_cells.py`). Arrow's
reader returns no place, fails on a field larger than its block, and turns "NA" into null and "007"
into 7 unless configured otherwise.

In countries with a decimal comma, spreadsheets separate cells by semicolons. So if the first line
has semicolons but not the delimiter, the delimiter is `;`. A first line such as `sep=;`, which is
for Excel, names the delimiter and is no row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar, NamedTuple

from mdsmix.errors import Unreachable
from mdsmix.messages import make_printable
from mdsmix.recipe.stream_spec import list_usual_names
from mdsmix.sources.csv_rows import LONGEST_ROW, RowReader, Stretch
from mdsmix.sources.format import (
    BLANK,
    BYTE_ORDER_MARK,
    CELL_REASONS,
    Block,
    Buffer,
    Decoded,
    Format,
    Item,
    parse_cells,
)
from mdsmix.sources.inflate import open_unpacked
from mdsmix.sources.row_blocks import Rows, make_records, make_row_blocks
from mdsmix.sources.units import SourceFile, Span, Unit

NAME = re.compile(r"[a-z_][a-z0-9_. -]{0,40}")
"What the name of a field looks like, in lower case."
SEPARATOR = re.compile(rb'(?:\xef\xbb\xbf)?("?)sep=([ !#-~\t])\1\r?\n')
"The line before the header that names the delimiter for Excel, such as `sep=;`."
MOST_SHOWN = 160
"The most characters of a row in a message."


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
        line has `;` and lacks the format's own delimiter, `;` is the delimiter. A first line such
        as `sep=;` names it, and is left out.
        """
        with open_unpacked(file, self.packing, span.memory) as stream:
            first_line = stream.readline(LONGEST_ROW)
            # Spreadsheets of countries with a decimal comma write `;` between cells.
            delimiter = self._delimiter
            if b";" in first_line and delimiter.encode() not in first_line:
                delimiter = ";"
            separator = SEPARATOR.fullmatch(first_line)
            if separator:
                delimiter = separator[2].decode()
            stretches = RowReader(first_line, stream, delimiter).read()
            if separator:
                stretches = _drop_first_row(stretches)
            header = list(file.read_as.header)  # as the recipe sets it
            if header:
                stretches = _refuse_repeated_header(file, stretches, header)
            else:
                header, stretches = _read_header(file, stretches)
            rows = _name_fields(stretches, header, span.unit)
            # The digests cover the delimiter and the header: with others, equal bytes would be
            # other records.
            yield from make_row_blocks(file, span, f"{delimiter} {header}", rows)


def _drop_first_row(stretches: Iterator[Stretch]) -> Iterator[Stretch]:
    """Yield all rows but the first."""
    for stretch in stretches:
        yield stretch.slice(1, len(stretch.raws))
        break
    yield from stretches


def _refuse_repeated_header(
    file: SourceFile, stretches: Iterator[Stretch], header: list[str]
) -> Iterator[Stretch]:
    """Yield all rows. Raise Unreachable if the first row that is not blank names fields, as the
    header of the recipe does: it would become a record.
    """
    is_checked = False
    for stretch in stretches:
        index = stretch.find_filled()
        if index is not None and not is_checked:
            is_checked = True
            cells = stretch.list_cells(index)
            if cells and _names_fields(cells, header):
                hint = "remove source.header from the recipe"
                if cells != header:
                    names = make_printable(", ".join(cells)[:MOST_SHOWN])
                    hint += f", and name the fields as this line does ({names})"
                raise Unreachable(
                    f"line {stretch.find_line(index):,} of {file.location.url} names the fields, "
                    f"as source.header does, so it would be read as a record: {hint}"
                )
        yield stretch


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


class _Table(NamedTuple):
    """The names of a table's fields, and its rows."""

    header: list[str]
    stretches: Iterator[Stretch]


def _read_header(file: SourceFile, stretches: Iterator[Stretch]) -> _Table:
    """Return the names of the fields, which are the cells of the first row that is not blank, and
    the rows after it. A table without rows has no names.

    Args:
        stretches: the rows of the table.

    Raises Unreachable if the header has a fault, or two fields with the same name.
    """
    for stretch in stretches:
        index = stretch.find_filled()
        if index is None:
            continue
        names = stretch.list_cells(index)
        repeated = {name for name in names if names.count(name) > 1}
        fault = stretch.faults.get(index, "")
        if repeated:
            fault = f"two columns are named {min(repeated)!r}"
        if fault:
            raise Unreachable(
                f"line {stretch.find_line(index):,} of {file.location.url} does not name its "
                f"columns ({fault}): correct this line, or name the columns in the recipe with "
                "source.header"
            )
        rest = stretch.slice(index + 1, len(stretch.raws))
        rows_after: Iterator[Stretch] = chain([rest], stretches)
        if len(names) > 1:  # a table of one column may contain the name as a word
            rows_after = _refuse_joined_tables(file, rows_after, names)
        return _Table(names, rows_after)
    return _Table([], iter(()))


def _refuse_joined_tables(
    file: SourceFile, stretches: Iterator[Stretch], header: list[str]
) -> Iterator[Stretch]:
    """Yield all rows. Raise Unreachable if one of them is the header again: tables were joined by
    `cat`, and the names of the fields would become a record. The other table may have other line
    ends or quotes, and a byte order mark.
    """
    for stretch in stretches:
        index = _find_header(stretch, header)
        if index is not None:
            raise Unreachable(
                f"line {stretch.find_line(index):,} of {file.location.url} names the fields, as "
                "its header does, as if tables were joined by cat, so it would be read as a "
                "record: remove this line and others like it, or name the tables themselves in "
                "source.path"
            )
        yield stretch


def _find_header(stretch: Stretch, header: list[str]) -> int | None:
    """Return the index of the first row whose cells are those of the header; None if there is no
    such row.
    """
    # Compare the first cells only, which is fast: rows are many. Almost always that is all.
    first, *others = header
    mark = BYTE_ORDER_MARK.decode()
    forms = (first, f"{mark}{first}", f'{mark}"{first}"')
    width = len(header)
    starts: Sequence[int] = range(0, len(stretch.cells), width)
    if stretch.widths.count(width) < len(stretch.widths):
        starts = [*accumulate(stretch.widths, initial=0)][:-1]
        candidates = stretch.cells
    else:
        candidates = stretch.cells[::width]
    if not any(form in candidates for form in forms):
        return None
    for index, start in enumerate(starts):
        cells = stretch.cells[start : start + stretch.widths[index]]
        if cells and cells[0] in forms and cells[1:] == others and index not in stretch.faults:
            return index
    return None


def _name_fields(stretches: Iterator[Stretch], header: list[str], unit: Unit) -> Iterator[Rows]:
    """Yield the rows of a table as rows with named fields.

    Args:
        stretches: the rows after the header.
        header: the names of the fields.
        unit: names the fields whose cells are JSON, or may be.
    """
    number = 0
    for stretch in stretches:
        yield TableRows(
            ordinal=stretch.offset,
            raws=stretch.raws,
            stretch=stretch,
            number=number,
            header=tuple(header),
            unit=unit,
        )
        number += stretch.count_filled()


class _RowPlace(NamedTuple):
    """Where a row begins."""

    offset: int
    "The byte of the file."
    line: int
    "The number of the line, from 1."
    row: int
    "The number of the row, from 0; neither the header nor blank lines count."


@dataclass(slots=True, kw_only=True)
class TableRows(Rows):
    """Consecutive rows of a table. Their places are counted only if one of them is asked for."""

    stretch: Stretch
    number: int
    "The number of the first row in the table; blank lines do not count."
    header: tuple[str, ...]
    "The names of the fields."
    unit: Unit
    "Names the fields whose cells are JSON, or may be."
    _places: list[_RowPlace] = field(default_factory=list)
    "The places of the first rows, as far as they were counted."

    @property
    def lengths(self) -> Sequence[int]:
        return self.stretch.lengths

    def slice(self, start: int, stop: int) -> Rows:
        if start == 0 and stop == len(self.raws):
            return self
        earlier = self.stretch.slice(0, start)
        stretch = self.stretch.slice(start, stop)
        return replace(
            self,
            ordinal=stretch.offset,
            raws=stretch.raws,
            stretch=stretch,
            number=self.number + earlier.count_filled(),
            _places=[],
        )

    def content(self) -> Buffer:
        # The length of each row shows where the row ends.
        lines = {length: b"%d\n" % length for length in set(self.lengths)}
        parts = [b""] * (2 * len(self.raws))
        parts[::2] = [lines[length] for length in self.lengths]
        parts[1::2] = self.raws
        return b"".join(parts)

    def decode(self) -> Decoded:
        cells = self.stretch.cells
        widths = self.stretch.widths
        reasons = dict(self.stretch.faults)
        width = len(self.header)
        if widths.count(width) < len(widths):
            for index, count in enumerate(widths):
                if count != width and index not in reasons:
                    reasons[index] = _find_misfit(count, width)
            reasons = dict(sorted(reasons.items()))
        if reasons:
            rows = pairwise(accumulate(widths, initial=0))
            good = (slice(*row) for index, row in enumerate(rows) if index not in reasons)
            cells = [*chain.from_iterable(map(cells.__getitem__, good))]
        columns = [cells[number::width] for number in range(width)]
        records = make_records(self.header, columns)
        if self.unit.parsed or self.unit.text_or_messages:
            return self._parse_cells(records, reasons)
        return records, reasons

    def _parse_cells(self, records: list[Any], reasons: dict[int, str]) -> Decoded:
        """Decode the JSON in the cells of records. Return the good records, and all reasons.

        Args:
            records: the rows that are not in `reasons`, in order.
            reasons: index of a row that is not a record -> reason code.
        """
        indexes = [index for index in range(len(self.raws)) if index not in reasons]
        new_reasons = dict[int, str]()
        good = list[Any]()
        for index, record in zip(indexes, records, strict=True):
            reason = parse_cells(record, self.unit.parsed, self.unit.text_or_messages)
            if reason:
                new_reasons[index] = reason
            else:
                good.append(record)
        return good, dict(sorted((reasons | new_reasons).items()))

    def item(self, index: int) -> Item:
        begin = self._find_place(index)
        return Item(
            ordinal=begin.offset,
            place={"row": begin.row, "line": begin.line, "offset": begin.offset},
            length=self.lengths[index],
            raw=self.raws[index],
            fields=self.header,
        )

    def _find_place(self, index: int) -> _RowPlace:
        """Return the place of a row. The places of the rows before it are counted and kept."""
        stretch = self.stretch
        places = self._places
        if not places:
            places.append(_RowPlace(offset=stretch.offset, line=stretch.line, row=self.number))
        for number in range(len(places) - 1, index):
            begin = places[number]
            next_begin = _RowPlace(
                offset=begin.offset + stretch.lengths[number],
                line=begin.line + self.raws[number].count(b"\n"),
                row=begin.row + (0 if stretch.is_blank(number) else 1),
            )
            places.append(next_begin)
        return places[index]


def _find_misfit(cells: int, fields: int) -> str:
    """Return the reason code of a row whose number of cells differs from the table's number of
    fields. The reason of a row without cells is BLANK.
    """
    if cells == 0:
        return BLANK
    return "too_few_fields" if cells < fields else "too_many_fields"

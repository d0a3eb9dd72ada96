"""A table as data: raw values under headings.

One Table is shown on a terminal (`mdsmix.report.show`), in JSON, and in the comment at the top of a
rendered YAML. Its values are formatted only when it is shown, so all of these have the same
figures.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from mdsmix.frozen import frozen
from mdsmix.messages import make_printable

Row = tuple[Any, ...]
Tree = dict[str, Any]
"A result for programs: keys and values as JSON has them."


@frozen
class Column:
    """A column: its heading, and how its values are written."""

    heading: str
    form: str = "count"
    "A key of NUMBERS or of FORMS, such as `share`: how values are written for a person."
    key: str = ""
    "The column's name in JSON. Empty: the heading is the name."


@frozen
class Worded:
    """A value that is text for a person and a number for a program."""

    text: str
    "Such as `up to date`; it may be empty."
    figure: float | None = None
    "The value in JSON. None: the value has no meaning there, and is null."


BLANK = Worded("")
"A cell without a value, such as the weight of all streams together."


@frozen(kw_only=True)
class Table:
    """Columns, and rows with a raw value for each column. None is an unknown value."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    total: Row | None = None
    "One more row, with the totals of the columns; None if the table has no totals."
    notes: Sequence[str] = field(default_factory=tuple)
    "Sentences that are shown with the table."


def _make_estimated(work: Callable[[Any, Any], float]) -> Any:
    """Return a method for Estimate, such as `__add__`, whose result is an Estimate.

    Args:
        work: computes the result as a plain number, such as `operator.add`.
    """

    def method(self: Estimate, number: Any) -> Estimate:
        return Estimate(work(float(self), number))

    return method


class Estimate(float):
    """An estimated figure, shown with a `~`. The result of arithmetic with an Estimate is an
    Estimate too. NaN is an unknown figure, shown as `?`.
    """

    __add__ = __radd__ = _make_estimated(operator.add)
    __mul__ = __rmul__ = _make_estimated(operator.mul)
    __sub__ = _make_estimated(operator.sub)
    __rsub__ = _make_estimated(lambda own, number: number - own)
    __truediv__ = _make_estimated(operator.truediv)
    __rtruediv__ = _make_estimated(lambda own, number: number / own)


UNKNOWN = Estimate("nan")


def is_known(figure: float) -> bool:
    """Check whether a figure is known: an unknown figure is NaN."""
    return not math.isnan(figure)


def mark_estimate(figure: float, is_exact: bool) -> float:
    """Return the figure as an Estimate, unless it is exact."""
    return figure if is_exact else Estimate(figure)


def format_grouped(value: Any) -> str:
    """Return a value as text: a number as `1,234,567`, a list as `1, 2`, a mapping as `web: 1,
    chat: 2`, a truth value as `true`, and None as `none`.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {format_grouped(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_grouped, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def format_size(count: float) -> str:
    """Return a number of bytes for a person, in units of 1,000: `812 bytes`, `1.3 GB`."""
    from rich.filesize import decimal

    return decimal(int(count))


def _format_weight(weight: Mapping[str, Any]) -> str:
    """Return the keys that set a stream's weight, with their values: `proportion 0.3`. Return `all`
    if no key sets the weight.
    """
    if not weight:
        return "all"
    return ", ".join(f"{key} {value}" for key, value in weight.items())


NUMBERS = {
    "count": ",.0f",
    "share": ".1%",
    "fine": ".2%",
    "finest": ".3%",
    "times": ",.2f",
    "loss": ",.4f",
    "seconds": ".1f",
}
"Name of a form -> the format specification for its numbers, as `format` takes it."
FORMS: dict[str, Callable[[Any], str]] = {
    "text": format_grouped,
    "size": format_size,
    "weight": _format_weight,
}
"Name of a form -> the function that formats its values."


def format_cell(column: Column, value: Any) -> str:
    """Return a value of a column as one line for a person: `1,234`, `~1,234` for an estimate, `?`
    for an unknown value.
    """
    is_estimate = isinstance(value, Estimate)
    if value is None or (is_estimate and not is_known(value)):
        return "?"
    if isinstance(value, Worded):
        return make_printable(value.text)
    # A column of numbers may contain a string in a table that is never JSON.
    if isinstance(value, str):
        return make_printable(value)
    number_format = NUMBERS.get(column.form)
    text = format(value, number_format) if number_format else FORMS[column.form](value)
    return make_printable(f"~{text}" if is_estimate else text)


def table_to_json(table: Table) -> Tree:
    """Return the table as a tree for JSON, with one mapping for each row."""
    keys = [column.key or column.heading for column in table.columns]

    def name_values(row: Row) -> Tree:
        values = [cell.figure if isinstance(cell, Worded) else cell for cell in row]
        return dict(zip(keys, values, strict=True))

    tree: Tree = {"rows": [name_values(row) for row in table.rows]}
    if table.total:
        tree["total"] = name_values(table.total)
    if table.notes:
        tree["notes"] = list(table.notes)
    return tree


def align_columns(table: Table) -> Iterator[list[str]]:
    """Yield a list for each column: its heading and its cells, padded with blanks to the same width
    on a terminal. Text is aligned to the left, numbers to the right.
    """
    rows = [*table.rows]
    if table.total:
        rows.append(table.total)
    for number, column in enumerate(table.columns):
        cells = [column.heading, *(format_cell(column, row[number]) for row in rows)]
        width = max(map(measure_width, cells))
        yield [_pad(cell, width, to_left=column.form == "text") for cell in cells]


def measure_width(text: str) -> int:
    """Return how many columns of a terminal a text takes: two for a Chinese character."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # 2 ms, and most tables are ASCII

    return cell_len(text)


def _pad(cell: str, width: int, to_left: bool) -> str:
    """Return a cell with blanks up to a width on a terminal.

    Args:
        cell: the text of the cell.
        width: the number of terminal columns.
        to_left: whether the text is aligned to the left, so that the blanks follow it.
    """
    blanks = " " * (width - measure_width(cell))
    return cell + blanks if to_left else blanks + cell


def format_table(table: Table) -> Iterator[str]:
    """Yield the lines of the table as plain text: the headings, then the rows."""
    # `align_columns` yields columns; zip makes rows of them.
    for row in zip(*align_columns(table), strict=True):
        yield "  ".join(row).rstrip()

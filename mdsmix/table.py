"""A table as data: raw values under headings. Values are formatted only when a table is shown, so
every reader gets the same figures.

A terminal (`mdsmix.report.show`), JSON and the comment at the top of a rendered YAML show the same
object.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.filesize import decimal

from mdsmix.messages import make_printable

Row = tuple[Any, ...]
Tree = dict[str, Any]
"A result for programs: keys and values as JSON has them."


@dataclass(frozen=True)
class Column:
    """A column: its heading, and how its values are written."""

    heading: str
    form: str = "count"
    "A key of NUMBERS or FORMS: how values are written for a person."
    key: str = ""
    "The column's name in JSON; empty: the heading."


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of raw values; None is an unknown value."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    total: Row | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    "Sentences that are shown with the table."


def _estimated(work: Callable[[Any, Any], float]) -> Any:
    """Return the method of an arithmetic operator; its result is an Estimate."""
    return lambda self, other: Estimate(work(float(self), other))


class Estimate(float):
    """An estimated figure, shown with a `~`. The result of arithmetic with an Estimate is an
    Estimate too. NaN is an unknown figure, shown as `?`.
    """

    __add__ = __radd__ = _estimated(operator.add)
    __mul__ = __rmul__ = _estimated(operator.mul)
    __sub__ = _estimated(operator.sub)
    __rsub__ = _estimated(lambda own, other: other - own)
    __truediv__ = _estimated(operator.truediv)
    __rtruediv__ = _estimated(lambda own, other: other / own)


UNKNOWN = Estimate("nan")


def is_known(figure: float) -> bool:
    return not math.isnan(figure)


def mark_estimate(figure: float, is_exact: bool) -> float:
    """Return the figure as an Estimate, unless it is exact."""
    return figure if is_exact else Estimate(figure)


def format_grouped(value: Any) -> str:
    """Return a value as text: a number as `1,234,567`, a list as `1, 2`, a mapping as `web: 1,
    chat: 2`.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {format_grouped(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_grouped, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def format_size(count: float) -> str:
    """Return a number of bytes for a person, in units of 1,000: `812 bytes`, `1.3 GB`."""
    return decimal(int(count))


NUMBERS = {
    "count": ",.0f",
    "share": ".1%",
    "fine": ".2%",
    "finest": ".3%",
    "times": ",.2f",
    "seconds": ".1f",
}
"Form -> how Python formats its numbers."
FORMS: dict[str, Callable[[Any], str]] = {
    "text": format_grouped,
    "size": format_size,
    "weight": lambda value: ", ".join(f"{word} {n}" for word, n in value.items()) or "all",
}
"Form -> the function that writes its values."


def format_cell(column: Column, value: Any) -> str:
    """Return the value as one line for a person. A string in a column of numbers, such as `up to
    date`, is not changed.
    """
    is_estimate = isinstance(value, Estimate)
    if value is None or (is_estimate and not is_known(value)):
        return "?"
    if isinstance(value, str):
        return make_printable(value)
    number_format = NUMBERS.get(column.form)
    text = format(value, number_format) if number_format else FORMS[column.form](value)
    return make_printable(f"~{text}" if is_estimate else text)


def table_to_json(table: Table) -> Tree:
    """Return the table as a tree for JSON, with one mapping for each row."""
    keys = [column.key or column.heading for column in table.columns]
    tree: Tree = {"rows": [dict(zip(keys, row, strict=True)) for row in table.rows]}
    if table.total:
        tree["total"] = dict(zip(keys, table.total, strict=True))
    if table.notes:
        tree["notes"] = list(table.notes)
    return tree


def align_columns(table: Table) -> Iterator[list[str]]:
    """Yield the cells of each column, its heading first, padded to one width on a terminal: text to
    the left, numbers to the right.
    """
    rows = [*table.rows, *([table.total] if table.total else [])]
    for number, column in enumerate(table.columns):
        cells = [column.heading, *(format_cell(column, row[number]) for row in rows)]
        width = max(map(cell_len, cells))
        yield [_pad(cell, width, to_left=column.form == "text") for cell in cells]


def _pad(cell: str, width: int, to_left: bool) -> str:
    """Fill a cell with blanks to a width on a terminal: after the text if `to_left`."""
    blanks = " " * (width - cell_len(cell))
    return cell + blanks if to_left else blanks + cell


def format_table(table: Table) -> Iterator[str]:
    """Yield the lines of the table as plain text."""
    for row in zip(*align_columns(table), strict=True):
        yield "  ".join(row).rstrip()

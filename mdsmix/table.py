"""A table as data: raw values under headings. Values are formatted only where a table is shown, so
every reader gets the same figures.

A terminal (`mdsmix.report.show`), JSON and the comment at the head of a rendered YAML show the same
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
"A result for programs: keys and values as JSON holds them."


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
    """Rows of raw values; None stands for an unknown value."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    total: Row | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    "Sentences that are shown with the table."


def _estimated(work: Callable[[Any, Any], float]) -> Any:
    return lambda self, other: Estimate(work(float(self), other))


class Estimate(float):
    """An estimated figure, shown with a `~`. Arithmetic with it gives an Estimate again. NaN:
    unknown, shown as `?`.
    """

    __add__ = __radd__ = _estimated(operator.add)
    __mul__ = __rmul__ = _estimated(operator.mul)
    __sub__ = _estimated(operator.sub)
    __rsub__ = _estimated(lambda one, other: other - one)
    __truediv__ = _estimated(operator.truediv)
    __rtruediv__ = _estimated(lambda one, other: other / one)


UNKNOWN = Estimate("nan")


def is_known(figure: float) -> bool:
    return not math.isnan(figure)


def mark_estimate(figure: float, is_exact: bool) -> float:
    """The figure as an Estimate, unless it is exact."""
    return figure if is_exact else Estimate(figure)


def format_grouped(value: Any) -> str:
    """A value as text: a number as `1,234,567`, a list as `1, 2`, a mapping as `web: 1,
    chat: 2`.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {format_grouped(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_grouped, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def format_size(count: float) -> str:
    """A number of bytes for a person, in units of 1,000: `812 bytes`, `1.3 GB`."""
    return decimal(int(count))


NUMBERS = {
    "count": ",.0f",
    "share": ".1%",
    "fine": ".2%",
    "finest": ".3%",
    "times": ",.2f",
    "seconds": ".1f",
}
FORMS: dict[str, Callable[[Any], str]] = {
    "text": format_grouped,
    "size": format_size,
    "weight": lambda value: ", ".join(f"{word} {n}" for word, n in value.items()) or "all",
}


def format_cell(column: Column, value: Any) -> str:
    """The value as one line of text for a person. A text in a column of numbers, such as `up to
    date`, stays as it is.
    """
    is_guess = isinstance(value, Estimate)
    if value is None or (is_guess and not is_known(value)):
        return "?"
    if isinstance(value, str):
        return make_printable(value)
    number = NUMBERS.get(column.form)
    text = format(value, number) if number else FORMS[column.form](value)
    return make_printable(f"{'~' * is_guess}{text}")


def table_to_json(table: Table) -> Tree:
    """The table for JSON: one mapping for each row."""
    keys = [column.key or column.heading for column in table.columns]

    found: Tree = {"rows": [dict(zip(keys, row, strict=True)) for row in table.rows]}
    if table.total:
        found["total"] = dict(zip(keys, table.total, strict=True))
    return found | ({"notes": list(table.notes)} if table.notes else {})


def align_columns(table: Table) -> Iterator[list[str]]:
    """The cells of each column, its heading first, padded to one width on a terminal: texts to the
    left, numbers to the right.
    """
    rows = [*table.rows, *([table.total] if table.total else [])]
    for i, column in enumerate(table.columns):
        texts = [column.heading, *(format_cell(column, row[i]) for row in rows)]
        wide = [cell_len(text) for text in texts]
        filled = zip(texts, (" " * (max(wide) - each) for each in wide), strict=True)
        yield [text + blank if column.form == "text" else blank + text for text, blank in filled]


def format_lines(table: Table) -> Iterator[str]:
    """The table as plain text."""
    for row in zip(*align_columns(table), strict=True):
        yield "  ".join(row).rstrip()

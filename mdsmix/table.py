"""A table as data: raw values under headings. Whoever shows it spells them, so every reader gets the same figures.

A terminal (`mdsmix.report.show`), JSON and the comment at the head of a rendered YAML show the same object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mdsmix.words import printable

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and how its values are written."""

    heading: str
    form: str = "count"
    "A key of FORMS: how a person is shown its values."
    key: str = ""
    "Its name for programs, where the heading is no good one."


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of raw values; None is what is not known."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    total: Row | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    "Sentences that a reader should see with it."


class Estimate(float):
    """A figure that nobody counted, shown with a `~`. What is worked out from it is an Estimate too. NaN: not known, shown as `?`."""

    def __add__(self, other: float) -> Estimate:
        return Estimate(float(self) + other)

    def __sub__(self, other: float) -> Estimate:
        return Estimate(float(self) - other)

    def __rsub__(self, other: float) -> Estimate:
        return Estimate(other - float(self))

    def __mul__(self, other: float) -> Estimate:
        return Estimate(float(self) * other)

    def __truediv__(self, other: float) -> Estimate:
        return Estimate(float(self) / other)

    def __rtruediv__(self, other: float) -> Estimate:
        return Estimate(other / float(self))

    __radd__, __rmul__ = __add__, __mul__


UNKNOWN = Estimate("nan")


def is_known(figure: float) -> bool:
    return not math.isnan(figure)


def about(figure: float, is_exact: bool = False) -> float:
    """The figure as an Estimate, unless it is exact."""
    return figure if is_exact else Estimate(figure)


def grouped(value: Any) -> str:
    """A value as text: 1,234,567 with commas, several values with their names."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {grouped(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(grouped, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def size_of(count: float) -> str:
    """Bytes for a person: `812 B`, `1.3 GB`, of 1,000 each."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} PB"


def _about(value: Any) -> str:
    return "~" if isinstance(value, Estimate) else ""


FORMS: dict[str, Callable[[Any], str]] = {
    "text": grouped,
    "count": lambda value: f"{_about(value)}{value:,.0f}",
    "share": lambda value: f"{_about(value)}{value:.1%}",
    "fine": lambda value: f"{_about(value)}{value:.2%}",
    "finest": lambda value: f"{_about(value)}{value:.3%}",
    "times": lambda value: f"{_about(value)}{value:,.2f}",
    "size": lambda value: f"{_about(value)}{size_of(value)}",
    "seconds": lambda value: f"{value:.1f}",
    "weight": lambda value: ", ".join(f"{word} {n}" for word, n in value.items()) or "all",
}


def cell_text(column: Column, value: Any) -> str:
    """The value as a person reads it, in one line; a word, such as `up to date`, in a column of numbers stays a word."""
    if value is None or (isinstance(value, Estimate) and not is_known(value)):
        return "?"
    return printable(value if isinstance(value, str) else FORMS[column.form](value))


def as_json(table: Table) -> dict[str, Any]:
    """The table for programs: a mapping a row, an estimate as a plain number."""
    keys = [column.key or column.heading for column in table.columns]

    def named(row: Row) -> dict[str, Any]:
        plain = [float(value) if isinstance(value, Estimate) else value for value in row]
        return dict(zip(keys, plain, strict=True))

    found: dict[str, Any] = {"rows": [named(row) for row in table.rows]}
    if table.total:
        found["total"] = named(table.total)
    return found | ({"notes": list(table.notes)} if table.notes else {})


def cells(table: Table, i: int) -> list[str]:
    """Everything that is shown in a column, its heading first."""
    column = table.columns[i]
    rows = [*table.rows, *([table.total] if table.total else [])]
    return [column.heading, *(cell_text(column, row[i]) for row in rows)]


def lines(table: Table) -> Iterator[str]:
    """The table as plain text: the first column on the left, numbers on the right."""
    columns = [cells(table, i) for i in range(len(table.columns))]
    widths = [max(map(len, column)) for column in columns]
    for first, *others in zip(*columns, strict=True):
        yield "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])

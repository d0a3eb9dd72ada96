"""A table as data: raw values under headings, shown on a terminal or as JSON by the same object.

What makes a table never spells a number, so every reader gets the same figures: people by `print_table`, programs by
`as_json`, and a page by whoever lays one out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """What stands in a column."""

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


def spelled(value: Any) -> str:
    """A value of the card: numbers grouped, several values by their names."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {spelled(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(spelled, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


FORMS: dict[str, Callable[[Any], str]] = {
    "text": spelled,
    "count": lambda value: f"{value:,}",
    "share": lambda value: f"{value:.1%}",
    "seconds": lambda value: f"{value:.1f}",
    "weight": lambda value: ", ".join(f"{word} {n}" for word, n in value.items()) or "all",
}


def shown(column: Column, value: Any) -> str:
    """The value as a person reads it; a word, such as `up to date`, in a column of numbers stays a word."""
    if value is None:
        return "?"
    return value if isinstance(value, str) else FORMS[column.form](value)


def as_json(table: Table) -> dict[str, Any]:
    """The table for programs: a mapping a row."""
    keys = [column.key or column.heading for column in table.columns]
    found: dict[str, Any] = {"rows": [dict(zip(keys, row, strict=True)) for row in table.rows]}
    if table.total:
        found["total"] = dict(zip(keys, table.total, strict=True))
    return found | ({"notes": list(table.notes)} if table.notes else {})


def print_table(table: Table, console: Console) -> None:
    """The table. On a terminal that is too narrow it is folded: as many columns as fit, the others below, no digit lost."""
    for columns in _folds(table, console.width if console.is_terminal else 10_000):
        _print_columns(table, columns, console)


def _folds(table: Table, width: int) -> Iterator[list[int]]:
    """Groups of columns that fit; each begins with the first one, which names the rows."""
    widths = [max(map(len, _cells(table, i))) + 2 for i in range(len(table.columns))]
    group: list[int] = [0]
    for column in range(1, len(widths)):
        if len(group) > 1 and sum(widths[i] for i in group) + widths[column] > width:
            yield group
            group = [0]
        group.append(column)
    yield group


def _cells(table: Table, i: int) -> list[str]:
    """Everything that is printed in a column."""
    column = table.columns[i]
    rows = [*table.rows, *([table.total] if table.total else [])]
    return [column.heading, *(shown(column, row[i]) for row in rows)]


def _print_columns(table: Table, columns: Sequence[int], console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table as Lines

    lines = Lines(box=SIMPLE_HEAD)
    for i in columns:
        column = table.columns[i]
        lines.add_column(
            column.heading, justify="left" if column.form == "text" else "right", no_wrap=True
        )
    for row in table.rows:
        lines.add_row(*(escape(shown(table.columns[i], row[i])) for i in columns))
    if table.total:
        lines.add_section()
        lines.add_row(*(escape(shown(table.columns[i], table.total[i])) for i in columns))
    # A single column that is too wide goes over the edge rather than lose digits.
    whole = console.measure(lines, options=console.options.update(max_width=10_000)).maximum
    before, console.width = console.width, max(console.width, whole)
    console.print(lines)
    console.width = before

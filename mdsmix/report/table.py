"""A table on a terminal. On one that is too narrow it is folded, and no digit is lost.

What is no terminal gets whole lines. Nothing that is shown steers a terminal, or is read as markup or as an emoji.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mdsmix.table import Table, cells, shown
from mdsmix.words import printable

if TYPE_CHECKING:
    from rich.console import Console


def print_table(table: Table, console: Console) -> None:
    """The table. On a terminal that is too narrow it is folded: as many columns as fit, the others below, no digit lost."""
    for columns in _folds(table, console.width if console.is_terminal else 10_000):
        _print_columns(table, columns, console)


def print_pairs(pairs: Sequence[tuple[str, str]], console: Console) -> None:
    """(what, value) lines as two columns. On a terminal a long value is folded between words; a word that is too long, as
    a path or a hash, goes over the edge and can be copied whole."""
    left = max(len(what) for what, _ in pairs) + 2
    for what, value in pairs:
        first, *others = _folded(printable(value), console.width - left - 2, console.is_terminal)
        for name, line in [(what, first), *(("", line) for line in others)]:
            console.out(f"  {name:{left}}{line}".rstrip(), highlight=False)


def _folded(text: str, width: int, is_terminal: bool) -> list[str]:
    if not is_terminal:
        return [text]
    lines = textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _folds(table: Table, width: int) -> Iterator[list[int]]:
    """Groups of columns that fit; each begins with the first one, which names the rows."""
    widths = [max(map(len, cells(table, i))) + 2 for i in range(len(table.columns))]
    group: list[int] = [0]
    for column in range(1, len(widths)):
        if len(group) > 1 and sum(widths[i] for i in group) + widths[column] > width:
            yield group
            group = [0]
        group.append(column)
    yield group


def _print_columns(table: Table, columns: Sequence[int], console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Lines
    from rich.text import Text

    lines = Lines(box=SIMPLE_HEAD)
    for i in columns:
        column = table.columns[i]
        lines.add_column(
            column.heading, justify="left" if column.form == "text" else "right", no_wrap=True
        )
    for row in table.rows:
        lines.add_row(*(Text(shown(table.columns[i], row[i])) for i in columns))
    if table.total:
        lines.add_section()
        lines.add_row(*(Text(shown(table.columns[i], table.total[i])) for i in columns))
    # A single column that is too wide goes over the edge rather than lose digits.
    whole = console.measure(lines, options=console.options.update(max_width=10_000)).maximum
    before, console.width = console.width, max(console.width, whole)
    console.print(lines)
    console.width = before

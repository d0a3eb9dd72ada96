"""A table on a terminal. On one that is too narrow it is folded, and no digit is lost.

What is no terminal gets whole lines. Nothing that is shown steers a terminal, or is read as markup or as an emoji.
"""

from __future__ import annotations

import shutil
import sys
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
    left = max(len(what) for what, _ in pairs) + 4
    width = console.width if console.is_terminal else None
    for what, value in pairs:
        first, *others = folded(printable(value), " " * left, width)
        console.out(f"  {what}".ljust(left) + first[left:], *others, sep="\n", highlight=False)


def terminal_width() -> int | None:
    """Of stdout; None where that is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def folded(line: str, indent: str, width: int | None) -> list[str]:
    """The line, indented, as lines of a terminal of this width, folded between words; None: what is no terminal gets it whole."""
    if width is None:
        return [indent + line]
    wide = textwrap.TextWrapper(
        width=max(width, len(indent) + 20),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
    )
    return wide.wrap(line) or [indent]


def _folds(table: Table, width: int) -> Iterator[list[int]]:
    """Groups of columns that fit; each begins with the first one, which names the rows."""
    # A blank on both sides of each, one between, and one at either edge.
    widths = [max(map(len, cells(table, i))) + 3 for i in range(len(table.columns))]
    group: list[int] = [0]
    for column in range(1, len(widths)):
        if len(group) > 1 and sum(widths[i] for i in group) + widths[column] + 1 > width:
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

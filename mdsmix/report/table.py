"""A table on a terminal. On one that is too narrow it is folded, and no digit is lost.

What is no terminal gets whole lines. Nothing that is shown steers a terminal, or is read as markup or as an emoji.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len

from mdsmix.table import Table, cells
from mdsmix.words import printable

if TYPE_CHECKING:
    from rich.console import Console


def print_table(table: Table, console: Console) -> None:
    """The table. On a terminal that is too narrow it is folded: as many columns as fit, the others below, no digit lost. A
    single column that is too wide goes over the edge."""
    rule = "-" if console.options.ascii_only else "─"
    columns = [_aligned(table, i) for i in range(len(table.columns))]
    for group in _folds(columns, console.width if console.is_terminal else 10_000):
        head, *rows = (
            f" {' '.join(line)} " for line in zip(*(columns[i] for i in group), strict=True)
        )
        width = cell_len(head)
        if table.rows and table.total:
            rows.insert(-1, " " * width)
        console.out(" " * width)
        console.out(head, style="bold", highlight=False)
        console.out(f" {rule * (width - 2)} ", *rows, " " * width, sep="\n", highlight=False)


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


def _aligned(table: Table, i: int) -> list[str]:
    """All cells of a column, its heading first, of one width on a terminal, a blank on both sides: words on the left."""
    texts = cells(table, i)
    widest = max(map(cell_len, texts))
    blanks = [" " * (widest - cell_len(text)) for text in texts]
    if table.columns[i].form == "text":
        return [f" {text}{blank} " for text, blank in zip(texts, blanks, strict=True)]
    return [f" {blank}{text} " for text, blank in zip(texts, blanks, strict=True)]


def _folds(columns: Sequence[Sequence[str]], width: int) -> Iterator[list[int]]:
    """Groups of columns that fit, a blank before and after each; each begins with the first one, which names the rows."""
    widths = [cell_len(column[0]) + 1 for column in columns]
    group: list[int] = [0]
    for column in range(1, len(widths)):
        if len(group) > 1 and sum(widths[i] for i in group) + widths[column] + 1 > width:
            yield group
            group = [0]
        group.append(column)
    yield group

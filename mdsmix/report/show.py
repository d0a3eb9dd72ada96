"""A result for a person: tables, named values, titles, samples and sentences, in their order.

Commands hand their result to `show`. The page of `mdsmix report` draws the same tables, and programs get them by
`mdsmix.table.as_json`. On a terminal a table that is too wide is folded, and no digit is lost; a sentence is folded between words.
What is no terminal gets whole lines. Nothing that is shown steers a terminal, or is read as markup or as an emoji.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len

from mdsmix.table import Table, cells
from mdsmix.words import printable

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"text": "", "mark": "bold", "control": "cyan"}
"How the runs of a sample look on a terminal."
Run = tuple[str, str]
"Text without escape codes, and a key of STYLES."


@dataclass(frozen=True, slots=True)
class NamedValues:
    """(name, value) lines as two columns. A word that is too long, as a path or a hash, goes over the edge and can be copied whole."""

    lines: Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Title:
    """A line across the terminal that begins with a title."""

    title: str


@dataclass(frozen=True, slots=True)
class SampleText:
    """Text of a sample. It is never folded: no line break is added to it."""

    runs: Iterable[Run]


class Headings(str):
    """The headings of a table."""

    __slots__ = ()


Item = str | Table | NamedValues | Title | SampleText


def shortened(runs: Iterable[Run], most: int) -> Iterator[Run]:
    """The runs; a text longer than `most` loses its middle, since its end is trained."""
    every = list(runs)
    count = sum(len(text) for text, _ in every)
    stop, start, at = (most // 2, count - most // 2, 0) if count > most else (count, count, 0)
    for text, form in every:
        head, tail = text[: max(0, stop - at)], text[max(0, start - at) :]
        yield head, form
        if at < stop <= at + len(text) and stop < start:
            yield f" ... {start - stop:,} characters ... ", "text"
        yield tail, form
        at += len(text)


def show(*items: Item, err: bool = False, console: Console | None = None) -> None:
    """Prints the items. The notes of a table follow it."""
    from rich.console import Console
    from rich.text import Text

    to = console or Console(stderr=err, highlight=False)
    for item in items:
        if isinstance(item, Title):
            to.rule(Text(printable(item.title)), align="left")
        elif isinstance(item, SampleText):
            text = Text.assemble(*((text, STYLES[form]) for text, form in item.runs))
            to.print(text, soft_wrap=True)
        else:
            for line in _lines(item, to):
                to.out(line, style="bold" if isinstance(line, Headings) else None, highlight=False)


def folded(line: str, indent: str, width: int | None) -> list[str]:
    """The line, indented and folded between words at this width; None: not folded."""
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


def _lines(item: str | Table | NamedValues, to: Console) -> Iterator[str]:
    width = to.width if to.is_terminal else None
    if isinstance(item, Table):
        yield from _table(item, width, "-" if to.options.ascii_only else "─")
        sentences: Sequence[str] = item.notes
    elif isinstance(item, NamedValues):
        yield from _pairs(list(item.lines), width)
        return
    else:
        sentences = [item]
    for sentence in map(printable, sentences):
        words = sentence.lstrip()
        yield from folded(words, sentence[: len(sentence) - len(words)], width)


def _pairs(pairs: Sequence[tuple[str, str]], width: int | None) -> Iterator[str]:
    left = max(len(what) for what, _ in pairs) + 4
    for what, value in pairs:
        first, *others = folded(printable(value), " " * left, width)
        yield f"  {what}".ljust(left) + first[left:]
        yield from others


def _table(table: Table, width: int | None, rule: str) -> Iterator[str]:
    """The lines of a table. Columns that do not fit follow below, behind the first column. A single column may go over the edge."""
    columns = [_aligned(table, i) for i in range(len(table.columns))]
    for group in _folds(columns, width or 10_000):
        head, *rows = (
            f" {' '.join(line)} " for line in zip(*(columns[i] for i in group), strict=True)
        )
        blank = " " * cell_len(head)
        if table.rows and table.total:
            rows.insert(-1, blank)
        yield from (blank, Headings(head), f" {rule * (cell_len(head) - 2)} ", *rows, blank)


def _aligned(table: Table, i: int) -> list[str]:
    """The cells of a column, its heading first, of one width and with a blank on both sides. Words are aligned left, numbers right."""
    texts = cells(table, i)
    widest = max(map(cell_len, texts))
    blanks = [" " * (widest - cell_len(text)) for text in texts]
    if table.columns[i].form == "text":
        return [f" {text}{blank} " for text, blank in zip(texts, blanks, strict=True)]
    return [f" {blank}{text} " for text, blank in zip(texts, blanks, strict=True)]


def _folds(columns: Sequence[Sequence[str]], width: int) -> Iterator[list[int]]:
    """Groups of columns that fit the width. Each group begins with the first column, which names the rows."""
    widths = [cell_len(column[0]) + 1 for column in columns]
    group: list[int] = [0]
    for column in range(1, len(widths)):
        if len(group) > 1 and sum(widths[i] for i in group) + widths[column] + 1 > width:
            yield group
            group = [0]
        group.append(column)
    yield group

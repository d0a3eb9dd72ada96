"""Results as HTML, for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from markupsafe import Markup, escape

from mdsmix.messages import WRITTEN, make_printable
from mdsmix.report.show import Heading, Item, NamedValues, SampleText, Title
from mdsmix.table import Table, format_cell

FRAME = Markup('<div class="mdsmix-result">{}</div>')
PARAGRAPH = Markup("<p>{}</p>")
BOLD = Markup("<p><b>{}</b></p>")
SAMPLE = Markup('<pre style="white-space: pre-wrap">{}</pre>')
CELL = Markup('<td style="text-align: {}">{}</td>')
HEAD = Markup('<th style="text-align: {}">{}</th>')


def make_html(items: Iterable[Item]) -> str:
    """Return items as one HTML element. All text is escaped."""
    return str(FRAME.format(_join(_draw(item) for item in items)))


def _join(parts: Iterable[Markup]) -> Markup:
    return Markup("\n").join(parts)


def _draw(item: Item) -> Markup:
    """Return one item as HTML."""
    if isinstance(item, Table):
        return _draw_table(item)
    if isinstance(item, NamedValues):
        rows = (
            CELL.format("left", name) + CELL.format("left", value) for name, value in item.lines
        )
        return _table_of(rows)
    if isinstance(item, SampleText):
        text = "".join(text for text, _ in item.runs)
        return SAMPLE.format(make_printable(text, WRITTEN))
    if isinstance(item, Title):
        return BOLD.format(make_printable(item.title))
    if isinstance(item, Heading):
        return BOLD.format(make_printable(item.text))
    return PARAGRAPH.format(make_printable(item)) if item else Markup("")


def _draw_table(table: Table) -> Markup:
    """Return a table with its notes below it."""
    aligned = ["left" if column.form == "text" else "right" for column in table.columns]
    heads = [
        HEAD.format(side, column.heading)
        for side, column in zip(aligned, table.columns, strict=True)
    ]
    drawn = _table_of([Markup("").join(heads), *_draw_rows(table, aligned)])
    return _join([drawn, *(PARAGRAPH.format(escape(note)) for note in table.notes)])


def _draw_rows(table: Table, aligned: list[str]) -> Iterator[Markup]:
    """Yield the cells of each row, the total last."""
    for row in [*table.rows, *([table.total] if table.total else [])]:
        cells = zip(aligned, table.columns, row, strict=True)
        yield Markup("").join(
            CELL.format(side, format_cell(column, value)) for side, column, value in cells
        )


def _table_of(rows: Iterable[Markup]) -> Markup:
    """Return an HTML table of rows, each the markup of its cells."""
    body = Markup("").join(Markup("<tr>{}</tr>").format(row) for row in rows)
    return Markup("<table>{}</table>").format(body)

"""Results as HTML, for a notebook.

An element has its own style, whose rules name the class of the element, and no script. All text is
escaped. Colours are those of the page of `mdsmix report`, light or dark as JupyterLab or VS Code
is. If a notebook drops the style, the words and the brackets around trained and control tokens
still tell everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mdsmix.messages import WRITTEN, make_printable
from mdsmix.report.drawings import Ribbon
from mdsmix.report.show import SEVERITIES, Heading, Item, NamedValues, Run, SampleText, Title
from mdsmix.table import Column, Row, Table, format_cell

STYLE = Path(__file__).with_name("notebook.css")
ELEMENT = Markup('<div class="mdsmix-result"><style>{}</style>\n{}\n</div>')
PARAGRAPH = Markup('<p class="{}">{}</p>')
HEADING = Markup("<h4>{}</h4>")
FINDING = Markup('<div class="finding {}">{}</div>')
SCROLL = Markup('<div class="scroll">{}</div>')
TABLE = Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody><tfoot>{}</tfoot></table>")
PAIRS = Markup('<table class="pairs"><tbody>{}</tbody></table>')
PAIR = Markup('<tr><td class="text">{}</td><td class="text">{}</td></tr>')
ROW = Markup("<tr>{}</tr>")
HEAD = Markup('<th class="{}">{}</th>')
CELL = Markup('<td class="{}">{}</td>')
BAR = Markup('<span class="bar"><i class="{}" style="width: {:.3f}%"></i></span>')
RIBBON = Markup('<p>{}</p><div class="ribbon">{}</div><ul class="key">{}</ul>')
SHARE = Markup('<i class="{}" style="width: {:.3f}%" title="{}"></i>')
KEY = Markup('<li><i class="swatch {}"></i>{}</li>')
LINES = Markup('<div class="lines">{}</div>')
PROGRESS = Markup('<p><progress value="{:.4f}"></progress> {:.0%} {}</p>')
SAMPLE = Markup("<pre>{}</pre>")
BRACKET = Markup('<span class="bracket">{}</span>')
CONTROL = Markup('<b class="control">{}</b>')
BEFORE_MARKED, AFTER_MARKED = "⟦⟮", "⟧⟯"
"Brackets before and after trained or shared tokens."


def make_html(items: Iterable[Item | Ribbon]) -> str:
    """Return items as one HTML element with its style. All text is escaped."""
    return str(ELEMENT.format(_read_style(), _join(_draw_all(items), "\n")))


def make_progress_html(sentences: Sequence[str], share: float | None, text: str) -> str:
    """Return the progress of a conversion as one HTML element: the sentences, then a bar.

    Args:
        sentences: the sentences that were shown so far.
        share: how much of the work is done, from 0 to 1; None: no bar.
        text: the text next to the bar.
    """
    parts = [LINES.format(_join(map(_draw_sentence, sentences)))] if sentences else []
    if share is not None:
        parts.append(PROGRESS.format(share, share, make_printable(text)))
    return str(ELEMENT.format(_read_style(), _join(parts, "\n")))


def _read_style() -> Markup:
    return Markup(STYLE.read_text("utf-8").strip())


def _join(parts: Iterable[Markup], between: str = "") -> Markup:
    return Markup(between).join(parts)


def _draw_all(items: Iterable[Item | Ribbon]) -> Iterator[Markup]:
    """Yield the items as HTML. The indented lines below the heading of a finding belong to it."""
    severity = ""
    lines = list[Markup]()
    for item in items:
        if severity and isinstance(item, str) and item.startswith(" "):
            lines.append(_draw_sentence(item))
            continue
        if severity:
            yield FINDING.format(severity, _join(lines))
            severity = ""
        # The heading of a finding begins with its severity, such as `error`.
        word = item.text.split(" ")[0] if isinstance(item, Heading) else ""
        if word in SEVERITIES:
            severity = word
            lines = [_draw(item)]
        else:
            yield _draw(item)
    if severity:
        yield FINDING.format(severity, _join(lines))


def _draw(item: Item | Ribbon) -> Markup:
    """Return one item as HTML."""
    if isinstance(item, Table):
        return _draw_table(item)
    if isinstance(item, Ribbon):
        return _draw_ribbon(item)
    if isinstance(item, NamedValues):
        pairs = [
            PAIR.format(make_printable(name), make_printable(text)) for name, text in item.lines
        ]
        return PAIRS.format(_join(pairs))
    if isinstance(item, SampleText):
        return SAMPLE.format(_join(_draw_runs(item.runs)))
    if isinstance(item, Title):
        return HEADING.format(make_printable(item.title))
    if isinstance(item, Heading):
        return HEADING.format(make_printable(item.text))
    return _draw_sentence(item)


def _draw_sentence(sentence: str) -> Markup:
    """Return a sentence as a paragraph: indented if it is, and marked if it is a warning."""
    text = sentence.strip()
    if not text:
        return Markup("")
    classes = []
    if sentence.startswith(" "):
        classes.append("in")
    if text.startswith("WARNING"):
        classes.append("warning")
    return PARAGRAPH.format(" ".join(classes), make_printable(text))


def _draw_runs(runs: Iterable[Run]) -> Iterator[Markup]:
    """Yield the text of a sample. Trained tokens are a `<mark>`, a control token is a `<b>`; their
    brackets are hidden, but copied.
    """
    for text, form in runs:
        shown = make_printable(text, WRITTEN)
        if form == "mark" and text in BEFORE_MARKED:
            yield Markup("<mark>") + BRACKET.format(text)
        elif form == "mark" and text in AFTER_MARKED:
            yield BRACKET.format(text) + Markup("</mark>")
        elif form == "mark":  # not a bracket: the heading of a packed document
            yield Markup("<b>{}</b>").format(shown)
        elif form == "control":
            # A control token is written in brackets, as its first and last character.
            before, after = BRACKET.format(shown[0]), BRACKET.format(shown[-1])
            yield CONTROL.format(before + shown[1:-1] + after)
        else:
            yield Markup("{}").format(shown)


def _draw_ribbon(ribbon: Ribbon) -> Markup:
    """Return a bar that is divided into shares, with its key below."""
    shares = []
    keys = []
    for rect in ribbon.rects:
        label = make_printable(rect.label)
        shares.append(SHARE.format(rect.css, rect.width, label))
        keys.append(KEY.format(rect.css, label))
    return RIBBON.format(make_printable(ribbon.label), _join(shares), _join(keys))


def _draw_table(table: Table) -> Markup:
    """Return a table with its notes below it."""
    heads = [HEAD.format(_name_side(column), column.heading) for column in table.columns]
    rows = [_draw_row(table.columns, row) for row in table.rows]
    total = _draw_row(table.columns, table.total) if table.total else Markup("")
    drawn = SCROLL.format(TABLE.format(_join(heads), _join(rows), total))
    return _join([drawn, *map(_draw_sentence, table.notes)], "\n")


def _draw_row(columns: Sequence[Column], row: Row) -> Markup:
    """Return a row of a table, with a value for each column."""
    cells = []
    for column, value in zip(columns, row, strict=True):
        cells.append(CELL.format(_name_side(column), _draw_cell(column, value)))
    return ROW.format(_join(cells))


def _draw_cell(column: Column, value: Any) -> Markup | str:
    """Return the content of a cell. The value of a bar is (its length from 0 to 1, its class)."""
    if column.form == "bar":
        length, css = value
        return BAR.format(css, 100 * length)
    return format_cell(column, value)


def _name_side(column: Column) -> str:
    """Return the class that aligns a column."""
    return "text" if column.form in ("text", "bar") else ""

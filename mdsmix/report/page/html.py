"""Gathered -> the text of the page, by jinja2 with autoescape: a sample that holds markup stays text.

The page reaches nothing outside of itself: its policy allows its own style and script, by their hashes, and images that it holds.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mdsmix import __version__
from mdsmix.mix.shares_table import shares_table, title
from mdsmix.mix.streams import Mix
from mdsmix.recipe.read import parted
from mdsmix.report.findings import alike
from mdsmix.report.page import svg
from mdsmix.report.page.gather import MOST_BAD, NOT_YET, ROWS, Gathered
from mdsmix.report.page.stream_cards import UNSEEN, drawn, samples_of
from mdsmix.report.page.svg import figure, mix_rows, positions_of, ribbons
from mdsmix.report.plan import plan_shown
from mdsmix.report.show import Item, NamedValues, Title
from mdsmix.table import Table, cell_text, size_of
from mdsmix.words import WRITTEN, plural, printable

if TYPE_CHECKING:
    from mdsmix.preview.verdict import Preview

TEMPLATES = Path(__file__).parent / "templates"


def page_html(page: Gathered) -> str:
    """The whole page."""
    style, script = _own("page.css"), _own("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template("page.html")
        .render(**_context(page), style=Markup(style), script=Markup(script), policy=policy)
    )


def _own(name: str) -> str:
    return (TEMPLATES / name).read_text("utf-8").strip()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    made.filters |= {
        "figure": figure,
        "size": size_of,
        "told": cell_text,
        "plural": plural,
        "ticks": ticks,
    }
    made.tests |= {
        "a_table": lambda item: isinstance(item, Table),
        "pairs": lambda item: isinstance(item, NamedValues),
        "rule": lambda item: isinstance(item, Title),
    }
    return made


def _printable(value: Any) -> Any:
    """Escapes characters that change the direction of writing, and NUL. Markup is made by us, and stays."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, WRITTEN)
    return value


def ticks(text: str) -> Markup:
    """A sentence; words in backticks become code."""
    parts = printable(text).split("`")
    if not len(parts) % 2:
        return escape(printable(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts)
    )


def _context(page: Gathered) -> dict[str, Any]:
    colours = _colours(page)
    rows = list(mix_rows(page, colours))
    css = [colours[s.place.name] for s in page.streams]
    samples, left_out = samples_of(page.streams, css)
    there = [s for s in page.streams if s.problem != NOT_YET or s.bad]
    lost = [s for s in there if s.problem]
    told = {s.problem for s in lost}
    return {
        "page": page,
        "version": __version__,
        "title": _title(page),
        "command": shlex.join(["mdsmix", "report", *page.targets, *page.asked.options()]),
        "svg": svg,
        "colours": colours,
        "findings": alike(page.findings),
        "rows": rows,
        "ribbons": list(ribbons(rows)),
        "shares": _shares(page.mix),
        "samples": samples,
        "left_out": left_out,
        "streams": [drawn(each, colours[each.place.name]) for each in there],
        "plan": list(plan_shown(page.plan)) if page.plan else [],
        "positions": positions_of(page.plan),
        "windows": _windows(page.preview),
        "preview": _preview(page),
        "lost": lost,
        "notes": {part: UNSEEN if said in told else said for part, said in page.notes.items()},
        "most_bad": MOST_BAD,
        "rows_a_device": ROWS,
    }


def _colours(page: Gathered) -> dict[str, str]:
    """Stream -> class. Those of the mix come first, in its order, as everywhere; evaluations after them."""
    mixed = [s.stream for s in page.plan.streams] if page.plan else []
    every = dict.fromkeys([*mixed, *(s.place.name for s in page.streams)])
    return {name: svg.colour(number) for number, name in enumerate(every)}


def _preview(page: Gathered) -> list[Item]:
    """What `mdsmix preview` shows. Imported with it, since it imports streaming."""
    if page.preview is None:
        return []
    from mdsmix.report.preview import preview_shown

    return list(preview_shown(page.preview, page.decoder, with_ids=False))


def _windows(found: Preview | None) -> Markup:
    """The epoch in windows of steps: a mix that drifts is seen here."""
    if found is None:
        return Markup("")
    from mdsmix.report.preview import windows_table

    said = [
        [f"steps {row[0]}, {name}: {s:.1%}" for name, s in zip(found.streams, row[1:], strict=True)]
        for row in windows_table(found).rows
    ]
    label = f"shares of {plural(len(found.streams), 'stream')} in {plural(len(said), 'window')} of the epoch's steps"
    return svg.windows(label, found.windows.shares.tolist(), said)


def _title(page: Gathered) -> str:
    named, _ = parted(page.targets)
    if len(named) == 1:
        name = Path(named[0]).name or named[0]
        return name.removesuffix(".yaml").removesuffix(".yml")
    return plural(len(page.streams), "stream")


def _shares(mix: Mix | None) -> tuple[str, Table] | None:
    return (title(mix.shares), shares_table(mix.shares)) if mix and mix.shares else None

"""`mdsmix inspect`: what a published stream is, and what its samples say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mdsmix.cli.options import AsJson, Stream, echo_json

if TYPE_CHECKING:
    from mdsmix.report.inspection import Inspection


def inspect(
    stream: Stream,
    samples: Annotated[
        int, typer.Option("-n", "--samples", min=0, metavar="N", help="Samples to show.")
    ] = 3,
    tokenizer: Annotated[
        Optional[str],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            metavar="NAME",
            help="Decode with this tokenizer.",
            show_default="the one that made it, if known here",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the manifest of STREAM as a table and its first samples, trained tokens in ⟦ ⟧."""
    from mdsmix.report.inspection import inspection_json, look

    found = look(stream, samples, tokenizer)
    if as_json:
        echo_json(inspection_json(found))
    else:
        _print(found)


def _print(found: Inspection) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from mdsmix.report.card import card_rows
    from mdsmix.report.samples import shown

    console = Console(highlight=False, soft_wrap=False)
    table = Table(box=SIMPLE, show_header=False)
    for what, value in card_rows(found.where, found.index, found.manifest):
        table.add_row(what, escape(value))
    console.print(table)
    for number, sample in enumerate(found.samples):
        console.rule(f"sample {number}", align="left")
        text = shown(sample, found.decode)
        console.print(text, markup=False, soft_wrap=True)  # no line break that is not in the text

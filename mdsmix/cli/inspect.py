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
    """Show the manifest of STREAM as a table and its first samples, trained tokens in ⟦ ⟧, control tokens in ⟨ ⟩.

    Text that only looks like a control token stands in no ⟨ ⟩: it is ordinary tokens.
    """
    from mdsmix.report.inspection import inspection_json, look

    found = look(stream, samples, tokenizer)
    if as_json:
        echo_json(inspection_json(found))
    else:
        _print(found)


def _print(found: Inspection) -> None:
    from rich.console import Console
    from rich.text import Text

    from mdsmix.report.card import card_rows
    from mdsmix.report.samples import STYLES, shown
    from mdsmix.report.table import print_pairs

    console = Console(highlight=False)
    print_pairs(list(card_rows(found.where, found.index, found.manifest)), console)
    for number, sample in enumerate(found.samples):
        console.rule(f"sample {number}", align="left")
        runs = [(text, STYLES[form]) for text, form in shown(sample, found.decoder)]
        console.print(Text.assemble(*runs), soft_wrap=True)  # no line break that is not in the text

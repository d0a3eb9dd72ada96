"""`mdsmix export`: published streams -> the formats of other trainers."""

from __future__ import annotations

from typing import Annotated

import typer

from mdsmix.cli.json_document import echo_json
from mdsmix.cli.options import DATA, AsJson, LogFile, Quiet, Streams
from mdsmix.errors import MixRefused


def export(
    streams: Streams,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="The format: megatron-bridge, megatron, parquet or litdata.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "-o",
            "--out",
            metavar="FOLDER",
            help="Write here, to a folder of this machine. Each stream of a recipe gets a folder "
            "in it.",
            show_default=False,
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STREAM",
            help="Export only this stream of the recipe; may be repeated.",
            rich_help_panel=DATA,
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_file: LogFile = None,
) -> None:
    """Write the rows of published streams, with the tokens that are trained, in the format of
    another trainer.

    Nothing is tokenized again. Samples, tokens and trained tokens are counted while they are
    written, and an export that differs from the manifest fails. A killed export continues, and an
    unchanged one is not written again.
    """
    from mdsmix import api
    from mdsmix.report.show import log_items, print_briefly, show

    try:
        exported = api.export(streams, to=to, out=out, only=only or (), progress=not quiet)
    except MixRefused as refused:
        if refused.checked is not None:
            print_briefly(refused.checked, streams)
        raise
    if as_json:
        echo_json(exported.to_dict())
    if as_json or quiet:
        log_items(*exported.items())
    else:
        show(*exported.items())

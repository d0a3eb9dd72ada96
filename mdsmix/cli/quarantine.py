"""`mdsmix quarantine`: the bad records of streams, by reason."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mdsmix.cli.options import (
    AsJson,
    Streams,
    for_each_stream,
)


def quarantine(
    streams: Streams,
    each: Annotated[
        int,
        typer.Option("-n", "--each", metavar="N", min=0, help="Records to show of each reason."),
    ] = 3,
    reason: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE", help="Only these reasons; may be repeated.", show_default="all"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the bad records of each STREAM by reason, the most frequent first: file, position and
    content.

    `convert` writes such records to quarantine/, even if it publishes nothing because too many
    are bad.
    """
    from mdsmix.report.inspection import find_bad_records, show_bad_records
    from mdsmix.report.show import show

    def show_records(stream: str) -> Any:
        records = find_bad_records(stream, each, reason or ())
        if as_json:
            return records
        show(*show_bad_records(records))
        return None

    for_each_stream(streams, as_json, show_records)

"""`mdsmix quarantine`: the bad records of a stream, by reason."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from mdsmix.cli.options import AsJson, Stream, echo_json
from mdsmix.words import plural


def quarantine(
    stream: Stream,
    each: Annotated[
        int,
        typer.Option("-n", "--each", min=0, metavar="N", help="Records to show of each reason."),
    ] = 3,
    reason: Annotated[
        Optional[list[str]],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            metavar="CODE", help="Only these reasons; may be repeated.", show_default="all"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the bad records of STREAM by reason, the most frequent first: where each stands, and what it holds.

    They were set aside by `convert`, also by one that published nothing since too many were bad.
    """
    from mdsmix.report.bad_records import bad_record_lines, bad_records_json, find_bad_records

    found = find_bad_records(stream, each, reason or ())
    if as_json:
        echo_json(bad_records_json(found))
        return
    typer.echo(f"{found.where}: {plural(found.count, 'bad record')}")
    for one in found.reasons:
        typer.echo(f"\n{one.code}: {one.count:,}")
        for record in one.records:
            typer.echo("\n".join(f"  {line}" for line in bad_record_lines(record)))

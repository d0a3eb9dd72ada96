"""`mdsmix quarantine`: the bad records of streams, by reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mdsmix.cli.options import AsJson, echo
from mdsmix.cli.several import Streams, for_each
from mdsmix.words import plural

if TYPE_CHECKING:
    from mdsmix.report.bad_records import BadRecords


def quarantine(
    streams: Streams,
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
    """Show the bad records of each STREAM by reason, the most frequent first: where each stands, and what it holds.

    They were set aside by `convert`, also by one that published nothing since too many were bad.
    """
    from mdsmix.report.bad_records import bad_records_json, find_bad_records, refuse_unknown

    seen: list[BadRecords] = []

    def one(stream: str) -> Any:
        found = find_bad_records(stream, each, reason or ())
        seen.append(found)
        return bad_records_json(found) if as_json else _print(found)

    for_each(streams, as_json, one)
    refuse_unknown(seen, reason or ())


def _print(found: BadRecords) -> None:
    """On a terminal a record is folded between words, below its place."""
    from mdsmix.report.bad_records import bad_record_lines
    from mdsmix.report.table import folded, terminal_width

    width = terminal_width()
    echo(f"{found.where}: {plural(found.count, 'bad record')}")
    for one in found.reasons:
        echo("", f"{one.code}: {one.count:,}")
        for record in one.records:
            for indent, line in bad_record_lines(record):
                echo(*folded(line, indent, width))

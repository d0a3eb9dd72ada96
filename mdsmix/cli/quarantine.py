"""`mdsmix quarantine`: the bad records of streams, by reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mdsmix.cli.options import AsJson
from mdsmix.cli.several import Streams, for_each

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
    from mdsmix.report.bad_records import (
        bad_records_json,
        bad_records_shown,
        find_bad_records,
        refuse_unknown,
    )
    from mdsmix.report.show import show

    seen: list[BadRecords] = []

    def one(stream: str) -> Any:
        found = find_bad_records(stream, each, reason or ())
        seen.append(found)
        return bad_records_json(found) if as_json else show(*bad_records_shown(found))

    for_each(streams, as_json, one)
    refuse_unknown(seen, reason or ())

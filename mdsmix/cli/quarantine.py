"""`mdsmix quarantine`: the bad records of streams, by reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mdsmix.cli.options import AsJson, Streams, Texts, for_each, option

if TYPE_CHECKING:
    from mdsmix.report.bad_records import BadRecords


def quarantine(
    streams: Streams,
    each: int = option(3, "Records to show of each reason.", "N", "-n", "--each", least=0),
    reason: Texts = option(None, "Only these reasons; may be repeated.", "CODE", shown="all"),
    as_json: AsJson = False,
) -> None:
    """Show the bad records of each STREAM by reason, the most frequent first: where each stands, and what it holds.

    They were set aside by `convert`, also by one that published nothing since too many were bad.
    """
    from mdsmix.report import bad_records
    from mdsmix.report.show import show

    every = list["BadRecords"]()

    def one(stream: str) -> Any:
        every.append(found := bad_records.find_bad_records(stream, each, reason or ()))
        if as_json:
            return bad_records.bad_records_json(found)
        return show(*bad_records.bad_records_shown(found))

    for_each(streams, as_json, one)
    bad_records.refuse_unknown(every, reason or ())

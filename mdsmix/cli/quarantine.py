"""`mdsmix quarantine`: the bad records of streams, by reason."""

from __future__ import annotations

from typing import Any

from mdsmix.cli.options import AS_JSON, STREAMS, Texts, for_each, option


def quarantine(
    streams: list[str] = STREAMS,
    each: int = option(3, "Records to show of each reason.", "N", "-n", "--each", least=0),
    reason: Texts = option(None, "Only these reasons; may be repeated.", "CODE", shown="all"),
    as_json: bool = AS_JSON,
) -> None:
    """Show the bad records of each STREAM by reason, the most frequent first: where each stands,
    and what it holds.

    `convert` sets such records aside, even where it publishes nothing because too many are bad.
    """
    from mdsmix.report.inspection import bad_records_shown, find_bad_records
    from mdsmix.report.show import show

    def one(stream: str) -> Any:
        found = find_bad_records(stream, each, reason or ())
        return found if as_json else show(*bad_records_shown(found))

    for_each(streams, as_json, one)

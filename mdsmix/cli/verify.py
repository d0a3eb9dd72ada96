"""`mdsmix verify`: are published streams whole?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from mdsmix.cli.options import (
    AS_JSON,
    QUIET,
    STREAMS,
    echo,
    flag,
    for_each,
)
from mdsmix.errors import Damaged
from mdsmix.words import plural

if TYPE_CHECKING:
    from mdsmix.shards.published import StreamFault
    from mdsmix.shards.verification import Report


def verify(
    streams: list[str] = STREAMS,
    quick: bool = flag("--quick", "Presence and sizes only, by one listing."),
    quiet: bool = QUIET,
    as_json: bool = AS_JSON,
) -> None:
    """Verify each STREAM against its index and manifest: every shard is read, hashed, decoded and
    counted.

    Each fault is one line, and the last line says what mends the stream. Exit code 3: the stream
    may not be used; 4: it could not be looked at.
    """
    from mdsmix.report.progress import watching
    from mdsmix.shards import verification
    from mdsmix.shards.published import find_published
    from mdsmix.storage import locate

    damaged: list[StreamFault] = []

    def one(stream: str) -> Any:
        folder = find_published(locate(stream))
        with watching(quiet) as watcher:
            report = verification.verify(folder, watcher, quick)
        damaged.extend(report.faults)
        return asdict(report) if as_json else _print(report, quick, quiet)

    for_each(streams, as_json, one)
    if damaged:
        raise typer.Exit(Damaged.exit_code)


def _print(report: Report, quick: bool, quiet: bool) -> None:
    for fault in report.in_transit:
        echo(f"damaged on its way, and whole when it was read again: {fault}", err=True)
    for fault in report.faults:
        echo(f"fault {fault}")
    said = "names and sizes are right" if quick else "whole"
    if report.blind and not quick:
        said += f"; of {plural(report.blind, 'shard')} no hash or no decompressor is known"
    if report.faults:
        said = (
            f"{plural(len(report.faults), 'fault')}, the stream may not be used; mdsmix repair {report.stream} --recipe RECIPE "
            "makes it anew; what mdsmix convert did not make, publish again with the tool that made it"
        )
    counts = f"{plural(report.shards, 'shard')}, {plural(report.samples, 'sample')}, {plural(report.bytes, 'byte')}"
    if report.faults or not quiet:
        echo(f"{report.stream}: {counts}: {said}")

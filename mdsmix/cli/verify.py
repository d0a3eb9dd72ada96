"""`mdsmix verify`: are published streams whole?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdsmix.cli.options import AsJson, Quiet, echo
from mdsmix.cli.several import Streams, for_each
from mdsmix.words import plural

if TYPE_CHECKING:
    from mdsmix.shards.contradictions import StreamFault
    from mdsmix.shards.verification import Report

DAMAGED = 3


def verify(
    streams: Streams,
    quick: Annotated[
        bool, typer.Option("--quick", help="Presence and sizes only, by one listing.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Say whether each STREAM is what its index and manifest say: every shard is read, hashed, decoded and counted.

    One line for each fault, with its fix. Exit code 3: the stream may not be used; 4: it could not be looked at.
    """
    damaged: list[StreamFault] = []

    def one(stream: str) -> Any:
        report = _look(stream, quick, quiet)
        damaged.extend(report.faults[:1])
        return asdict(report) if as_json else _print(report, quick, quiet)

    for_each(streams, as_json, one)
    if damaged:
        raise typer.Exit(DAMAGED)


def _look(stream: str, quick: bool, quiet: bool) -> Report:
    from mdsmix.report.progress import watching
    from mdsmix.shards.published import find_published
    from mdsmix.shards.verification import verify
    from mdsmix.storage import locate

    folder = find_published(locate(stream))
    with watching(quiet) as watcher:
        return verify(folder, quick=quick, begin=watcher.begin, on_progress=watcher.on_progress)


def _print(report: Report, quick: bool, quiet: bool) -> None:
    for damage in report.in_transit:
        echo(f"damaged on its way: {damage}", err=True)
    for fault in report.faults:
        echo(f"fault {fault}")
    if not quiet or report.faults:
        echo(_verdict(report, quick))


def _verdict(report: Report, quick: bool) -> str:
    held = ", ".join(
        (
            plural(report.shards, "shard"),
            plural(report.samples, "sample"),
            plural(report.bytes, "byte"),
        )
    )
    if report.faults:
        return f"{report.stream}: {held}: {plural(len(report.faults), 'fault')}, the stream may not be used"
    looked = "names and sizes are right" if quick else "whole"
    notes = [
        f"; {plural(number, 'shard')} {what}"
        for number, what in (
            (report.undecoded, "hashed and not decoded, for want of a decompressor"),
            (0 if quick else report.unhashed, "without a hash in the index"),
        )
        if number
    ]
    return f"{report.stream}: {held}: {looked}{''.join(notes)}"

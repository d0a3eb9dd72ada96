"""`mdsmix verify`: is a published stream whole?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mdsmix.cli.options import AsJson, Stream, echo_json
from mdsmix.words import plural

if TYPE_CHECKING:
    from mdsmix.shards.verify import Report

DAMAGED = 3


def verify(
    stream: Stream,
    quick: Annotated[
        bool, typer.Option("--quick", help="Presence and sizes only, by one listing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether STREAM is what its index and manifest say: every shard is read, hashed, decoded and counted.

    One line for each fault, with its fix. Exit code 3: the stream may not be used; 4: it could not be looked at.
    """
    from mdsmix.report.progress import watching
    from mdsmix.shards import verify as shards
    from mdsmix.shards.published import find_published
    from mdsmix.storage import locate

    folder = find_published(locate(stream))
    with watching() as watcher:
        report = shards.verify(
            folder, quick=quick, begin=watcher.begin, on_progress=watcher.on_progress
        )
    _print(report, quick, as_json)
    if report.faults:
        raise typer.Exit(DAMAGED)


def _print(report: Report, quick: bool, as_json: bool) -> None:
    if as_json:
        echo_json(asdict(report))
        return
    for fault in report.faults:
        typer.echo(f"fault {fault}")
    typer.echo(_verdict(report, quick))


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

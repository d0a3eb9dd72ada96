"""`mdsmix verify`: are published streams whole?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdsmix.cli.options import (
    AsJson,
    LogFile,
    Quiet,
    Streams,
    echo,
    for_each_stream,
)
from mdsmix.errors import Damaged
from mdsmix.messages import plural

if TYPE_CHECKING:
    from mdsmix.shards.published import StreamFault
    from mdsmix.shards.verification import VerifyReport


def verify(
    streams: Streams,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Only check that files exist and have the right sizes, by one listing."
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_file: LogFile = None,
) -> None:
    """Verify each STREAM against its index and manifest: every shard is read, hashed, decoded and
    counted.

    Each fault is one line, and the last line says how to repair the stream. Exit code 3: the
    stream may not be used; 4: it could not be read.
    """
    from mdsmix.report.progress import watching
    from mdsmix.shards import verification
    from mdsmix.shards.published import find_published
    from mdsmix.storage import locate

    damaged: list[StreamFault] = []

    def verify_one(stream: str) -> Any:
        folder = find_published(locate(stream))
        with watching(not quiet) as watcher:
            report = verification.verify(folder, watcher, quick)
        damaged.extend(report.faults)
        if as_json:
            return report.to_json()
        _print(report, quick, quiet)
        return None

    for_each_stream(streams, as_json, verify_one)
    if damaged:
        raise typer.Exit(Damaged.exit_code)


def _print(report: VerifyReport, quick: bool, quiet: bool) -> None:
    """Print the faults of a stream, then one line with its counts and the outcome.

    Args:
        quick: whether only names and sizes were checked.
        quiet: whether to print nothing about a stream without faults.
    """
    from mdsmix.report.log_file import write_log

    for fault in report.in_transit:
        echo(f"damaged in transit, whole when read again: {fault}", err=True)
    for fault in report.faults:
        echo(f"fault {fault}")
    outcome = "names and sizes are right" if quick else "whole"
    if report.unchecked and not quick:
        shards = plural(report.unchecked, "shard")
        outcome += f"; {shards} not checked: no hash or no decompressor is known"
    if report.faults:
        outcome = (
            f"{plural(len(report.faults), 'fault')}, the stream may not be used; "
            f"mdsmix repair {report.stream} --recipe RECIPE makes the damaged shards again; "
            "if mdsmix convert did not make the stream, publish it again with the tool that did"
        )
    counts = (
        f"{plural(report.shards, 'shard')}, {plural(report.samples, 'sample')}, "
        f"{plural(report.bytes, 'byte')}"
    )
    line = f"{report.stream}: {counts}: {outcome}"
    if report.faults or not quiet:
        echo(line)
    else:
        write_log(line)

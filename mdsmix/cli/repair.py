"""`mdsmix repair`: the damaged shards of a published stream, made again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mdsmix.cli.completion import complete_published
from mdsmix.cli.json_document import echo_json
from mdsmix.cli.options import (
    AsJson,
    LogFile,
    Memory,
    Overrides,
    QuarantineCrashes,
    Quiet,
    Workers,
    echo,
)


def repair(
    stream: Annotated[
        str,
        typer.Argument(
            metavar="STREAM",
            help="A published stream: a folder or a URL of a bucket.",
            show_default=False,
            autocompletion=complete_published,
        ),
    ],
    recipe: Annotated[Path, typer.Option(help="The recipe that made it.", show_default=False)],
    overrides: Overrides = None,
    workers: Workers = None,
    memory: Memory = None,
    quarantine_crashes: QuarantineCrashes = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_file: LogFile = None,
) -> None:
    """Verify STREAM, and convert only the work units again whose shards are damaged or missing.

    Every byte of the repaired stream is the same as when it was published.
    """
    from mdsmix.conversion.planning import Options
    from mdsmix.conversion.repair import repair as make_whole
    from mdsmix.engines.memory import parse_memory_option
    from mdsmix.kinds import open_recipe
    from mdsmix.report.log_file import write_log
    from mdsmix.report.progress import watching
    from mdsmix.shards.published import find_published
    from mdsmix.storage import locate

    options = Options(
        workers=workers,
        memory=None if memory is None else parse_memory_option(memory),
        quarantine_crashes=quarantine_crashes,
    )
    folder = find_published(locate(stream))
    with watching(not quiet) as watcher:
        done = make_whole(open_recipe(recipe, overrides or ()), folder, options, watcher)
    if as_json:
        echo_json(asdict(done))
        return
    for fault in done.faults:
        echo(f"fault {fault.file}: {fault.problem}")
    outcome = "whole, nothing to repair"
    if done.faults:
        outcome = (
            f"repaired, {done.units} of {done.all_units} work units made again, byte for byte as "
            "before"
        )
    if quiet:
        write_log(f"{done.stream}: {outcome}")
    else:
        echo(f"{done.stream}: {outcome}")

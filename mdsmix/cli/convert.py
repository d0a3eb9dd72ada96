"""`mdsmix convert`: its options. conversion_command.py does what they ask for."""

from __future__ import annotations

from typing import Annotated

import typer

from mdsmix.cli.completion import complete_converted
from mdsmix.cli.conversion_command import run_conversion
from mdsmix.cli.options import (
    DATA,
    MACHINES,
    SAFETY,
    AsJson,
    LogFile,
    Memory,
    Overrides,
    QuarantineCrashes,
    Quiet,
    RecipeFile,
    Workers,
)


def convert(
    recipe: RecipeFile,
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STREAM",
            help="Convert only this stream; may be repeated.",
            autocompletion=complete_converted,
            rich_help_panel=DATA,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Convert only the first N records of each stream, published under "
            "<stream>/limit-N/.",
            rich_help_panel=DATA,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Convert only a sample of each stream, as large as the stream's share of TOKENS, "
            "e.g. 2B; every run chooses the same records, by their content.",
            rich_help_panel=DATA,
        ),
    ] = None,
    reencode: Annotated[
        bool,
        typer.Option(
            "--reencode",
            help="Allow replacing published streams that have other columns or sources.",
            rich_help_panel=SAFETY,
        ),
    ] = False,
    max_bad: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Publish nothing if a larger share of records is bad, e.g. 0.1%.",
            rich_help_panel=SAFETY,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be done and why.", rich_help_panel=SAFETY),
    ] = False,
    verify_source: Annotated[
        bool,
        typer.Option(
            "--verify-source",
            help="Read sources again even if their size and modification time are unchanged.",
            rich_help_panel=SAFETY,
        ),
    ] = False,
    verify_target: Annotated[
        bool,
        typer.Option(
            "--verify-target",
            help="Read and hash existing shards before they are reused; make damaged ones again.",
            rich_help_panel=SAFETY,
        ),
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Do only part K of N of the work (K from 1), as one job of an array; publish "
            "nothing.",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish",
            help="Do the work that the parts left undone, join all parts and publish.",
            rich_help_panel=MACHINES,
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where the work runs: local (this machine), ray (a Ray cluster), or "
            "ray://HOST:PORT.",
            rich_help_panel=MACHINES,
        ),
    ] = "local",
    workers: Workers = None,
    memory: Memory = None,
    quarantine_crashes: QuarantineCrashes = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_file: LogFile = None,
) -> None:
    """Convert every stream of RECIPE that has a source, and publish it.

    Each stream is written to <remote or local>/<stream>/<split>/ with its index.json and manifest.

    Unchanged work is not done again. Bad records are written to quarantine/ and counted.
    """
    run_conversion(**locals())

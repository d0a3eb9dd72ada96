"""`mdsmix convert`: sources -> published streams."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def convert(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to set, e.g. max_seq_len=4096."),
    ] = None,
    only: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="STREAM",
            help="Convert this stream only; may be repeated.",
            rich_help_panel="What",
        ),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            metavar="N",
            help="Only the first N records of each stream, published under <stream>/limit-N/.",
            rich_help_panel="What",
        ),
    ] = None,
    reencode: Annotated[
        bool,
        typer.Option(
            "--reencode",
            help="Allow replacing published streams whose columns or sources are others.",
            rich_help_panel="What",
        ),
    ] = False,
    max_bad: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SHARE",
            help="Publish nothing where more records are bad, e.g. 0.1%.",
            rich_help_panel="What",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be done and why.", rich_help_panel="How"),
    ] = False,
    verify_source: Annotated[
        bool,
        typer.Option(
            "--verify-source",
            help="Read sources again even where size and modification time are as they were.",
            rich_help_panel="How",
        ),
    ] = False,
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            metavar="N",
            help="Processes; they shape no byte.",
            show_default="one per processor",
            rich_help_panel="How",
        ),
    ] = None,
    memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SIZE",
            help="What all processes together may take, e.g. 2GiB.",
            show_default="half of the machine or its control group",
            rich_help_panel="How",
        ),
    ] = None,
    quarantine_crashes: Annotated[
        bool,
        typer.Option(
            "--quarantine-crashes",
            help="Set a record aside if worker processes die of it.",
            rich_help_panel="How",
        ),
    ] = False,
) -> None:
    """Convert every stream of RECIPE that has a source, and publish it.

    Each stream lands under <remote or local>/<stream>/<split>/ with its index.json and manifest.

    What is unchanged is not done again; bad records are set aside in quarantine/ and counted.
    """
    from mdsmix.convert.memory import bytes_of
    from mdsmix.convert.outcome import Outcome
    from mdsmix.convert.preview import preview
    from mdsmix.convert.run import Options
    from mdsmix.convert.run import convert as convert_recipe
    from mdsmix.recipe import load_recipe
    from mdsmix.report.progress import watching
    from mdsmix.report.summary import print_summary

    bound = [] if max_bad is None else [f'max_bad="{max_bad}"']
    loaded = load_recipe(recipe, [*(overrides or ()), *bound])
    options = Options(
        only=only or (),
        limit=limit,
        reencode=reencode,
        workers=workers,
        memory=None if memory is None else bytes_of(memory),
        quarantine_crashes=quarantine_crashes,
        verify_source=verify_source,
    )
    if dry_run:
        for sentence in preview(loaded, options):
            typer.echo(sentence)
        return
    outcomes: list[Outcome] = []
    try:
        with watching() as watcher:
            for outcome in convert_recipe(loaded, options, watcher):
                outcomes.append(outcome)
    finally:  # where a stream fails, those before it are published
        if outcomes:
            print_summary(outcomes)

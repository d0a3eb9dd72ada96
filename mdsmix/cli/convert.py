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
) -> None:
    """Convert every stream of RECIPE that has a source, and publish it.

    Each stream lands under <remote or local>/<stream>/<split>/ with its index.json and manifest.

    What is unchanged is not done again; bad records are set aside in quarantine/ and counted.
    """
    from mdsmix.convert.run import convert as convert_recipe
    from mdsmix.recipe import load_recipe
    from mdsmix.report.progress import watching
    from mdsmix.report.summary import print_summary

    loaded = load_recipe(recipe, overrides or ())
    with watching() as watcher:
        outcomes = convert_recipe(
            loaded,
            only=only or (),
            limit=limit,
            reencode=reencode,
            workers=workers,
            watcher=watcher,
        )
    print_summary(outcomes)

"""`mdsmix repair`: the damaged shards of a published stream, made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def repair(
    stream: Annotated[
        str, typer.Argument(help="A published stream: a folder or s3:// URL.", show_default=False)
    ],
    recipe: Annotated[
        Path,
        typer.Option(help="The recipe that made it.", show_default=False),
    ],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Overrides of the recipe.", show_default=False
        ),
    ] = None,
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            metavar="N",
            help="Processes; they shape no byte.",
            show_default="one per processor",
        ),
    ] = None,
    memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SIZE",
            help="What all processes together may take, e.g. 2GiB.",
            show_default="half of the machine or its control group",
        ),
    ] = None,
    quarantine_crashes: Annotated[
        bool,
        typer.Option(
            "--quarantine-crashes", help="Set a record aside if worker processes die of it."
        ),
    ] = False,
) -> None:
    """Verify STREAM and convert again only the work units whose shards fail: it comes out byte for byte as it was."""
    from mdsmix.convert.memory import bytes_of
    from mdsmix.convert.repair import repair as make_whole
    from mdsmix.convert.run import Options
    from mdsmix.recipe import load_recipe
    from mdsmix.report.progress import watching
    from mdsmix.shards.published import find_published
    from mdsmix.storage import locate

    options = Options(
        workers=workers,
        memory=None if memory is None else bytes_of(memory),
        quarantine_crashes=quarantine_crashes,
    )
    folder = find_published(locate(stream))
    with watching() as watcher:
        done = make_whole(load_recipe(recipe, overrides or ()), folder, options, watcher)
    for fault in done.faults:
        typer.echo(f"fault {fault.file}: {fault.problem}")
    if not done.faults:
        typer.echo(f"{done.stream}: whole, nothing to repair")
        return
    typer.echo(
        f"{done.stream}: repaired, {done.units} of {done.of} work units made again "
        f"({', '.join(done.shards) or 'no shard'}), byte for byte as before"
    )

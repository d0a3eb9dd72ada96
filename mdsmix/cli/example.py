"""`mdsmix example`: a folder with everything for a first run."""

from __future__ import annotations

from typing import Annotated

import typer

from mdsmix.cli.json_document import echo_json
from mdsmix.cli.options import AsJson, echo


def example(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="The folder to write into. It must be empty, or not exist yet.",
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Write two small data files, a tokenizer, a recipe and LLM-Foundry's YAML of a tiny model.

    With them the whole way from raw data to a trained model runs in minutes, on a CPU and without
    a network. The commands to run next are printed.
    """
    from mdsmix.example.example import write_example

    written = write_example(folder)
    if as_json:
        echo_json(
            {"folder": folder, "files": written.files, "next_commands": written.next_commands}
        )
        return
    echo(f"wrote into {folder}:")
    echo(*(f"  {file}" for file in written.files))
    echo("next:")
    echo(*(f"  {command}" for command in written.next_commands))
